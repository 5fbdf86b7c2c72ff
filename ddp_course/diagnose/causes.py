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


# In the order in which they go before each other, where times and places do not tell which came first.
# fmt: off
CAUSES = tuple(
    Cause(*row)
    for row in (
        ("local-rank-argument",
         r"unrecognized arguments: .*--local[-_]rank|the following arguments are required: .*--local[-_]rank",
         'torchrun passes no --local_rank: read int(os.environ["LOCAL_RANK"])'),
        ("arguments",
         r"^\S+: error: (?:unrecognized arguments|argument \S+: |the following arguments are required|ambiguous option|invalid choice|expected)",
         "the program does not take these arguments: compare the command with its --help; torchrun's own options go before the script"),
        ("program-missing",
         r"can't open file '?[^']*'?: \[Errno 2\]|(?:torchrun|python3?|accelerate|deepspeed): command not found|execve\(\): .*: No such file or directory",
         "the program or its interpreter is not there on this node: give absolute paths, and activate the same environment on every node"),
        ("no-group",
         r"Default process group has not been initialized",
         "call init_process_group first, in each process that communicates: one that was spawned has no group yet"),
        ("group-twice",
         r"initialize the default process group twice",
         "init_process_group is called twice in one process: leave one call out, or ask dist.is_initialized() first"),
        ("marked-ready-twice",
         r"Expected to mark a variable ready only once",
         "a parameter is used in two backward passes or in reentrant checkpoints: use_reentrant=False, static_graph=True, or one forward for one backward"),
        ("unused-parameters",
         r"Expected to have finished reduction in the prior iteration",
         "in the step before, a parameter got no gradient, and DDP still waits for it: use its layer in the loss, or DistributedDataParallel(model, "
         "find_unused_parameters=True); TORCH_DISTRIBUTED_DEBUG=INFO tells its name"),
        ("in-place-modification",
         r"modified by an inplace operation",
         "two forwards before a backward change buffers in place: forward_sync_buffers=False (before torch 2.13: broadcast_buffers), or one forward for both"),
        ("models-differ",
         r"DDP expects same model across all ranks|appears not to match (?:sizes|strides) of the same param",
         "the ranks have built different models: the same configuration and code on every rank, no branch on the rank before DDP"),
        ("file-descriptors",
         r"Too many open files|received 0 items of ancdata|\[Errno 24\]",
         "too many open files: ulimit -n 65536, fewer workers, or torch.multiprocessing.set_sharing_strategy('file_system'); close what is opened in a loop"),
        ("shared-memory",
         r"Bus error|insufficient shared memory|unable to (?:mmap|open shared memory|write to file </torch)|/dev/shm.*No space left|No space left.*/dev/shm"
         r"|NCCL WARN .*(?:/dev/shm/nccl|shared memory segment|posix_fallocate)|failed to extend /dev/shm",
         "shared memory (/dev/shm) is too small, not the disk: --shm-size=8g for the container, an emptyDir in memory for the pod; or fewer workers"),
        ("gpu-out-of-memory",
         r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|Cuda failure (?:\d+ )?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory",
         "a smaller batch with gradient accumulation, activation checkpointing, or sharding (ddp-course plan)"),
        ("out-of-memory",
         r"oom[-_ ]kill|OOMKill|Out [Oo]f [Mm]emory: Kill|task \d+: Out Of Memory|Killed process \d+|Memory cgroup out of memory|\bMemoryError\b|Cannot allocate memory"
         r"|DefaultCPUAllocator: (?:can't|not enough)|exceeded memory limit|OUT_OF_MEMORY|std::bad_alloc|killed due to memory pressure|running low on memory",
         "less in memory: fewer workers, a smaller batch, rows read when they are needed; or ask for more memory"),
        ("invalid-device",
         r"invalid device ordinal",
         "more ranks on this machine than GPUs are visible: check --nproc-per-node and CUDA_VISIBLE_DEVICES"),
        ("duplicate-gpu",
         r"Duplicate GPU detected ?:? ?(?:rank (?P<rank>\d+))?|Multiple Ranks are using the same GPU",  # NCCL 2.30
         "two ranks use one GPU: call torch.cuda.set_device(local_rank) before anything on CUDA"),
        ("gpu-failed",
         r"\bXid\b.*?\b(?:48|6[1-4]|74|79|9[245]|119|12[01]|140|14[3-9]|15\d)\b|uncorrectable ECC|[Dd]ouble.[Bb]it ECC|fallen off the bus|CUDA error: hardware"
         r"|Unable to determine the device handle for GPU|GPU is lost|row.remap\w* fail",
         "the GPU or its driver failed: drain the node, run nvidia-smi -q and dcgmi diag, resume elsewhere"),
        ("device-assert",
         r"device-side assert triggered|Assertion `[^`]*` failed\.?$|(?:indexSelect|nll_loss|ScatterGather)\w*.*Assertion",
         "an index on the GPU is out of range, mostly a label or token not below the number of classes: run that batch on the CPU, or with CUDA_LAUNCH_BLOCKING=1"),
        ("illegal-memory-access",
         r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction was encountered|\bXid\b.*?\b(?:13|31|43|45)\b"
         r"|CU(?:BLAS|DNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)",
         "a kernel on the GPU failed: CUDA_LAUNCH_BLOCKING=1 shows its line, compute-sanitizer its access; on one node again and again, test that GPU"),
        ("gpu-busy",
         r"CUDA-capable device\(s\) is/are busy or unavailable",
         "another process holds the GPU in exclusive mode: nvidia-smi shows which; end it, or use another GPU"),
        ("driver-too-old",
         r"CUDA driver version is insufficient|NVIDIA driver on your system is too old|no kernel image is available|Driver/library version mismatch"
         r"|API call is not supported in the installed CUDA driver|forward compatibility was attempted",
         "install the torch that fits this driver and GPU, the same on every node; after a driver's update, reboot"),
        ("no-gpu",
         r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device is detected|no GPUs found!|not compiled with CUDA enabled|couldn't communicate with the NVIDIA driver"
         r"|Distributed package doesn't have NCCL",
         "no GPU, or no torch for GPUs, on this node: nvidia-smi, CUDA_VISIBLE_DEVICES, --gpus for the container, torch's build; or backend='gloo'"),
        ("wrong-backend",
         r"No backend type associated with device type|Tensors must be CUDA and dense",
         "NCCL takes tensors on GPUs only: move the tensor to the rank's device, or init_process_group('cpu:gloo,cuda:nccl')"),
        ("versions-differ",
         r"NCCL version (?i:mismatch)|(?i:mismatched NCCL version)|NCCL (?:.{0,40})?versions? (?:differ|mismatch)|ncclInvalidUsage.*version|[Vv]ersion mismatch.{0,60}(?:NCCL|ranks?|nodes?)",
         "the same torch, CUDA and NCCL on every node: compare ddp-course doctor on each"),
        ("libuv",
         r"use_libuv was requested but PyTorch was built without libuv|libuv support",
         "set USE_LIBUV=0, or install a torch with libuv"),
        ("torn-checkpoint",
         r"failed finding central directory|PytorchStreamReader failed|invalid header or archive is corrupted|unexpected EOF, expected|Ran out of input|EOFError.*torch\.load"
         r"|pickle data was truncated|BadZipFile|MetadataIncompleteBuffer|HeaderTooLarge|InvalidHeaderDeserialization|invalid load key",
         "the file was cut off while it was written: load an older one; write to a temporary name and rename it"),
        ("weights-only",
         r"Weights only load failed",
         "the checkpoint holds more than tensors: save state_dicts alone, or allow the classes by torch.serialization.add_safe_globals, if you trust the file"),
        ("module-prefix",
         r"(?:Missing|Unexpected) key\(s\) in state_dict: \"(?:\w+\.)?module\.|(?:Missing|Unexpected) key\(s\) in state_dict(?:.|\n){0,400}\"module\.",
         "unexpected: it was saved from the wrapped model, so save replica.module.state_dict(); missing: it is loaded into the wrapped model, so load it before wrapping"),
        ("state-dict",
         r"Error\(s\) in loading state_dict|size mismatch for \S+: copying a param|(?:Missing|Unexpected) key\(s\) in state_dict|loaded state dict (?:contains|has) a",
         "the checkpoint is of another model or optimizer: the same configuration as when it was saved, or map its keys"),
        ("disk-full",
         r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing|\[Errno (?:28|122)\]",
         "free the disk or quota, keep fewer checkpoints; the last whole one can be resumed from"),
        ("file-system",
         r"Stale (?:NFS )?file handle|Transport endpoint is not connected|Read-only file system|Input/output error|Remote I/O error|\[Errno (?:5|107|116|121)\]|nfs: server .* not responding",
         "the shared file system failed on this node: mount it again or drain the node; replace files by rename, never under a reader; resume"),
        ("time-limit",
         r"DUE TO TIME LIMIT|DeadlineExceeded",
         "save on SIGTERM (--signal=B:TERM@120) and requeue, or ask for more time"),
        ("preempted",
         r"DUE TO PREEMPTION|(?:\b[Ww]as|\b[Bb]eing|[Jj]ob|[Nn]ode|[Pp]od|[Ii]nstance|^)\s*preempted\b|PREEMPTED|(?i:spot (?:instance )?interruption notice|spot instance interruption)",
         "save on SIGTERM, exit, and let the job be requeued and resumed"),
        ("node-failed",
         r"NODE[_ ]FAIL|DUE TO NODE FAILURE|Node failure on|Node is not ready|NodeNotReady|NodeLost|[Nn]ode \S+ (?:is )?(?:not responding|down)\b",
         "resume on other nodes from the last checkpoint; ask for the node's log"),
        ("evicted",
         r"\bEvicted\b|The node was low on resource",
         "the node ran short of what the pod did not ask for: set requests and limits, resume"),
        ("not-scheduled",
         r"FailedScheduling|ImagePullBackOff|ErrImagePull|Insufficient nvidia\.com/gpu|CreateContainer(?:Config)?Error|FailedMount",
         "the pod never started: its event says what is missing (a GPU, an image, a volume)"),
        ("hang-up",
         r"got signal: 1$|Received (?:Signals\.)?(?:1|SIGHUP) death signal|closing signal (?:Signals\.)?SIGHUP|\bSIGHUP\b.*(?:received|caught)|(?:received|caught).*\bSIGHUP\b",
         "SIGHUP: the terminal or the connection was closed, and the job with it; start it by setsid, nohup, tmux or the scheduler"),
        ("interrupted",
         r"got signal: 2$|Received (?:Signals\.)?(?:2|SIGINT) death signal|^KeyboardInterrupt$",
         "SIGINT: Ctrl-C, or a scheduler's request to stop"),
        ("terminated",
         r"got signal: 15$|Received (?:Signals\.)?(?:15|SIGTERM) death signal",
         "SIGTERM from outside: a scheduler's limit, preemption, a person, or another node that failed first; look at the scheduler's record and at the logs of other nodes"),
        ("cancelled",
         r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(?: \*\*\*| DUE TO (?!TIME|PREEMPTION|NODE))|\bCANCELLED by \d+",
         "scancel, by a person or by a step that failed: sacct -j JOB --format=JobID,State,ExitCode,User"),
        ("port-taken",
         r"EADDRINUSE|[Aa]ddress already in use",
         "another job listens there: use --standalone, or another --rdzv-endpoint"),
        ("name-resolution",
         r"Name or service not known|[Tt]emporary failure in name resolution|getaddrinfo failed|gai error|nodename nor servname|Could not resolve host|No address associated with hostname",
         "MASTER_ADDR does not resolve on this node: use an address that every node can reach"),
        ("no-interface",
         r"No usable listening interface|No interface found|no socket interface found|Unable to find address for: \S+|find interface .*(?:fail|not found)",
         "name the interface, as ip addr shows it on every node: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"),
        ("locked-memory",
         r"ibv_(?:reg_mr|create_cq|create_qp)\w* failed.*(?:Cannot allocate|memory)|ibv_reg_mr\S* .*Cannot allocate",
         "InfiniBand may not lock enough memory: ulimit -l unlimited (--ulimit memlock=-1 for the container)"),
        ("infiniband",
         r"NET/IB.*(?:Got completion|Got async event|[Aa]sync fatal event)|Got completion (?:from|with).*(?:status|error)|ibv_\w+ failed|IBV_EVENT_\w+|mlx5\S*.*(?:[Pp]ort (?:down|error)|[Ll]ink down)",
         "the InfiniBand link, or the peer named in the line: ibstat and the port's error counters on both hosts, the switch; status 12 is no answer after all retries, 5 follows "
         "from another error. If the peer's process died first, its own log has the cause"),
        ("network-unreachable",
         r"No route to host|Network is unreachable|NCCL WARN .*(?:[Cc]onnect\w*.*(?:failed|refused|timed? ?out))",
         "one node cannot reach another: firewall, the wrong interface (NCCL_SOCKET_IFNAME) or subnet; ddp-course doctor --world-size 2 --rendezvous HOST:PORT on both"),
        ("stale-rendezvous",
         r"\(world_size=(?P<size>\d+), worker_count=(?!(?P=size)\b)(?P<came>\d+)",
         "more have signed in than the world size counts: a file of an earlier job (delete the one of init_method='file://…'), or ranks that were given "
         "another world size"),
        ("rendezvous-unreachable",
         r"client socket has (?:timed out|failed to connect to any)|connection to the C10d store has failed|RendezvousConnectionError",
         "nothing answered at MASTER_ADDR:MASTER_PORT: is rank 0's node up, the address right, the port open in the firewall?"),
        ("install-failed",
         r"ERROR: No matching distribution found for|ERROR: Could not install packages|error: externally-managed-environment|EnvironmentNotWritableError|PackagesNotFoundError",
         "this node's environment could not be made, so its launcher never started: build one image for all nodes"),
        ("rendezvous-timeout",
         r"RendezvousTimeoutError|[Rr]endezvous .*timed out",
         "not all nodes joined in time: the same --nnodes, --rdzv-id and --rdzv-endpoint everywhere; which node's launcher has no line?"),
        ("import-error",
         r"^(?:ModuleNotFoundError|ImportError): |error while loading shared libraries|undefined symbol: ",
         "a package is missing or another version here: the same environment on every node"),
        ("not-a-number",
         r"(?i:\w*loss['\"]?(?: is| was| became|:|=|\s)+\s*(?:nan|non-?finite|not finite)\b|\bnan\b[^\n]{0,20}(?:\bin\b|\bas\b|detected|\bfor\b)[^\n]{0,20}(?:loss|gradient)|(?:loss|gradients?)\b[^\n]{0,40}"
         r"\b(?:contains?|has|is|are|became) (?:nan|inf|infinite|not finite|non-?finite)\b|returned nan values)",
         "lower the learning rate or clip gradients; look at the batch of that step on that rank"),
        ("worker-killed",
         r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal|exited unexpectedly)[^\n]*",
         "a worker died: num_workers=0 shows its error; too little memory or /dev/shm is the usual cause"),
        ("mismatched-calls",
         r"Detected mismatch between collectives on ranks|Mismatched? (?:collective|shapes?)|op\.preamble\.length|[Ii]nvalid tensor (?:size|shape)|Got (?:\d+) elements, expected"
         r"|tensor sizes? mismatch|received data size doesn't match|[Mm]essage truncated",
         "ranks call different collectives or with different sizes: find the line with TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        ("world-size",
         r"expected world size \d+|(?:World|world)[ _]size .{0,30}(?:mismatch|does not match|differ|should be)|waiting for clients\. \d+/\d+ clients joined"
         r"|Timed out after \d+ seconds waiting for clients",
         "not all ranks joined, or they count differently: the same --nnodes and --nproc-per-node everywhere"),
    )
)
# fmt: on

# These follow from others as often as not, so another cause, or the program's own error, goes before them.
FOLLOWS = {
    *("worker-killed", "mismatched-calls", "world-size", "port-taken", "versions-differ", "rendezvous-timeout"),
    *("rendezvous-unreachable", "infiniband", "network-unreachable", "not-a-number", "stale-rendezvous"),
}
# What ends a job from outside: a hang, or a rank that was killed, goes before these.
OUTSIDE = {"terminated", "interrupted", "cancelled", "hang-up", "time-limit"}
# Whoever says these may be right or wrong: they lie between ranks, or come from outside.
BETWEEN = {
    *("models-differ", "versions-differ", "preempted", "infiniband", "network-unreachable", "stale-rendezvous"),
    *("rendezvous-unreachable", "rendezvous-timeout", "mismatched-calls", "world-size", "not-scheduled"),
    *OUTSIDE,
}

# The job's own error on a rank, when no cause above is in it.
EXCEPTION = re.compile(
    r"^\s*(?:\[?(?:rank|default)?\s?\d+\]?:\s*)?(?P<error>(?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|NotFound)\b): ?(?P<words>[^\n]*)",
    re.M,
)

# What follows from something else.
ECHOES = re.compile(
    r"Connection (?:was )?(?:closed|reset) by (?:remote )?peer|DistBackendError|ChildFailedError|SignalException|DistNetworkError|DistStoreError"
    r"|Broken pipe|BrokenPipeError|ConnectionResetError|ncclRemoteError|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|NCCL communicator was aborted"
    r"|[Ww]atchdog|RendezvousClosedError|RendezvousConnectionError|[Ss]ocket closed|Socket Timeout|[Ww]ait timeout|Timed out waiting \w+ for \w+ operation"
    r"|recvVector|ProcessExitedException|ProcessRaisedException|monitoredBarrier|NCCL error in|driver shutting down|store->get|Stop_waiting|CalledProcessError"
    r"|RankError|Some NCCL operations have failed|store based barrier|[Rr]endezvousStateError|remote process exited"
)
