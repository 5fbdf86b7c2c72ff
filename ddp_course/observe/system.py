"""What does Linux tell of processes: how one ends, and how much each computes?

Read next: `watch.py`, which asks.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

ENDS_S = 0.3  # for an ended process to be seen as such
EXITING = 4  # Linux's flag of a process that is about to go


def stat(pid: int | str) -> list[str]:
    """The fields of a process from its state on; none if it is gone, or the system has no such files."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def exit_status(pid: int) -> int | None:
    """How a process that is ending ends, if it can still be seen: its parent alone is told."""
    deadline = time.monotonic() + ENDS_S
    while (fields := stat(pid)) and time.monotonic() < deadline:
        if fields[0] in "ZX" or int(fields[6]) & EXITING:
            return os.waitstatus_to_exitcode(int(fields[49]))
        time.sleep(0.001)
    return None


def processor_seconds() -> dict[int, float]:
    """Of each process that runs here, what it and all that it has started have used; nothing where no system says."""
    if not os.path.isdir("/proc"):
        return {}
    stats = {int(pid): fields for pid in os.listdir("/proc") if pid.isdigit() and (fields := stat(pid))}
    ticks = {pid: sum(map(int, fields[11:15])) for pid, fields in stats.items()}
    for pid in sorted(stats, reverse=True):  # children have higher numbers, but for the moment when these wrap
        if (parent := int(stats[pid][1])) in ticks:
            ticks[parent] += ticks[pid]
    return {pid: count / os.sysconf("SC_CLK_TCK") for pid, count in ticks.items()}
