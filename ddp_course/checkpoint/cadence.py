"""When does a run save, when does it stop, and how do all ranks come to the same answer?

A signal reaches one rank, or each at another moment, and the ranks' clocks differ. A rank that left on its own, or
began to save on its own, would leave the others waiting. So in every step each rank says what it wishes, and the
largest wish holds for all. That is one all_reduce of one number, under way while the step computes. It has a gloo
group of its own: there it cannot come between the gradients, and no GPU has to be waited for.

SIGTERM wishes to save and stop: a scheduler sends it before it takes the machine away. SIGUSR1 wishes to save and go
on. `seconds` is rank 0's clock. `steps` needs no talk, for every rank counts alike.

Left out on purpose: what is saved, and how; that is `train/run.py`'s part.
Read next: `train/run.py`.
"""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from enum import IntEnum
from types import FrameType

import torch
import torch.distributed as dist


class Wish(IntEnum):
    """What a rank wants to be done at the end of a step; a larger one includes the smaller."""

    GO_ON = 0
    SAVE = 1
    STOP = 2  # save, then leave


WISHES = {signal.SIGUSR1: Wish.SAVE, signal.SIGTERM: Wish.STOP}


class Cadence:
    """The ranks' agreement on when to save and when to stop.

        with Cadence(steps=100) as cadence:
            for step in ...:
                ...                                    # forward, backward, optimizer.step()
                wish = cadence.next(step)              # the same on every rank
            cadence.finish()

    A signal is acted on at the end of the step after the one in which it came: the step before had asked already.

    Args:
        steps: save whenever the number of the step is a multiple of this; 0: never.
        seconds: save when rank 0's clock says that this much time has passed since the last time; 0: never.
        timeout_s: how long a rank waits for the others' answers.
    Collective: one new_group when made, one small all_reduce on it for each `next`, one barrier in `finish`; every
        rank of the default group.
    """

    def __init__(self, steps: int = 0, seconds: float = 0.0, timeout_s: float = 60.0) -> None:
        self.steps, self.seconds = steps, seconds
        self._clock = time.monotonic()
        # Each is written by the handler or by `_ask`, never by both: a signal may come between any two lines.
        self._stop = False
        self._saves = self._saves_said = 0  # how many were wished, and how many of these the others know of
        self._handlers: dict[int, object] = {}
        # A group does not inherit the default group's time limit.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._rank = dist.get_rank()
        self._ask()

    def next(self, step: int) -> Wish:
        """Return what all ranks do at the end of `step`, and ask for the next one.

        Collective: one small all_reduce, every rank of the default group.
        """
        wish = self._answer()
        if self.steps and step % self.steps == 0:
            wish = max(wish, Wish.SAVE)
        if wish:
            self._clock = time.monotonic()
        self._ask()
        return wish

    def finish(self) -> None:
        """Wait for the last answer, and close the group: a process may train many times, and each has a group.

        Call it only if nothing failed: after an error nobody may answer any more.

        Collective: one barrier of the default group, or a fast rank would close what another still reads from.
        """
        self._answer()
        dist.barrier()
        dist.destroy_process_group(self._group)

    def _ask(self) -> None:
        saves = self._saves
        wish = Wish.STOP if self._stop else Wish.SAVE if saves > self._saves_said else Wish.GO_ON
        self._saves_said = saves  # said once; what comes from here on is said next time
        if self._rank == 0 and self.seconds and time.monotonic() - self._clock >= self.seconds:
            wish = max(wish, Wish.SAVE)
        self._asked = torch.tensor([int(wish)])
        self._work = dist.all_reduce(self._asked, dist.ReduceOp.MAX, self._group, async_op=True)

    def _answer(self) -> Wish:
        self._work.wait()
        return Wish(int(self._asked.item()))

    # --- Signals -----------------------------------------------------------------------------------

    def __enter__(self) -> Cadence:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._handlers = {number: signal.signal(number, self._note) for number in WISHES}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """A handler may interrupt any line, so it only notes what came."""
        if WISHES[signal.Signals(number)] == Wish.STOP:
            self._stop = True
        else:
            self._saves += 1
