"""How much may a box use, and how long may an answer take on a machine that others use, too?

Memory, processes, threads and files of a box are looked at twice a second, from outside; what goes beyond ends the
box. Files count that have no name any more, or never had one, as long as they are open or mapped. Time is stretched
while the machine has more to do than it has cores for: an answer is not to lose points for the neighbours.

Left out on purpose: System V's shared memory that is not mapped, which only a control group of the system sees.

Read next: `sandbox/box.py`.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

LIMIT_S = 10.0  # for one run of an answer
MOST_PROCESSES, MOST_THREADS = 200, 4000
MOST_BYTES = 8 * 2**30  # of memory, and so much of files
MOST_OF_A_FILE = 64 * 2**20  # bytes, that an answer has written and a judge reads
LOOK_EVERY_S = 0.5
AT_EASE = 4.0  # programs that wait for each core without anybody's noticing


def patience() -> float:
    """Return by how much to stretch a time limit now: 1 on a machine that is not overloaded."""
    if not hasattr(os, "getloadavg"):
        return 1.0
    return max(1.0, os.getloadavg()[0] / (AT_EASE * (os.cpu_count() or 1)))


class Watch(threading.Thread):
    """Looks at a box, and ends it when it uses too much; `reason` then says of what.

    Args:
        pid: of the program that keeps the box.
        folder: of the box.
    """

    def __init__(self, pid: int, folder: Path):
        super().__init__(daemon=True)
        self.pid, self.folder, self.reason = pid, folder, ""
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            if reason := excess(self.pid, self.folder):
                return self.end(reason)

    def end(self, reason: str) -> None:
        """End the box."""
        self.reason = self.reason or reason
        end_tree(self.pid)

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self.join()


def end_tree(pid: int) -> None:
    """End a process and all that it has started."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                each.kill()


def excess(pid: int, folder: Path) -> str:
    """Return what a box uses too much of, or nothing."""
    with suppress(psutil.Error):
        inside = psutil.Process(pid).children(recursive=True)
        if len(inside) > MOST_PROCESSES:
            return f"{len(inside)} processes, where {MOST_PROCESSES} may be"
        if (threads := _sum(inside, psutil.Process.num_threads)) > MOST_THREADS:
            return f"{threads} threads, where {MOST_THREADS} may be"
        # What processes share counts for each of them in the first sum, once in the second, which takes a while.
        memory = _sum(inside, lambda process: process.memory_info().rss)
        if (
            memory > MOST_BYTES
            and (memory := _sum(inside, lambda process: process.memory_full_info().pss)) > MOST_BYTES
        ):
            return f"{memory / 2**30:.0f} GiB of memory, where {MOST_BYTES / 2**30:.0f} may be"
        in_memory = sum(_in_memory(process.pid) for process in inside[-1:])
        if (held := _size(folder) + in_memory + _nameless(inside)) > MOST_BYTES:
            return f"{held / 2**30:.0f} GiB of files, where {MOST_BYTES / 2**30:.0f} may be"
    return ""


def _sum(processes: list[psutil.Process], what: Callable[[psutil.Process], int]) -> int:
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += what(process)
    return total


def _nameless(processes: list[psutil.Process]) -> int:
    """Bytes of open or mapped files that stand in no folder: deleted ones, and those made by memfd_create."""
    found: dict[tuple[int, int], int] = {}  # by device and inode: several processes may have one
    for process in processes:
        with suppress(OSError):
            for number in os.listdir(f"/proc/{process.pid}/fd"):
                with suppress(OSError):
                    facts = os.stat(f"/proc/{process.pid}/fd/{number}")
                    if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0:
                        found[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
            for line in Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines():
                # Anonymous pages that processes share have this name; those that are used count as memory.
                if line.endswith("(deleted)") and not line.endswith("/dev/zero (deleted)"):
                    span, _, _, device, inode, _ = line.split(maxsplit=5)
                    start, end = (int(each, 16) for each in span.split("-"))
                    major, minor = (int(each, 16) for each in device.split(":"))
                    found.setdefault((os.makedev(major, minor), int(inode)), end - start)
    return sum(found.values())


def _in_memory(pid: int) -> int:
    """Bytes of the files that lie in memory, as this process sees them."""
    root = Path(f"/proc/{pid}/root")
    with suppress(OSError):
        if root.stat().st_dev != Path("/").stat().st_dev:  # else the walls are not built yet
            facts = [os.statvfs(root / place) for place in ("tmp", "dev/shm")]
            return sum((each.f_blocks - each.f_bfree) * each.f_frsize for each in facts)
    return 0


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def own_file(path: str | os.PathLike) -> Path:
    """Return the path of a file that an answer has written, to be read outside of its box.

    Raises:
        OSError: it leads out of the folder for temporary files; it is no plain file, or very large.
    """
    found = Path(os.path.realpath(path))  # where checks have their files: in a box, its own folder
    if not found.is_relative_to(os.path.realpath(tempfile.gettempdir())):
        raise OSError(f"{Path(path).name} is a link that leads elsewhere")
    facts = found.stat()
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_OF_A_FILE:
        raise OSError(f"{found.name} is no plain file, or has more than {MOST_OF_A_FILE} bytes")
    return found
