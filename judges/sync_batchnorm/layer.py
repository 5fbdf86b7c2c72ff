"""08.2 `MySyncBatchNorm`: does the layer compute what `nn.BatchNorm` computes on the whole batch, and follow it?

The gradient is left to `backward.py`. Read `rows.py` first. Read next: `backward.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.vocabulary.compare import flat
from ddp_course.grading.vocabulary.expect import Expect, all_of, exercise, first_fault, nothing, talks
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.sync_batchnorm.rows import affine, batch, mean_of, numbers, unequal, variance_of, wide

EPS, MOMENTUM = 0.3, 0.2  # far from the defaults, so that they cannot be left out
STATS = {"running_mean": mean_of, "running_var": variance_of}
Value = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A layer's weight and bias, and the batches of all ranks; the last one is for an evaluation."""

    affine_2C: torch.Tensor
    batches: list[list[torch.Tensor]]


def act(layer_class, case: Case, rank: int, world_size: int) -> Note:
    """Train on all batches but the last, then evaluate on the last; note what the layer returned and kept."""
    weight_C, bias_C = case.affine_2C
    layer = layer_class(len(weight_C), eps=EPS, momentum=MOMENTUM).double()
    layer.weight.data.copy_(weight_C)
    layer.bias.data.copy_(bias_C)
    note, calls = Note(y=[], graph="", kept=[_kept(layer)], given_changed=False), []
    for index, parts in enumerate(case.batches, 1):
        layer.train(index < len(case.batches))
        rows = parts[rank].clone().requires_grad_(index == len(case.batches) - 1)  # as from a layer below, or not
        with Collectives() as seen:
            note["y"].append(plain(layer(rows)))
        note["given_changed"] = note["given_changed"] or not torch.equal(rows, parts[rank])
        calls.append(seen.talks)
        note["kept"].append(_kept(layer))
        graphs = (f"{name}.requires_grad is True" for name in STATS if getattr(layer, name).requires_grad)
        note["graph"] = note["graph"] or next(graphs, "")
    in_eval = f"{len(calls[-1])} of them" if calls[-1] else ""
    changed = "" if note["kept"][-2] == note["kept"][-1] else "different ones"
    return Note(note, sent=calls[-2], in_eval=in_eval, changed=changed)


def _kept(layer: torch.nn.Module) -> dict:
    return {name: plain(getattr(layer, name).detach()) for name in STATS}


def rounds(rng: Random) -> list[Round]:
    """Rows of unequal numbers first, twice, and an evaluation; then images, with other ranks; then one rank alone."""
    ranks, channels = rng.choice((2, 3)), rng.randint(4, 6)
    sizes = [unequal(rng, ranks), unequal(rng, ranks, least=40), unequal(rng, ranks)]
    rows, both = [batch(rng, counts, (channels,)) for counts in sizes], affine(rng, channels)
    images = [batch(rng, unequal(rng, 2), (channels, 2, 7)) for _ in range(2)]
    alone = Round(1, [("alone", Case(both, [batch(rng, [9], (channels,)) for _ in range(2)]))])
    return [Round(ranks, [("rows", Case(both, rows))]), Round(2, [("images", Case(both, images))]), alone]


# --- What is expected ------------------------------------------------------------------------------


def running(case: Case, steps: int) -> dict[str, torch.Tensor]:
    """Return the running statistics after so many steps of one process."""
    mean_C, var_C = torch.zeros_like(case.affine_2C[0]), torch.ones_like(case.affine_2C[0])
    for whole in map(torch.cat, case.batches[:steps]):
        mean_C, var_C = mean_C.lerp(mean_of(whole), MOMENTUM), var_C.lerp(variance_of(whole, 1), MOMENTUM)
    return {"running_mean": mean_C, "running_var": var_C}


def output(seen: Seen, step: int, mean_C: torch.Tensor, scale_C: torch.Tensor, bare: bool = False) -> torch.Tensor:
    """Return (x - mean) * scale * weight + bias, or less if `bare`, of this rank's rows."""
    own, (weight_C, bias_C) = seen.case.batches[step][seen.rank], seen.case.affine_2C
    normal = (own - wide(mean_C, own)) * wide(scale_C, own)
    return normal if bare else normal * wide(weight_C, own) + wide(bias_C, own)


def right_output(seen: Seen, step: int) -> torch.Tensor:
    whole = torch.cat(seen.case.batches[step])
    return output(seen, step, mean_of(whole), (variance_of(whole) + EPS).rsqrt())


def output_slips(seen: Seen, step: int) -> Iterator[Value]:
    parts, own = seen.case.batches[step], seen.case.batches[step][seen.rank]
    whole = torch.cat(parts)
    mean_C, var_C, loose_C = mean_of(whole), variance_of(whole), variance_of(whole, 1)
    means, variances = (torch.stack([of(part) for part in parts]).mean(0) for of in (mean_of, variance_of))
    unbiased = "normalise by the variance divided by count; count - 1 is for the running variance alone"
    of_own = "the statistics are those of this rank's rows; take those of all ranks' rows"
    of_means = "the ranks' means, or variances, are averaged; weigh by rows, and add the distances of the means"
    of_running = "training normalises by the batch; the running statistics are for eval mode"
    ways = [  # mistake, mean, variance + eps
        (of_own, mean_of(own), variance_of(own) + EPS),
        (of_own, mean_of(own), variance_of(own, 1) + EPS),
        (unbiased, mean_C, loose_C + EPS),
        (of_means, means, variances + EPS),
        (of_means, mean_C, variances + EPS),
        ("eps is missing: add self.eps to the variance", mean_C, var_C),
        ("eps belongs to the variance, before the root is taken", mean_C, (var_C.sqrt() + EPS).square()),
        ("eps is not always 1e-5; take self.eps", mean_C, var_C + 1e-5),
        ("divide by the standard deviation, the root of variance + eps", mean_C, (var_C + EPS).square()),
    ]
    for stats in (running(seen.case, step), running(seen.case, step + 1)):
        ways.append((of_running, stats["running_mean"], stats["running_var"] + EPS))
    bare = output(seen, step, mean_C, (var_C + EPS).rsqrt(), bare=True)
    yield "weight and bias are missing: y * weight + bias", bare
    yield from ((cause, output(seen, step, mean_C, var_C.rsqrt())) for cause, mean_C, var_C in ways)


def running_slips(seen: Seen, step: int, name: str) -> Iterator[Value]:
    whole, own, of = torch.cat(seen.case.batches[step]), seen.case.batches[step][seen.rank], STATS[name]
    before, right = running(seen.case, step)[name], mean_of(whole)
    own_rows = "it follows this rank's rows; take the statistics of all rows"
    if of is variance_of:
        right = variance_of(whole, 1)
    yield "it stayed what it was; move it towards the batch's in each training step, in place or not", before
    share = "momentum is the share of the new: 1 - momentum of the old stays"
    yield share, before.lerp(right, 1 - MOMENTUM)
    yield "it was replaced; momentum says how far to move", right
    yield "the old value must shrink: (1 - momentum) * old + momentum * new", before + MOMENTUM * right
    yield "momentum is not always 0.1; take self.momentum", before.lerp(right, 0.1)
    yield own_rows, before.lerp(of(own), MOMENTUM)
    if of is mean_of:
        return
    biased, count = variance_of(whole), whole.numel() / whole.shape[1]
    yield "the running variance takes the batch's times count / (count - 1)", before.lerp(biased, MOMENTUM)
    pixels = ", and pixels" if count > len(whole) else ""
    of_own = "this rank's rows"
    for n, counted in ((own.numel() / own.shape[1], of_own), (len(own), of_own), (len(whole), "rows alone")):
        words = f"count / (count - 1) is of {counted}; the count is that of all ranks' rows{pixels}"
        yield words, before.lerp(biased * n / (n - 1), MOMENTUM)
    yield own_rows, before.lerp(variance_of(own, 1), MOMENTUM)
    yield "count / (count - 1) is applied twice", before.lerp(right * count / (count - 1), MOMENTUM)


def output_of(step: int) -> Expect:
    formula = "y = (x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance of all rows"
    right, slips = partial(right_output, step=step), partial(output_slips, step=step)
    return numbers("output", right, slips, formula, lambda seen: seen["y"][step])


def running_of(step: int, name: str, new: str) -> Expect:
    formula = f"(1 - momentum) * old + momentum * new, where new is the {new} of all ranks' rows"
    slips = partial(running_slips, step=step, name=name)
    after = {"right": lambda seen: running(seen.case, step + 1)[name], "of": lambda seen: seen["kept"][step + 1][name]}
    return numbers(name, slips=slips, otherwise=formula, **after)


def in_training(expect_of: Callable[[int], Expect]) -> Expect:
    """Expect it in each training step, counted from 0."""
    return lambda seen: first_fault(expect_of(step)(seen) for step in range(len(seen.case.batches) - 1))


def by_kept(seen: Seen) -> torch.Tensor:
    """Return the output in eval mode by what this layer itself kept: a fault in that is told by another check."""
    mean_C, var_C = (torch.tensor(flat(seen["kept"][-2][name]), dtype=torch.float64) for name in STATS)
    return output(seen, -1, mean_C, (var_C + EPS).rsqrt())


def by_batch(seen: Seen) -> Iterator[Value]:
    own = seen.case.batches[-1][seen.rank]
    cause = "the batch's statistics are used; in eval mode take running_mean and running_var"
    yield cause, output(seen, -1, mean_of(own), (variance_of(own) + EPS).rsqrt())


silent = nothing(
    *("in_eval", "no collective in eval mode"),
    "other ranks may be training, or done: decide by self.training before anything is sent",
)
fixed = nothing("changed", "the same running statistics after it", "only training changes them")
use_kept = "in eval mode, normalise by running_mean and running_var + eps"
no_graph = nothing(
    *("graph", "buffers without a gradient"),
    "they carry the graph of the batch from step to step; change them under torch.no_grad()",
)
few = talks(
    *(4, "a mean, a sum of squares and a count for each channel"),
    lambda seen: seen.case.batches[-2][seen.rank].nbytes,
    of="sent",
)
outputs = in_training(output_of)
means = in_training(partial(running_of, name="running_mean", new="mean"))
variances = in_training(partial(running_of, name="running_var", new="variance * count / (count - 1)"))
followed = all_of(no_graph, means, variances)
evaluated = all_of(silent, fixed, numbers("output", by_kept, by_batch, use_kept, lambda seen: seen["y"][-1]))

LAYER = exercise(
    *("08.2", "A layer that agrees", "MySyncBatchNorm", 25),
    act=act,
    rounds=rounds,
    checks={
        "output": ("in training, the output is that of the whole batch", 2, outputs, "rows"),
        "running": ("the running statistics follow the whole batch", 2, followed, "rows alone"),
        "eval": ("in eval mode they are used, and nobody talks", 1, evaluated, "rows"),
        "few": ("a few numbers travel, and no rows", 1, few, "rows"),
        "images": ("so it is for images", 1, all_of(outputs, followed, evaluated), "images"),
    },
    hints={
        "absent|disagree; limit: waited in": "in training every rank must call the same collectives, "
        "whatever its rows are",
        r"must match the size of tensor|not broadcastable|shape .* is invalid for input": "a value per channel, (C,), "
        "must be viewed as (1, C, 1, 1) to fit images",
    },
    refused=(
        *("torch.nn.SyncBatchNorm", "ddp_course.parallel.syncbn.SyncBatchNorm"),
        "ddp_course.parallel.syncbn._wide",  # called by the heart of the course's own
    ),
)
