"""11.3 `repaired()`: are the four mistakes of a given program gone, also after it has been stopped and started again?

The mistakes: a forward that goes past the replica, an optimizer that begins again, a mean of means, a file that all
ranks write. Read `convert.py` first. Read next: `incident.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from random import Random

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import all_of, exercise, once
from ddp_course.grading.vocabulary.play import Round, Seen
from judges.your_own_program.convert import error_slips, the_printed, the_weights, told, voices, weights, writers
from judges.your_own_program.reference import BATCH, ROWS
from judges.your_own_program.running import Case, act


def rounds(rng: Random, folder: str) -> list[Round]:
    """An epoch or two on two ranks, then the same program again on three, up to four epochs."""
    first, seed = rng.choice((1, 2)), rng.randint(10, 99)
    begun, again = Case(folder, first, seed), Case(folder, 4, seed, first)
    return [Round(2, [("begun", begun)], init=False, fresh=True), Round(3, [("again", again)], init=False, fresh=True)]


def _step_slips(seen: Seen) -> Iterator[tuple[str, list[float]]]:
    past = (
        "this is what rank 0 learns from its own rows: a gradient is averaged by the backward of a forward through the "
    )
    yield past + "replica, outside of no_sync; look at each forward", weights(seen, of_rank=0)


def _last_slips(seen: Seen) -> Iterator[tuple[str, list[float]]]:
    yield (
        "the momentum begins again after the start; save and load the optimizer's state, too",
        weights(seen, forgets_at=seen.case.first),
    )
    alone = "this is what rank 0 learns from its own rows; repair the training first"
    yield alone, weights(seen, of_rank=0)


def once_a_step(seen: Seen) -> Fault | None:
    """Gradients travel in a step's last backward pass alone."""
    sent, steps = sum(call.in_backward for call in seen["calls"]), ROWS // BATCH * (seen.case.epochs - seen.case.first)
    if sent <= steps:
        return None
    cause = "all micro-batches of a step but the last belong inside replica.no_sync()"
    return Fault(f"{steps} steps, gradients sent once in each", f"{sent} times", seen.rank, cause)


REPAIR = exercise(
    "11.3",
    "Repair a program",
    "repaired",
    25,
    act=act,
    rounds=rounds,
    within=tempfile.TemporaryDirectory,
    checks={
        "step": (
            "two ranks train as one process does",
            2,
            all_of(the_weights("one process's weights", _step_slips,
                   "the two micro-batches of all ranks together make one process's batch, and its mean gradient",
                   "model."), once_a_step),
            "begun",
        ),
        "resume": (
            "a run that was stopped and started again ends with the same weights",
            2,
            the_weights("the weights of a run that was never stopped", _last_slips,
                        "everything that the next step depends on is saved, and loaded on every rank", "model."),
            "again",
        ),
        "error": (
            "each test row counts the same",
            1,
            the_printed("error", lambda seen: [torch.cat(each).mean().item() for _, _, each in told(seen)],
                        error_slips),
            "begun again",
        ),
        "voice": ("one rank prints, a line for each epoch", 1, once(voices), "begun again"),
        "writer": ("one rank saves", 1, writers("state.pt", "model", "epoch"), "begun again"),
    },
)  # fmt: skip
