"""How does my function come to run on N ranks?

`launch` is `torch.multiprocessing.spawn` with what a notebook needs: functions from cells, results by rank,
prints in order, a process group, and a report when a rank fails. It is a pool for one call.

Read next: `magic.py`, whole cells on ranks; or `groups.py`, how the ranks find each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_course.launcher import packing
from ddp_course.launcher.pool import RankPool
from ddp_course.launcher.settings import check_limit, takes_settings


@takes_settings
def launch(fn: Callable, world_size: int, args: tuple = (), *, limit_s: float | None = None, **settings: Any) -> list:
    """Run `fn(rank, world_size, *args)` on fresh ranks and return what each returned, by rank.

    Args:
        fn, args, limit_s: as in `RankPool.run`.
        world_size, backend, start_method, init, rendezvous, timeout_s, quiet: as in `RankPool`.
    Raises:
        RankError: a rank raised, died or hung; its message is the report.
        ValueError, TypeError: an argument is wrong; nothing was started.
    Collective: one barrier when the group opens and one when it closes, if `init`; the rest is up to `fn`.
    """
    check_limit(limit_s)
    call = packing.pack(fn, world_size, args)  # before the ranks start: a mistake costs no time
    with RankPool(world_size, **settings) as ranks:
        return ranks.run_packed(call, limit_s)
