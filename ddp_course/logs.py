"""Who says the numbers, when W processes run the same program?

Everything that is written to one place has one writer, rank 0: lines of progress, the bar, the event files of
TensorBoard. The other ranks run the same lines of code with something that does nothing, so that no branch on the
rank is needed around them. What goes wrong on any rank is still said by that rank.

Left out on purpose: log files, rotation and log servers, which are the same as in a program of one process.
Read next: `checkpoint/`, the other thing that rank 0 alone writes.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from typing import Any, TextIO

import torch.distributed as dist

NO_TENSORBOARD = "TensorBoard is not installed, so no event files are written to {folder}: pip install tensorboard"


def my_rank() -> int:
    """Return this process's rank: of the default group, or what the launcher said, or 0 when there is neither."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def rank0_print(*values: Any, **options: Any) -> None:
    """`print`, on rank 0 only, and at once."""
    if my_rank() == 0:
        print(*values, **{"flush": True, **options})


def rank_logger(
    name: str = "train",
    *,
    rank: int | None = None,
    level: int = logging.INFO,
    everywhere: bool = False,
    stream: TextIO | None = None,
) -> logging.Logger:
    """Return the logger `name`, set up so that every line tells its rank.

    Rank 0 says what is at least as serious as `level`. The others say warnings and errors only: a rank that is in
    trouble must be heard, whichever it is. A second call replaces what the first one set up.

    Args:
        rank: None means `my_rank()`.
        everywhere: let every rank speak at `level`, to look for a mistake.
        stream: where to write; None means stderr.
    """
    rank = my_rank() if rank is None else rank
    handler = logging.StreamHandler(stream)
    line = "%(asctime)s rank %(rank)s %(levelname)s: %(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%H:%M:%S", defaults={"rank": rank}))
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.propagate = False  # the root logger would say it a second time, without the rank
    logger.setLevel(level if rank == 0 or everywhere else max(level, logging.WARNING))
    return logger


def progress_bar(steps: int, *, initial: int = 0, shown: bool | None = None, rank: int | None = None) -> Any:
    """Return a tqdm bar: the job's only one on rank 0, one that does nothing elsewhere.

    Args:
        steps: how many there are.
        initial: how many of them are behind a resumed run; `update()` will be called for the others.
        shown: None shows the bar when stderr is a terminal, and spares a log file. The stderr of a rank that
            `launch` started is no terminal, but `launch` shows what it writes: say True there.
        rank: None means `my_rank()`.
    """
    from tqdm import tqdm

    rank = my_rank() if rank is None else rank
    tqdm.set_lock(threading.RLock())  # tqdm's own is a semaphore of the system, which a killed rank would leak
    hidden = None if shown is None else not shown  # tqdm reads None as "hidden unless it is a terminal"
    return tqdm(total=steps, initial=initial, disable=True if rank else hidden, unit="step", mininterval=0.5)


class NoWriter:
    """Has every `add_...` of a `SummaryWriter` and writes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("add_"):
            return lambda *args, **options: None
        raise AttributeError(f"a summary writer has no {name!r}")

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def __enter__(self) -> NoWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def summary_writer(folder: str | os.PathLike, *, rank: int | None = None) -> Any:
    """Return TensorBoard's writer on rank 0, and a `NoWriter` elsewhere and where TensorBoard is not installed.

    Without TensorBoard, rank 0 warns once. Writers on several ranks would write several curves of one name.
    """
    rank = my_rank() if rank is None else rank
    if rank != 0:
        return NoWriter()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        if error.name != "tensorboard":
            raise  # it is there, and broken: that must not look as if it were missing
        warnings.warn(NO_TENSORBOARD.format(folder=folder), stacklevel=2)
        return NoWriter()
    return SummaryWriter(os.fspath(folder))
