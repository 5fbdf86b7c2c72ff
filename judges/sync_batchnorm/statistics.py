"""08.1 `global_statistics(x_NC)`: mean and variance of the rows of all ranks, without losing rows or digits.

Read `rows.py` first. Read next: `layer.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.communication import talks
from ddp_course.grading.vocabulary.compare import same
from ddp_course.grading.vocabulary.rounds import Round, Seen
from judges.sync_batchnorm.rows import batch, unequal

FAR_TOLERANCE = 0.01  # float32 at 10,000 has three digits after the point


def cases(rng: Random) -> list[Round]:
    """Unequal parts first, near zero and far from it; then, on other ranks, with one row or none, such as rank 0."""
    ranks, channels = rng.choice((2, 3)), (rng.randint(4, 6),)
    near = batch(rng, unequal(rng, ranks), channels)
    far = batch(rng, unequal(rng, ranks, least=600), channels, offset=rng.randint(9_000, 12_000))
    more = rng.choice((3, 4))
    sizes = [0, 1, *unequal(rng, more - 2)]
    rng.shuffle(sizes)
    without = batch(rng, [0, 1, *unequal(rng, more - 2, least=600)], channels, offset=10_000)
    return [
        Round(ranks, [("near", near), ("far", [part.float() for part in far])]),
        Round(more, [("empty", batch(rng, sizes, channels)), ("empty", [part.float() for part in without])]),
    ]


def act(function, parts: list[torch.Tensor], rank: int, world_size: int) -> Any:
    return function(parts[rank])


def mean(seen: Seen) -> dict:
    mean_C, _, count = seen["value"]
    return {"mean": mean_C, "count": count}


def variance(seen: Seen) -> dict:
    _, variance_C, _ = seen["value"]
    return {"variance": variance_C}


def digits(seen: Seen) -> dict:
    """Rounding leaves some freedom in float32: what is nearly right is shown as right, the rest with two digits."""
    _, found_C, _ = seen["value"]
    right_C = torch.cat(seen.case).double().var(0, correction=0).tolist()
    nearly = same(found_C, right_C, FAR_TOLERANCE)
    return {"variance": right_C if nearly else [float(f"{number:.1e}") for number in found_C]}


def without_rows(seen: Seen) -> dict:
    return digits(seen) if seen.case[0].dtype == torch.float32 else {**mean(seen), **variance(seen)}


MISTAKES = r"""
own rows alone | all | the other ranks' rows are missing
    dist.all_gather(everyone, mine) => everyone = [mine]
the ranks' means averaged | mean variance digits empty
| this is the mean of the ranks' means; ranks have different numbers of rows: add up sums and counts
    (mean_WC * count_W1).sum(dim=0) / total => mean_WC.mean(dim=0)
    squares_C / total => (squares_WC / count_W1.clamp(min=1)).mean(dim=0)
divided by the rank's own rows | mean variance digits empty
| the sum of all ranks is divided by this rank's count; add up the counts as well
    (mean_WC * count_W1).sum(dim=0) / total => (mean_WC * count_W1).sum(dim=0) / max(count, 1)
the distances of the means are missing | variance digits empty
| this leaves out the distances of the ranks' means from the common mean: they belong to the variance
    (squares_WC + count_W1 * (mean_WC - mean_C).square()) => squares_WC
divided by count - 1 | variance empty | a variance is divided by its count here; torch.var needs correction=0 for that
    squares_C / total => squares_C / (total - 1)
torch.var as it is on each rank | variance empty | torch.var divides by count - 1 unless you give correction=0
    (x_NC - mean_C).square().sum(dim=0) => x_NC.var(dim=0) * count
standard deviation | variance digits empty | this is the standard deviation; return its square
    squares_C / total, total => (squares_C / total).sqrt(), total
not in the shape (C,) | mean variance digits empty | the numbers are right, their shape is another one
    return mean_C, squares_C / total, total => return mean_C[None], squares_C[None] / total, total
its own count | mean empty | this is the number of this rank's rows; add up those of all ranks
    squares_C / total, total => squares_C / total, count
no rows are nan | empty
| nan: the mean of no rows is nan, and nan times 0 stays nan; let a rank without rows send zeros
    if count: => if True:
one row counts as none | empty | one row has a mean and counts as 1; its sum of squared differences is 0, not nan
    if count: => count -= count == 1
    if count:
float32 from a rank without rows | empty | a rank without rows sends zeros of x_NC's dtype
    x_NC.new_zeros( => torch.zeros(
the rows are changed | mean | the function changes what it is given
    (x_NC - mean_C).square() => x_NC.sub_(mean_C).square()
float32, whatever the rows are | mean variance empty | computed in float32 here
    channels, count => x_NC = x_NC.float()
    channels, count
number by number | few | each collective has a price of its own
    dist.all_gather(everyone, mine) => for n in range(len(mine)):
        dist.all_gather([each[n : n + 1] for each in everyone], mine[n : n + 1])
all rows on every rank | few | the rows travel | tests
    def global_statistics(x_NC):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, x_NC)
        rows = torch.cat(everyone)
        return rows.mean(0), rows.var(0, correction=0), len(rows)
squares minus the square of the mean | digits empty | the difference of two large numbers, which float32 rounds | tests
    def global_statistics(x_NC):
        sums = torch.cat([x_NC.sum(0), (x_NC * x_NC).sum(0), x_NC.new_tensor([len(x_NC)])])
        dist.all_reduce(sums)
        mean_C, squares_C = (sums[:-1] / sums[-1]).chunk(2)
        return mean_C, squares_C - mean_C**2, sums[-1]
a rank without rows leaves | empty | a rank without rows has to join as well | hangs
    mine = torch => if not count:
        return mean_C, squares_C, count
    mine = torch
"""

RIGHT = """
sums of squares in float64
    def global_statistics(x_NC):
        x_NC = x_NC.double()
        sums = torch.cat([x_NC.sum(0), (x_NC * x_NC).sum(0), torch.tensor([len(x_NC)])])
        dist.reduce(sums, dst=0)
        dist.broadcast(sums, src=0)
        mean_C, squares_C = (sums[:-1] / sums[-1]).chunk(2)
        return [mean_C, squares_C - mean_C**2, sums[-1]]
"""

STATISTICS = exercise(
    *("08.1", "Statistics of the whole batch", "global_statistics", 15),
    cases=cases,
    act=act,
    tolerance=1e-9,
    said=lambda seen: f"of {' + '.join(str(len(part)) for part in seen.case)} rows:",
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "mean": ("the mean is that of all rows, and so is the count", 1, "near", mean,
                 "return mean_C, var_C, count: the mean is the sum of all rows / their number"),
        "variance": ("the variance is that of all rows", 1, "near", variance,
                     "add up squared differences from the common mean, and divide by the number of all rows"),
        "digits": ("it keeps its digits far from zero, in float32", 1, "far", digits,
                   "if it is right near zero, digits are lost: squares / count - mean² is the difference of two large "
                   "numbers, which float32 rounds; add up the squared differences from a mean"),
        "few": ("a few numbers travel, and no rows", 1, "far",
                talks(4, "a mean, a sum of squares and a count for each channel",
                      lambda seen: seen.case[seen.rank].nbytes), ""),
        "empty": ("one row on a rank, or none, does no harm", 1, "empty", without_rows,
                  "the mean of no rows is nan: a rank without rows sends zeros and a count of 0; in float32, squares / "
                  "count - mean² is the difference of two large numbers, which float32 rounds"),
    },
    hints={
        r"tensors of different (sizes|dtypes)": "all ranks bring tensors of the same shape and dtype to a collective; "
        "rows differ in number, so they can't be gathered as they are, and a rank without rows sends zeros of x_NC's "
        "dtype",
        r"Cannot reduce over an empty|empty tensor|ZeroDivisionError": "a rank may have no rows; let it send zeros and "
        "a count of 0",
        "absent|disagree; limit: waited in": "a rank leaves out a collective that the others wait in; "
        "a rank without rows has to join as well",
    },
    refused=(
        *("ddp_course.parallel.syncbn.local_statistics", "ddp_course.parallel.syncbn.all_statistics"),
        "ddp_course.parallel.syncbn.combine",
    ),
)  # fmt: skip
