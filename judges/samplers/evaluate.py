"""05.2 `accuracy(rank, world_size, predict, x, y)`: is each row counted once, by one rank, for a result that all have?

`predict` is the judge's own, and notes which rows it is shown. Read next: `resume.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import close
from ddp_course.grading.vocabulary.expect import equals, exercise, first_mistake, once
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.samplers.deal import REFUSED

SAME = 1e-6  # of the expected number: what float32 may leave


@dataclass(frozen=True)
class Case:
    """So many rows, from a seed."""

    seed: int
    length: int

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x of shape (length, 2), whose first column numbers the rows; right labels; and what is predicted."""
        chance = torch.Generator().manual_seed(self.seed)
        x = torch.stack([torch.arange(float(self.length)), torch.rand(self.length, generator=chance)], dim=1)
        y = torch.randint(0, 3, (self.length,), generator=chance)
        predicted = torch.where(torch.rand(self.length, generator=chance) < 0.4, y, (y + 1) % 3)
        # Padding begins with row 0. Counted twice, it changes the result, with three rows as well.
        predicted[0], predicted[1] = y[0], (y[1] + 1) % 3
        return x, y, predicted

    def share(self, rows: Sequence[int] | torch.Tensor | None = None) -> float:
        """Return the share of right answers among these rows, or all; nan among none."""
        _, y, predicted = self.rows()
        right = (predicted == y).double()
        return (right if rows is None else right[torch.as_tensor(rows, dtype=torch.long)]).mean().item()

    def tells(self, world_size: int) -> bool:
        """Whether no common mistake happens to give the right result."""
        rows = torch.arange(self.length)
        dealt = [self.share(rows[rank::world_size]) for rank in range(world_size)]
        blocks = [self.share(part) for part in rows.tensor_split(world_size)]
        four_ranks = self.share(rows[rows % 4 < world_size])  # the 4 of other exercises, by heart
        means = [sum(own) / world_size for own in (dealt, blocks)] if self.length % world_size else []
        return not any(close(wrong, self.share(), SAME) for wrong in [0.5, *dealt, *blocks, four_ranks, *means])


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the result, the rows that were predicted on this rank, and whether x or y has changed."""
    x, y, predicted = case.rows()
    shown: list[int] = []

    def predict(rows: torch.Tensor) -> torch.Tensor:
        numbers = rows[:, 0].long()
        shown.extend(numbers.tolist())
        return predicted[numbers]

    result = function(rank, world_size, predict, x, y)
    changed = not all(map(torch.equal, (x, y), case.rows()))
    value = plain(result.item() if isinstance(result, np.generic) else result)
    return Note(value=value, rows=shown, given_changed=changed)


def rounds(rng: Random) -> list[Round]:
    """Rows that the ranks divide, rows that they don't, a few or many; then three rows, and nine, on four ranks."""
    world_size = rng.choice((2, 3))
    lengths = 24, world_size * rng.randint(8, 12) + rng.randint(1, world_size - 1)
    seed = rng.randrange(10**6)
    while not all(Case(seed, length).tells(world_size) for length in lengths):
        seed = rng.randrange(10**6)
    both = [(name, Case(seed, length)) for name, length in zip(("even", "uneven"), lengths, strict=True)]
    many = 2000 * world_size + rng.choice((1, 3, 5))  # odd, and more than float16 can count
    both.append(("uneven", Case(seed, many)))
    return [Round(world_size, both), Round(4, [("few", Case(seed, 3)), ("nine", Case(seed, 9))])]


def right(seen: Seen) -> float:
    """The share of right answers among all rows."""
    return seen.case.share()


def slips(seen: Seen) -> Iterator[tuple[str, Any]]:
    """Wrong ways to it; when rank 0 has the right result, something else went wrong."""
    found, share, length = seen["value"], seen.case.share, seen.case.length
    rows = [seen.of(rank)["rows"] for rank in range(seen.world_size)]
    shown = sum(rows, [])
    if close(seen.of(0)["value"], right(seen), SAME):
        return
    yield "this is the accuracy of the rank's own rows; nothing from the other ranks is in it", share(rows[seen.rank])
    if len(shown) > length:
        yield "the shards are padded: some rows are counted twice; let the shards differ by a row instead", share(shown)
    if len(set(shown)) < length:
        yield "some rows are predicted by nobody; the rest that does not divide counts, too", found
    mean = sum(share(own) if own else 0.0 for own in rows) / len(rows)
    yield (
        "this is the mean of the ranks' accuracies; shards are unequal, so add up right answers and rows instead",
        mean,
    )
    yield "this is the number of right answers; divide by the rows", right(seen) * length
    yield (
        "reduced once too often, or divided by the rows of one rank: the sum of rows is over all ranks, too",
        right(seen) * seen.world_size,
    )


def otherwise(seen: Seen, found: Any) -> str:
    """Say what is wrong with another result."""
    if close(seen.of(0)["value"], right(seen), SAME):
        return "rank 0 has the result, this rank has not: reduce has one receiver, all_reduce has all"
    if not isinstance(found, int | float):
        return "return one number between 0 and 1, on every rank"
    if found != found:
        return "0 / 0: a rank without rows has no accuracy; add up right answers and rows, and divide once, at the end"
    if close(found, right(seen), 0.01):
        return "nearly: add up whole numbers, or float64, and do not round; float16 can count to 2048"
    return "add up right answers and rows over all ranks, then divide"


accuracy = equals(
    lambda seen, right: f"{right:.6g}, that is {round(right * seen.case.length)} of {seen.case.length} rows",
    right,
    slips,
    otherwise,
    tolerance=SAME,
)


def each_once(seen: Seen) -> Fault | None:
    """Every row is predicted by one rank."""
    rows, length = [seen.of(rank)["rows"] for rank in range(seen.world_size)], seen.case.length
    counts = Counter(sum(rows, []))
    row, most = (counts.most_common(1) or [(0, 0)])[0]
    mistakes = {
        "call predict with this rank's rows of x": not counts and "no row at all",
        "every rank evaluates everything; give each rank its part":
            all(len(own) == length for own in rows) and "all rows on every rank",
        "the shards are padded, or overlap": most > 1 and f"row {row} {most} times",
        "the rest that does not divide is lost": len(counts) < length and f"{length - len(counts)} rows not at all",
    }  # fmt: skip
    return first_mistake(f"each of {length} rows predicted once, on one rank", mistakes)


def shared(seen: Seen) -> Fault | None:
    """The ranks predict as many rows, or one more."""
    sizes = [len(seen.of(rank)["rows"]) for rank in range(seen.world_size)]
    cause = "the work is not shared: every world_size-th row, beginning with the rank's own number, is fair"
    unfair = (max(sizes) - min(sizes) > 1 or min(sizes) == seen.case.length) and f"{sizes} rows"
    return first_mistake("shards that differ by one row at most, and no rank with all rows", {cause: unfair})


EVALUATE = exercise(
    "05.2",
    "An exact evaluation",
    "accuracy",
    15,
    act=act,
    rounds=rounds,
    checks={
        "even": ("rows that the ranks divide", 1, accuracy, "even"),
        "uneven": ("rows that they do not divide", 2, accuracy, "uneven"),
        "few": ("fewer rows than ranks", 1, accuracy, "few"),
        "once": ("each row is predicted once", 1, once(each_once), "even uneven few"),
        "shared": ("the ranks share the work", 1, once(shared), "even uneven few nine"),
    },
    hints={
        "absent; limit: waited in": "a rank stayed away from a collective; one without rows must take part in it, too",
        r"IndexError": "chunk() may give fewer parts than asked for; tensor_split(), or x[rank::world_size], does not",
    },
    refused=REFUSED,
)
