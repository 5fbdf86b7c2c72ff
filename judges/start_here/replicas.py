"""00.2 `replicas_equal(rank, world_size, model)`: is a difference found wherever it is, and do all ranks agree?

The cases differ from equal replicas in one number, so small that rounding must not hide it. Read next: `step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import nn

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from ddp_course.grading.observe import Collectives

# Case -> (is it equal, what a wrong answer missed).
CASES = {
    "equal": (True, ""),
    "last": (False, "compare with every rank, also with the last one"),
    "swapped": (False, "two numbers have changed places, so sums and means are as before; compare number by number"),
    "buffer": (False, "parameters are equal, a buffer is not; model.state_dict() has both"),
    "tiny": (False, "the difference is the last bit of one number; compare exactly, without a tolerance"),
    "first": (False, "here rank 0 is the one that differs from all others"),
}


def make_model(case: str, rank: int, world_size: int, seed: int) -> nn.Module:
    """Return this rank's replica for a case."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    last, weight = rank == world_size - 1, model[2].weight.data
    if case == "last" and last:
        weight[-1, -1] += 1
    if case == "first" and rank == 0:
        weight[0, 0] -= 0.5
    if case == "swapped" and last:
        weight[0, 0], weight[1, 3] = weight[1, 3].clone(), weight[0, 0].clone()
    if case == "buffer" and last:
        model[1].running_mean[2] = 0.125
    if case == "tiny" and rank == 1:
        weight[0, 1] = torch.nextafter(weight[0, 1], torch.tensor(9.0))
    return model


def replicas_driver(rank: int, world_size: int, function: Callable, seed: int) -> dict[str, list]:
    """Call the function for each case; note its result, whether it left the model alone, and how often it talked."""
    return {case: _one(function, case, rank, world_size, seed) for case in CASES}


def _one(function: Callable, case: str, rank: int, world_size: int, seed: int) -> list:
    model, before = make_model(case, rank, world_size, seed), make_model(case, rank, world_size, seed).state_dict()
    with Collectives() as seen:
        result = plain(function(rank, world_size, model))
    if isinstance(result, int | float):
        result = bool(result)  # a tensor with one element is an answer, too
    kept = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return [result, kept, len(seen.calls)]


def replicas_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """All cases on three ranks, then on another number."""
    seed = rng.randrange(10**6)
    three = answer.run(replicas_driver, 3, seed, init=True)
    more = answer.run(replicas_driver, rng.choice((2, 4)), seed + 1, init=True)
    silent = _silent_fault(three) or _silent_fault(more)
    for key, cases in (
        ("equal", ["equal"]),
        ("different", ["last", "first"]),
        ("hidden", ["swapped", "buffer", "tiny"]),
    ):
        faults = (_fault(case, ranks) for ranks in (three, more) for case in cases)
        yield key, next(filter(None, faults), silent)
    changed = next((rank for ranks in (three, more) for rank, note in enumerate(ranks) if not _kept(note)), None)
    cause = "a collective changed the model's own tensors in place; work on copies"
    yield "kept", silent if changed is None else Fault("the model as it was", "changed tensors", changed, cause)


def _kept(note: dict) -> bool:
    return all(kept for _, kept, _ in note.values())


def _silent_fault(ranks: list[dict]) -> Fault | None:
    """An answer that always says True is right about equal replicas, and knows nothing."""
    silent = next((rank for rank, note in enumerate(ranks) if not note["equal"][2]), None)
    cause = "the ranks never talked, so no rank can know what the others hold"
    return None if silent is None else Fault("a collective", "none", silent, cause)


def _fault(case: str, ranks: list[dict]) -> Fault | None:
    right, missed = CASES[case]
    found = [note[case][0] for note in ranks]
    if found == [right] * len(ranks):
        return None
    expected = f"{right} on each of {len(ranks)} ranks"
    if any(not isinstance(value, bool) for value in found):
        return Fault(expected, repr(found), cause="return True or False on every rank")
    if not all(map(_kept, ranks)):
        cause = "the collective changed the model itself, and what was to be compared with; work on copies"
        return Fault(expected, repr(found), cause=cause)
    rank = next(rank for rank, value in enumerate(found) if value is not right)
    if len(set(found)) > 1:
        cause = "the ranks do not agree: each one's finding must reach all, or a program goes on here and stops there"
        return Fault(expected, repr(found), rank, cause)
    return Fault(expected, repr(found), rank, missed or "these replicas are equal, bit for bit")


REPLICAS = Exercise(
    "00.2",
    "Are the replicas equal?",
    "replicas_equal",
    15,
    (
        Check("equal", "equal replicas are told as equal", 1),
        Check("different", "a rank that differs is found, and all ranks say so", 2),
        Check("hidden", "swapped numbers, a buffer, a last bit", 2),
        Check("kept", "the model is left alone", 1),
    ),
    replicas_judge,
    hints=(
        (
            r"never entered|disagree about collective|lost the connection",
            "a rank went on without the others; one that has found a difference must still call every collective",
        ),
    ),
)
