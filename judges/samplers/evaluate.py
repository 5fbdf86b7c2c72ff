"""05.2 `accuracy(rank, world_size, predict, x, y)`: is each row counted once, by one rank, for a result that all have?

`predict` is the judge's own, and notes which rows it is shown. Read next: `resume.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from judges.samplers.deal import REFUSED


def make_rows(seed: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x of shape (length, 2), whose first column numbers the rows; right labels; and what is predicted."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.stack([torch.arange(float(length)), torch.rand(length, generator=chance)], dim=1)
    y = torch.randint(0, 3, (length,), generator=chance)
    predicted = torch.where(torch.rand(length, generator=chance) < 0.4, y, (y + 1) % 3)
    # Padding begins with row 0. Counted twice, it changes the result, with three rows as well.
    predicted[0], predicted[1] = y[0], (y[1] + 1) % 3
    return x, y, predicted


def accuracy_driver(rank: int, world_size: int, function: Callable, seed: int, lengths: list[int]) -> list[dict]:
    """Call the function for each number of rows; note its result and the rows that were predicted on this rank."""
    notes = []
    for length in lengths:
        x, y, predicted = make_rows(seed, length)
        shown: list[int] = []

        def predict(rows: torch.Tensor, shown=shown, predicted=predicted) -> torch.Tensor:
            numbers = rows[:, 0].long()
            shown += numbers.tolist()
            return predicted[numbers]

        notes.append({"result": _number(function(rank, world_size, predict, x, y)), "rows": shown})
    return notes


def _number(result: Any) -> Any:
    return plain(result.item() if isinstance(result, np.generic) else result)


def accuracy_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Rows that the ranks divide, rows that they don't; then three rows on four ranks."""
    world_size, few = rng.choice((2, 3)), 3
    lengths = [24, world_size * rng.randint(8, 12) + rng.randint(1, world_size - 1)]
    seed = telling_seed(rng, lengths, world_size)
    notes = answer.run(accuracy_driver, world_size, seed, lengths, init=True)
    cases = {length: [ranks[i] for ranks in notes] for i, length in enumerate(lengths)}
    yield "even", _value_fault(seed, lengths[0], cases[lengths[0]])
    yield "uneven", _value_fault(seed, lengths[1], cases[lengths[1]])
    cases[few] = [ranks[0] for ranks in answer.run(accuracy_driver, 4, seed, [few], init=True)]
    yield "few", _value_fault(seed, few, cases[few])
    yield "once", next(filter(None, (_once_fault(length, ranks) for length, ranks in cases.items())), None)
    yield "shared", next(filter(None, (_shared_fault(length, ranks) for length, ranks in cases.items())), None)


def telling_seed(rng: Random, lengths: list[int], world_size: int) -> int:
    """Return a seed of rows for which no common mistake happens to give the right result."""
    while True:
        seed = rng.randrange(10**6)
        if all(_is_telling(seed, length, world_size) for length in lengths):
            return seed


def _is_telling(seed: int, length: int, world_size: int) -> bool:
    rows = torch.arange(length)
    dealt = [share_right(seed, rows[rank::world_size].tolist(), length) for rank in range(world_size)]
    blocks = [share_right(seed, part.tolist(), length) for part in rows.tensor_split(world_size)]
    four_ranks = share_right(seed, rows[rows % 4 < world_size].tolist(), length)  # the 4 of other exercises, by heart
    means = [sum(own) / world_size for own in (dealt, blocks)] if length % world_size else []
    right = share_right(seed, rows.tolist(), length)
    return not any(_near(value, right) for value in [0.5, *dealt, *blocks, four_ranks, *means])


def share_right(seed: int, rows: list[int], length: int) -> float:
    """Return the share of right answers among these rows."""
    _, y, predicted = make_rows(seed, length)
    return (predicted[rows] == y[rows]).double().mean().item() if rows else float("nan")


def _value_fault(seed: int, length: int, ranks: list[dict]) -> Fault | None:
    right = share_right(seed, list(range(length)), length)
    for rank, note in enumerate(ranks):
        if not _near(note["result"], right):
            expected = f"{right:.6g}, that is {round(right * length)} of {length} rows"
            return Fault(expected, repr(note["result"]), rank, _cause(seed, length, ranks, rank))
    return None


def _near(found: Any, right: float) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and abs(found - right) < 1e-5


def _cause(seed: int, length: int, ranks: list[dict], rank: int) -> str:
    found, world_size = ranks[rank]["result"], len(ranks)
    own = [share_right(seed, note["rows"], length) for note in ranks]
    right = share_right(seed, list(range(length)), length)
    shown = [row for note in ranks for row in note["rows"]]
    if _near(ranks[0]["result"], right):
        return "rank 0 has the result, this rank has not: reduce has one receiver, all_reduce has all"
    if found is None or not isinstance(found, int | float):
        return "return one number between 0 and 1, on every rank"
    if found != found:
        return "0 / 0: a rank without rows has no accuracy; add up right answers and rows, and divide once, at the end"
    if _near(found, own[rank]) and not _near(right, own[rank]):
        return "this is the accuracy of the rank's own rows; nothing from the other ranks is in it"
    if len(shown) > length and _near(found, share_right(seed, shown, length)):
        return "the shards are padded: some rows are counted twice; let the shards differ by a row instead"
    if len(set(shown)) < length:
        return "some rows are predicted by nobody; the rest that does not divide counts, too"
    filled = [0.0 if value != value else value for value in own]
    if _near(found, sum(filled) / world_size):
        return "this is the mean of the ranks' accuracies; shards are unequal, so add up right answers and rows instead"
    if _near(found, right * length):
        return "this is the number of right answers; divide by the rows"
    if _near(found, right * world_size):
        return "reduced once too often, or divided by the rows of one rank: the sum of rows is over all ranks, too"
    return "add up right answers and rows over all ranks, then divide"


def _once_fault(length: int, ranks: list[dict]) -> Fault | None:
    counts = Counter(row for note in ranks for row in note["rows"])
    expected = f"each of {length} rows predicted once, on one rank"
    if not counts:
        return Fault(expected, "no row at all", cause="call predict with this rank's rows of x")
    row, most = counts.most_common(1)[0]
    if most == len(ranks) and all(len(note["rows"]) == length for note in ranks):
        return Fault(
            expected, "all rows on every rank", cause="every rank evaluates everything; give each rank its part"
        )
    if most > 1:
        return Fault(expected, f"row {row} {most} times", cause="the shards are padded, or overlap")
    if len(counts) < length:
        return Fault(expected, f"{length - len(counts)} rows not at all", cause="the rest that does not divide is lost")
    return None


def _shared_fault(length: int, ranks: list[dict]) -> Fault | None:
    sizes = [len(note["rows"]) for note in ranks]
    if min(sizes) == length:
        cause = (
            "every rank does all of the work; every world_size-th row, beginning with the rank's own number, is fair"
        )
        return Fault("shards that differ by one row at most", f"all {length} rows on every rank", cause=cause)
    if max(sizes) - min(sizes) <= 1:
        return None
    cause = "the work is not shared: every world_size-th row, beginning with the rank's own number, is fair"
    return Fault("shards that differ by one row at most", f"{sizes} rows", cause=cause)


EVALUATE = Exercise(
    "05.2",
    "An exact evaluation",
    "accuracy",
    15,
    (
        Check("even", "rows that the ranks divide", 1),
        Check("uneven", "rows that they do not divide", 2),
        Check("few", "fewer rows than ranks", 1),
        Check("once", "each row is predicted once", 1),
        Check("shared", "the ranks share the work", 1),
    ),
    accuracy_judge,
    hints=(
        (
            r"(?s)never entered|no result after.*waited in",
            "a rank stayed away from a collective; one without rows must take part in it, too",
        ),
        (
            r"IndexError",
            "chunk() may give fewer parts than asked for; tensor_split(), or x[rank::world_size], does not",
        ),
    ),
    refused=REFUSED,
)
