"""09.3 `evaluate(rank, world_size, loss_N, guess_N, label_N, classes)`: several metrics, exact, by one collective.

Sums can share a message; a maximum finds its way into it as well, on a place of its own for each rank, or as one row of
a gather. Read `shards.py` first.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.communication import talks
from ddp_course.grading.vocabulary.rounds import Round, Seen
from judges.logging.shards import SAME, SKIPPED, losses, unequal

MANY_ROWS = 1600  # 20 bytes each, so rows on the way cannot be taken for counts; one rank's count passes a byte's 255
PARTS = ("mean", "worst", "confusion", "f1")
Shard = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # loss, guess and label of each row of a rank


def cases(rng: Random) -> list[Round]:
    """Unequal shards; then a rank without rows, a class that never occurs, losses far below zero or 0 at best."""
    world_size, classes = rng.choice((3, 4)), rng.randint(3, 4)
    many = [_shard(rng, rows, range(classes)) for rows in unequal(rng, world_size, least=MANY_ROWS)]
    # Here class 0 occurs but is never guessed, the last one neither.
    far, zero = (_with_empty(rng, classes, scale) for scale in (-(2.0**100), -1.0))
    next(loss_N for loss_N, _, _ in zero if len(loss_N))[0] = 0.0
    few = [("few", (shards, classes + 1)) for shards in (far, zero)]
    return [Round(world_size, [("many", (many, classes))]), Round(3, few)]


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


def act(function, case: tuple[list[Shard], int], rank: int, world_size: int) -> Any:
    shards, classes = case
    return function(rank, world_size, *shards[rank], classes)


def parts(seen: Seen) -> dict:
    return dict(zip(PARTS, seen["value"], strict=True))


MISTAKES = r"""
own rows alone | mean worst confusion f1 empty
| this is of this rank's rows alone; the other ranks' rows are missing
    ranks = torch.stack(everyone) => ranks = mine[None]
mean of means | mean empty
| this is the mean of the ranks' means; ranks have different numbers of rows: reduce sums and counts
    loss_N.sum(dtype=torch.float64) => loss_N.mean(dtype=torch.float64) if len(loss_N) else 0.0
    ranks[:, 0].sum() / confusion.sum() => ranks[:, 0].sum() / (ranks[:, 2:].sum(dim=1) > 0).sum()
the largest losses are added up | worst empty
| the largest losses were added up; give each rank a place of its own, and take the largest
    ranks[:, 1].max() => ranks[:, 1].sum()
0 is the worst of no rows | empty
| losses may be far below zero, and this came from a rank without rows; let it bring -inf, or leave it out
    float("-inf") => 0.0
a worst loss of 0 is taken for a rank without rows | empty
| a loss of 0 is as good as others; tell a rank without rows by its count
    float("-inf") => 0.0
    ranks[:, 1].max() => ranks[:, 1][ranks[:, 1] != 0].max()
the worst of no rows is asked for | empty | nothing is the largest of none; let it bring -inf
     if len(loss_N) else float("-inf") =>
counts of one byte | mean confusion f1 | the counts pass what their dtype holds; count in int64 or float64
    minlength=classes * classes) => minlength=classes * classes).to(torch.uint8)
a pair counts once | mean confusion f1 empty
| indexing with += counts a pair once, however often it occurs; use bincount(label * classes + guess)
    minlength=classes * classes) => minlength=classes * classes).clamp(max=1)
rows and columns exchanged | confusion empty
| rows and columns are exchanged; confusion[label][guess] counts the rows with this label and guess
    label_N * classes + guess_N => guess_N * classes + label_N
mean of the ranks' F1 | f1 empty
| this is the mean of the ranks' F1; add the counts up first, then use the formula once
    return ranks => each = ranks[:, 2:].view(-1, classes, classes)
    f1 = torch.stack([2 * c.diagonal() / (c.sum(0) + c.sum(1)).clamp(min=1) for c in each]).mean(0)
    return ranks
F1 of an unseen class | empty | nan: 0 was divided by 0; the F1 of a class that never occurs is 0
    .clamp(min=1) =>
only rank 0 answers | mean worst confusion f1 empty | return mean_loss, worst_loss, confusion, f1, on every rank
    return ranks => if rank:
        return None
    return ranks
three collectives | one | put the numbers into one tensor
    dist.all_gather(everyone, mine) => for part in (slice(0, 1), slice(1, 2), slice(2, None)):
        dist.all_gather([each[part] for each in everyone], mine[part])
all rows are gathered | one | the rows travel | tests
    def evaluate(rank, world_size, loss_N, guess_N, label_N, classes):
        rows = torch.full((9000, 3), float("nan"), dtype=torch.float64)
        rows[: len(loss_N)] = torch.stack([loss_N.double(), guess_N.double(), label_N.double()], dim=1)
        everyone = torch.empty(world_size * 9000, 3, dtype=torch.float64)
        dist.all_gather_into_tensor(everyone, rows)
        loss_N, guess_N, label_N = everyone[~everyone[:, 0].isnan()].unbind(1)
        confusion = torch.zeros(classes, classes)
        confusion.index_put_((label_N.long(), guess_N.long()), torch.ones(len(loss_N)), accumulate=True)
        f1 = 2 * confusion.diagonal() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
        return loss_N.mean(), loss_N.max(), confusion, f1
the course's own | all | this exercise is to write | tests
    from ddp_course import metrics

    def evaluate(rank, world_size, loss_N, guess_N, label_N, classes):
        meter = metrics.MeanMetrics("loss")
        meter.add(len(loss_N), loss=loss_N)
        return meter.reduce()["loss"], loss_N.max(), None, None
a rank without rows stays away | empty | one rank skips a collective | hangs
    confusion = torch.bincount => if not len(loss_N):
        return 0, 0, 0, 0
    confusion = torch.bincount
"""

RIGHT = """
a place for each rank in one all_reduce, lists
    def evaluate(rank, world_size, loss_N, guess_N, label_N, classes):
        counts, places = torch.zeros(classes, classes), torch.zeros(world_size)
        counts.index_put_((label_N, guess_N), torch.ones(len(label_N)), accumulate=True)
        places[rank] = max(loss_N.tolist(), default=-torch.inf)
        message = torch.cat([counts.flatten(), places, loss_N.sum()[None]])
        dist.all_reduce(message)
        counts = message[: classes**2].int().view(classes, classes)
        f1 = [2 * counts[n, n] / max(1, counts[n].sum() + counts[:, n].sum()) for n in range(classes)]
        return (message[-1] / counts.sum()).item(), message[classes**2 : -1].max().item(), counts.tolist(), f1
"""

EVALUATE = exercise(
    *("09.3", "Everything in one collective (stretch)", "evaluate", 25),
    cases=cases,
    act=act,
    tolerance=SAME,
    said=lambda seen: f"of {' + '.join(str(len(label_N)) for *_, label_N in seen.case[0])} rows:",
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "mean": ("the mean loss is that of all rows", 1, "many", lambda seen: parts(seen)["mean"],
                 "return four values; the mean is the sum over all ranks / the count over all ranks"),
        "worst": ("the worst loss is that of all rows", 1, "many", lambda seen: parts(seen)["worst"],
                  "the worst loss is the largest over all ranks; ReduceOp.SUM alone cannot find it"),
        "confusion": ("the confusion matrix counts all rows", 1, "many", lambda seen: parts(seen)["confusion"],
                      "add up each rank's counts: confusion[label][guess], classes times classes, for all rows"),
        "f1": ("F1 is computed from the counts of all rows", 1, "many", lambda seen: parts(seen)["f1"],
               "F1 of a class is 2 * hits / (rows with the label + rows with the guess), from the counts of all ranks"),
        "one": ("one collective, and no rows in it", 1, "many",
                talks(1, "sums and counts", lambda seen: sum(part.nbytes for part in seen.case[0][seen.rank])), ""),
        "empty": ("a rank without rows, losses below zero, a class that never occurs", 1, "few", parts,
                  "a rank without rows sends zeros, and -inf as its largest loss; a class that never occurs has F1 0"),
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
)  # fmt: skip
