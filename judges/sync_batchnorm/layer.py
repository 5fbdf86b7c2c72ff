"""08.2 `MySyncBatchNorm`: does the layer compute what `nn.BatchNorm` computes on the whole batch, and follow it?

The gradient is left to `backward.py`. Read `rows.py` first, and `layer_guesses.py` for the mistakes.
Read next: `backward.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import nn

from ddp_course.grading import observe
from ddp_course.grading.compare import close
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from judges.sync_batchnorm.layer_guesses import EPS, MOMENTUM, followed, outputs
from judges.sync_batchnorm.rows import (
    batch,
    difference,
    guessed,
    mean_of,
    talk_faults,
    talks,
    unequal,
    variance_of,
    wide,
    wrong_size,
)

STATS = ("running_mean", "running_var")


def layer_driver(
    rank: int, world_size: int, layer_class: Callable, weight_C: torch.Tensor, bias_C: torch.Tensor, batches: list
) -> list[dict]:
    """Train on all batches but the last, then evaluate on the last; note what the layer returned and kept."""
    layer = layer_class(len(weight_C), eps=EPS, momentum=MOMENTUM).double()
    with torch.no_grad():
        layer.weight.copy_(weight_C)
        layer.bias.copy_(bias_C)
    notes = []
    for index, parts in enumerate(batches):
        layer.train(index < len(batches) - 1)
        x_NC = parts[rank].clone().requires_grad_(layer.training)  # as from a layer below
        before = _kept(layer)
        with observe.Collectives() as seen:
            y_NC = plain(layer(x_NC))
        graph = [name for name in STATS if getattr(layer, name).requires_grad]
        notes.append({"y": y_NC, "before": before, **_kept(layer), "graph": graph, "talks": talks(seen.calls)})
    return notes


def _kept(layer: nn.Module) -> dict:
    return {name: plain(getattr(layer, name).detach()) for name in STATS}


def layer_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Rows of unequal numbers first, twice, and an evaluation; then images, with other ranks."""
    world_size = rng.choice((2, 3))
    channels = rng.randint(4, 6)
    sizes = [unequal(rng, world_size, least=3), unequal(rng, world_size, least=40), unequal(rng, world_size)]
    batches = [batch(rng, counts, (channels,)) for counts in sizes]
    weight_C, bias_C = torch.tensor([[rng.uniform(0.5, 2) for _ in range(channels)] for _ in range(2)]).double()
    notes = answer.run(layer_driver, world_size, weight_C, bias_C, batches, init=True)
    model = _Expected(weight_C, bias_C)
    expected = [model.step(parts) for parts in batches[:-1]]
    yield "output", _first(_output_fault, batches[:-1], expected, notes)
    yield "running", _first(_running_fault, batches[:-1], expected, notes)
    yield "eval", _first(_eval_fault, batches[-1:], expected[-1:], [note[-1:] for note in notes])
    row_bytes = min(part.numel() * part.element_size() for part in batches[1])
    what = "a mean, a sum of squares and a count"
    yield "few", next(talk_faults([note[1] for note in notes], row_bytes, what), None)
    images = [batch(rng, unequal(rng, 2), (channels, 2, 7)) for _ in range(2)]
    notes = answer.run(layer_driver, 2, weight_C, bias_C, images, init=True)
    expected = [_Expected(weight_C, bias_C).step(images[0])]
    fault = _first(_output_fault, images[:1], expected, notes) or _first(_running_fault, images[:1], expected, notes)
    yield "images", fault or _first(_eval_fault, images[1:], expected, [note[1:] for note in notes])


class _Expected:
    """`nn.BatchNorm` on the whole batch, in one process."""

    def __init__(self, weight_C: torch.Tensor, bias_C: torch.Tensor):
        self.layer = nn.BatchNorm1d(len(weight_C), eps=EPS, momentum=MOMENTUM).double()
        self.weight_C, self.bias_C = weight_C, bias_C
        self.layer._check_input_dim = lambda x: None  # 1d and 2d in one

    def step(self, parts: list[torch.Tensor]) -> dict:
        """Normalise a batch; return what a rank must find, and the statistics before and after."""
        before = {name: getattr(self.layer, name).clone() for name in STATS}
        with torch.no_grad():
            plain_y = self.layer(torch.cat(parts))
        y_NC = plain_y * wide(self.weight_C, plain_y) + wide(self.bias_C, plain_y)
        y = y_NC.split([len(part) for part in parts])
        after = {name: getattr(self.layer, name).clone() for name in STATS}
        return {"y": y, "before": before, **after, "weight": self.weight_C, "bias": self.bias_C}


def _first(fault_of: Callable, batches: list, expected: list[dict], notes: list[list[dict]]) -> Fault | None:
    for index, (parts, right) in enumerate(zip(batches, expected, strict=True)):
        faults = (fault_of(parts, rank, right, note[index]) for rank, note in enumerate(notes))
        if fault := next(filter(None, faults), None):
            return fault
    return None


def _output_fault(parts: list[torch.Tensor], rank: int, right: dict, note: dict) -> Fault | None:
    right_y = right["y"][rank]
    if close(note["y"], right_y):
        return None
    cause = wrong_size(note["y"], right_y) or guessed(note["y"], outputs(parts, rank, right))
    cause = cause or "y = (x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance of all rows"
    return difference("output", note["y"], right_y, rank, cause)


def _running_fault(parts: list[torch.Tensor], rank: int, right: dict, note: dict) -> Fault | None:
    if note["graph"]:
        cause = "they carry the graph of the batch from step to step; change them under torch.no_grad()"
        return Fault("buffers without a gradient", f"{note['graph'][0]}.requires_grad is True", rank, cause)
    for name, of in zip(STATS, (mean_of, variance_of), strict=True):
        if not close(note[name], right[name]):
            guesses = followed(parts, rank, right["before"][name], of)
            cause = wrong_size(note[name], right[name]) or guessed(note[name], guesses)
            new = "mean" if of is mean_of else "variance * count / (count - 1)"
            cause = cause or f"(1 - momentum) * old + momentum * new, where new is the {new} of all ranks' rows"
            return difference(name, note[name], right[name], rank, cause)
    return None


def _eval_fault(parts: list[torch.Tensor], rank: int, right: dict, note: dict) -> Fault | None:
    """Compare an evaluation with what the layer kept: it changes nothing, and talks to nobody."""
    own = parts[rank]
    if note["talks"]["times"]:
        cause = "other ranks may be training, or done: decide by self.training before anything is sent"
        return Fault("no collective in eval mode", f"{note['talks']['times']}", rank, cause)
    if any(note[name] != note["before"][name] for name in STATS):
        return Fault("the same running statistics after it", "others", rank, "only training changes them")
    # By what this layer itself kept: a fault in the following is told by the check before.
    mean_C, var_C = (torch.tensor(note["before"][name], dtype=torch.float64) for name in STATS)
    right_y = _normalised(own, mean_C, var_C, right)
    if close(note["y"], right_y):
        return None
    cause = wrong_size(note["y"], right_y) or "in eval mode, normalise by running_mean and running_var + eps"
    if close(note["y"], _normalised(own, mean_of(own), variance_of(own), right)):
        cause = "the batch's statistics are used; in eval mode take running_mean and running_var"
    return difference("output", note["y"], right_y, rank, cause)


def _normalised(x_NC: torch.Tensor, mean_C: torch.Tensor, var_C: torch.Tensor, right: dict) -> torch.Tensor:
    y_NC = (x_NC - wide(mean_C, x_NC)) / wide((var_C + EPS).sqrt(), x_NC)
    return y_NC * wide(right["weight"], x_NC) + wide(right["bias"], x_NC)


LAYER = Exercise(
    "08.2",
    "A layer that agrees",
    "MySyncBatchNorm",
    25,
    (
        Check("output", "in training, the output is that of the whole batch", 2),
        Check("running", "the running statistics follow the whole batch", 2),
        Check("eval", "in eval mode they are used, and nobody talks", 1),
        Check("few", "a few numbers travel, and no rows", 1),
        Check("images", "so it is for images", 1),
    ),
    layer_judge,
    hints=(
        (
            r"never entered|disagree about collective|waited in",
            "in training every rank must call the same collectives, whatever its rows are",
        ),
        (
            r"must match the size of tensor|not broadcastable|shape .* is invalid for input",
            "a value per channel, (C,), must be viewed as (1, C, 1, 1) to fit images",
        ),
    ),
    refused=(
        "torch.nn.SyncBatchNorm",
        "ddp_course.parallel.syncbn.SyncBatchNorm",
        "ddp_course.parallel.syncbn._wide",  # called by the heart of the course's own
    ),
)
