"""09.3 `evaluate(rank, world_size, loss_N, guess_N, label_N, classes)`: several metrics, exact, by one collective.

Sums can share a message; a maximum finds its way into it as well, on a place of its own for each rank, or as one row of
a gather. Read `shards.py` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from ddp_course.grading import observe
from ddp_course.grading.compare import close, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from judges.logging.shards import (
    SAME,
    SKIPPED,
    Guess,
    guessed,
    losses,
    mean_guesses,
    talk_fault,
    unequal,
)

Shard = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # loss, guess and label of each row of a rank
MANY_ROWS = 300  # 20 bytes each, so rows on the way cannot be taken for counts
PARTS = ("mean", "worst", "confusion", "f1")


def evaluate_driver(rank: int, world_size: int, function: Callable, shards: list[Shard], classes: int) -> dict:
    """Call the function with this rank's rows; note result and collectives."""
    with observe.Collectives() as seen:
        result = function(rank, world_size, *(tensor.clone() for tensor in shards[rank]), classes)
    return {"result": [plain(item) for item in result] if isinstance(result, tuple | list) else plain(result)} | {
        "calls": seen.calls
    }


def evaluate_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Unequal shards first; then a rank without rows, losses below zero, and a class that never occurs."""
    world_size, classes = rng.choice((3, 4)), rng.randint(3, 4)
    shards = [_shard(rng, rows, range(classes)) for rows in unequal(rng, world_size, least=MANY_ROWS)]
    notes = answer.run(evaluate_driver, world_size, shards, classes, init=True)
    for part in PARTS:
        yield part, _first_fault(part, shards, classes, notes)
    row_bytes = [sum(tensor.nbytes for tensor in shard) for shard in shards]
    faults = (talk_fault(n["calls"], 1, row_bytes[r], r, "sums and counts") for r, n in enumerate(notes))
    yield "one", next(filter(None, faults), None)
    sizes = unequal(rng, 2, least=9)
    sizes.insert(rng.randrange(3), 0)
    # Class 0 occurs but is never guessed, the last one neither; all losses are below zero.
    shards = [_shard(rng, rows, range(classes), guesses=range(1, classes), sign=-1) for rows in sizes]
    notes = answer.run(evaluate_driver, 3, shards, classes + 1, init=True)
    yield "empty", next(filter(None, (_first_fault(part, shards, classes + 1, notes) for part in PARTS)), None)


def _shard(rng: Random, rows: int, labels: range, guesses: range | None = None, sign: int = 1) -> Shard:
    label_N = torch.tensor([rng.choice(labels) for _ in range(rows)], dtype=torch.int64)
    others = torch.tensor([rng.choice(guesses or labels) for _ in range(rows)], dtype=torch.int64)
    right_N = torch.tensor([rng.random() < 0.6 for _ in range(rows)], dtype=torch.bool)
    keep_N = right_N & (label_N >= (guesses or labels)[0])
    return sign * losses(rng, rows), torch.where(keep_N, label_N, others), label_N


def _first_fault(part: str, shards: list[Shard], classes: int, notes: list[dict]) -> Fault | None:
    return next(filter(None, (_fault(part, shards, classes, r, note["result"]) for r, note in enumerate(notes))), None)


def _fault(part: str, shards: list[Shard], classes: int, rank: int, result: Any) -> Fault | None:
    """Compare one of the four parts, on one rank."""
    if not isinstance(result, list) or len(result) != len(PARTS):
        cause = "return mean_loss, worst_loss, confusion, f1, on every rank"
        return Fault("four values", short(result), rank, cause)
    found = result[PARTS.index(part)]
    right = _expected(part, shards, classes)
    if part == "confusion" and close(found, right.T, 0) and not close(found, right, 0):
        cause = "rows and columns are exchanged; confusion[label][guess] counts the rows with this label and this guess"
        return Fault(f"confusion {short(right.tolist())}", short(found), rank, cause)
    if close(found, right, 0 if part == "confusion" else SAME) and _shape(found) == list(torch.as_tensor(right).shape):
        return None
    shown = right.tolist() if isinstance(right, torch.Tensor) else right
    cause = _not_a_number(found) or guessed(found, _guesses(part, shards, classes, rank), _OTHERWISE[part])
    return Fault(f"{part} {short(shown)}", short(found), rank, cause)


def _shape(found: Any) -> list[int]:
    return [len(found), *_shape(found[0])] if isinstance(found, list) and found else []


def _not_a_number(found: Any) -> str:
    numbers = found if isinstance(found, list) else [found]
    if any(isinstance(number, float) and number != number for number in numbers):
        return "nan: 0 was divided by 0; a rank without rows sends zeros, and the F1 of a class that never occurs is 0"
    return ""


def _counted(shards: list[Shard], classes: int) -> torch.Tensor:
    confusion = torch.zeros(classes, classes, dtype=torch.float64)
    for _, guess_N, label_N in shards:
        for label, guess in zip(label_N.tolist(), guess_N.tolist(), strict=True):
            confusion[label, guess] += 1
    return confusion


def _f1(confusion: torch.Tensor) -> torch.Tensor:
    hits, sides = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
    return torch.where(sides > 0, 2 * hits / sides.clamp(min=1), 0.0)


def _expected(part: str, shards: list[Shard], classes: int) -> Any:
    loss_N = torch.cat([shard[0] for shard in shards]).double()
    if part in ("mean", "worst"):
        return (loss_N.mean() if part == "mean" else loss_N.max()).item()
    confusion = _counted(shards, classes)
    return confusion if part == "confusion" else _f1(confusion)


def _guesses(part: str, shards: list[Shard], classes: int, rank: int) -> list[Guess]:
    own = [_counted([shard], classes) for shard in shards]
    worst = [loss_N.max().item() for loss_N, _, _ in shards if len(loss_N)]
    alone = "this is of this rank's rows alone; the other ranks' rows are missing"
    if part == "mean":
        return mean_guesses([loss_N for loss_N, _, _ in shards], rank)
    if part == "worst":
        mine = shards[rank][0]
        return [
            (sum(worst), "the largest losses were added up; give each rank a place of its own, and take the largest"),
            (sum(worst) / len(worst), "this is the mean of the ranks' largest losses; take the largest of them"),
            (mine.max().item() if len(mine) else 0.0, alone),
            (0.0, "losses may be below zero, and 0 came from a rank without rows; let it bring -inf, or leave it out"),
        ]
    if part == "confusion":
        once = "indexing with += counts a pair once, however often it occurs; use bincount(label * classes + guess)"
        return [
            (own[rank], alone),
            (sum(own) / len(own), "these are means over the ranks; counts are added up"),
            (sum(counts.clamp(max=1) for counts in own), once),
        ]
    averaged = "this is the mean of the ranks' F1; add the counts up first, then use the formula once"
    return [(_f1(own[rank]), alone), (sum(map(_f1, own)) / len(own), averaged)]


_OTHERWISE = {
    "mean": "the mean is the sum over all ranks / the count over all ranks",
    "worst": "the worst loss is the largest over all ranks; ReduceOp.SUM alone cannot find it",
    "confusion": "add up each rank's counts: confusion[label][guess], classes times classes, for all rows",
    "f1": "F1 of a class is 2 * hits / (rows with the label + rows with the guess), from the counts of all ranks",
}

EVALUATE = Exercise(
    "09.3",
    "Everything in one collective (stretch)",
    "evaluate",
    25,
    (
        Check("mean", "the mean loss is that of all rows", 1),
        Check("worst", "the worst loss is that of all rows", 1),
        Check("confusion", "the confusion matrix counts all rows", 1),
        Check("f1", "F1 is computed from the counts of all rows", 1),
        Check("one", "one collective, and no rows in it", 1),
        Check("empty", "a rank without rows, losses below zero, a class that never occurs", 1),
    ),
    evaluate_judge,
    refused=("ddp_course.metrics.mean_over_ranks", "ddp_course.metrics.MeanMetrics"),
    hints=(
        (
            r"max\(\): Expected reduction dim|numel\(\) == 0|empty tensor",
            "a rank may have no rows, and nothing is the largest of none; let it bring -inf",
        ),
        (
            r"different sizes|(?i:mismatch)",
            "all_reduce adds tensors of one shape, but ranks have different numbers of rows; send sums and counts",
        ),
        SKIPPED,
    ),
)
