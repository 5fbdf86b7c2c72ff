"""How do ranks stay alive between cells, and what happens when one of them does not?

`RankPool` starts its ranks once, by `torch.multiprocessing.spawn`, and keeps a pipe to each. A call travels as
bytes (cloudpickle, so functions from cells work), the answers come back by rank. While it waits, the parent
shows what ranks print, and watches for the three ways in which a call fails: a rank raises, dies, or hangs.

Left out on purpose: more than one host, which is torchrun's part.
Read next: `spawn.py`, one call on fresh ranks.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ddp_course.launcher import failure_report, guard, lines, packing, processes
from ddp_course.launcher.failure_report import RankError
from ddp_course.launcher.relay import Relay
from ddp_course.launcher.running_call import Call
from ddp_course.launcher.settings import Settings, WrongValue, check_limit, takes_settings
from ddp_course.rendezvous import agent_store

START_LIMIT_S = 120.0  # importing torch on a busy machine takes tens of seconds

T = TypeVar("T")


class RankPool:
    """Ranks that live until `close`: a call on them takes milliseconds, not seconds.

    Two calls on the same two ranks, which give [0, 1] and [2, 2]:

        with RankPool(2) as ranks:
            ranks.run(lambda rank, world_size: rank)
            ranks.run(lambda rank, world_size: world_size)

    Args:
        world_size: how many ranks, a process each, at least 1.
        backend: "nccl", "gloo", or None (default): NCCL when every rank has a GPU of its own, else gloo.
        start_method: "spawn" (default outside notebooks; fresh interpreters) or "forkserver" (default in a notebook;
            much faster after the first).
        init: open a process group (default); if False, only torchrun's environment variables are set.
        rendezvous: how the ranks meet: "file" (default), or "env", a store of the parent's as torchrun has one.
        timeout_s: seconds that a rank may wait for the others in one collective (default 60).
        quiet: None (default) shows what ranks print and, outside notebooks, a header line, "2 ranks on cpu, gloo"
            before it; False shows both everywhere, True neither.
    Raises:
        ValueError, TypeError: an argument is wrong; says which and what would be right.
        RankError: a rank could not start.
    Collective: one barrier when the group opens and one when it closes, if `init`.
    """

    @takes_settings
    def __init__(self, world_size: int, **settings: Any):
        self.settings = Settings.of(world_size, settings)
        guard.end_rank_that_imports()
        self.world_size, self.backend = world_size, self.settings.backend
        self._calls = 0  # the start counts as call 0
        self._folder = Path(tempfile.mkdtemp(prefix="ddp_course_"))
        self._relay = Relay(self._folder, world_size, bool(self.settings.quiet))
        hosts_store = self.settings.rendezvous == "env" or not self.settings.init
        self._store, environ = agent_store(world_size) if hosts_store else (None, {})
        with processes.interrupts_wait():
            folder = str(self._folder)
            self._ranks, janitor = processes.start(self.settings, folder, {**os.environ, **environ})
            self._end = weakref.finalize(self, processes.end_now, self._ranks, janitor, folder, os.getpid())
            self._end.atexit = False  # its own hook may come after multiprocessing's, which would wait for the ranks
            atexit.register(self._end)
            if self.settings.header:
                ranks, device = "rank" if world_size == 1 else "ranks", "cuda" if self.backend == "nccl" else "cpu"
                print(f"{world_size} {ranks} on {device}, {self.backend}")
        self._guarded(START_LIMIT_S)

    def run(self, fn: Callable[..., T], args: tuple = (), *, limit_s: float | None = None) -> list[T]:
        """Call `fn(rank, world_size, *args)` on every rank and return what each returned, by rank, tensors on the CPU.

        Args:
            fn: any function, also one defined in a notebook's cell.
            args: what `fn` is given after rank and world_size, the same on every rank (default: nothing).
            limit_s: seconds that the call may take before the ranks are ended; None (default): as long as it likes,
                but no longer than `timeout_s` in one collective.
        Raises:
            RankError: a rank raised, died or hung. The pool lives on if all ranks are idle and in step.
            ValueError, TypeError: the call itself is wrong, or the pool has ended.
        """
        check_limit(limit_s)
        return self.run_packed(packing.pack(fn, self.world_size, args), limit_s)

    def run_packed(self, payload: bytes, limit_s: float | None = None) -> list:
        """`run` for a call that `packing.pack` has packed."""
        if not self.alive:
            raise WrongValue("the ranks of this pool have ended; start a new RankPool")
        self._relay.begin()
        self._calls += 1
        for rank in self._ranks:
            rank.tell(self._calls, "call", (payload, lines.cell_sources()))
        return self._guarded(limit_s)

    @property
    def alive(self) -> bool:
        """Whether the ranks can take a call."""
        return self._end.alive

    @property
    def pids(self) -> list[int]:
        """The process of each rank, by rank; for signals of your own."""
        return [rank.process.pid for rank in self._ranks] if self.alive else []

    def close(self) -> None:
        """End the ranks in order; those that do not follow are killed."""
        if self.alive:
            for trouble in processes.end_in_order(self._ranks):
                warnings.warn(trouble, RuntimeWarning, stacklevel=2)
            self.kill()

    def kill(self) -> None:
        """End the ranks at once, whatever they are doing."""
        atexit.unregister(self._end)
        self._end()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()  # after an error no collective, so no orderly end

    def _guarded(self, limit_s: float | None) -> list[Any]:
        """Collect all answers; on a failure report it, and end the ranks unless they are all idle and in step."""
        call = Call(self._calls, self._ranks, self._relay)
        try:
            answers = call.collect(limit_s, self.settings.timeout_s)
        except RankError as error:
            error.output = self._relay.finish()
            if not call.in_step():
                self.kill()
            raise
        except BaseException as error:
            try:
                where = failure_report.where_all_were(call.whereabouts())
                self._relay.finish()
            finally:
                self.kill()
            if isinstance(error, KeyboardInterrupt):
                raise failure_report.RankInterrupt(
                    f"interrupted; the {self.world_size} ranks have been ended\n{where}"
                ) from None
            raise
        self._relay.finish()
        return answers
