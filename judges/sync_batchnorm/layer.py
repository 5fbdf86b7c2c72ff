"""08.2 `MySyncBatchNorm`: does the layer compute what `nn.BatchNorm` computes on the whole batch, and follow it?

The gradient is left to `backward.py`. Read `rows.py` first. Read next: `backward.py`.
"""

from __future__ import annotations

from random import Random

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.communication import talks
from ddp_course.grading.vocabulary.compare import same
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.sync_batchnorm.rows import NOT_ACCEPTED, affine, batch, unequal

EPS, MOMENTUM = 0.3, 0.2  # far from the defaults, so that they cannot be left out
TOLERANCE = 1e-9
STATS = ("running_mean", "running_var")


def cases(rng: Random) -> list[Round]:
    """Weight and bias, and the batches of all ranks, of which the last is for an evaluation.

    Rows of unequal numbers first, twice, and an evaluation; then images, with other ranks; then one rank alone.
    """
    ranks, channels = rng.choice((2, 3)), rng.randint(4, 6)
    sizes = [unequal(rng, ranks), unequal(rng, ranks, least=40), unequal(rng, ranks)]
    rows, both = [batch(rng, counts, (channels,)) for counts in sizes], affine(rng, channels)
    images = [batch(rng, unequal(rng, 2), (channels, 2, 7)) for _ in range(2)]
    alone = [batch(rng, [9], (channels,)) for _ in range(2)]
    rounds = ((ranks, "rows", rows), (2, "images", images), (1, "alone", alone))
    return [Round(size, [(name, (both, batches))]) for size, name, batches in rounds]


def act(layer_class, case: tuple, rank: int, world_size: int) -> Note:
    """Train on all batches but the last, then evaluate on the last; note what the layer returned and kept."""
    (weight_C, bias_C), batches = case
    layer = layer_class(len(weight_C), eps=EPS, momentum=MOMENTUM).double()
    layer.weight.data.copy_(weight_C)
    layer.bias.data.copy_(bias_C)
    note = Note(y=[], graph=[], kept=[_kept(layer)], talks=[])
    for index, parts in enumerate(batches, 1):
        layer.train(index < len(batches))
        rows = parts[rank].detach().requires_grad_(index == len(batches) - 1)  # as from a layer below, or not
        with Collectives() as seen:
            note["y"].append(plain(layer(rows)))
        note["graph"] += [name for name in STATS if getattr(layer, name).requires_grad]
        note["kept"].append(_kept(layer))
        note["talks"].append(seen.talks)
    return Note(note, sent=note["talks"][-2])


def _kept(layer: nn.Module) -> dict:
    return {name: plain(getattr(layer, name).detach()) for name in STATS}


def outputs(seen: Seen) -> dict:
    return {"output of step": {step: y for step, y in enumerate(seen["y"][:-1], 1)}}


def running(seen: Seen) -> dict:
    return {"with a graph:": seen["graph"], "after step": dict(enumerate(seen["kept"][1:-1], 1))}


def evaluated(seen: Seen) -> dict:
    """By what this layer itself kept: a fault in that is told by another check."""
    (weight_C, bias_C), batches = seen.case
    rows, *before, y = batches[-1][seen.rank], *(seen["kept"][-2][name] for name in STATS), seen["y"][-1]
    mean_C, var_C = (torch.tensor(value, dtype=torch.float64) for value in before)
    if mean_C.shape == var_C.shape == weight_C.shape:
        right = nn.functional.batch_norm(rows, mean_C, var_C, weight_C, bias_C, False, 0.0, EPS)
        y = "normalised by running_mean and running_var" if same(y, right.tolist(), TOLERANCE) else y
    stay = seen["kept"][-2] == seen["kept"][-1]
    return {"collectives in eval mode:": len(seen["talks"][-1]), "the statistics stay:": stay, "output:": y}


def images(seen: Seen) -> list:
    return [outputs(seen), running(seen), evaluated(seen)]


MISTAKES = r"""
own rows alone | output running few images
| the statistics are those of this rank's rows; take those of all ranks' rows
    all_statistics(local_statistics(x_NC), None) => local_statistics(x_NC)[None]
weight and bias left out | output eval images | weight and bias are missing: y * weight + bias
    normal_NC * wide(self.weight) + wide(self.bias) => normal_NC
no eps | output eval images | eps is missing: add self.eps to the variance
    (var_C + self.eps) => var_C
eps is always 1e-5 | output eval images | eps is not always 1e-5; take self.eps
    (var_C + self.eps) => (var_C + 1e-5)
the running variance takes the biased one | running images
| the running variance takes the batch's times count / (count - 1)
    var_C * count / (count - 1) => var_C
corrected by the rank's own count | running images
| count / (count - 1) is of this rank's rows; the count is that of all ranks' rows, and pixels
    var_C * count / (count - 1) => var_C * len(x_NC) / (len(x_NC) - 1)
pixels are not counted | images | count / (count - 1) is of rows alone; a channel's count has the pixels as well
    var_C * count / (count - 1) => (pixels := x_NC[:1, 0].numel()) and var_C * count / (count - pixels)
normalises by the corrected variance | output images
| normalise by the variance divided by count; count - 1 is for the running variance alone
    lerp_(var_C * count / (count - 1), self.momentum) => lerp_(var_C.mul_(count / (count - 1)), self.momentum)
the running statistics carry the graph of a rank alone | running | they carry the graph of the batch from step to step
    with torch.no_grad(): => if True:
the running statistics carry the graph | running images
| they carry the graph of the batch from step to step; change them under torch.no_grad()
    with torch.no_grad(): => mean_C, var_C = (value_C + 0 * x_NC.sum() for value_C in (mean_C, var_C))
    if True:
momentum the wrong way round | running images | momentum is the share of the new: 1 - momentum of the old stays
    self.momentum) => 1 - self.momentum)
the running statistics stay | running images
| they stayed what they were; move them towards the batch's in each training step, in place or not
    .lerp_ => .lerp
training by the running statistics | output images
| training normalises by the batch; the running statistics are for eval mode
    def wide => mean_C, var_C = self.running_mean, self.running_var

    def wide
statistics of the batch in eval mode | eval images
| other ranks may be training, or done: decide by self.training before anything is sent
    if self.training: => if True:
own rows in eval mode | eval images | the batch's statistics are used; in eval mode take running_mean and running_var
    def wide => if not self.training:
        mean_C, var_C, _ = combine(local_statistics(x_NC)[None])

    def wide
not in the shape of the input | images | the numbers are right, their shape is another one
    return normal_NC * wide(self.weight) + wide(self.bias) => y = normal_NC * wide(self.weight) + wide(self.bias)
    return y.flatten(1)
not for images | images | must be viewed as (1, C, 1, 1)
    value_C.view(1, -1, *[1] * (x_NC.dim() - 2)) => value_C
all rows on every rank | few | the rows travel | tests
    class MySyncBatchNorm(nn.modules.batchnorm._BatchNorm):
        def forward(self, x_NC):
            rows, before = x_NC, 0
            if self.training:
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, x_NC.detach())
                before = sum(len(part) for part in everyone[: dist.get_rank()])
                rows = torch.cat(everyone)
            y = nn.functional.batch_norm(rows, self.running_mean, self.running_var, self.weight, self.bias,
                                         self.training, self.momentum, self.eps)
            return y[before : before + len(x_NC)]
torch's own | all | this exercise is to write what it does | tests
    class MySyncBatchNorm(nn.SyncBatchNorm):
        pass
rank 0 alone gathers | all | in training every rank must call the same collectives | hangs
    if self.training: => if self.training and dist.get_rank() == 0:
"""

RIGHT = """
torch's BatchNorm in eval mode, given the batch's statistics, and new buffers
    class MySyncBatchNorm(nn.modules.batchnorm._BatchNorm):
        def forward(self, x_NC):
            mean, var, m = self.running_mean, self.running_var, self.momentum
            if self.training:
                mean, var, count = combine(all_statistics(local_statistics(x_NC.detach()), None))
                self.running_mean = (1 - m) * self.running_mean + m * mean
                self.running_var = (1 - m) * self.running_var + m * var * count / (count - 1)
            return nn.functional.batch_norm(x_NC, mean, var, self.weight, self.bias, False, 0.0, self.eps)
"""

LAYER = exercise(
    *("08.2", "A layer that agrees", "MySyncBatchNorm", 25),
    cases=cases,
    act=act,
    tolerance=TOLERANCE,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "output": ("in training, the output is that of the whole batch", 2, "rows", outputs,
                   "y = (x - mean) / sqrt(variance + eps) * weight + bias, with mean and variance of all rows"),
        "running": ("the running statistics follow the whole batch", 2, "rows alone", running,
                    "(1 - momentum) * old + momentum * new, where new is the mean of all ranks' rows, or their "
                    "variance * count / (count - 1); change them under torch.no_grad()"),
        "eval": ("in eval mode they are used, and nobody talks", 1, "rows", evaluated,
                 "in eval mode, normalise by running_mean and running_var + eps, which only training changes"),
        "few": ("a few numbers travel, and no rows", 1, "rows",
                talks(4, "a mean, a sum of squares and a count for each channel",
                      lambda seen: seen.case[1][-2][seen.rank].nbytes, of="sent"), ""),
        "images": ("so it is for images", 1, "images", images,
                   "mean, variance and count are of rows and pixels, and the output has the shape of the input"),
    },
    hints={
        "absent|disagree; limit: waited in": "in training every rank must call the same collectives, "
        "whatever its rows are",
        r"must match the size of tensor|not broadcastable|shape .* is invalid for input": "a value per channel, (C,), "
        "must be viewed as (1, C, 1, 1) to fit images",
    },
    refused=NOT_ACCEPTED,
)  # fmt: skip
