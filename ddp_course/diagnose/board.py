"""How does every machine come to tell the same story?

Whoever opened the meeting, rank 0, holds the store. The others post what they found, rank 0 puts it together, and
either lets all go on or tells all how it ended. So each machine prints the same verdict, and nobody waits for a
machine that is known to be missing.

Read next: `meeting.py`, which goes through it step by step.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ddp_course.diagnose import network, pairs
from ddp_course.diagnose.arrival import POLL_S, PREFIX, Clock
from ddp_course.diagnose.pairs import Guest
from ddp_course.diagnose.verdict import Problem, Verdict

GOODBYE_S = 1.5  # how long rank 0 stays to let the others hear


class Board:
    """Notes in the store: JSON under a name."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, clock: Clock) -> None:
        self.store, self.rank, self.world_size, self.clock = store, rank, world_size, clock

    def post(self, name: str, value: object) -> None:
        self._ask(self.store.set, f"{PREFIX}/{name}", json.dumps(value))

    def read(self, name: str) -> Any:
        """Return what was posted under `name`, or None if nothing was."""
        key = f"{PREFIX}/{name}"
        return json.loads(self._ask(self.store.get, key)) if self._ask(self.store.check, [key]) else None

    def _ask(self, do: Callable, *arguments: object) -> object:
        try:
            return do(*arguments)
        except RuntimeError:  # torch's DistError among them
            raise Problem(
                "meeting", "rank 0, which opened the meeting, has left it", "read what it printed, and run all again"
            ) from None

    def wait_for(self, name: str) -> Any:
        """Wait for what rank 0 decides: the next step, or the end."""
        while self.clock.left() > 0:
            if (end := self.read("over")) is not None:
                self._ask(self.store.add, f"{PREFIX}/left", 1)
                raise Problem(**end)
            if (value := self.read(name)) is not None:
                return value
            time.sleep(POLL_S)
        if len(here := self._all_there("guest")) < self.world_size:  # this machine had less time than rank 0
            raise self._who_is_missing(here)
        found = f"rank 0, which opened the meeting, did not get as far as {name} in {self.clock.limit_s:g} s"
        raise Problem("meeting", found, "read what rank 0 printed; start all with the same --timeout, or a larger one")

    # What rank 0 does.

    def gather_guests(self) -> list[Guest]:
        """Wait for all to sign in; keep a third of the time, 10 s at most, for what comes after."""
        here = self._wait_for_all("guest", min(10.0, self.clock.limit_s / 3))
        if len(here) < self.world_size:
            raise self._who_is_missing(here)
        self.post("guests", [here[rank] for rank in range(self.world_size)])
        return [Guest(**here[rank]) for rank in range(self.world_size)]

    def _who_is_missing(self, here: dict[int, dict]) -> Problem:
        guests = {rank: Guest(**told) for rank, told in here.items()}
        missing = [str(rank) for rank in range(self.world_size) if rank not in guests]
        found = f"{len(guests)} of {self.world_size} came within {self.clock.passed():.0f} s; missing: "
        found += f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
        if turned_away := self.read("turned away"):
            found += f"; {turned_away}"
        came = "; ".join(f"rank {rank} {guest.name}" for rank, guest in guests.items())
        cure = f"start the same line on each machine that is not among these: {came}; or give --timeout more"
        if 0 in guests and network.is_loopback(guests[0].address):
            cure += f". The meeting is at {guests[0].address}, which no other machine can reach"
        return Problem("arrival", found, cure)

    def gather_reached(self, guests: list[Guest]) -> None:
        """Collect what each rank could reach, and name whom nobody or somebody could not."""
        reached = self._wait_for_all("reached", max(0.0, self.clock.left() - pairs.LIMIT_S - 2.0))
        if gone := sorted(set(range(self.world_size)) - set(reached)):
            names = "; ".join(f"rank {rank} {guests[rank].name}" for rank in gone)
            cure = "read what it printed; start all with the same --timeout, or a larger one"
            raise Problem("pairs", f"came and then left or stopped answering: {names}", cure)
        errors = {rank: {int(to): error for to, error in told.items()} for rank, told in reached.items()}
        if found := pairs.blame(guests, errors):
            raise Problem("pairs", found, pairs.CURE)
        self.post("pairs", "all reached")

    def _wait_for_all(self, name: str, keep_s: float) -> dict[int, dict]:
        """Return what the ranks left under `name`, once all have, or when only `keep_s` seconds are left."""
        while len(found := self._all_there(name)) < self.world_size and self.clock.left() > keep_s:
            time.sleep(POLL_S)
        return found

    def _all_there(self, name: str) -> dict[int, dict]:
        """Return what the ranks have left under `name` so far."""
        found = {rank: self.read(f"{name}/{rank}") for rank in range(self.world_size)}
        return {rank: told for rank, told in found.items() if told is not None}

    def tell_all(self, verdict: Verdict) -> None:
        """Tell those who came how it ended, and give them a moment to hear it."""
        self.post("over", {"name": verdict.name, "found": verdict.found, "cure": verdict.cure})
        self._see_off(self._ask(self.store.add, f"{PREFIX}/came", 0))

    def leave(self, opened: bool) -> None:
        """End a good meeting: the one that holds the store goes last."""
        if opened:
            self._see_off(self.world_size - 1)
        else:
            with contextlib.suppress(Problem):
                self._ask(self.store.add, f"{PREFIX}/left", 1)

    def _see_off(self, others: int) -> None:
        until = time.monotonic() + GOODBYE_S
        while time.monotonic() < until and self._ask(self.store.add, f"{PREFIX}/left", 0) < others:
            time.sleep(POLL_S)
