"""The words that jobs leave when they die: torch's, NCCL's, CUDA's, SLURM's, Kubernetes', the kernel's.

A cause is known by words that nothing else leaves. Causes come before consequences: a rank whose peer is gone, a
watchdog that gives up and a launcher that sums up say that something has happened, not what.

Left out on purpose: reports of this course's launcher, which `recognise.py` knows.
Read next: `logs.py`, which looks for these words in the files of a job.
"""

# ruff: noqa: E501  (words that are looked for stay whole)
from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One thing that jobs die of.

    Attributes:
        name: short words for it.
        words: a pattern; a group called rank names who is to blame.
        cure: what to try.
    """

    name: str
    words: str
    cure: str

    def match(self, text: str) -> re.Match | None:
        return re.search(self.words, text)


CAUSES = tuple(
    Cause(*row)
    for row in (
        (
            "local-rank-argument",
            r"unrecognized arguments: .*--local[-_]rank|the following arguments are required: .*--local[-_]rank",
            'torchrun passes no --local_rank: read int(os.environ["LOCAL_RANK"])',
        ),
        (
            "no-group",
            r"Default process group has not been initialized",
            "call init_process_group first, in each process that talks: one that was spawned has no group yet",
        ),
        (
            "marked-ready-twice",
            r"Expected to mark a variable ready only once",
            "a parameter is used in two backward passes or in reentrant checkpoints: use_reentrant=False, "
            "static_graph=True, or one forward for one backward",
        ),
        (
            "unused-parameters",
            r"Expected to have finished reduction in the prior iteration",
            "in the step before, a parameter got no gradient, and DDP still waits for it: use its layer in the loss, or "
            "DistributedDataParallel(model, find_unused_parameters=True); TORCH_DISTRIBUTED_DEBUG=INFO tells its name",
        ),
        (
            "in-place-modification",
            r"modified by an inplace operation",
            "two forwards before a backward change buffers in place: one forward for both, or DDP with "
            "forward_sync_buffers=False (until torch 2.12: broadcast_buffers=False)",
        ),
        (
            "shared-memory",
            r"Bus error|insufficient shared memory|unable to (?:mmap|open shared memory|write to file </torch)",
            "give the container more /dev/shm (--shm-size, or an emptyDir in memory), or use fewer workers",
        ),
        (
            "gpu-out-of-memory",
            r"(?:torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory)",
            "a smaller batch with gradient accumulation, activation checkpointing, or sharding (ddp-course plan)",
        ),
        (
            "out-of-memory",
            r"oom[-_ ]kill|OOMKilled|Out of memory: Killed process|Killed process \d+|\bMemoryError\b|Cannot allocate memory"
            r"|DefaultCPUAllocator: can't allocate memory|exceeded memory limit",
            "less in memory: fewer workers, a smaller batch, rows read when they are needed; or ask for more memory",
        ),
        (
            "invalid-device",
            r"invalid device ordinal",
            "more ranks on this machine than GPUs are visible: check --nproc-per-node and CUDA_VISIBLE_DEVICES",
        ),
        (
            "duplicate-gpu",
            r"Duplicate GPU detected ?:? ?(?:rank (?P<rank>\d+))?|Multiple Ranks are using the same GPU",  # NCCL 2.30
            "two ranks use one GPU: call torch.cuda.set_device(local_rank) before anything on CUDA",
        ),
        (
            "gpu-failed",
            r"\bXid\b|uncorrectable ECC|GPU has fallen off the bus|CUDA error: (?:uncorrectable|an illegal|unspecified|hardware)",
            "the GPU or its driver failed: drain the node, run nvidia-smi -q and dcgmi diag, resume elsewhere",
        ),
        (
            "driver-too-old",
            r"CUDA driver version is insufficient|NVIDIA driver on your system is too old|no kernel image is available",
            "install the torch that fits this driver and GPU, the same on every node",
        ),
        (
            "versions-differ",
            r"(?i:version mismatch|versions? (?:differ|mismatch)|mismatched NCCL version|NCCL version .* (?:but|while|vs))"
            r"|ncclInvalidUsage.*version",
            "the same torch, CUDA and NCCL on every node: compare ddp-course doctor on each",
        ),
        (
            "libuv",
            r"use_libuv was requested but PyTorch was built without libuv|libuv support",
            "set USE_LIBUV=0, or install a torch with libuv",
        ),
        (
            "torn-checkpoint",
            r"failed finding central directory|PytorchStreamReader failed|invalid header or archive is corrupted"
            r"|unexpected EOF, expected|Ran out of input|EOFError.*torch\.load",
            "the file was cut off while it was written: load an older one; write to a temporary name and rename it",
        ),
        (
            "module-prefix",
            r"(?:Missing|Unexpected) key\(s\) in state_dict: \"(?:\w+\.)?module\.|(?:Missing|Unexpected) key\(s\) in state_dict"
            r"(?:.|\n){0,400}\"module\.",
            "unexpected: it was saved from the wrapped model, so save replica.module.state_dict(); missing: it is loaded into "
            "the wrapped model, so load it before wrapping",
        ),
        (
            "disk-full",
            r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing",
            "free the disk or quota, keep fewer checkpoints; the last whole one can be resumed from",
        ),
        (
            "time-limit",
            r"DUE TO TIME LIMIT|DeadlineExceeded",
            "save on SIGTERM (--signal=B:TERM@120) and requeue, or ask for more time",
        ),
        (
            "preempted",
            r"DUE TO PREEMPTION|\bpreempt(?:ed|ion)\b|(?i:spot instance interruption)",
            "save on SIGTERM, exit, and let the job be requeued and resumed",
        ),
        (
            "node-failed",
            r"NODE[_ ]FAIL|DUE TO NODE FAILURE|Node is not ready|NodeNotReady|node .{0,40}(?:not responding|is down|failure)",
            "resume on other nodes from the last checkpoint; ask for the node's log",
        ),
        (
            "evicted",
            r"\bEvicted\b|The node was low on resource",
            "the node ran short of what the pod did not ask for: set requests and limits, resume",
        ),
        (
            "port-taken",
            r"EADDRINUSE|[Aa]ddress already in use",
            "another job listens there: use --standalone, or another --rdzv-endpoint",
        ),
        (
            "name-resolution",
            r"Name or service not known|Temporary failure in name resolution|getaddrinfo failed|gai error"
            r"|nodename nor servname|Could not resolve host",
            "MASTER_ADDR does not resolve on this node: use an address that every node can reach",
        ),
        (
            "nccl-in-docker",
            r"NCCL WARN .*(?:/dev/shm/nccl|shared memory segment|posix_fallocate)",
            "give the container more /dev/shm: --shm-size=8g",
        ),
        (
            "no-interface",
            r"No usable listening interface|No interface found|Bootstrap : no socket interface found",
            "name the interface: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME",
        ),
        (
            "not-a-number",
            r"(?i:(?:loss|grad\w*)\b[^\n]{0,40}\b(?:is |became |=+ ?|: ?)?(?:nan|inf)\b|\bnan\b[^\n]{0,30}(?:loss|gradient)"
            r"|returned nan values|non-finite|not finite)",
            "lower the learning rate or clip gradients; look at the batch of that step on that rank",
        ),
        (
            "worker-killed",
            r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal|exited unexpectedly)[^\n]*",
            "a worker died: num_workers=0 shows its error; too little memory or /dev/shm is the usual cause",
        ),
        (
            "mismatched-calls",
            r"Detected mismatch between collectives on ranks|Mismatched? (?:collective|shapes?)|op\.preamble\.length"
            r"|[Ii]nvalid tensor (?:size|shape)|Got (?:\d+) elements, expected|tensor sizes? mismatch|received data size doesn't match",
            "ranks call different collectives or with different sizes: find the line with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        ),
        (
            "world-size",
            r"expected world size \d+|(?:World|world)[ _]size .{0,30}(?:mismatch|does not match|differ|should be)"
            r"|waiting for clients\. \d+/\d+ clients joined|Timed out after \d+ seconds waiting for clients",
            "not all ranks came, or they count differently: the same --nnodes and --nproc-per-node everywhere",
        ),
    )
)

# The job's own error on a rank, when no cause above is in it.
EXCEPTION = re.compile(
    r"^\s*(?:\[?(?:rank|default)?\s?\d+\]?:\s*)?(?P<error>(?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|NotFound)\b): ?(?P<words>[^\n]*)",
    re.M,
)

# What follows from something else.
ECHOES = re.compile(
    r"Connection (?:closed|reset) by peer|DistBackendError|ChildFailedError|SignalException|DistNetworkError|DistStoreError"
    r"|Broken pipe|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|[Ww]atchdog|RendezvousConnectionError|socket closed"
    r"|Timed out waiting \w+ for \w+ operation|recvVector|ProcessExitedException|ProcessRaisedException"
)
