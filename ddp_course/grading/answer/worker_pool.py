"""On which processes does an answer run, when starting some takes seconds and running it takes milliseconds?

On ranks that stay: a pool for each number of ranks, with and without a process group. After each run every rank looks
whether anything has changed for good; then, and where a rank died or waits in a collective, the pool is thrown away,
so that no answer finds what another one left. The clock of a run starts when all ranks are up and have imported the
judge.

Read next: `process_changes.py`, what is looked at.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from typing import Any
from unittest import mock

from ddp_course.grading.answer import process_changes
from ddp_course.grading.answer.limits import patience
from ddp_course.launcher import RankError, RankPool

TIMEOUT_S = 5.0  # for one collective of an answer
START_S = 60.0  # for ranks that are up to import a judge
MOST_RANKS = 12  # that wait for the next run; then the pool that was used longest ago ends


class KeptRanks:
    """The pools of this process that wait for an answer."""

    def __init__(self) -> None:
        self.idle: dict[tuple, tuple[RankPool, tuple]] = {}  # with the surroundings in which each was started
        self.thrown_away: deque[list[str]] = deque(maxlen=100)  # why

    def take(self, world_size: int, init: bool, call: tuple, fresh: bool) -> RankPool:
        """Return ranks that have imported what `call` needs; a run that follows has them to itself."""
        key = (os.getpid(), world_size, init)
        pool, surroundings = (None, None) if fresh else self.idle.pop(key, (None, None))
        timeout_s = TIMEOUT_S * patience()
        if pool and surroundings == _surroundings() and pool.settings.timeout_s > timeout_s / 2:
            with suppress(RankError):  # somebody has killed one
                pool.run(_import, call, limit_s=START_S * patience())
                return pool
        if pool:
            pool.kill()
        _end_at_exit(os.getpid())
        with mock.patch.object(tempfile, "tempdir", None):  # not a box's folder, which goes before they do
            pool = RankPool(world_size, backend="gloo", start_method="forkserver", init=init, timeout_s=timeout_s)
        try:
            pool.run(_import, call, limit_s=START_S * patience())
        except BaseException as error:
            pool.kill()
            if isinstance(error, RankError):
                error.code = "start"
            raise
        return pool

    def put_back(self, pool: RankPool, init: bool) -> None:
        """Keep these ranks for the next run, and not too many others."""
        self.idle[os.getpid(), pool.world_size, init] = pool, _surroundings()
        while sum(kept.world_size for kept, _ in self.idle.values()) > MOST_RANKS and len(self.idle) > 1:
            self.idle.pop(next(iter(self.idle)))[0].kill()

    def end(self) -> None:
        """End all ranks that wait."""
        while self.idle:
            self.idle.popitem()[1][0].kill()


KEPT = KeptRanks()


def run_on_ranks(fn: Callable, world_size: int, call: tuple, *, init: bool, limit_s: float, fresh: bool) -> list:
    """Return what `fn(rank, world_size, *call)` returns on each rank.

    Args:
        init: whether the ranks have a process group already.
        fresh: on ranks of its own.
    Raises:
        RankError: a rank raised, died or ran past `limit_s`.
    """
    pool = KEPT.take(world_size, init, call, fresh)
    harms = [["failed"]]
    try:
        results, harms = zip(*pool.run(process_changes.looked_after, (fn, call, init), limit_s=limit_s), strict=True)
        return list(results)
    except RankError:
        if pool.alive and not fresh:  # all ranks have raised, and are in step
            with suppress(RankError):
                harms = pool.run(process_changes.changed, limit_s=limit_s)
        raise
    finally:
        if fresh or any(harms):
            KEPT.thrown_away.append(sorted(set().union(*harms)))
            pool.kill()
        else:
            KEPT.put_back(pool, init)


def _import(rank: int, world_size: int, *call: Any) -> None:
    """Unpacking the arguments has imported what they need."""


def _surroundings() -> tuple:
    """What ranks take over from this process when they start."""
    return dict(os.environ), list(sys.path)


@functools.cache
def _end_at_exit(owner: int) -> None:
    # Before multiprocessing waits for its children, which in a child of multiprocessing comes before `atexit`.
    util.Finalize(None, KEPT.end, exitpriority=10)
