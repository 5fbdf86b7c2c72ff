"""08.3 `Normalise`: does the gradient go through the mean and the variance, which belong to all ranks' rows?

The forward pass is given, and its result is compared as well, so that a change there is not taken for a fault of the
backward pass. Read `rows.py` first. Read next: `own_test.py`.
"""

from __future__ import annotations

from random import Random

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.exercise import Fault, FaultFound
from ddp_course.grading.vocabulary.communication import talks
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.sync_batchnorm.rows import NOT_ACCEPTED, affine, batch, unequal

EPS = 0.3  # large enough to be missed


def cases(rng: Random) -> list[Round]:
    """Rows and gradients from above of each rank, weight and bias: equal parts, then others, one of them empty."""
    channels, ranks = rng.randint(3, 5), rng.choice((2, 3))
    equal = [rng.randint(30, 40)] * ranks
    sizes = [0, *unequal(rng, rng.choice((2, 3)))]
    return [
        Round(len(s), [(name, (batch(rng, s, (channels,)), batch(rng, s, (channels,)), affine(rng, channels)))])
        for name, s in (("equal", equal), ("unequal", sizes))
    ]


def act(function, case: tuple, rank: int, world_size: int) -> Note:
    """Run forward and backward with this rank's rows; note the gradients, and what was sent in backward."""
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        cause = "keep the class that is given, and write its backward; here autograd does not derive it for you"
        raise FaultFound(Fault("a subclass of torch.autograd.Function", type(function).__name__, cause=cause))
    x_W, dy_W, affine_2C = case
    leaves = [value.clone().requires_grad_() for value in (x_W[rank], *affine_2C)]
    y_NC = function.apply(*leaves, EPS)
    function.apply(2 - 3 * x_W[rank], *leaves[1:], EPS)  # another layer of the model
    with Collectives() as seen:
        y_NC.backward(dy_W[rank])
    x, weight, bias = (plain(leaf.grad) for leaf in leaves)
    return Note(x=x, weight=weight, bias=bias, y=plain(y_NC), sent=seen.talks)


def rows(seen: Seen) -> dict:
    return {"output": seen["y"], "gradient of x": seen["x"]}


def weights(seen: Seen) -> dict:
    return {"gradient of weight": seen["weight"], "gradient of bias": seen["bias"]}


MISTAKES = r"""
sums of the own rows, divided by all rows | rows few unequal
| the two sums are of this rank's rows; a row's output depends on all rows, so all_reduce the sums
    dist.all_reduce(sums_2C) => pass
means of the own rows | rows few unequal
| the two means are of this rank's rows; a row's output depends on all rows, so all_reduce the sums
    dist.all_reduce(sums_2C) => pass
    / count => / max(len(dy_NC), 1)
divided by the own rows | rows unequal
| the sums are of all ranks, divided by this rank's number of rows; divide by the count of all rows
    / count => / max(len(dy_NC), 1)
right for equal parts only | unequal
| divided by this rank's rows times the world size; ranks have different numbers of rows, so divide by the count
    / count => / len(dy_NC) / dist.get_world_size()
the mean over ranks of the sums | rows unequal
| the sums are divided by the world size, too; they are sums over all rows, divided by the count of all rows
    / count => / count / dist.get_world_size()
the weight is forgotten | rows unequal | the weight is missing: n was multiplied by it in forward
    * inv_std_C * weight_C => * inv_std_C
the variance is a constant | rows unequal | the part of dy that follows n is missing: n * mean(dy * n)
    - normal_NC * mean_dy_normal_C =>
mean and variance are constants | rows unequal
| mean and variance are taken for constants; they move with every row
    (dy_NC - mean_dy_C - normal_NC * mean_dy_normal_C) => dy_NC
kept by the class, for the last forward pass | rows weights unequal
| what forward keeps on the class is that of the last layer that ran; save it in ctx
    ctx.save_for_backward( => Normalise.kept = (
    ctx.saved_tensors => Normalise.kept
dy is changed | rows | the function changes what it is given
    (dy_NC - mean_dy_C - => (dy_NC.sub_(mean_dy_C) -
weight and bias are summed over the ranks | weights unequal
| this is the sum over all ranks; DDP averages the gradients of weight and bias afterwards, so keep this rank's sums
    return dx_NC, dweight_C, dbias_C => return dx_NC, sums_2C[1], sums_2C[0]
weight and bias exchanged | weights unequal
| weight and bias are exchanged: return the gradients in the order of forward's arguments
    return dx_NC, dweight_C, dbias_C => return dx_NC, dbias_C, dweight_C
nothing for eps | all | and None for eps
    dbias_C, None => dbias_C
all rows on every rank | few | the rows travel
    dist.all_reduce(sums_2C) => everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (dy_NC, normal_NC))
    dys, normals = (torch.cat(parts) for parts in zip(*everyone))
    sums_2C = torch.stack([dys.sum(0), (dys * normals).sum(0)])
autograd does it | all | write its backward | tests
    class Normalise:
        @staticmethod
        def apply(x_NC, weight_C, bias_C, eps):
            from torch.distributed.nn.functional import all_reduce
            count = all_reduce(torch.tensor(float(len(x_NC))))
            mean_C = all_reduce(x_NC.sum(0)) / count
            var_C = all_reduce((x_NC - mean_C).square().sum(0)) / count
            return (x_NC - mean_C) / (var_C + eps).sqrt() * weight_C + bias_C
a rank without rows leaves | unequal | also one without rows | hangs
    dbias_C, dweight_C = dy => if not len(dy_NC):
        return dy_NC, None, None, None
    dbias_C, dweight_C = dy
"""

FORMULA = "dx = (dy - mean(dy) - n * mean(dy * n)) * inv_std * weight, with means over all rows of all ranks"
PARAMETERS = "bias gets the sum of dy, weight that of dy * n, each over this rank's rows"

BACKWARD = exercise(
    *("08.3", "The way back", "Normalise", 25),
    cases=cases,
    act=act,
    tolerance=1e-9,
    mistakes=MISTAKES,
    checks={
        "rows": ("the gradient of x is that of one process", 2, "equal", rows,
                 f"keep the output of the forward pass that is given; {FORMULA}"),
        "weights": ("weight and bias have the sums of the rank's own rows", 1, "equal", weights, PARAMETERS),
        "few": ("two sums travel, and no rows", 1, "equal",
                talks(2, "two sums for each channel", lambda seen: seen.case[0][seen.rank].nbytes, of="sent"), ""),
        "unequal": ("so it is with unequal parts, also with none", 1, "unequal",
                    lambda seen: {**rows(seen), **weights(seen)}, f"{FORMULA}; {PARAMETERS}"),
    },
    hints={
        r"returned an incorrect number of gradients": "backward returns one value for each argument of forward: x, "
        "weight, bias, and None for eps",
        r"returned an invalid gradient at index|incompatible with": "each gradient has the shape of its argument; the "
        "order is x, weight, bias, eps",
        "absent|disagree; limit: waited in": "every rank calls all_reduce in backward, also one without rows",
    },
    refused=NOT_ACCEPTED,
)  # fmt: skip
