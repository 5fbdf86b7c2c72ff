"""What is behind this report?

Every failure of distributed training leaves words: ours, torch's, gloo's or NCCL's. `recognise` knows the words of
each fault, and takes from them the rank to blame. It is told nothing else, so it reads a report from last night's
log as well as one from this cell.

Left out on purpose: faults that leave no words, because training goes on and is only worse.
Read next: `faults/fault.py`, which provokes what is recognised here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ddp_course.launch import RankError


@dataclass(frozen=True)
class Diagnosis:
    """What a tool found.

    Attributes:
        fault: its name in the catalogue; None when nothing was found to be wrong, or nothing known.
        rank: the rank to blame; None when it is not one rank's doing, or nothing says whose.
        evidence: the words or figures that decided.
        seconds: from the fault to the report.
        report: the whole report, if there was one.
    """

    fault: str | None
    rank: int | None
    evidence: str
    seconds: float = 0.0
    report: str = ""


def recognise(report: RankError | str) -> Diagnosis:
    """Name the fault behind a report, and the rank to blame.

    Args:
        report: what `launch` raised; or the text of a report, a traceback or a log, as of torchrun.
    Returns:
        The first rule that fits. A fault of None says that no rule did; then the evidence is the report's first line.
    """
    text = report.report if isinstance(report, RankError) else report
    for fault, rule in RULES:
        if found := rule(text):
            rank, evidence = found
            return Diagnosis(fault, rank, evidence, report=text)
    return Diagnosis(None, None, next(iter(text.strip().splitlines()), ""), report=text)


# What a rule returns: the rank to blame, and the words that decided.
Finding = tuple[int | None, str]
Rule = Callable[[str], Finding | None]


# --- What the reports of `launch` say --------------------------------------------------------------


def rank_that_never_came(text: str) -> Finding | None:
    """`rank 1 never entered all_reduce #3`, the first such rank if there are several."""
    found = re.search(r"rank (\d+)[, rank\d]* never entered [^;\n]*", text)
    return (int(found[1]), found[0]) if found else None


def calls_that_differ(text: str) -> dict[int, str]:
    """`rank 0 called all_reduce #1 (float [4], 16 B); rank 1 called ...` as {0: "all_reduce #1 (...)", ...}."""
    return {int(rank): call for rank, call in re.findall(r"rank (\d+) called (\w+ #\d+(?: \([^)]*\))?)", text)}


def odd_one_out(calls: dict[int, str]) -> int | None:
    """The one rank whose call differs, when all the others agree; of two ranks nobody can tell."""
    alone = [rank for rank, call in calls.items() if list(calls.values()).count(call) == 1]
    return alone[0] if len(alone) == 1 < len(calls) - 1 else None


def different_shapes(text: str) -> Finding | None:
    calls = calls_that_differ(text)
    same_op = len({call.split()[0] for call in calls.values()}) == 1
    return (odd_one_out(calls), _side_by_side(calls)) if same_op and len(set(calls.values())) > 1 else None


def different_order(text: str) -> Finding | None:
    calls = calls_that_differ(text)
    ops = {call.split()[0] for call in calls.values()}
    return (odd_one_out(calls), _side_by_side(calls)) if len(ops) > 1 else None


def _side_by_side(calls: dict[int, str]) -> str:
    return "; ".join(f"rank {rank} called {call}" for rank, call in calls.items())


# In this order: what says most comes first.
RULES: tuple[tuple[str, Rule], ...] = (
    ("collective-shape", different_shapes),
    ("collective-order", different_order),
    ("skipped-collective", rank_that_never_came),
)
