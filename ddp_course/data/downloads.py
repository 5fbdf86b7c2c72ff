"""How do many ranks come by one file? One rank of each host fetches it; the others wait for its word.

Three things go wrong when every rank downloads for itself. The ranks overwrite each other's files. A run that
is killed half-way leaves half a file, which the next run takes for good. A download that fails on one rank
leaves the others waiting. `once_per_host` answers the first and the last, `staged` the second.

Read next: `datasets.py`, which uses both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


class DatasetError(RuntimeError):
    """A dataset could not be had. The message names it, where it was looked for, and the way out."""


def once_per_host(prepare: Callable[[], None], limit_s: float) -> None:
    """Run `prepare` on local rank 0 of each host while the other ranks wait for it.

    Args:
        prepare: raises DatasetError if it fails.
        limit_s: how long the others wait.
    Raises:
        DatasetError: it failed on some host. The same message on every rank, of every host.
    Collective: with a process group, every rank: one new_group, one all_gather_object over it, one
        barrier. Without a group, none.
    """
    if not dist.is_initialized():
        return prepare()
    # A group of its own: a download may take longer than a collective of the default group is allowed to.
    waiting_room = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
    mine = problem_of(prepare) if local_rank() == 0 else None
    problems = gather(mine, waiting_room, limit_s)
    dist.barrier()  # nobody closes the waiting room while a slower rank is still in it
    dist.destroy_process_group(waiting_room)
    for problem in problems:
        if problem is not None:
            raise DatasetError(problem)


def local_rank() -> int:
    # A group that was opened by hand may lack the launcher's variables; it is then taken to be on one host.
    return int(os.environ.get("LOCAL_RANK", dist.get_rank()))


def problem_of(prepare: Callable[[], None]) -> str | None:
    try:
        prepare()
    except DatasetError as error:
        return str(error)
    return None


def gather(mine: str | None, waiting_room: dist.ProcessGroup, limit_s: float) -> list[str | None]:
    """Tell all ranks what came of this one's part, and return what they tell, by rank.

    Raises:
        DatasetError: not every rank answered within `limit_s`.
    Collective: one all_gather_object; every rank of `waiting_room`.
    """
    gathered: list[str | None] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(gathered, mine, group=waiting_room)
    except RuntimeError as error:
        raise DatasetError(
            f"rank {dist.get_rank()}: no word of the download within {limit_s:g} s ({last_line(error)}); "
            "look at what local rank 0 reports, or give it longer (download_limit_s=...)"
        ) from error
    return gathered


def staged(destination: Path, download: Callable[[Path], None]) -> None:
    """Let `download` fill a folder beside `destination`, and rename the result when it is complete.

    Args:
        destination: where the files are to be at the end.
        download: called with an empty folder; leaves the files in it, below `destination`'s name.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{destination.name}-", dir=destination.parent, ignore_cleanup_errors=True
    ) as folder:
        download(Path(folder))
        move_into_place(Path(folder, destination.name), destination)


def move_into_place(complete: Path, destination: Path) -> None:
    try:
        os.rename(complete, destination)
    except OSError:
        if not destination.exists():
            raise
        shutil.rmtree(complete)  # another run was faster, and its files are as good as ours


@contextlib.contextmanager
def silence_limit(limit_s: float) -> Iterator[None]:
    """Give up on a server that sends nothing for `limit_s`; Python's own default is to wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(limit_s)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def last_line(error: BaseException) -> str:
    """Return the line of an error's message that says most, or its class if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
