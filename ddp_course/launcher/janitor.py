"""Who ends the ranks when their parent is killed?

A rank ends itself when its pipe breaks, but not while compiled code holds its interpreter. So each set of ranks
has a janitor: a small process, without torch, that reads the ranks' process numbers from its stdin and waits
there. Its stdin ends when the parent is gone. Then it kills the ranks, with their children, and removes their
folder. A parent that cleans up itself kills its janitor last. SIGTERM, with which a notebook's kernel ends all its
children at shutdown, means the same as the end of stdin.

torchrun's ranks come and go, each in a session of its own. They are known by a mark in their environment, which
whatever they start inherits.

Run as `python janitor.py FOLDER [MARK]`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

SEMAPHORES = "/dev/shm"  # where Linux keeps named semaphores; elsewhere they have no files
MARKED_LIMIT_S = 5.0  # for the marked to be gone; a killed process that waits for a dead disk is not


def start(folder: str, mark: str = "") -> subprocess.Popen:
    """Start a janitor for `folder`, and for the processes with `mark` ("NAME=VALUE") in their environment."""
    command = [sys.executable, "-I", "-S", __file__, folder, *[mark] * bool(mark)]  # no site-packages: starts at once
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)


def main(folder: str, mark: str = "") -> None:
    """Wait for the end of stdin, then leave nothing of the ranks named there."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    pids = []
    try:
        for line in sys.stdin:
            pids.append(int(line))
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it may not have become the head of its process group yet
        if mark:
            kill_marked(mark)
        remove(folder)


def remove(folder: str) -> list[str]:
    """Remove the ranks' folder and their semaphores, which bear its name; return the names of these."""
    shutil.rmtree(folder, ignore_errors=True)
    prefix = f"sem.{os.path.basename(folder)}"
    found = [entry for entry in _listdir(SEMAPHORES) if entry.startswith(prefix)]
    for entry in found:
        with suppress(FileNotFoundError):
            os.unlink(f"{SEMAPHORES}/{entry}")
    return [entry.replace("sem.", "/", 1) for entry in found]


def _listdir(path: str) -> list[str]:
    return os.listdir(path) if os.path.isdir(path) else []


# --- Processes by their environment (Linux) --------------------------------------------------------


def kill_marked(mark: str) -> None:
    """Kill every process with `mark` in its environment, and those that these start meanwhile."""
    deadline = time.monotonic() + MARKED_LIMIT_S
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Return the processes that live and have `mark` in their environment, oldest number first."""
    name, _, value = mark.partition("=")
    pids = sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [pid for pid in pids if pid != os.getpid() and environment(pid).get(name) == value]


def environment(pid: int) -> dict[str, str]:
    """Return the variables a process was started with; none if it has ended or is somebody else's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def parent(pid: int) -> int:
    """Return the number of a process's parent; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
