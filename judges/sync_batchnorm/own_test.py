"""08.4 `agrees(rank, world_size, make_layer)`: does the learner's own test find what is wrong with a SyncBatchNorm?

Right are the course's layer and one that lets autograd find the way back. The mistakes are the second one with a knob
turned. Read `../learners_tests.py` first; `verdict` there is the view of all checks, and tells the cause.
"""

from __future__ import annotations

from functools import partial
from random import Random

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round
from judges.learners_tests import Trial, act, trials, verdict

FINDS = {
    "local": ("finds statistics of this rank's rows alone", "compare with nn.BatchNorm1d on the rows of all ranks"),
    "unweighted": ("finds a mean that does not weigh the ranks", "give the ranks different numbers of rows"),
    "within": (
        "finds a variance that leaves out how far the ranks' means are apart",
        "let the ranks' rows lie around different values, and compare outputs",
    ),
    "unbiased": (
        "finds a batch normalised by the wrong count",
        "take few rows; with many, n is nearly n - 1",
    ),
    "detached": (
        "finds a way back that takes the statistics for constants",
        "compare the gradient of the input, under a loss that is no plain sum of the output",
    ),
    "own_back": (
        "finds a way back that ends on this rank",
        "a row's gradient depends on the other ranks' rows: compare it with one process on all rows",
    ),
    "running": (
        "finds a running variance divided by the wrong count",
        "look at running_mean and running_var of every rank",
    ),
    "eval": ("finds a layer that looks at the batch in eval mode", "compare each rank's evaluation after some steps"),
}

ON_ONE_RANK = ("running", "eval")  # where the others do not see it


class AddOverRanks(torch.autograd.Function):
    """A sum over the ranks; so every rank's loss depends on every rank's input, and the gradients are added, too."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.back = back
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        if ctx.back:
            dist.all_reduce(total)
        return total, None


class Layer(nn.Module):
    """What 08.2 and 08.3 ask for, or that with one mistake, maybe on the last rank only."""

    def __init__(self, channels: int, mistake: str = "", last: bool = False, half: bool = False):
        super().__init__()
        self.mistake = "" if last and dist.get_rank() < dist.get_world_size() - 1 else mistake
        self.half = half  # the variance alone for a constant: under a plain sum of the output, nothing of that is seen
        self.eps, self.momentum = 1e-5, 0.1
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x_NC: torch.Tensor) -> torch.Tensor:
        mean_C, var_C = self.running_mean, self.running_var
        if self.training:
            few = torch.tensor(int(len(x_NC) < 3))
            dist.all_reduce(few)
            if few:  # raised on every rank, so that none waits
                raise ValueError("a rank gave the layer fewer than three rows")
        if self.training or self.mistake == "eval":
            mean_C, var_C, count = self._statistics(x_NC)
            unbiased_C = var_C * count / (count - 1)
            if self.training:
                with torch.no_grad():
                    self.running_mean.lerp_(mean_C, self.momentum)
                    self.running_var.lerp_(var_C if self.mistake == "running" else unbiased_C, self.momentum)
            var_C = unbiased_C if self.mistake == "unbiased" else var_C
        if self.mistake == "detached":
            mean_C, var_C = mean_C if self.half else mean_C.detach(), var_C.detach()
        return (x_NC - mean_C) / (var_C + self.eps).sqrt() * self.weight + self.bias

    def _statistics(self, x_NC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def total(x):
            alone = self.mistake == "local" or not self.training
            return x if alone else AddOverRanks.apply(x, self.mistake != "own_back")

        ranks = total(x_NC.new_ones(()))
        count = total(x_NC.new_tensor(float(len(x_NC))))
        mean_C = total(x_NC.sum(dim=0)) / count
        if self.mistake == "unweighted":
            mean_C = total(x_NC.mean(dim=0)) / ranks
        around_C = x_NC.mean(dim=0) if self.mistake == "within" else mean_C
        return mean_C, total((x_NC - around_C).square().sum(dim=0)) / count, count


def course_layer(channels: int) -> nn.Module:
    """The layer of the lesson, imported where it is made."""
    from ddp_course.parallel import SyncBatchNorm

    return SyncBatchNorm(channels)


def cases(rng: Random) -> list[Round]:
    """The right ones and the wrong ones, each in another order."""
    right = [
        Trial(course_layer, "the course's SyncBatchNorm"),
        Trial(Layer, "a layer that lets autograd find the way back"),
    ]
    wrong = [
        Trial(partial(Layer, mistake=mistake, last=last), "a layer with that mistake", mistake)
        for mistake in FINDS
        for last in (False, True)[: 1 + (mistake in ON_ONE_RANK)]
    ]
    wrong.append(
        Trial(partial(Layer, mistake="detached", half=True), "a layer that takes its variance for one", "detached")
    )
    return [trials(rng.choice((2, 3)), rng.sample(right, len(right)), rng.sample(wrong, len(wrong)))]


MISTAKES = r"""
always True | all | on the rows of all ranks | tests
    def agrees(rank, world_size, make_layer):
        return True
always False | all | a test that refuses what is right earns nothing | tests
    def agrees(rank, world_size, make_layer):
        return False
equal to the bit | all | compare with a tolerance
    torch.allclose => torch.equal
equally many rows | unweighted | different numbers of rows
    3 + 2 * other => 5
the way back is not compared | detached own_back | compare the gradient of the input
    , (mine.grad, whole.grad.split(sizes)[rank]) =>
a plain sum of the output | detached | no plain sum of the output
    (found * pulls[rank]).sum() => found.sum()
    (expected * torch.cat(pulls)).sum() => expected.sum()
no evaluation | eval | evaluation after some steps
    right = right and torch.allclose(layer.eval()(rows), alone.eval()(rows)) => pass
the running mean only, and no evaluation | running eval | look at running_mean and running_var
    , (layer.running_var, alone.running_var) =>
    right = right and torch.allclose(layer.eval()(rows), alone.eval()(rows)) => pass
a verdict of each rank | running eval | the ranks do not agree
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN) => pass
two rows on rank 0 | all | fewer than three rows
    3 + 2 * other => 2 + 3 * other
no verdict | all | return one verdict
    return bool(verdict) => return None
the ranks with a difference leave | all | the ranks do not call the same collectives | hangs
    verdict = torch => if not right:
        return False
    verdict = torch
"""

OWN_TEST = exercise(
    *("08.4", "Write the test (stretch)", "agrees", 30),
    cases=cases,
    act=act,
    mistakes=MISTAKES,
    checks={name: (words, 1, f"right {name}", verdict(cause), "") for name, (words, cause) in FINDS.items()},
    hints={
        "absent|disagree; limit: waited in": "the ranks do not call the same collectives: decide "
        "together, and let every rank go through all of the test",
    },
)
