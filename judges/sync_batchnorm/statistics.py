"""08.1 `global_statistics(x_NC)`: mean and variance of the rows of all ranks, without losing rows or digits.

Read `rows.py` first. Read next: `layer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import Expect, all_of, equals, exercise, nothing, talks
from ddp_course.grading.vocabulary.means import mean_slips
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.sync_batchnorm.rows import batch, mean_of, numbers, unequal, variance_of

Parts = list[torch.Tensor]  # the rows of each rank
FAR_TOLERANCE = 0.01  # float32 at 10,000 has three digits after the point


def act(function, parts: Parts, rank: int, world_size: int) -> Note:
    """Call the function with this rank's part; note the three values."""
    result = plain(function(parts[rank]))
    if isinstance(result, list) and len(result) == 3:
        return Note(zip(("mean", "variance", "count"), result, strict=True))
    return Note(strange=repr(result))


def rounds(rng: Random) -> list[Round]:
    """Unequal parts first, near zero and far from it; then, on other ranks, with one row or none, such as rank 0."""
    ranks, channels = rng.choice((2, 3)), (rng.randint(4, 6),)
    near = batch(rng, unequal(rng, ranks), channels)
    far = batch(rng, unequal(rng, ranks, least=600), channels, offset=rng.randint(9_000, 12_000))
    more = rng.choice((3, 4))
    sizes = [0, 1, *unequal(rng, more - 2)]
    rng.shuffle(sizes)
    cases = [("near", near), ("far", [part.float() for part in far])]
    without = batch(rng, [0, 1, *unequal(rng, more - 2, least=600)], channels, offset=10_000)
    others = [("empty", batch(rng, sizes, channels)), ("empty", [part.float() for part in without])]
    return [Round(ranks, cases), Round(more, others)]


# --- What is expected ------------------------------------------------------------------------------


def variance_slips(seen: Seen) -> Iterator[tuple[str, torch.Tensor]]:
    whole, own, parts = torch.cat(seen.case), seen.case[seen.rank], [part for part in seen.case if len(part)]
    shares = torch.tensor([[len(part) / len(whole)] for part in parts], dtype=torch.float64)
    inner, loose = (torch.stack([variance_of(part, less) for part in parts]) for less in (0, 1))
    apart = (torch.stack([mean_of(part) for part in parts]) - mean_of(whole)).square()
    distance = "the distances of the ranks' means from the common mean belong to it"
    of_ranks = f"this is the mean of the ranks' variances; {distance}, and each rank weighs by its rows"
    own_rows = "this is the variance of this rank's rows; the other ranks' rows are missing"
    unbiased = "a variance is divided by its count - 1, which is torch.var's default; give correction=0"
    yield of_ranks, inner.mean(0)
    yield f"this is the mean of the ranks' variances, by rows; {distance}", (inner * shares).sum(0)
    yield "the ranks weigh the same here; each weighs by its number of rows", (inner + apart).mean(0)
    words = "the squared distance of a rank's mean counts once for each of its rows"
    yield words, (inner * shares).sum(0) + apart.sum(0) / len(whole)
    yield own_rows, variance_of(own)
    yield own_rows, variance_of(own, 1)
    yield unbiased, variance_of(whole, 1)
    yield unbiased, ((loose + apart) * shares).sum(0)
    yield of_ranks, loose.mean(0)
    words = "these are the squared differences added up; divide by the number of all rows"
    yield words, variance_of(whole) * len(whole)
    yield "this is the standard deviation; return its square", variance_of(whole).sqrt()


def whole(name: str, of, slips, otherwise: str, tolerance: float = 1e-9) -> Expect:
    """Expect three values, one of which is that of all rows."""
    right = numbers(name, lambda seen: of(torch.cat(seen.case)), slips, otherwise, name, tolerance)
    return all_of(nothing("strange", "three values: mean, variance, count", "return mean_C, var_C, count"), right)


count = equals(
    "count",
    lambda seen: sum(map(len, seen.case)),
    lambda seen: [("this is the number of this rank's rows; add up those of all ranks", len(seen.case[seen.rank]))],
    "add the numbers of rows of all ranks",
    of="count",
    tolerance=0,
)
mean_of_all = whole(
    *("mean", mean_of, lambda seen: mean_slips(seen.case, seen.rank)),
    "the mean is the sum of all rows / their number",
)
mean = all_of(mean_of_all, count)
variance = whole("variance", variance_of, variance_slips, "add up squared differences from the common mean")
digits = whole(
    *("variance", variance_of, variance_slips),
    "squares / count - mean² is the difference of two large numbers, which float32 rounds; add up the squared "
    "differences from a mean",
    FAR_TOLERANCE,
)


def without_rows(seen: Seen) -> Fault | None:
    """Near zero all numbers are right, far from it, in float32, as many digits as elsewhere."""
    return (digits if seen.case[0].dtype == torch.float32 else all_of(mean, variance))(seen)


few = talks(4, "a mean, a sum of squares and a count for each channel", lambda seen: seen.case[seen.rank].nbytes)

STATISTICS = exercise(
    *("08.1", "Statistics of the whole batch", "global_statistics", 15),
    act=act,
    rounds=rounds,
    checks={
        "mean": ("the mean is that of all rows, and so is the count", 1, mean, "near"),
        "variance": ("the variance is that of all rows", 1, variance, "near"),
        "digits": ("it keeps its digits far from zero, in float32", 1, digits, "far"),
        "few": ("a few numbers travel, and no rows", 1, few, "far"),
        "empty": ("one row on a rank, or none, does no harm", 1, without_rows, "empty"),
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
)
