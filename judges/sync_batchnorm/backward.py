"""08.3 `Normalise`: does the gradient go through the mean and the variance, which belong to all ranks' rows?

The forward pass is given, and its result is compared first, so that a change there is not taken for a fault of the
backward pass. Read `rows.py` first. Read next: `own_test.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault, FaultFound
from ddp_course.grading.vocabulary.expect import Expect, all_of, exercise, talks
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.sync_batchnorm.rows import affine, batch, mean_of, numbers, unequal, variance_of

EPS = 0.3  # large enough to be missed
Value = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Rows, and gradients from above, of each rank; weight and bias."""

    x_W: list[torch.Tensor]
    dy_W: list[torch.Tensor]
    affine_2C: torch.Tensor


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Run forward and backward with this rank's rows; note the gradients, and what was sent in backward."""
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        cause = "keep the class that is given, and write its backward; here autograd does not derive it for you"
        raise FaultFound(Fault("a subclass of torch.autograd.Function", type(function).__name__, cause=cause))
    leaves = [value.clone().requires_grad_() for value in (case.x_W[rank], *case.affine_2C)]
    y_NC = function.apply(*leaves, EPS)
    function.apply(2 - 3 * case.x_W[rank], *leaves[1:], EPS)  # another layer of the model
    with Collectives() as seen:
        y_NC.backward(case.dy_W[rank])
    x, weight, bias = (plain(leaf.grad) for leaf in leaves)
    return Note(x=x, weight=weight, bias=bias, y=plain(y_NC), sent=seen.talks)


def rounds(rng: Random) -> list[Round]:
    """Equal parts first; then, with other ranks, unequal ones, one of them empty."""
    channels, ranks = rng.randint(3, 5), rng.choice((2, 3))
    equal = [rng.randint(30, 40)] * ranks
    sizes = [0, *unequal(rng, rng.choice((2, 3)))]
    return [
        Round(len(s), [(name, Case(batch(rng, s, (channels,)), batch(rng, s, (channels,)), affine(rng, channels)))])
        for name, s in (("equal", equal), ("unequal", sizes))
    ]


# --- What is expected ------------------------------------------------------------------------------


def one_process(seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of the output, and of the gradient of x."""
    leaf, (weight_C, bias_C) = torch.cat(seen.case.x_W).requires_grad_(), seen.case.affine_2C
    y_NC = nn.functional.batch_norm(leaf, None, None, weight_C, bias_C, training=True, eps=EPS)
    y_NC.backward(torch.cat(seen.case.dy_W))
    sizes = [len(x) for x in seen.case.x_W]
    return y_NC.detach().split(sizes)[seen.rank], leaf.grad.split(sizes)[seen.rank]


def normal(seen: Seen) -> list[torch.Tensor]:
    """Return the normalised rows of each rank."""
    whole = torch.cat(seen.case.x_W)
    return [(x_NC - mean_of(whole)) * (variance_of(whole) + EPS).rsqrt() for x_NC in seen.case.x_W]


def row_slips(seen: Seen) -> Iterator[Value]:
    whole, dys, dy, n = torch.cat(seen.case.x_W), torch.cat(seen.case.dy_W), seen.case.dy_W[seen.rank], normal(seen)
    inv_std, weight_C = (variance_of(whole) + EPS).rsqrt(), seen.case.affine_2C[0]
    own, every = (dy.sum(0), (dy * n[seen.rank]).sum(0)), (dys.sum(0), (dys * torch.cat(n)).sum(0))
    rows, count, scale = max(len(dy), 1), len(whole), inv_std * weight_C

    def dx(one: torch.Tensor, two: torch.Tensor, count: float = count, scale: torch.Tensor = scale) -> torch.Tensor:
        return (dy - one / count - n[seen.rank] * two / count) * scale

    yield "the weight is missing: n was multiplied by it in forward", dx(*every, scale=inv_std)
    yield "the standard deviation is missing: multiply by inv_std_C", dx(*every, scale=weight_C)
    yield "multiply by inv_std_C and by the weight", dx(*every, scale=torch.ones(()))
    local = "the two sums are of this rank's rows; a row's output depends on all rows, so all_reduce the sums"
    yield local, dx(*own, rows)
    yield local, dx(*own)
    by_own = "the sums are of all ranks, divided by this rank's number of rows"
    yield f"{by_own}; divide by the count of all rows", dx(*every, rows)
    words = f"{by_own} times the world size; ranks have different numbers of rows, so divide by the count of all rows"
    yield words, dx(*every, rows * seen.world_size)
    words = "the sums are divided by the world size, too; they are sums over all rows, divided by the count of all rows"
    yield words, dx(*every, count * seen.world_size)
    yield "the part of dy that follows n is missing: n * mean(dy * n)", dx(every[0], 0 * every[1])
    yield "mean(dy) is missing: shifting all rows changes no output", dx(0 * every[0], every[1])
    yield "these are sums; divide them by the count of all rows", dx(*every, 1)
    yield "mean and variance are taken for constants; they move with every row", dy * scale
    yield "the sum of dy * n is of this rank's rows; add it up too", dx(every[0], own[1])
    yield "the sum of dy is of this rank's rows; add it up too", dx(own[0], every[1])
    words = "the second sum is of dy times n, the normalised rows, not of dy times x"
    yield words, dx(every[0], (dys * whole).sum(0))


def sums(seen: Seen) -> dict[str, list[torch.Tensor]]:
    """Return the sums over each rank's rows that are the gradients of weight and bias."""
    pairs = list(zip(seen.case.dy_W, normal(seen), strict=True))
    return {"weight": [(dy * n).sum(0) for dy, n in pairs], "bias": [dy.sum(0) for dy, _ in pairs]}


def of_parameter(name: str, other: str) -> Expect:
    """Expect the sum over the rank's own rows as the gradient of weight or bias."""

    def slips(seen: Seen) -> Iterator[Value]:
        everyone, own = sum(sums(seen)[name]), sums(seen)[name][seen.rank]
        later = "DDP averages the gradients of weight and bias afterwards, as all others; keep the sums of this rank's "
        later += "rows"
        yield f"this is the sum over all ranks; {later}", everyone
        yield f"this is averaged over the ranks already; {later}", everyone / seen.world_size
        yield f"this is the mean over all rows; {later}", everyone / sum(map(len, seen.case.x_W))
        words = "this is a mean; a parameter's gradient is the sum over the rows"
        yield words, own / max(len(seen.case.x_W[seen.rank]), 1)
        words = "weight and bias are exchanged: return the gradients in the order of forward's arguments"
        yield words, sums(seen)[other][seen.rank]

    otherwise = "bias gets the sum of dy, weight that of dy * n, each over this rank's rows"
    return numbers(f"gradient of {name}", lambda seen: sums(seen)[name][seen.rank], slips, otherwise, name)


kept = "the forward pass is given; keep what it computes"
formula = "dx = (dy - mean(dy) - n * mean(dy * n)) * inv_std * weight, with means over all rows of all ranks"
rows = all_of(
    numbers("output", lambda seen: one_process(seen)[0], lambda seen: (), kept, "y"),
    numbers("gradient of x", lambda seen: one_process(seen)[1], row_slips, formula, "x"),
)
parameters = all_of(of_parameter("weight", "bias"), of_parameter("bias", "weight"))
few = talks(2, "two sums for each channel", lambda seen: seen.case.x_W[seen.rank].nbytes, of="sent")

BACKWARD = exercise(
    *("08.3", "The way back", "Normalise", 25),
    act=act,
    rounds=rounds,
    checks={
        "rows": ("the gradient of x is that of one process", 2, rows, "equal"),
        "weights": ("weight and bias have the sums of the rank's own rows", 1, parameters, "equal"),
        "few": ("two sums travel, and no rows", 1, few, "equal"),
        "unequal": ("so it is with unequal parts, also with none", 1, all_of(rows, parameters), "unequal"),
    },
    hints={
        r"returned an incorrect number of gradients": "backward returns one value for each argument of forward: x, "
        "weight, bias, and None for eps",
        r"returned an invalid gradient at index|incompatible with": "each gradient has the shape of its argument; the "
        "order is x, weight, bias, eps",
        "absent|disagree; limit: waited in": "every rank calls all_reduce in backward, also one without rows",
    },
    refused=(
        *("torch.nn.SyncBatchNorm", "ddp_course.parallel.syncbn.SyncBatchNorm"),
        "ddp_course.parallel.syncbn._wide",  # called by the heart of the course's own
    ),
)
