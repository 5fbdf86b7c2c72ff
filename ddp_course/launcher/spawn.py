"""How does my function come to run on N ranks?

`launch` is `torch.multiprocessing.spawn` with what a notebook needs: functions from cells, results by rank,
prints in order, a process group, and a report when a rank fails. It is a pool for one call.

Read next: `groups.py`, how the ranks find each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ddp_course.launcher import packing
from ddp_course.launcher.pool import RankPool
from ddp_course.launcher.settings import check_limit, takes_settings

T = TypeVar("T")


@takes_settings
def launch(
    fn: Callable[..., T], world_size: int, args: tuple = (), *, limit_s: float | None = None, **settings: Any
) -> list[T]:
    """Run `fn(rank, world_size, *args)` on fresh ranks of this machine and return what each returned, by rank.

    Four ranks add 1 to their number, none waiting longer than 10 s, which gives [1, 2, 3, 4]:

        launch(lambda rank, world_size, more: rank + more, 4, args=(1,), timeout_s=10)

    Args:
        fn: any function, also one defined in a notebook's cell.
        world_size: how many ranks, a process each, at least 1.
        args: what `fn` is given after rank and world_size, the same on every rank (default: nothing).
        limit_s: seconds that the whole call may take before the ranks are ended; None (default): as long as it likes.
        backend: "nccl", "gloo", or None (default): NCCL when every rank has a GPU of its own, else gloo.
        start_method: "spawn" (default outside notebooks; fresh interpreters) or "forkserver" (default in a notebook;
            much faster after the first).
        init: open a process group (default); if False, only torchrun's environment variables are set.
        rendezvous: how the ranks meet: "file" (default), or "env", a store of the parent's as torchrun has one.
        timeout_s: seconds that a rank may wait for the others in one collective (default 60).
        quiet: None (default) shows what ranks print and, outside notebooks, a header line, "2 ranks on cpu, gloo"
            before it; False shows both everywhere, True neither.
    Raises:
        RankError: a rank raised, died or hung; its message is the report.
        ValueError, TypeError: an argument is wrong, and nothing was started; says which and what would be right.
    Collective: one barrier when the group opens and one when it closes, if `init`; the rest is up to `fn`.
    """
    check_limit(limit_s)
    call = packing.pack(fn, world_size, args)  # before the ranks start: a mistake costs no time
    with RankPool(world_size, **settings) as ranks:
        return ranks.run_packed(call, limit_s)
