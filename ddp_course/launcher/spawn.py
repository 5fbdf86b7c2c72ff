"""How does my function come to run on N ranks?

`launch` is `torch.multiprocessing.spawn` with what a notebook needs: functions from cells, results by rank,
prints in order, a process group, and a report when a rank fails. It is a pool for one call.

Read next: `magic.py`, whole cells on ranks; or `groups.py`, how the ranks find each other.
"""

from __future__ import annotations

from collections.abc import Callable

from ddp_course.launcher import checks
from ddp_course.launcher.pool import RankPool


def launch(
    fn: Callable,
    world_size: int,
    args: tuple = (),
    *,
    backend: str | None = None,
    start_method: str = "spawn",
    init: bool = True,
    rendezvous: str = "file",
    timeout_s: float = 60.0,
    limit_s: float | None = None,
    quiet: bool = False,
) -> list:
    """Run `fn(rank, world_size, *args)` on fresh ranks and return what each returned, by rank.

    Args:
        fn, args, limit_s: as in `RankPool.run`.
        world_size, backend, start_method, init, rendezvous, timeout_s, quiet: as in `RankPool`.
    Raises:
        RankError: a rank raised, died or hung; its message is the report.
        ValueError, TypeError: an argument is wrong; nothing was started.
    Collective: one barrier when the group opens and one when it closes, if `init`; the rest is up to `fn`.
    """
    checks.check_settings(world_size, start_method, rendezvous, timeout_s, limit_s)
    call = checks.pack(fn, world_size, args)  # before the ranks start: a mistake costs no time
    settings = {"backend": backend, "start_method": start_method, "init": init, "rendezvous": rendezvous}
    with RankPool(world_size, **settings, timeout_s=timeout_s, quiet=quiet) as ranks:
        return ranks.run_packed(call, limit_s)
