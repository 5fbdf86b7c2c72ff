"""00.2 `replicas_equal(rank, world_size, model)`: is a difference found wherever it is, and do all ranks agree?

The cases differ from equal replicas in one number, so small that rounding must not hide it. Read next: `step.py`.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import all_of, exercise, once, speaks
from ddp_course.grading.vocabulary.play import Note, Round, Seen

# What a wrong answer missed.
KINDS = {
    "equal": "these replicas are equal, bit for bit",
    "last": "compare with every rank, also with the last one",
    "swapped": "two numbers have changed places, so sums and means are as before; compare number by number",
    "buffer": "parameters are equal, a buffer is not; model.state_dict() has both",
    "frozen": "a parameter that is not trained differs; it is a parameter all the same",
    "tiny": "the difference is the last bit of one number; compare exactly, in its own dtype, without a tolerance",
    "counter": "a whole number differs that no float32 holds; compare each tensor in its own dtype",
    "first": "here rank 0 is the one that differs from all others",
}


class Case(NamedTuple):
    """Replicas that differ in this way."""

    kind: str
    seed: int

    def model(self, rank: int, world_size: int) -> nn.Module:
        """Return this rank's replica."""
        torch.manual_seed(self.seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        if self.kind == "tiny":
            model.double()
            model[2].weight.data[0, 1] = 1.5 + 2**-52 * (rank == 1)  # a sum over the ranks rounds it away
        last, weight = rank == world_size - 1, model[2].weight.data
        if self.kind == "last" and last:
            weight[-1, -1] += 1
        if self.kind == "first" and rank == 0:
            weight[0, 0] -= 0.5
        if self.kind == "swapped" and last:
            weight[0, 0], weight[1, 3] = weight[1, 3].clone(), weight[0, 0].clone()
        if self.kind == "buffer" and last:
            model[1].running_mean[2] = 0.125
        if self.kind == "counter":
            model[1].num_batches_tracked += 2**24 + last
        if self.kind == "frozen" and last:
            model[0].bias.data[1] += 1
        return model


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the result, and whether the model was left alone."""
    model, before = case.model(rank, world_size), case.model(rank, world_size)
    result = plain(function(rank, world_size, model))
    if result in (0, 1):
        result = bool(result)  # a tensor with one element is an answer, too
    same = _modes(model) == _modes(before) and all(map(torch.equal, _tensors(model), _tensors(before)))
    return Note(value=result, kept=same)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _modes(model: nn.Module) -> list:
    return [(t.dtype, t.requires_grad) for t in _tensors(model)] + [part.training for part in model.modules()]


def rounds(rng: Random) -> list[Round]:
    """All cases on three ranks, then on another number."""
    seed = rng.randrange(10**6)
    return [
        Round(world_size, [(f"{kind}-{name}", Case(kind, seed + number)) for kind in KINDS])
        for number, (name, world_size) in enumerate({"three": 3, "more": rng.choice((2, 4))}.items())
    ]


def found(seen: Seen) -> Fault | None:
    """All ranks say what is right."""
    right, everyone = seen.case.kind == "equal", [note["value"] for note in seen.everyone]
    rank = next((rank for rank, value in enumerate(everyone) if value is not right), None)
    if rank is None:
        return None
    cause = KINDS[seen.case.kind]
    if any(not isinstance(value, bool) for value in everyone):
        rank, cause = None, "return True or False on every rank"
    elif not all(note["kept"] for note in seen.everyone):
        rank, cause = None, "the collective changed the model itself, and what was to be compared with; work on copies"
    elif len(set(everyone)) > 1:
        cause = "the ranks do not agree: each one's finding must reach all, or a program goes on here and stops there"
    return Fault(f"{right} on each of {len(everyone)} ranks", repr(everyone), rank, cause)


def kept(seen: Seen) -> Fault | None:
    """The model is as it was."""
    cause = "something changed the model's own tensors, or its mode; work on copies"
    return None if seen["kept"] else Fault("the model as it was", "a changed one", seen.rank, cause)


def _on_all(*kinds: str) -> str:
    return " ".join(f"{kind}-{name}" for name in ("three", "more") for kind in kinds)


HIDDEN = ("swapped", "buffer", "frozen", "tiny", "counter")
right = all_of(once(found), speaks())  # who always says True is right about equal replicas, and knows nothing
REPLICAS = exercise(
    "00.2",
    "Are the replicas equal?",
    "replicas_equal",
    15,
    act=act,
    rounds=rounds,
    checks={
        "equal": ("equal replicas are told as equal", 1, right, _on_all("equal")),
        "different": ("a rank that differs is found, and all ranks say so", 2, right, _on_all("last", "first")),
        "hidden": ("swapped numbers, any buffer, a last bit", 2, right, _on_all(*HIDDEN)),
        "kept": ("the model is left alone", 1, all_of(kept, speaks()), _on_all(*KINDS)),
    },
    hints={
        "absent|disagree|cut-off": "a rank went on without the others; one that "
        "has found a difference must still call every collective",
    },
)
