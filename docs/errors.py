"""The page "What does this error mean?": hangs first, then error texts, then faults with and without an error.

Its steps are the cheat sheet's, its cures those of `ddp-course read`, its faults those of `ddp-course faults`.
Read next: `pages.py`.
"""

import re

from ddp_course.diagnose.causes import CAUSES
from ddp_course.diagnose.faults.catalogue import FAULTS

HANGING = (
    *("rendezvous-unreachable", "world-size-mismatch", "skipped-collective", "collective-order", "collective-shape"),
    *("rank0-only-validation", "rank0-only-save", "uneven-inputs", "unused-parameters", "forked-cuda"),
)
ECHO = """An echo, not the cause: another rank died, never came, called something else or was too slow, and this one
{waited}. Read that other rank's log first. `ddp-course read LOGS` finds it among the logs of a job.
"""
ECHOES = {
    "Watchdog caught collective operation timeout": "waited until NCCL's time limit",
    "Operation timed out after 600794 ms": "waited until the time limit of PyTorch 2.15's NCCL backend",
    "Connection closed by peer": "lost its connection to it",
    "Timed out waiting 1800000ms for recv operation": "waited until gloo's time limit",
}
# One text that people see for each cause, in the order in which a job meets them.
MESSAGES = {
    "Start-up": {
        "no-group": "Default process group has not been initialized",
        "group-twice": "trying to initialize the default process group twice!",
        "arguments": "train.py: error: unrecognized arguments: --epohcs 3",
        "program-missing": "can't open file '/data/train.py': [Errno 2] No such file or directory",
        "import-error": "ModuleNotFoundError: No module named 'einops'",
        "local-rank-argument": "unrecognized arguments: --local-rank=0",
        "port-taken": "EADDRINUSE, address already in use",
        "name-resolution": "Name or service not known",
        "no-interface": "No usable listening interface found",
        "world-size": "Timed out after 60 seconds waiting for clients. 1/2 clients joined",
        "stale-rendezvous": "Timed out initializing process group (world_size=2, worker_count=4)",
        "rendezvous-unreachable": "The client socket has timed out after 60000ms while trying to connect",
        "rendezvous-timeout": "RendezvousTimeoutError",
        "install-failed": "ERROR: No matching distribution found for flash-attn==2.7.3",
        "libuv": "use_libuv was requested but PyTorch was built without libuv support",
        "versions-differ": "NCCL version mismatch",
        "driver-too-old": "CUDA driver version is insufficient for CUDA runtime version",
        "no-gpu": "No CUDA GPUs are available",
        "gpu-busy": "all CUDA-capable device(s) is/are busy or unavailable",
        "wrong-backend": "No backend type associated with device type cpu",
        "invalid-device": "CUDA error: invalid device ordinal",
        "duplicate-gpu": "Duplicate GPU detected",
    },
    "The model and its collectives": {
        "unused-parameters": "Expected to have finished reduction in the prior iteration",
        "marked-ready-twice": "Expected to mark a variable ready only once",
        "in-place-modification": "a variable has been modified by an inplace operation",
        "models-differ": "DDP expects same model across all ranks, but rank 1 has 38 params, while rank 0 has 40",
        "device-assert": "CUDA error: device-side assert triggered",
        "illegal-memory-access": "CUDA error: an illegal memory access was encountered",
        "mismatched-calls": "Detected mismatch between collectives on ranks",
        "not-a-number": "loss is nan",
    },
    "Memory": {
        "gpu-out-of-memory": "CUDA out of memory",
        "out-of-memory": "Out of memory: Killed process; oom-kill; OOMKilled",
        "shared-memory": "Bus error; insufficient shared memory; NCCL WARN Error: failed to extend /dev/shm/nccl-…",
        "locked-memory": "ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        "file-descriptors": "OSError: [Errno 24] Too many open files",
        "worker-killed": "DataLoader worker (pid 4711) is killed by signal: Killed",
    },
    "Checkpoints": {
        "torn-checkpoint": "PytorchStreamReader failed finding central directory",
        "module-prefix": 'Unexpected key(s) in state_dict: "module.…; Missing key(s) in state_dict: "module.…',
        "state-dict": "Error(s) in loading state_dict for Net: size mismatch for fc.weight",
        "weights-only": "Weights only load failed",
        "disk-full": "No space left on device",
        "file-system": "OSError: [Errno 116] Stale file handle",
    },
    "Cluster": {
        "gpu-failed": "Xid; uncorrectable ECC error; GPU has fallen off the bus",
        "node-failed": "NODE_FAIL; CANCELLED DUE TO NODE FAILURE",
        "time-limit": "CANCELLED DUE TO TIME LIMIT",
        "preempted": "CANCELLED DUE TO PREEMPTION",
        "hang-up": "SignalException: Process 4711 got signal: 1",
        "interrupted": "SignalException: Process 4711 got signal: 2",
        "terminated": "SignalException: Process 4711 got signal: 15",
        "cancelled": "*** JOB 4711 ON node3 CANCELLED AT 2026-11-23T04:00:00 ***",
        "infiniband": "NET/IB : Got completion from peer 10.0.0.3<54862> with status=12",
        "network-unreachable": "No route to host",
        "not-scheduled": "FailedScheduling: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu",
        "evicted": "Evicted: The node was low on resource: memory",
    },
}


def page() -> list[str]:
    """Return the page's lines."""
    return [
        "# What does this error mean?",
        "Press Ctrl+F and type a few words of your error, without numbers and names.",
        "`ddp-course read LOGS` does the same for the logs of a job; it comes with [the course](../install.md).",
        "Each fault with a command can be provoked, diagnosed and fixed on your machine; lesson 12 explains them.\n",
        *_hangs(),
        *_messages(),
        *_faults(),
    ]


def _hangs() -> list[str]:
    return [
        "(it-hangs)=\n## It hangs: begin here\n",
        "```{include} ../cheatsheet.md\n:start-after: '## When it hangs or dies'\n:end-before: '## '\n```\n",
        f"What hangs most often: {'; '.join(map(_link, HANGING))}.\n",
        *(f"### {message}\n\n{ECHO.format(waited=waited)}" for message, waited in ECHOES.items()),
    ]


def _messages() -> list[str]:
    causes, lines = {cause.name: cause for cause in CAUSES}, []
    for group, messages in MESSAGES.items():
        lines.append(f"## {group}\n")
        for name, message in messages.items():
            cause = causes.pop(name)
            assert cause.match(message), f"{name}: `ddp-course read` would not know {message!r}"
            more = f"Cause and cure in full, and a command to try it: {_link(name)}." if name in FAULTS else ""
            lines.append(f"### {message}\n\n{cause.cure[0].upper()}{cause.cure[1:]}. {more}\n")
    assert not causes, f"MESSAGES lacks {', '.join(causes)}"
    return lines


def _faults() -> list[str]:
    lines = ["## Faults, loud and silent\n"]
    for fault in FAULTS.values():
        see, cause, cure = map(_as_code, (fault.symptom, fault.cause, fault.cure))
        lines += [f"(fault-{fault.name})=\n### {fault.title}\n", f"**You see:** {see}\n"]
        lines += [f"**Cause:** {cause}\n", f"**Cure:** {cure}\n"]
        lines += [f"**Try it:** `ddp-course faults {fault.name}`\n"]
    return lines


def _as_code(text: str) -> str:
    """Set names with two underscores as code, which Markdown would take for bold."""
    return re.sub(r"(?<![`\w])__\w+__", r"`\g<0>`", text)


def _link(name: str) -> str:
    return f"[{FAULTS[name].title}](#fault-{name})"
