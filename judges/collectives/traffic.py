"""How do several cases run in one launch, so that a mistake in one is not met in the next?

Read next: `gather_rows.py`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ddp_course.grading.exercise import AnswerFailed, Fault
from ddp_course.grading.isolated import Answer
from ddp_course.grading.observe import Call

MEET_S = 4.0  # for the other ranks to end a case; less than the 5 s that a collective of theirs may wait


def told(calls: list[Call]) -> list[tuple]:
    """Return calls as plain data."""
    return [(call.op, call.ranks, call.n_bytes, call.peer) for call in calls]


def right_and_left(rank: int, world_size: int) -> set[int]:
    """Return a rank's neighbours in a ring."""
    return {(rank + 1) % world_size, (rank - 1) % world_size}


# --- Several cases in one launch ---------------------------------------------------------------------


def each_case(rank: int, world_size: int, path: str, cases: list, look: Callable[[Any], dict]) -> list[dict]:
    """Return `look(case)` for each case; all ranks end a case before one begins the next.

    Else a rank that skips a collective in one case would meet the others' with its first of the next case, and the
    learner would read about that. Who waits in vain returns, as if there were no more cases.

    Args:
        path: of a file for the grader's own store; fresh for each run, the same on all ranks.
    """
    store, notes = dist.FileStore(path, world_size), []
    for number, case in enumerate(cases):
        notes.append(look(case))
        if not _all_came(store, rank, world_size, number):
            break
    return notes


def _all_came(store: dist.Store, rank: int, world_size: int, number: int) -> bool:
    left, came = f"{number}/left", [f"{number}/{other}" for other in range(world_size)]
    store.set(came[rank], "came")
    deadline = time.monotonic() + MEET_S
    while not store.check([left]):  # once one has left, all do
        if store.check(came):
            return True
        if time.monotonic() > deadline:
            store.set(left, str(rank))
        time.sleep(0.002)
    return False


def run_cases(answer: Answer, driver: Callable, world_size: int, cases: list) -> list[list[dict]]:
    """Run the driver on all cases; return for each rank a note on each case.

    Raises:
        AnswerFailed: as `Answer.run`; also when a rank came too late to the end of a case, and was not waited for.
    """
    with tempfile.TemporaryDirectory() as folder:
        by_rank = answer.run(driver, world_size, f"{folder}/meet", cases, init=True)
    if any(len(notes) < len(cases) for notes in by_rank):
        cause = "the ranks ended a call more than 4 s apart; if the machine is very busy, run the check again"
        raise AnswerFailed(Fault(f"{len(cases)} calls on each rank", "some ranks were late", cause=cause))
    return by_rank
