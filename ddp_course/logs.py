"""Who says the numbers, when W processes run the same program?

Everything that is written to one place has one writer, rank 0: lines of progress, the bar. The other ranks run the same
lines of code with something that does nothing, so that no branch on the rank is needed around them.

Read next: `checkpoint/`, the other thing that rank 0 alone writes.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch.distributed as dist


def my_rank() -> int:
    """Return this process's rank: of the default group, or what the launcher said, or 0 when there is neither."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def rank0_print(*values: Any, **options: Any) -> None:
    """`print`, on rank 0 only, and at once."""
    if my_rank() == 0:
        print(*values, **{"flush": True, **options})


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
