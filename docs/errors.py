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
    "Connection closed by peer": "lost its connection to it",
    "Timed out waiting 1800000ms for recv operation": "waited until gloo's time limit",
}
# One text that people see for each cause, in the order in which a job meets them.
MESSAGES = {
    "Start-up": {
        "no-group": "Default process group has not been initialized",
        "local-rank-argument": "unrecognized arguments: --local-rank=0",
        "port-taken": "EADDRINUSE, address already in use",
        "name-resolution": "Name or service not known",
        "no-interface": "No usable listening interface found",
        "world-size": "Timed out after 60 seconds waiting for clients. 1/2 clients joined",
        "libuv": "use_libuv was requested but PyTorch was built without libuv support",
        "versions-differ": "NCCL version mismatch",
        "driver-too-old": "CUDA driver version is insufficient for CUDA runtime version",
        "invalid-device": "CUDA error: invalid device ordinal",
        "duplicate-gpu": "Duplicate GPU detected",
    },
    "The model and its collectives": {
        "unused-parameters": "Expected to have finished reduction in the prior iteration",
        "marked-ready-twice": "Expected to mark a variable ready only once",
        "in-place-modification": "a variable has been modified by an inplace operation",
        "mismatched-calls": "Detected mismatch between collectives on ranks",
        "not-a-number": "loss is nan",
    },
    "Memory": {
        "gpu-out-of-memory": "CUDA out of memory",
        "out-of-memory": "Out of memory: Killed process; oom-kill; OOMKilled",
        "shared-memory": "Bus error; insufficient shared memory",
        "nccl-in-docker": "NCCL WARN Call to posix_fallocate failed",
        "worker-killed": "DataLoader worker (pid 4711) is killed by signal: Killed",
    },
    "Checkpoints": {
        "torn-checkpoint": "PytorchStreamReader failed finding central directory",
        "module-prefix": 'Unexpected key(s) in state_dict: "module.…; Missing key(s) in state_dict: "module.…',
        "disk-full": "No space left on device",
    },
    "Cluster": {
        "gpu-failed": "Xid; uncorrectable ECC error; GPU has fallen off the bus",
        "node-failed": "NODE_FAIL; CANCELLED DUE TO NODE FAILURE",
        "time-limit": "CANCELLED DUE TO TIME LIMIT",
        "preempted": "CANCELLED DUE TO PREEMPTION",
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
