"""What is silently wrong with a training run that neither stops nor complains?

Such a run gives a number, and the number is false or late. No rank can see it alone: that all draw the same rows, or
write into the same file, shows only when their notes lie side by side. `observer.py` takes these notes on each rank
and brings them together. Here each check is a pure function from the notes of all ranks to a finding, so a test can
plant any run without running it.

Two findings have no fault of their own in the failure lab: "replicas-differ" and "wrong-mean".

The checks of this file are about rows, means and the learning rate; those of files, cores and replicas are next door.

Left out on purpose: gradient accumulation, which makes the global batch larger than is seen here.
Read next: `replica_checks.py`; `observer.py`, which takes the notes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from ddp_course.diagnose import replica_checks
from ddp_course.diagnose.training_facts import Finding, NotedMean, RankFacts
from ddp_course.launcher.rank_status import listed_ranks

FEWEST_ROWS = 8  # of an order that is judged: two shuffles of 8 rows are equal once in 40,320 times
SAME = 1e-5  # relative difference below which two means are one: float32 sums differ by less


def look(everyone: Sequence[RankFacts]) -> list[Finding]:
    """Return what is wrong, by the notes of all ranks; an empty list if nothing is."""
    return [finding for check in CHECKS if (finding := check(everyone))]


# --- Which rows ------------------------------------------------------------------------------------


def check_sharing(everyone: Sequence[RankFacts]) -> Finding | None:
    """Each row belongs to one rank. DistributedSampler repeats W - 1 of them at most, to make the shards equal."""
    for drawn in zip(*(facts.epochs for facts in everyone), strict=False):
        if any(len(set(rows)) < len(rows) for rows in drawn):
            continue  # drawn with replacement: then ranks share rows by design
        distinct, in_all = len(set().union(*drawn)), sum(map(len, drawn))
        if in_all - distinct > len(everyone) - 1:
            shard = math.ceil(distinct / len(everyone))
            evidence = (
                f"in one epoch {len(everyone)} ranks drew {in_all} rows, {distinct} of them different; each would draw "
                f"{shard} from a shard of its own, and takes {max(map(len, drawn)) / shard:.3g} times as many steps"
            )
            return Finding("missing-sampler", None, evidence, {"drawn": in_all, "distinct": distinct, "shard": shard})
    return None


def check_order(everyone: Sequence[RankFacts]) -> Finding | None:
    """An order that was shuffled is another one in the next epoch. One that was never shuffled is no mistake."""
    same = {facts.rank: n for facts in everyone if (n := _repeated_order(facts.epochs))}
    if not same:
        return None
    rank = None if len(same) == len(everyone) else min(same)
    who = "every rank" if rank is None else listed_ranks(same)
    evidence = f"{who} drew {next(iter(same.values()))} rows in the same shuffled order as in the epoch before"
    return Finding("missing-set-epoch", rank, evidence, {"ranks": len(same)})


def _repeated_order(epochs: list[list[int]]) -> int:
    """Return how many rows two epochs in a row have in the same order, or 0."""
    for before, after in zip(epochs, epochs[1:], strict=False):
        rows = min(len(before), len(after))  # an epoch may have been left early
        shuffled = after[: rows - 1] != sorted(after[: rows - 1])  # the last one may be padding
        if rows >= FEWEST_ROWS and shuffled and before[:rows] == after[:rows]:
            return rows
    return 0


def check_evaluation(everyone: Sequence[RankFacts]) -> Finding | None:
    """Every row counts equally often. If all ranks evaluate all rows, that is slow and right."""
    counts = Counter(row for facts in everyone for row in facts.evaluated)
    if not counts:
        return None
    usual = Counter(counts.values()).most_common(1)[0][0]
    more = sorted(row for row, count in counts.items() if count > usual)
    size = max((facts.evaluation_size or 0 for facts in everyone), default=0)
    left_out = max(0, size - len(counts))
    if not more and not left_out:
        return None
    parts = []
    if more:
        shown = ", ".join(map(str, more[:3])) + (", ..." if len(more) > 3 else "")
        parts.append(f"{_rows(len(more))} counted more often than the others (row {shown})")
    if left_out:
        parts.append(f"{_rows(left_out)} of {size} left out")
    evidence = f"of {len(counts)} rows evaluated, {' and '.join(parts)}; the mean over them is not the test set's"
    return Finding("padded-evaluation", None, evidence, {"repeated": len(more), "left_out": left_out})


# --- Which numbers ---------------------------------------------------------------------------------


def check_means(everyone: Sequence[RankFacts]) -> Finding | None:
    """A mean over all ranks is the sum of the sums over the sum of the rows."""
    for name in sorted({name for facts in everyone for name in facts.means}):
        noted = {facts.rank: facts.means[name] for facts in everyone if name in facts.means}
        if finding := _judge_mean(name, noted, len(everyone)):
            return finding
    return None


def _judge_mean(name: str, noted: dict[int, NotedMean], world_size: int) -> Finding | None:
    with_rows = [mean for mean in noted.values() if mean.rows]
    rows = sum(mean.rows for mean in with_rows)
    right = sum(mean.total for mean in with_rows) / max(rows, 1)
    said = {rank: mean.reported for rank, mean in noted.items() if mean.reported is not None}
    wrong = {rank: reported for rank, reported in said.items() if rows and not _same(reported, right)}
    if not wrong:
        return None
    rank, reported = next(iter(wrong.items()))
    blamed = None if len(wrong) == world_size else rank
    numbers = {"reported": reported, "right": right}
    evidence = f"{name} was reported as {reported:.6g}; the sum over {rows} rows gives {right:.6g}"
    of_ranks = sum(mean.total / mean.rows for mean in with_rows) / len(with_rows)
    of_batches = sum(mean.batch_means for mean in with_rows) / sum(mean.batches for mean in with_rows)
    for what, value in (("ranks'", of_ranks), ("batches'", of_batches)):
        if _same(reported, value):
            evidence += f". What was reported is the mean of the {what} means, which have unequal numbers of rows"
            return Finding("mean-of-means", blamed, evidence, numbers)
    return Finding("wrong-mean", blamed, evidence, numbers)


def check_rate(everyone: Sequence[RankFacts]) -> Finding | None:
    """More ranks with the same local batch take fewer steps; with the same rate they come less far.

    The linear rule is a rule of thumb, for SGD; for Adam many take the square root. Any rate from the one to the
    other is left alone. Without a reference nothing is said: then nobody knows for which batch the rate was good.

    Source: Goyal et al. 2017 (arXiv 1706.02677), section 2.1.
    """
    first = everyone[0]
    if first.reference is None or first.lr is None or any(facts.local_batch is None for facts in everyone):
        return None
    batch, was = sum(facts.local_batch for facts in everyone), first.reference
    times = batch / was.global_batch
    if times <= 1 or first.lr >= was.lr * math.sqrt(times) * 0.99:
        return None
    evidence = (
        f"the global batch is {batch}, {times:.3g} times the reference's {was.global_batch}, so an epoch has "
        f"1/{times:.3g} of its steps; lr is {first.lr:.3g}, the reference's was {was.lr:.3g}. As a rule of thumb try "
        f"{was.lr * times:.3g} with a warm-up, or keep the global batch at {was.global_batch}"
    )
    return Finding("lr-not-scaled", None, evidence, {"times": times, "lr": first.lr, "linear": was.lr * times})


CHECKS: tuple[Callable[[Sequence[RankFacts]], Finding | None], ...] = (
    check_sharing,
    check_order,
    check_evaluation,
    check_means,
    replica_checks.check_writers,
    replica_checks.check_devices,
    replica_checks.check_names,
    replica_checks.check_threads,
    replica_checks.check_batchnorm,
    replica_checks.check_replicas,
    check_rate,
)


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=SAME, abs_tol=1e-12)


def _rows(n: int) -> str:
    return f"{n} row{'' if n == 1 else 's'}"
