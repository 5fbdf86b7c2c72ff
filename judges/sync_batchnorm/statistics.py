"""08.1 `global_statistics(x_NC)`: mean and variance of the rows of all ranks, without losing rows or digits.

Read `rows.py` first. Read next: `layer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from ddp_course.grading import observe
from ddp_course.grading.compare import close
from ddp_course.grading.exercise import Check, Exercise, Fault
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

FAR_TOLERANCE = 0.01  # float32 at 10,000 has three digits after the point
NOT_A_NUMBER = (
    "nan: the mean of no rows is nan, the variance of one row divided by its count - 1 too, and nan times 0 stays nan; "
    "let a rank without rows send zeros, and divide by the count"
)
LOST_DIGITS = (
    "squares / count - mean² is the difference of two large numbers, which float32 rounds; "
    "add up the squared differences from a mean"
)


def statistics_driver(rank: int, world_size: int, function: Callable, batches: list[list[torch.Tensor]]) -> list[dict]:
    """Call the function for each batch with this rank's part; note result and collectives."""
    notes = []
    for parts in batches:
        with observe.Collectives() as seen:
            result = function(parts[rank].clone())
        notes.append({"result": plain(result), "talks": talks(seen.calls)})
    return notes


def statistics_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Unequal parts first, near zero and far from it; then, with other ranks, one row here and none there."""
    world_size, channels = rng.choice((2, 3)), rng.randint(4, 6)
    near = batch(rng, unequal(rng, world_size), (channels,))
    far = batch(rng, unequal(rng, world_size, least=600), (channels,), offset=rng.randint(9_000, 12_000))
    far = [part.float() for part in far]
    notes = answer.run(statistics_driver, world_size, [near, far], init=True)
    near_notes, far_notes = ([note[index] for note in notes] for index in (0, 1))
    yield "mean", _first(_mean_fault, near, near_notes)
    yield "variance", _first(_variance_fault, near, near_notes)
    yield "digits", _first(_variance_fault, far, far_notes, FAR_TOLERANCE)
    row_bytes = min(part.numel() * part.element_size() for part in far)
    yield "few", next(talk_faults(far_notes, row_bytes, "a mean, a sum of squares and a count"), None)
    world_size = rng.choice((3, 4))
    sizes = [0, 1, *unequal(rng, world_size - 2)]
    rng.shuffle(sizes)
    parts = batch(rng, sizes, (channels,))
    few_notes = [note[0] for note in answer.run(statistics_driver, world_size, [parts], init=True)]
    yield "empty", _first(_mean_fault, parts, few_notes) or _first(_variance_fault, parts, few_notes)


def _first(fault_of: Callable, parts: list[torch.Tensor], notes: list[dict], tolerance: float = 1e-6) -> Fault | None:
    faults = (fault_of(parts, rank, note["result"], tolerance) for rank, note in enumerate(notes))
    return next(filter(None, faults), None)


def _mean_fault(parts: list[torch.Tensor], rank: int, result: Any, tolerance: float) -> Fault | None:
    """Compare mean and count."""
    if not isinstance(result, list) or len(result) != 3:
        return Fault("three values: mean, variance, count", repr(result), rank, "return mean_C, var_C, count")
    mean_C, count = mean_of(_all(parts)), len(_all(parts))
    if not close(result[0], mean_C, tolerance):
        cause = wrong_size(result[0], mean_C) or _not_a_number(result[0]) or guessed(result[0], _means(parts, rank))
        return difference("mean", result[0], mean_C, rank, cause or "the mean is the sum of all rows / their number")
    if close(result[2], count, tolerance):
        return None
    cause = "this is the number of this rank's rows; " if close(result[2], len(parts[rank])) else ""
    return Fault(f"count {count}", f"count {result[2]}", rank, f"{cause}add the numbers of rows of all ranks")


def _variance_fault(parts: list[torch.Tensor], rank: int, result: Any, tolerance: float) -> Fault | None:
    var_C = variance_of(_all(parts))
    if not isinstance(result, list) or len(result) != 3:
        return Fault("three values: mean, variance, count", repr(result), rank, "return mean_C, var_C, count")
    if close(result[1], var_C, tolerance):
        return None
    cause = wrong_size(result[1], var_C) or guessed(result[1], _variances(parts, rank), max(tolerance / 5, 1e-6))
    if not cause and tolerance == FAR_TOLERANCE:  # right numbers of a wrong way differ by less than this
        cause = LOST_DIGITS
    cause = cause or _not_a_number(result[1])
    return difference("variance", result[1], var_C, rank, cause or "add up squared differences from the common mean")


def _not_a_number(found: Any) -> str:
    numbers = torch.tensor(found, dtype=torch.float64).flatten() if isinstance(found, list | float) else torch.zeros(1)
    return NOT_A_NUMBER if numbers.isnan().any() else ""


def _all(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts).double()


def _means(parts: list[torch.Tensor], rank: int) -> list[Guess]:
    own, total = parts[rank].double(), _all(parts).sum(0)
    counted = [part for part in parts if len(part)]
    of_means = torch.stack([mean_of(part.double()) for part in counted])
    weigh = "this is the mean of the ranks' means; ranks have different numbers of rows: weigh each mean by its rows"
    return [
        (of_means.mean(0), weigh),
        (of_means.sum(0) / len(parts), weigh),
        (mean_of(own), "this is the mean of this rank's rows; the other ranks' rows are missing"),
        (total, "this is the sum; divide it by the number of all rows"),
        (
            total / max(len(own), 1),
            "the sum of all rows is divided by this rank's number of rows; add the counts up too",
        ),
        (total / len(parts), "the sum is divided by the number of ranks; divide it by the number of all rows"),
    ]


def _variances(parts: list[torch.Tensor], rank: int) -> list[Guess]:
    """Return the numbers that wrong ways to the variance lead to."""
    whole, own = _all(parts), parts[rank].double()
    counted = [part.double() for part in parts if len(part)]
    counts = torch.tensor([[len(part)] for part in counted], dtype=torch.float64)
    means, inner = (torch.stack([of(part) for part in counted]) for of in (mean_of, variance_of))
    apart = (means - mean_of(whole)).square()
    loose = torch.stack([variance_of(part, correction=1) for part in counted])
    distance = "the distances of the ranks' means from the common mean belong to it"
    own_rows = "this is the variance of this rank's rows; the other ranks' rows are missing"
    unbiased = "a variance is divided by its count - 1, which is torch.var's default; give correction=0"
    return [
        (inner.mean(0), f"this is the mean of the ranks' variances; {distance}, and each rank weighs by its rows"),
        ((inner * counts).sum(0) / len(whole), f"this is the mean of the ranks' variances, by rows; {distance}"),
        (inner.mean(0) + apart.mean(0), "the ranks weigh the same here; each weighs by its number of rows"),
        (
            ((inner * counts).sum(0) + apart.sum(0)) / len(whole),
            "the squared distance of a rank's mean counts once for each of its rows",
        ),
        (variance_of(own), own_rows),
        (variance_of(own, correction=1), own_rows),
        (variance_of(whole, correction=1), unbiased),
        (((loose + apart) * counts).sum(0) / len(whole), unbiased),
        (loose.mean(0), f"this is the mean of the ranks' variances; {distance}, and each rank weighs by its rows"),
        (
            variance_of(whole) * len(whole),
            "these are the squared differences added up; divide by the number of all rows",
        ),
        (variance_of(whole).sqrt(), "this is the standard deviation; return its square"),
    ]


STATISTICS = Exercise(
    "08.1",
    "Statistics of the whole batch",
    "global_statistics",
    15,
    (
        Check("mean", "the mean is that of all rows, and so is the count", 1),
        Check("variance", "the variance is that of all rows", 1),
        Check("digits", "it keeps its digits far from zero, in float32", 1),
        Check("few", "a few numbers travel, and no rows", 1),
        Check("empty", "one row on a rank, or none, does no harm", 1),
    ),
    statistics_judge,
    hints=(
        (
            r"tensors of different (sizes|dtypes)",
            "all ranks bring tensors of the same shape and dtype to a collective; rows differ in number, so they can't "
            "be gathered as they are, and a rank without rows sends zeros of x_NC's dtype",
        ),
        (
            r"Cannot reduce over an empty|empty tensor|ZeroDivisionError",
            "a rank may have no rows; let it send zeros and a count of 0",
        ),
        (
            r"never entered|disagree about collective|waited in",
            "a rank leaves out a collective that the others wait in; a rank without rows has to join as well",
        ),
    ),
    refused=(
        "ddp_course.parallel.syncbn.local_statistics",
        "ddp_course.parallel.syncbn.all_statistics",
        "ddp_course.parallel.syncbn.combine",
    ),
)
