"""What is an exercise, what does its check find, and how is it said?

An exercise has named checks, each worth points. Judging an answer gives, for each check, nothing (it passed) or a
`Fault`: what was expected, what was found, on which rank, and the likely cause. Plain data in, text out.

Left out on purpose: running the answer, which is `answer/isolated.py`'s part.
Read next: `judges/process_groups/`, the exercises of lesson 03.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from ddp_course.grading.source import Mistake


@dataclass(frozen=True)
class Fault:
    """Why a check failed, in words for the learner; empty fields are not shown."""

    expected: str = ""
    found: str = ""
    rank: int | None = None
    cause: str = ""
    report: str = ""  # the learner's own traceback, or where the ranks hung
    goes_on: bool = False  # the answer raised or died in one run: others can still be right


class FaultFound(BaseException):
    """Raised by an observer inside a rank; carries the fault to the parent as text.

    No `Exception`, so that an answer which swallows those does not swallow this.
    """

    def __init__(self, fault: Fault):
        super().__init__(json.dumps(asdict(fault)))


class AnswerFailed(Exception):
    """The answer raised, died or hung, so there is nothing to compare."""

    def __init__(self, fault: Fault):
        super().__init__(fault.report or fault.cause)
        self.fault = fault


@dataclass(frozen=True)
class Check:
    """One named line of an exercise's check."""

    key: str
    name: str
    points: int


# A judge is given an `isolated.Answer`; it yields (key of a check, fault or None) in the order of the checks.
Judge = Callable[[Any, Random], Iterator[tuple[str, Fault | None]]]


@dataclass(frozen=True)
class Exercise:
    """One exercise: what it is called, what it is worth, and how an answer to it is judged."""

    id: str  # "03.1"
    title: str
    function: str  # the name of the function, or class, that the learner writes
    minutes: int
    checks: tuple[Check, ...]
    judge: Judge
    hints: tuple[tuple[str, str], ...] = ()  # (see `codes.fits`, likely cause)
    refused: tuple[str, ...] = ()  # what does the task already: "torch.nn.parallel.DistributedDataParallel"
    mistakes: tuple[Mistake, ...] = ()  # known wrong answers
    rights: tuple[tuple[str, str], ...] = ()  # right answers besides the solution: (way, text)

    @property
    def points(self) -> int:
        """Full marks."""
        return sum(check.points for check in self.checks)


@dataclass(frozen=True)
class Verdict:
    """One check and what came of it."""

    check: Check
    fault: Fault | None
    reached: bool = True

    @property
    def points(self) -> int:
        """Points earned."""
        return self.check.points if self.reached and self.fault is None else 0


def summary(verdict: Verdict) -> dict[str, Any]:
    """Return what a teacher counts over a class, as plain data."""
    cause = verdict.fault.cause if verdict.fault else ""
    return {
        "check": verdict.check.name,
        "points": verdict.points,
        "of": verdict.check.points,
        "reached": verdict.reached,
        "cause": cause,
    }


def shown(verdict: Verdict) -> str:
    """Return the lines that a learner reads about one check."""
    check, fault = verdict.check, verdict.fault
    if not verdict.reached:
        return f"✗ {check.name} (0 of {check.points}): not reached"
    if fault is None:
        return f"✓ {check.name} ({check.points})"
    where = f", on rank {fault.rank}" if fault.rank is not None else ""
    parts = [("expected", fault.expected), ("found", fault.found and fault.found + where), ("", fault.report)]
    parts.append(("likely cause", fault.cause))
    lines = [line for title, text in parts if text for line in _indented(title, text)]
    return "\n".join([f"✗ {check.name} (0 of {check.points})", *lines])


def _indented(title: str, text: str) -> list[str]:
    first, *rest = text.strip("\n").split("\n")
    return [f"    {title}: {first}" if title else f"    {first}", *(f"    {line}".rstrip() for line in rest)]
