"""15.1 `train_until_told(rank, world_size, run)`: do all ranks leave at the same step, though one was told?

The signals are real: the run sends SIGTERM to its own process in the middle of a step, or while the ranks agree.
Before each step, save and return the ranks meet at a store of the judge's, where a rank that goes another way than
the others is seen at once, and not by a hang.

Read next: `resume.py`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault, FaultFound
from ddp_course.grading.vocabulary import observe
from ddp_course.grading.vocabulary.expect import Ending, exercise, first_mistake
from ddp_course.grading.vocabulary.play import Note, Round, Seen

INSIDE_S = 0.05  # after which the signal comes to a rank that waits
MEET_S = 4.0  # for the other ranks to come to the next step, save or return
STATUS = 128 + signal.SIGTERM
SAID = {"step": "trains on after {} steps", "save": "saves after {} steps", "leave": "returns after {} steps"}
ALIKE, HANDLER = "all ranks do the same", "a handler that sets a flag, and nothing else"


@dataclass(frozen=True)
class Case:
    """Who gets SIGTERM when.

    Args:
        told: by rank, the step in which this rank gets it.
        between: the last rank gets it while the ranks agree, the first time after this many steps.
        inside: whether that is while it waits for the others in a collective, so that its handler runs after that.
        again: whether each rank gets it once more, while it saves.
        done: how many steps are done before the call.
    """

    steps: int
    told: Mapping[int, int] = field(default_factory=dict)
    between: int | None = None
    inside: bool = False
    again: bool = False
    done: int = 0


class Run:
    """A training run: what the learner's function is given."""

    def __init__(self, rank: int, case: Case):
        self.steps, self.step = case.steps, case.done
        self._rank, self._case = rank, case
        self._saves: list[int] = []
        self._sent: list[int] = []  # after how many steps, while they agreed
        self._meetings = 0
        self._in_signal = self._ours = False  # ours: a collective is not the learner's own

    def train_step(self) -> None:
        """Train on the next batch, with the other ranks."""
        self._meet("step")
        if self._case.told.get(self._rank) == self.step:
            self._tell()
        self._talk(lambda: dist.all_reduce(torch.ones(3)))
        self.step += 1

    def save(self) -> None:
        """Write the checkpoint, with the other ranks."""
        if self._in_signal:
            self._handler_fault("run.save() is called in the handler, in the middle of a step")
        self._meet("save")
        if self._case.again:
            self._tell()
        self._talk(dist.barrier)
        self._saves.append(self.step)

    def _talk(self, collective: Callable[[], object]) -> None:
        self._ours = True
        collective()
        self._ours = False

    def _tell(self) -> None:
        """Send SIGTERM to this process, and see that the handler comes back without having done anything."""
        self._in_signal = True
        loud = SimpleNamespace(write=lambda text: self._handler_fault("the handler prints"), flush=lambda: None)
        try:
            with mock.patch.multiple(sys, stdout=loud, stderr=loud):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0)  # a handler runs between two bytecodes
        except Exception as error:
            self._handler_fault(f"an exception comes out of the handler: {type(error).__name__}")
        except (SystemExit, KeyboardInterrupt) as error:
            self._handler_fault(f"the handler raises {type(error).__name__}, in the middle of a step")
        self._in_signal = False

    def _on_call(self) -> None:
        if self._in_signal:
            self._handler_fault("a collective is called in the handler, while the others are in the step")
        last, due = self._rank == dist.get_world_size() - 1, self._case.between
        if due is None or due > self.step or self._sent or self._ours:
            return
        self._sent.append(self.step)
        if self._case.inside and last:
            threading.Timer(INSIDE_S, os.kill, (os.getpid(), signal.SIGTERM)).start()
        elif self._case.inside:
            time.sleep(3 * INSIDE_S)
        elif last:
            self._tell()

    def _handler_fault(self, found: str) -> None:
        cause = "the handler runs between any two lines of the step; let it set a flag, and look at the flag after it"
        raise FaultFound(Fault(HANDLER, found, self._rank, cause))

    def _meet(self, move: str) -> None:
        store, size = c10d._get_default_store(), dist.get_world_size()
        keys = [f"judge/{self._case.done}/{self._meetings}/{rank}" for rank in range(size)]
        self._meetings += 1
        store.set(keys[self._rank], f"{move} {self.step}")
        try:
            store.wait(keys, timedelta(seconds=MEET_S))
        except RuntimeError:
            late = next(rank for rank, key in enumerate(keys) if not store.check([key]))
            found = f"rank {self._rank} {_said(f'{move} {self.step}')}, rank {late} does not come"
            raise FaultFound(Fault(ALIKE, found, cause=move)) from None
        moves = [store.get(key).decode() for key in keys]
        other = next((rank for rank, theirs in enumerate(moves) if theirs != moves[0]), None)
        if other is not None:
            found = f"rank 0 {_said(moves[0])}, rank {other} {_said(moves[other])}"
            raise FaultFound(Fault(ALIKE, found, cause="" if "step" in " ".join(moves) else "save"))


def _said(move: str) -> str:
    what, steps = move.split()
    return SAID[what].format(steps)


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Let the learner's function train; note how far it came, where it saved, and its status."""
    run = Run(rank, case)
    with observe.Collectives() as seen:
        seen.on_call = run._on_call
        value = function(rank, world_size, run)
        run._meet("leave")
    return Note(steps=run.step, saves=run._saves, status=plain(value), sent=run._sent)


def rounds(rng: Random) -> list[Round]:
    """Train undisturbed; tell one or all in a step; tell one while they agree; tell all again while they save."""
    world_size, steps = rng.choice((3, 4)), rng.randint(9, 12)
    rank, at = rng.randrange(1, world_size), rng.randint(2, 4)
    return [
        Round(world_size, [("undisturbed", Case(steps, done=done)) for done in (0, 3, steps)], fresh=True),
        Ending(world_size, [("told", Case(steps, {rank: at}))], fresh=True, how=ALIKE),
        Ending(2, [("late", Case(steps, {1: steps - 2}))], fresh=True, how=ALIKE),
        Ending(2, [("both", Case(steps, {0: at, 1: at}))], fresh=True, how=ALIKE),
        Ending(2, [("between", Case(steps, between=at))], fresh=True, how=f"{ALIKE}|{HANDLER}"),
        Ending(2, [("inside", Case(steps, between=at, inside=True))], fresh=True, how=f"{ALIKE}|{HANDLER}"),
        Ending(2, [("again", Case(steps, {0: at, 1: at + 1}, again=True))], fresh=True, how=f"{ALIKE}|{HANDLER}"),
    ]


def finish(seen: Seen) -> Fault | None:
    """All steps, and one save."""
    steps, found = seen["steps"], f"{seen['steps']} steps, saves after {seen['saves'] or 'none'}, status"
    found = f"{found} {seen['status']!r}"
    return first_mistake(f"{seen.case.steps} steps, one save after the last, status 0", {
        "nobody was told to stop: train until run.step reaches run.steps": steps != seen.case.steps and found,
        "call run.save() once, on every rank, after the loop": seen["saves"] != [seen.case.steps] and found,
        "return 0 when all steps are done": seen["status"] != 0 and found,
    }, seen.rank)  # fmt: skip


def handler(seen: Seen) -> None:
    """Nothing more: what a handler does wrong ends the run."""


def agree(seen: Seen) -> Fault | None:
    """All ranks leave after the step in which one was told, or all were, or one later."""
    [at], rank = set(seen.case.told.values()), " and ".join(map(str, seen.case.told))
    if seen["steps"] == seen.case.steps == at + 2 and not seen["ended"]:  # one later is the end
        expected = f"SIGTERM to rank {rank} in the last step but one: all save, and return {STATUS}"
        cause = "after the last step, too, the ranks look at what they have agreed: a question may still be open"
        found = seen["status"] != STATUS and f"status {seen['status']!r}"
        return first_mistake(expected, {cause: found}, seen.rank)
    return left_at(seen, f"rank {rank} in step {at + 1}", at + 1)


def left_at(seen: Seen, told: str, at: int) -> Fault | None:
    """All ranks leave after this step, or one later."""
    ended, left, all_steps = seen["ended"], seen["steps"], seen.case.steps
    return first_mistake(f"SIGTERM to {told}: all ranks leave after step {at}, or one later", {
        "call run.save() on every rank: it is a collective": ended and ended.cause == "save" and ended.found,
        "each rank looks at its own flag; let the ranks agree after each step: all_reduce the flag with MAX, and "
        "leave if any rank was told": ended and ended.found,
        "the signal is not heard: one rank's flag must count for all, and two count no less (MAX, or a sum over 0)":
            left == all_steps and f"all {all_steps} steps were trained",
        "let the ranks agree after every step: who sends SIGTERM may send SIGKILL soon":
            left not in (at, at + 1) and f"they leave after step {left}",
    })  # fmt: skip


def between(seen: Seen) -> Fault | None:
    """All ranks leave at the same step, though the flag of one has changed while they agreed."""
    at, ended, left = seen.case.between, seen["ended"], seen["steps"]
    if ended and ended.cause != "save":
        cause = (
            "a rank decides by its own flag, which may have changed since it was sent; decide by the agreed value "
            "alone, and look at the flag again after the next step"
        )
        cause = ended.cause if ended.expected == HANDLER else cause
        expected = f"SIGTERM to rank 1 while the ranks agree after step {at}: all ranks leave at the same step"
        return Fault(expected, ended.found, cause=cause)
    # Who asks one step ahead has asked already: then the signal counts as one in the next step. So it is two steps.
    sent = (seen.of(seen.world_size - 1)["sent"] or [at])[0]
    if left is not None and left in range(sent, min(sent + 3, seen.case.steps)):
        return None
    return left_at(seen, f"rank 1 while the ranks agree after step {sent}", sent + 1)


def save(seen: Seen) -> Fault | None:
    """One save on each rank after its last step, and the status of a process that was told."""
    ended, steps, saves, status = seen["ended"], seen["steps"], seen["saves"], seen["status"]
    if len(seen.case.told) == 1 and (ended or steps == seen.case.steps):
        return None  # the check before this one has said it
    expected = f"one save on every rank, after its last step, and status {STATUS}; also when SIGTERM comes again"
    if ended:
        cause = ended.cause if ended.expected == HANDLER else "the ranks part, so that not all of them save"
        return Fault(expected, ended.found, ended.rank, cause)
    return first_mistake(expected, {
        "save once, after the ranks have agreed to leave, and on every rank":
            saves != [steps] and (f"saves after {saves} of {steps} steps" if saves else "no save"),
        f"a process that SIGTERM ended has status 128 + 15; so the launcher knows: return {STATUS}":
            status != STATUS and f"status {status!r}",
    }, seen.rank)  # fmt: skip


SIGTERM = exercise(
    "15.1",
    "Leave when told",
    "train_until_told",
    20,
    act=act,
    rounds=rounds,
    checks={
        "finish": ("nobody is told: all steps, one save", 1, finish, "undisturbed"),
        "handler": ("the handler only sets a flag", 1, handler, "told"),
        "agree": ("one rank is told, or all: all leave at the same step", 2, agree, "told late both"),
        "between": ("told while the ranks agree", 1, between, "between inside"),
        "save": ("saved once, and the status says why; also when told twice", 1, save, "told again"),
    },
    hints={
        r"killed by SIGTERM": "the rank died of the signal: signal.signal(signal.SIGTERM, handler) before the first "
        "step, and the handler stays to the end, for a second SIGTERM must not break the save",
        r"signal only works in main thread": "set the handler in the function itself, not in a thread",
        r"exit status|raised SystemExit": "the process is ended, so the others wait for it; return the status instead "
        "of leaving",
        "absent|cut-off|disagree|limit": "every rank must take part when the ranks "
        "agree, after every step; an endless loop ends nothing either",
    },
)
