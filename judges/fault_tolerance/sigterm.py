"""14.1 `train_until_told(rank, world_size, run)`: do all ranks leave at the same step, though one was told?

The signals are real: the run sends SIGTERM to its own process in the middle of a step, or while the ranks agree.
Before each step, save and return the ranks meet at a store of the judge's, where a rank that goes another way than
the others is seen at once, and not by a hang.

Read next: `resume.py`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_course.grading import observe
from ddp_course.grading.exercise import AnswerFailed, Check, Exercise, Fault, FaultFound
from ddp_course.grading.isolated import Answer, plain

MEET_S = 4.0  # for the other ranks to come to the next step, save or return
STATUS = 128 + signal.SIGTERM
SAID = {"step": "trains on after {} steps", "save": "saves after {} steps", "leave": "returns after {} steps"}

Note = dict[str, Any]


class Run:
    """A training run: what the learner's function is given."""

    def __init__(self, rank: int, steps: int, told: dict[int, int], again: bool = False):
        self.steps, self.step = steps, 0
        self._rank, self._told, self._again = rank, told, again
        self._saves: list[int] = []
        self._meetings = 0
        self._in_signal = False
        self._among_themselves = True  # a collective is the learner's own

    def train_step(self) -> None:
        """Train on the next batch, with the other ranks."""
        self._meet("step")
        if self._told.get(self._rank) == self.step:
            self._tell()
        self._among_themselves = False
        dist.all_reduce(torch.ones(3))
        self._among_themselves = True
        self.step += 1

    def save(self) -> None:
        """Write the checkpoint, with the other ranks."""
        if self._in_signal:
            self._handler_fault("run.save() is called in the handler, in the middle of a step")
        self._meet("save")
        if self._again:
            self._tell()
        self._among_themselves = False
        dist.barrier()
        self._saves.append(self.step)

    def _tell(self) -> None:
        """Send SIGTERM to this process, and see that the handler comes back without having done anything."""
        self._in_signal = True
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)  # a handler runs between two bytecodes
        except Exception as error:
            self._handler_fault(f"an exception comes out of the handler: {type(error).__name__}")
        except (SystemExit, KeyboardInterrupt) as error:
            self._handler_fault(f"the handler raises {type(error).__name__}, in the middle of a step")
        self._in_signal = False

    def _talked(self) -> None:
        if self._in_signal:
            self._handler_fault("a collective is called in the handler, while the others are in the step")

    def _handler_fault(self, found: str) -> None:
        cause = "the handler runs between any two lines of the step; let it set a flag, and look at the flag after it"
        raise FaultFound(Fault("a handler that sets a flag, and nothing else", found, self._rank, cause))

    def _meet(self, move: str) -> None:
        store, size = c10d._get_default_store(), dist.get_world_size()
        keys = [f"judge/{self._meetings}/{rank}" for rank in range(size)]
        self._meetings += 1
        store.set(keys[self._rank], f"{move} {self.step}")
        try:
            store.wait(keys, timedelta(seconds=MEET_S))
        except RuntimeError:
            here = [rank for rank, key in enumerate(keys) if store.check([key])]
            late = next(rank for rank in range(size) if rank not in here)
            self._parted(f"rank {self._rank} {_said(f'{move} {self.step}')}, rank {late} does not come", move)
        moves = [store.get(key).decode() for key in keys]
        other = next((rank for rank, theirs in enumerate(moves) if theirs != moves[0]), None)
        if other is not None:
            found = f"rank 0 {_said(moves[0])}, rank {other} {_said(moves[other])}"
            self._parted(found, "save" if "step" not in " ".join(moves) else "")

    def _parted(self, found: str, move: str) -> None:
        raise FaultFound(Fault("all ranks do the same", found, cause="save" if move == "save" else "apart"))


def _said(move: str) -> str:
    what, steps = move.split()
    return SAID[what].format(steps)


def driver(rank: int, world_size: int, function: Callable, steps: int, told: dict, between: int, again: bool) -> Note:
    """Let the learner's function train; return how far it came, where it saved, and its status.

    Args:
        told: by rank, the step in which this rank gets the signal.
        between: the last rank gets it while the ranks agree, the first time after this many steps; -1 for never.
        again: whether each rank gets it once more, while it saves.
    """
    run, sent = Run(rank, steps, told, again), []  # `sent`: after how many steps, while they agreed
    with observe.Collectives() as seen:

        def on_call() -> None:
            run._talked()
            due = 0 <= between <= run.step and rank == world_size - 1 and not sent
            if due and run._among_themselves:
                sent.append(run.step)
                run._tell()

        seen.on_call = on_call
        value = function(rank, world_size, run)
        run._meet("leave")
    return {"steps": run.step, "saves": run._saves, "status": plain(value), "sent": sent}


def sigterm_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Train undisturbed; tell one rank in a step; tell one while they agree; tell all again while they save."""
    world_size, steps = rng.choice((3, 4)), rng.randint(9, 12)
    rank, at = rng.randrange(1, world_size), rng.randint(2, 4)
    notes = answer.run(driver, world_size, steps, {}, -1, False, init=True, fresh=True)
    yield "finish", _finish_fault(notes, steps)
    told, fault = _attempt(answer, world_size, steps, {rank: at}, -1, False)
    if fault and fault.expected.startswith("a handler"):
        raise AnswerFailed(fault)
    yield "handler", None
    yield "agree", _agree_fault(told, fault, f"rank {rank} in step {at + 1}", at + 1, steps)
    found, fault = _attempt(answer, 2, steps, {}, at, False)
    yield "between", _between_fault(found, fault, at, steps)
    both = {0: at, 1: at + 1}
    again, fault = _attempt(answer, 2, steps, both, -1, True)
    heard = [note for note in told if note["steps"] < steps]  # else the check before this one has said it
    yield "save", _save_fault(heard, None) or _save_fault(again, fault)


def _attempt(answer: Answer, world_size: int, *args: Any) -> tuple[list[Note], Fault | None]:
    """Run the answer; a fault that the run itself named does not end the judging, any other failure does."""
    try:
        return answer.run(driver, world_size, *args, init=True, fresh=True), None
    except AnswerFailed as failed:
        if failed.fault.report or not failed.fault.expected:
            raise
        return [], failed.fault


def _finish_fault(notes: list[Note], steps: int) -> Fault | None:
    expected = f"{steps} steps, one save after the last, status 0"
    for rank, note in enumerate(notes):
        found = f"{note['steps']} steps, saves after {note['saves'] or 'none'}, status {note['status']!r}"
        if note["steps"] != steps:
            return Fault(expected, found, rank, "nobody was told to stop: train until run.step reaches run.steps")
        if note["saves"] != [steps]:
            return Fault(expected, found, rank, "call run.save() once, on every rank, after the loop")
        if note["status"] != 0:
            return Fault(expected, found, rank, "return 0 when all steps are done")
    return None


def _agree_fault(notes: list[Note], fault: Fault | None, told: str, at: int, steps: int) -> Fault | None:
    expected = f"SIGTERM to {told}: all ranks leave after step {at}, or one later"
    if fault:
        cause = (
            "call run.save() on every rank: it is a collective"
            if fault.cause == "save"
            else "each rank looks at its own flag; let the ranks agree after each step: all_reduce the flag with MAX, "
            "and leave if any rank was told"
        )
        return Fault(expected, fault.found, cause=cause)
    left = notes[0]["steps"]
    if left == steps:
        cause = "the signal is not heard: one rank's flag must count for all, whichever rank it is (MAX or a sum)"
        return Fault(expected, f"all {steps} steps were trained", cause=cause)
    if left not in (at, at + 1):
        cause = "let the ranks agree after every step: who sends SIGTERM may send SIGKILL soon"
        return Fault(expected, f"they leave after step {left}", cause=cause)
    return None


def _between_fault(notes: list[Note], fault: Fault | None, at: int, steps: int) -> Fault | None:
    told = f"rank 1 while the ranks agree after step {at}"
    if fault and fault.cause != "save":
        cause = (
            "a rank decides by its own flag, which may have changed since it was sent; decide by the agreed value "
            "alone, and look at the flag again after the next step"
        )
        return Fault(f"SIGTERM to {told}: all ranks leave at the same step", fault.found, cause=cause)
    # Who asks one step ahead has asked already: then the signal counts as one in the next step. So it is two steps.
    sent = [step for note in notes for step in note["sent"]] or [at]
    if notes and notes[0]["steps"] in range(sent[0], min(sent[0] + 3, steps)):
        return None
    return _agree_fault(notes, fault, f"rank 1 while the ranks agree after step {sent[0]}", sent[0] + 1, steps)


def _save_fault(notes: list[Note], fault: Fault | None) -> Fault | None:
    expected = f"one save on every rank, after its last step, and status {STATUS}; also when SIGTERM comes again"
    if fault:
        cause = fault.cause if len(fault.cause) > 5 else "the ranks part, so that not all of them save"
        return Fault(expected, fault.found, fault.rank, cause)
    for rank, note in enumerate(notes):
        if note["saves"] != [note["steps"]]:
            found = f"saves after {note['saves']} of {note['steps']} steps" if note["saves"] else "no save"
            cause = "save once, after the ranks have agreed to leave, and on every rank"
            return Fault(expected, found, rank, cause)
        if note["status"] != STATUS:
            cause = f"a process that SIGTERM ended has status 128 + 15; so the launcher knows: return {STATUS}"
            return Fault(expected, f"status {note['status']!r}", rank, cause)
    return None


SIGTERM = Exercise(
    "14.1",
    "Leave when told",
    "train_until_told",
    20,
    (
        Check("finish", "nobody is told: all steps, one save", 1),
        Check("handler", "the handler only sets a flag", 1),
        Check("agree", "one rank is told: all leave at the same step", 2),
        Check("between", "told while the ranks agree", 1),
        Check("save", "saved once, and the status says why; also when told twice", 1),
    ),
    sigterm_judge,
    refused=("ddp_course.train.images.train",),
    hints=(
        (
            r"killed by SIGTERM",
            "the rank died of the signal: signal.signal(signal.SIGTERM, handler) before the first step, and the "
            "handler stays to the end, for a second SIGTERM must not break the save",
        ),
        (r"signal only works in main thread", "set the handler in the function itself, not in a thread"),
        (
            r"exit status|raised SystemExit",
            "the process is ended, so the others wait for it; return the status instead of leaving",
        ),
        (
            r"never entered|lost the connection|disagree about|no result after",
            "every rank must take part when the ranks agree, after every step; an endless loop ends nothing either",
        ),
    ),
)
