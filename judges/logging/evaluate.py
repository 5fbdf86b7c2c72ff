"""09.3 `evaluate(rank, world_size, loss_N, guess_N, label_N, classes)`: several metrics, exact, by one collective.

Sums can share a message; a maximum finds its way into it as well, on a place of its own for each rank, or as one row of
a gather. Read `shards.py` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.vocabulary.compare import flat
from ddp_course.grading.vocabulary.expect import Expect, Form, Slips, all_of, equals, exercise, talks
from ddp_course.grading.vocabulary.means import mean_slips
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.logging.shards import SAME, SKIPPED, losses, unequal

MANY_ROWS = 1600  # 20 bytes each, so rows on the way cannot be taken for counts; one rank's count passes a byte's 255
PARTS = ("mean", "worst", "confusion", "f1")
Shard = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # loss, guess and label of each row of a rank


@dataclass(frozen=True)
class Case:
    """The rows of each rank, and how many classes there are."""

    shards: list[Shard]
    classes: int

    def losses(self) -> list[torch.Tensor]:
        """Return each rank's losses."""
        return [loss_N for loss_N, _, _ in self.shards]

    def counted(self) -> list[torch.Tensor]:
        """Return each rank's confusion matrix, its labels in rows."""
        pairs = (label_N * self.classes + guess_N for _, guess_N, label_N in self.shards)
        counts = (torch.bincount(pair_N, minlength=self.classes**2).double() for pair_N in pairs)
        return [count.reshape(self.classes, self.classes) for count in counts]


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the four parts, or nothing where there are not four."""
    result = function(rank, world_size, *case.shards[rank], case.classes)
    parts = [plain(part) for part in result] if isinstance(result, tuple | list) else []
    return Note(zip(PARTS, parts, strict=True)) if len(parts) == len(PARTS) else Note()


def rounds(rng: Random) -> list[Round]:
    """Unequal shards; then a rank without rows, a class that never occurs, losses far below zero or 0 at best."""
    world_size, classes = rng.choice((3, 4)), rng.randint(3, 4)
    many = [_shard(rng, rows, range(classes)) for rows in unequal(rng, world_size, least=MANY_ROWS)]
    # Here class 0 occurs but is never guessed, the last one neither.
    far, zero = (_with_empty(rng, classes, scale) for scale in (-(2.0**100), -1.0))
    next(loss_N for loss_N, _, _ in zero if len(loss_N))[0] = 0.0
    few = [("few", Case(shards, classes + 1)) for shards in (far, zero)]
    return [Round(world_size, [("many", Case(many, classes))]), Round(3, few)]


def _with_empty(rng: Random, classes: int, scale: float) -> list[Shard]:
    sizes = unequal(rng, 2, least=9)
    sizes.insert(rng.randrange(3), 0)
    return [_shard(rng, rows, range(classes), range(1, classes), scale) for rows in sizes]


def _shard(rng: Random, rows: int, labels: range, guesses: range | None = None, scale: float = 1.0) -> Shard:
    label_N = torch.tensor([rng.choice(labels) for _ in range(rows)], dtype=torch.int64)
    others = torch.tensor([rng.choice(guesses or labels) for _ in range(rows)], dtype=torch.int64)
    right_N = torch.tensor([rng.random() < 0.6 for _ in range(rows)], dtype=torch.bool)
    keep_N = right_N & (label_N >= (guesses or labels)[0])
    return scale * losses(rng, rows), torch.where(keep_N, label_N, others), label_N


# --- What is right, and what is not ----------------------------------------------------------------

ALONE = "this is of this rank's rows alone; the other ranks' rows are missing"


def _f1(confusion: torch.Tensor) -> torch.Tensor:
    hits, sides = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
    return torch.where(sides > 0, 2 * hits / sides.clamp(min=1), 0.0)


def worst_slips(seen: Seen) -> Iterator[tuple[str, float]]:
    parts = seen.case.losses()
    mine, worst = parts[seen.rank], [part.max().item() for part in parts if len(part)]
    if max(worst) == 0:
        others = max(filter(None, worst))
        yield "a loss of 0 is as good as others; tell a rank without rows by its count", others
    yield "the largest losses were added up; give each rank a place of its own, and take the largest", sum(worst)
    yield "this is the mean of the ranks' largest losses; take the largest of them", sum(worst) / len(worst)
    yield ALONE, mine.max().item() if len(mine) else 0.0
    if len(worst) < len(parts) and isinstance(seen["worst"], float) and seen["worst"] > max(worst):
        least = (
            "losses may be far below zero, and this came from a rank without rows; let it bring -inf, or leave it out"
        )
        yield least, seen["worst"]


def confusion_slips(seen: Seen) -> Iterator[tuple[str, torch.Tensor]]:
    own = seen.case.counted()
    exchanged = "rows and columns are exchanged; confusion[label][guess] counts the rows with this label and guess"
    once = "indexing with += counts a pair once, however often it occurs; use bincount(label * classes + guess)"
    yield exchanged, sum(own).T
    yield ALONE, own[seen.rank]
    yield "these are means over the ranks; counts are added up", sum(own) / len(own)
    yield once, sum(counts.clamp(max=1) for counts in own)


def f1_slips(seen: Seen) -> Iterator[tuple[str, torch.Tensor]]:
    own = seen.case.counted()
    yield ALONE, _f1(own[seen.rank])
    of_means = "this is the mean of the ranks' F1; add the counts up first, then use the formula once"
    yield of_means, sum(map(_f1, own)) / len(own)


def _form(*sizes: str) -> Form:
    """Return what says that a part has not as many dimensions as there are names of sizes."""

    def form(found: Any) -> str:
        if found is None:
            return "return mean_loss, worst_loss, confusion, f1, on every rank"
        if any(number != number for number in flat(found) or []):
            zeros = "a rank without rows sends zeros, and the F1 of a class that never occurs is 0"
            return f"nan: 0 was divided by 0; {zeros}"
        depth = 0
        while isinstance(found, list):
            found, depth = found[0] if found else None, depth + 1
        return "" if depth == len(sizes) else f"return {' times '.join(sizes) or 'one number'}"

    return form


def part(name: str, *sizes: str, right: Callable[[Seen], Any], slips: Slips, otherwise: str) -> Expect:
    """Return what is expected of one of the four parts, which has as many dimensions as there are sizes."""
    tolerance = 0 if name == "confusion" else SAME
    return equals(name, right, slips, otherwise, of=name, tolerance=tolerance, form=_form(*sizes))


mean = part(
    "mean",
    right=lambda seen: torch.cat(seen.case.losses()).double().mean().item(),
    slips=lambda seen: mean_slips(seen.case.losses(), seen.rank),
    otherwise="the mean is the sum over all ranks / the count over all ranks",
)
worst = part(
    "worst",
    right=lambda seen: torch.cat(seen.case.losses()).max().item(),
    slips=worst_slips,
    otherwise="the worst loss is the largest over all ranks; ReduceOp.SUM alone cannot find it",
)
confusion = part(
    *("confusion", "classes", "classes"),
    right=lambda seen: sum(seen.case.counted()).tolist(),
    slips=confusion_slips,
    otherwise="add up each rank's counts: confusion[label][guess], classes times classes, for all rows",
)
f1 = part(
    *("f1", "classes"),
    right=lambda seen: _f1(sum(seen.case.counted())).tolist(),
    slips=f1_slips,
    otherwise="F1 of a class is 2 * hits / (rows with the label + rows with the guess), from the counts of all ranks",
)
one = talks(1, "sums and counts", lambda seen: sum(part.nbytes for part in seen.case.shards[seen.rank]))
each = all_of(mean, worst, confusion, f1)

EVALUATE = exercise(
    "09.3",
    "Everything in one collective (stretch)",
    "evaluate",
    25,
    act=act,
    rounds=rounds,
    checks={
        "mean": ("the mean loss is that of all rows", 1, mean, "many"),
        "worst": ("the worst loss is that of all rows", 1, worst, "many"),
        "confusion": ("the confusion matrix counts all rows", 1, confusion, "many"),
        "f1": ("F1 is computed from the counts of all rows", 1, f1, "many"),
        "one": ("one collective, and no rows in it", 1, one, "many"),
        "empty": ("a rank without rows, losses below zero, a class that never occurs", 1, each, "few"),
    },
    refused=("ddp_course.metrics.mean_over_ranks", "ddp_course.metrics.MeanMetrics"),
    hints={
        r"max\(\): Expected reduction dim|numel\(\) == 0|empty tensor": "a rank may have no rows, and nothing is the "
        "largest of none; let it bring -inf",
        "sizes; disagree: different sizes; (?i:mismatch)": "all_reduce adds tensors of one shape, but ranks have "
        "different numbers of "
        "rows; send sums and counts",
        **SKIPPED,
    },
)
