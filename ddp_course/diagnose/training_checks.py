"""What is silently wrong with a training run that neither stops nor complains?

Such a run gives a number, and the number is false or late. No rank can see it alone: that all draw the same rows, or
write into the same file, shows only when their notes lie side by side. `observer.py` takes these notes on each rank
and brings them together. Here each check is a pure function from the notes of all ranks to a finding, so a test can
plant any run without running it.

Two findings have no fault of their own in the failure lab: "replicas-differ" and "wrong-mean".

Left out on purpose: gradient accumulation (lr), DataLoader's workers and CPU quotas of containers (threads), and
BatchNorm layers whose statistics were shared just before the look.
Read next: `observer.py`, which takes the notes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ddp_course.diagnose.training_facts import NotedMean, RankFacts, Write

PREFIX = "module."
FEWEST_ROWS = 8  # of an order that is judged: two shuffles of 8 rows are equal once in 40,320 times
SAME = 1e-5  # relative difference below which two means are one: float32 sums differ by less
HARMLESS = ("cpu", "meta")  # to load a checkpoint there takes no GPU's memory


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    fault: str  # its name in the failure lab
    rank: int | None  # the first rank that is to blame; None when all do the same
    evidence: str  # what was found, in numbers, and what would be right
    numbers: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.fault}{'' if self.rank is None else f' (rank {self.rank})'}: {self.evidence}"


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
    who = "every rank" if rank is None else _ranks(same)
    evidence = f"{who} drew its {next(iter(same.values()))} rows twice in the same shuffled order, epoch after epoch"
    return Finding("missing-set-epoch", rank, evidence, {"ranks": len(same)})


def _repeated_order(epochs: list[list[int]]) -> int:
    """Return how many rows two epochs in a row have in the same order, or 0."""
    for before, after in zip(epochs, epochs[1:], strict=False):
        rows = min(len(before), len(after))  # an epoch may have been left early
        if rows >= FEWEST_ROWS and before[:rows] == after[:rows] != sorted(after[:rows]):
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
        with_rows = [mean for mean in noted.values() if mean.rows]
        if not with_rows:
            continue
        right = sum(mean.total for mean in with_rows) / sum(mean.rows for mean in with_rows)
        wrong = {
            rank: m.reported for rank, m in noted.items() if m.reported is not None and not _same(m.reported, right)
        }
        if wrong:
            return _about_mean(name, right, wrong, with_rows, all_ranks=len(wrong) == len(everyone))
    return None


def _about_mean(
    name: str, right: float, wrong: dict[int, float], with_rows: list[NotedMean], all_ranks: bool
) -> Finding:
    rank, reported = next(iter(wrong.items()))
    of_ranks = sum(mean.total / mean.rows for mean in with_rows) / len(with_rows)
    of_batches = sum(mean.batch_means for mean in with_rows) / sum(mean.batches for mean in with_rows)
    numbers = {"reported": reported, "right": right}
    said = (
        f"{name} was reported as {reported:.6g}; the sum over {sum(m.rows for m in with_rows)} rows gives {right:.6g}"
    )
    blamed = None if all_ranks else rank
    for what, value in (("ranks'", of_ranks), ("batches'", of_batches)):
        if _same(reported, value):
            evidence = f"{said}. What was reported is the mean of the {what} means, which have unequal numbers of rows"
            return Finding("mean-of-means", blamed, evidence, numbers)
    return Finding("wrong-mean", blamed, said, numbers)


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


# --- Which files, devices, cores -------------------------------------------------------------------


def check_writers(everyone: Sequence[RankFacts]) -> Finding | None:
    """One file has one writer."""
    writers: dict[str, list[tuple[int, Write]]] = {}
    for facts in everyone:
        for write in facts.writes:
            writers.setdefault(write.path, []).append((facts.rank, write))
    for path, found in writers.items():
        ranks = sorted({rank for rank, _ in found})
        if len(ranks) < 2:
            continue
        together = any(a < b and v.began < w.ended and w.began < v.ended for a, v in found for b, w in found)
        hosts = {facts.host for facts in everyone if facts.rank in ranks}
        evidence = (
            f"{_ranks(ranks)} wrote the same file, {path.rpartition('/')[2]}"
            f"{'' if len(hosts) == 1 else f', from {len(hosts)} hosts: a fault if they share its folder'}; "
            "let rank 0 write, and the others wait for it"
        )
        return Finding("several-writers", ranks[1], evidence, {"writers": len(ranks), "together": together})
    return None


def check_devices(everyone: Sequence[RankFacts]) -> Finding | None:
    """What a rank loads lies on its own device, or on the CPU."""
    astray = {}
    for facts in everyone:
        elsewhere = {d for load in facts.loads for d in load.devices} - {facts.device, *HARMLESS}
        if elsewhere:
            astray[facts.rank] = (facts.device, sorted(elsewhere))
    if not astray:
        return None
    rank, (own, found) = next(iter(astray.items()))
    evidence = (
        f"{_ranks(astray)} loaded a state onto another rank's device: rank {rank} has {own}, its state lies on "
        f"{', '.join(found)}. Without map_location, a tensor returns to the device that it was saved from"
    )
    return Finding("all-on-gpu-0", rank, evidence, {"ranks": len(astray)})


def check_names(everyone: Sequence[RankFacts]) -> Finding | None:
    """A state that fits but for a prefix was saved from the other side of DDP's wrapper."""
    misfits = {}
    for facts in everyone:
        for load in facts.loads:
            fits = len(set(load.names) & set(load.model_names))
            bare = len(
                {n.removeprefix(PREFIX) for n in load.names} & {n.removeprefix(PREFIX) for n in load.model_names}
            )
            if bare > fits:
                misfits[facts.rank] = (fits, bare, len(load.model_names))
    if not misfits:
        return None
    rank = None if len(misfits) == len(everyone) else min(misfits)
    fits, bare, size = next(iter(misfits.values()))
    evidence = (
        f"{fits} of the model's {size} tensors have their name in the state that was loaded; without the prefix "
        f"{PREFIX!r}, {bare} have. With strict=False nothing is said, and the model keeps its first weights"
    )
    return Finding("module-prefix", rank, evidence, {"fits": fits, "without_prefix": bare, "tensors": size})


def _without_prefix(names: Sequence[str]) -> set[str]:
    return {name.removeprefix(PREFIX) for name in names}


def check_threads(everyone: Sequence[RankFacts]) -> Finding | None:
    """The threads of all ranks of a host fit on its cores. One thread each is the least, and never a fault."""
    for host in sorted({facts.host for facts in everyone}):
        here = [facts for facts in everyone if facts.host == host]
        threads, cores = sum(facts.threads for facts in here), len(set().union(*(facts.cores for facts in here)))
        if threads > cores and max(facts.threads for facts in here) > 1:
            share = max(1, cores // len(here))
            greedy = [facts.rank for facts in here if facts.threads > share]
            evidence = (
                f"{len(here)} ranks on {host} use {threads} threads for {cores} cores; torch.set_num_threads({share}) "
                f"on each, or OMP_NUM_THREADS={share} before they start"
            )
            rank = None if len(greedy) == len(here) else greedy[0]
            return Finding("too-many-threads", rank, evidence, {"threads": threads, "cores": cores, "share": share})
    return None


# --- Which replicas --------------------------------------------------------------------------------


def check_batchnorm(everyone: Sequence[RankFacts]) -> Finding | None:
    """Running statistics of the global batch are the same everywhere; those of local batches are not."""
    apart = {}
    for name in everyone[0].of_batchnorm:
        for facts in everyone[1:]:
            mine, theirs = everyone[0].buffers[name], facts.buffers.get(name)
            if theirs is not None and theirs.shape == mine.shape and not torch.equal(mine, theirs):
                apart[name, facts.rank] = (mine.double() - theirs.double()).abs().max().item()
    if not apart:
        return None
    (name, rank), largest = max(apart.items(), key=lambda item: item[1])
    evidence = (
        f"{name} of rank {rank} is {largest:.3g} away from rank 0's at most; {len({n for n, _ in apart})} running "
        "statistics differ. Each rank normalises by its own rows, so each evaluates another model"
    )
    return Finding("batchnorm-drift", rank, evidence, {"largest": largest, "buffers": len({n for n, _ in apart})})


def check_replicas(everyone: Sequence[RankFacts]) -> Finding | None:
    """All other values of the model are the same everywhere."""
    first = everyone[0]
    for facts in everyone[1:]:
        names = [name for name, mine in first.parameters.items() if facts.parameters.get(name) != mine]
        for name in set(first.buffers) - set(first.of_batchnorm):
            if name not in facts.buffers or not torch.equal(first.buffers[name], facts.buffers[name]):
                names.append(name)
        if names:
            evidence = (
                f"{len(names)} tensors of rank {facts.rank} are not rank 0's, {names[0]} among them; the replicas "
                "began unequal, or took unequal steps"
            )
            return Finding("replicas-differ", facts.rank, evidence, {"tensors": len(names)})
    return None


CHECKS: tuple[Callable[[Sequence[RankFacts]], Finding | None], ...] = (
    check_sharing,
    check_order,
    check_evaluation,
    check_means,
    check_writers,
    check_devices,
    check_names,
    check_threads,
    check_batchnorm,
    check_replicas,
    check_rate,
)


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=SAME, abs_tol=1e-12)


def _ranks(ranks: Sequence[int] | dict[int, object]) -> str:
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:-1])) + (" and " if len(listed) > 1 else "") + str(listed[-1])
    return f"rank{'s' if len(listed) > 1 else ''} {shown}"


def _rows(n: int) -> str:
    return f"{n} row{'' if n == 1 else 's'}"
