"""08.3 `Normalise`: does the gradient go through the mean and the variance, which belong to all ranks' rows?

The forward pass is given, and its result is compared first, so that a change there is not taken for a fault of the
backward pass. Read `rows.py` first. Read next: `convert.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import nn

from ddp_course.grading import observe
from ddp_course.grading.compare import close
from ddp_course.grading.exercise import Check, Exercise, Fault, FaultFound
from ddp_course.grading.isolated import Answer, plain
from judges.sync_batchnorm.rows import (
    Guess,
    batch,
    difference,
    guessed,
    mean_of,
    talk_faults,
    talks,
    unequal,
    variance_of,
    wrong_size,
)

EPS = 0.3  # large enough to be missed


def backward_driver(
    rank: int, world_size: int, function: type, x_W: list, dy_W: list, weight_C: torch.Tensor, bias_C: torch.Tensor
) -> dict:
    """Run forward and backward with this rank's rows; note the gradients, and what was sent in backward."""
    _refuse_what_is_no_function(function)
    leaves = [value.clone().requires_grad_() for value in (x_W[rank], weight_C, bias_C)]
    y_NC = function.apply(*leaves, EPS)
    with observe.Collectives() as seen:
        y_NC.backward(dy_W[rank])
    grads = [None if leaf.grad is None else plain(leaf.grad) for leaf in leaves]
    return {"y": plain(y_NC), "grads": grads, "talks": talks(seen.calls)}


def _refuse_what_is_no_function(function: type) -> None:
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        cause = "keep the class that is given, and write its backward; here autograd does not derive it for you"
        raise FaultFound(Fault("a subclass of torch.autograd.Function", type(function).__name__, cause=cause))


def backward_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Equal parts first; then, with other ranks, unequal ones, one of them empty."""
    channels = rng.randint(3, 5)
    world_size = rng.choice((2, 3))
    case = _case(rng, [rng.randint(30, 40)] * world_size, channels)
    notes = answer.run(backward_driver, world_size, *case, init=True)
    yield "rows", _first(_row_fault, case, notes)
    yield "weights", _first(_weight_fault, case, notes)
    row_bytes = case[0][0].numel() * case[0][0].element_size()
    yield "few", next(talk_faults(notes, row_bytes, "two sums", most=2), None)
    sizes = [0, *unequal(rng, rng.choice((2, 3)))]
    rng.shuffle(sizes)
    case = _case(rng, sizes, channels)
    notes = answer.run(backward_driver, len(sizes), *case, init=True)
    yield "unequal", _first(_row_fault, case, notes) or _first(_weight_fault, case, notes)


def _case(rng: Random, sizes: list[int], channels: int) -> tuple:
    """Return rows, gradients from above, weight and bias."""
    weight_C, bias_C = torch.tensor([[rng.uniform(0.5, 2) for _ in range(channels)] for _ in range(2)]).double()
    return batch(rng, sizes, (channels,)), batch(rng, sizes, (channels,)), weight_C, bias_C


def _first(fault_of: Callable, case: tuple, notes: list[dict]) -> Fault | None:
    faults = (fault_of(case, rank, note) for rank, note in enumerate(notes))
    return next(filter(None, faults), None)


def _row_fault(case: tuple, rank: int, note: dict) -> Fault | None:
    x_W, dy_W, weight_C, bias_C = case
    leaf = torch.cat(x_W).requires_grad_()
    normal = nn.functional.batch_norm(leaf, None, None, weight_C, bias_C, training=True, eps=EPS)
    right_y = normal.detach().split([len(x) for x in x_W])[rank]
    if not close(note["y"], right_y):
        return difference("output", note["y"], right_y, rank, "the forward pass is given; keep what it computes")
    normal.backward(torch.cat(dy_W))
    expected = leaf.grad.split([len(x) for x in x_W])[rank]
    found = note["grads"][0]
    if close(found, expected):
        return None
    if found is None:
        return Fault("a gradient of x", "None", rank, "return the gradient of x first")
    cause = wrong_size(found, expected) or guessed(found, _row_gradients(case, rank))
    cause = cause or "dx = (dy - mean(dy) - n * mean(dy * n)) * inv_std * weight, with means over all rows of all ranks"
    return difference("gradient of x", found, expected, rank, cause)


def _row_gradients(case: tuple, rank: int) -> Iterator[Guess]:
    """Yield the gradients of wrong ways."""
    x_W, dy_W, weight_C, _ = case
    whole, dys, dy, world_size = torch.cat(x_W), torch.cat(dy_W), dy_W[rank], len(x_W)
    inv_std = (variance_of(whole) + EPS).rsqrt()
    normals, n = (whole - mean_of(whole)) * inv_std, (x_W[rank] - mean_of(whole)) * inv_std
    own, everyone = (dy.sum(0), (dy * n).sum(0)), (dys.sum(0), (dys * normals).sum(0))
    rows, all_rows, scale = max(len(dy), 1), len(whole), inv_std * weight_C

    def gradient(sums: tuple, count: float, scale: torch.Tensor, one: float = 1, two: float = 1) -> torch.Tensor:
        return (dy - one * sums[0] / count - two * n * sums[1] / count) * scale

    yield gradient(everyone, all_rows, inv_std), "the weight is missing: n was multiplied by it in forward"
    yield gradient(everyone, all_rows, weight_C), "the standard deviation is missing: multiply by inv_std_C"
    yield gradient(everyone, all_rows, torch.ones(())), "multiply by inv_std_C and by the weight"
    local = "the two sums are of this rank's rows; a row's output depends on all rows, so all_reduce the sums"
    yield gradient(own, rows, scale), local
    yield gradient(own, all_rows, scale), local
    yield (
        gradient(everyone, rows, scale),
        "the sums are of all ranks, divided by this rank's number of rows; divide by the count of all rows",
    )
    yield (
        gradient(everyone, rows * world_size, scale),
        "the sums are divided by this rank's number of rows times the world size; ranks have different numbers of "
        "rows, so divide by the count of all rows",
    )
    yield (
        gradient(everyone, all_rows * world_size, scale),
        "the sums are divided by the world size, too; they are sums over all rows, divided by the count of all rows",
    )
    yield gradient(everyone, all_rows, scale, two=0), "the part of dy that follows n is missing: n * mean(dy * n)"
    yield gradient(everyone, all_rows, scale, one=0), "mean(dy) is missing: shifting all rows changes no output"
    yield gradient(everyone, 1, scale), "these are sums; divide them by the count of all rows"
    yield dy * scale, "mean and variance are taken for constants; they move with every row"
    yield gradient((everyone[0], own[1]), all_rows, scale), "the sum of dy * n is of this rank's rows; add it up too"
    yield gradient((own[0], everyone[1]), all_rows, scale), "the sum of dy is of this rank's rows; add it up too"
    raw = (everyone[0], (dys * whole).sum(0))
    yield gradient(raw, all_rows, scale), "the second sum is of dy times n, the normalised rows, not of dy times x"


def _weight_fault(case: tuple, rank: int, note: dict) -> Fault | None:
    """Compare the gradients of weight and bias with the sums over this rank's rows."""
    x_W, dy_W, *_ = case
    whole = torch.cat(x_W)
    normal_W = [(x - mean_of(whole)) * (variance_of(whole) + EPS).rsqrt() for x in x_W]
    of_weight = [(dy * n).sum(0) for dy, n in zip(dy_W, normal_W, strict=True)]
    of_bias = [dy.sum(0) for dy in dy_W]
    for name, found, sums in zip(("weight", "bias"), note["grads"][1:], (of_weight, of_bias), strict=True):
        if close(found, sums[rank]):
            continue
        if found is None:
            return Fault(f"a gradient of {name}", "None", rank, "return four values: of x, weight, bias, and None")
        other = of_bias if name == "weight" else of_weight
        cause = wrong_size(found, sums[rank]) or guessed(found, _weight_gradients(sums, other, rank, whole, x_W[rank]))
        cause = cause or "bias gets the sum of dy, weight that of dy * n, each over this rank's rows"
        return difference(f"gradient of {name}", found, sums[rank], rank, cause)
    return None


def _weight_gradients(sums: list, other: list, rank: int, whole: torch.Tensor, own: torch.Tensor) -> Iterator[Guess]:
    everyone = torch.stack(sums).sum(0)
    later = "DDP averages the gradients of weight and bias afterwards, as all others; keep the sums of this rank's rows"
    yield everyone, f"this is the sum over all ranks; {later}"
    yield everyone / len(sums), f"this is averaged over the ranks already; {later}"
    yield everyone / len(whole), f"this is the mean over all rows; {later}"
    yield sums[rank] / max(len(own), 1), "this is a mean; a parameter's gradient is the sum over the rows"
    yield other[rank], "weight and bias are exchanged: return the gradients in the order of forward's arguments"


BACKWARD = Exercise(
    "08.3",
    "The way back",
    "Normalise",
    25,
    (
        Check("rows", "the gradient of x is that of one process", 2),
        Check("weights", "weight and bias have the sums of the rank's own rows", 1),
        Check("few", "two sums travel, and no rows", 1),
        Check("unequal", "so it is with unequal parts, also with none", 1),
    ),
    backward_judge,
    hints=(
        (
            r"returned an incorrect number of gradients",
            "backward returns one value for each argument of forward: x, weight, bias, and None for eps",
        ),
        (
            r"returned an invalid gradient at index|incompatible with",
            "each gradient has the shape of its argument; the order is x, weight, bias, eps",
        ),
        (
            r"never entered|disagree about collective|waited in",
            "every rank calls all_reduce in backward, also one without rows",
        ),
    ),
    refused=(
        "torch.nn.SyncBatchNorm",
        "ddp_course.parallel.syncbn.SyncBatchNorm",
        "ddp_course.parallel.syncbn._wide",  # called by the heart of the course's own
    ),
)
