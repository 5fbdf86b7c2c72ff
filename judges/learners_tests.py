"""What is a test worth that a learner wrote? It must accept what is right, and refuse each known mistake.

The answer is called with something to try on every rank, and says True or False there. What is right comes first: a
test that refuses it refuses too much, and earns nothing. The mistakes are the right one with a knob turned, so each
differs from it in one respect.

Read next: `ddp_from_scratch/own_test.py`, `sync_batchnorm/own_test.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import HOLDS
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen


@dataclass(frozen=True)
class Trial:
    """One thing to try.

    Args:
        make: what the learner's test is given.
        words: what it is, for the learner.
        mistake: "" for something right.
    """

    make: Callable[..., Any]
    words: str
    mistake: str = ""


REFUSES = (
    "a test that refuses what is right earns nothing; compare with a tolerance, and see what you expect: "
    "are the ranks' losses added up or averaged?"
)


def act(function: Callable, trial: Trial, rank: int, world_size: int) -> Note:
    """Ask the learner's test for its verdict."""
    return Note(verdict=plain(function(rank, world_size, trial.make)))


def trials(world_size: int, right: list[Trial], wrong: list[Trial]) -> Round:
    """All on the same ranks; an error costs what it happened with, and nothing else."""
    cases = [*(("right", trial) for trial in right), *((trial.mistake, trial) for trial in wrong)]
    return Round(world_size, cases, raises=(Exception,))


def verdict(cause: str) -> Callable[[Seen], Any]:
    """Expect True of what is right, and False of the rest, on every rank."""

    def expect(seen: Seen) -> Any:
        trial, found = seen.case, seen["verdict"]
        right = not trial.mistake
        if seen["error"]:
            words = "a test that raises says nothing: catch what may be wrong, such as a .grad that is None"
            return Fault(f"{right}, of {trial.words}", f"{seen['error']}: {seen['message']}", seen.rank, words)
        if not isinstance(found, bool | int) or found not in (0, 1):
            return Fault("True or False", str(found), seen.rank, "return one verdict, on every rank")
        if bool(found) == right:
            return HOLDS
        told = {bool(note.get("verdict")) for note in seen.everyone}
        why = cause if trial.mistake else REFUSES
        if len(told) == 2:
            why = "the ranks do not agree; let a collective make one verdict of theirs, such as all_reduce with MIN"
        return Fault(f"{right}, of {trial.words}", f"{bool(found)}", seen.rank, why)

    return expect
