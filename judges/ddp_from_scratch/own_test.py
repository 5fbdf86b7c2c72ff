"""06.5 `trains_right(rank, world_size, wrap)`: does the learner's own test find what is wrong with a replica?

Right are the answer to 06.3, one that averages at the end of backward, the course's replica and torch's. The mistakes
are 06.3's answer with a knob turned.
Read `../learners_tests.py` first. Read next: `../gradient_bucketing/`.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from random import Random

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round
from judges.ddp_from_scratch.nets import WAITS
from judges.learners_tests import Trial, act, trials, verdict

WRONG = {
    "local": ("finds gradients that are not averaged", "compare .grad with the mean over all ranks' rows"),
    "sum": ("finds a sum in the place of the mean", "equal on all ranks is not right: compare with one process"),
    "start": (
        "finds replicas that start apart",
        "give each rank another module, as by a seed of its own, and see whether the parameters become rank 0's",
    ),
    "buffers": (
        "finds buffers that start apart",
        "take a module with a buffer, such as BatchNorm's running mean, other on each rank",
    ),
    "last": ("finds a parameter that was left out", "look at the gradients of all parameters"),
    "once": ("finds an average that happens once", "try a second step, or more"),
    "copy": (
        "finds a wrapper that trains a copy",
        "look at the .grad of the module that you gave, which is what an optimizer holds",
    ),
    "drops": (
        "finds gradients that do not add up",
        "call backward twice without zero_grad: .grad is the sum of both means then",
    ),
}

TWO_FORMS = ("local", "start", "buffers", "last")  # rank 0 alone has the mean; the last rank's start; the first


class Replica(nn.Module):
    """What 06.3 asks for, or that with one mistake, which may have another form."""

    def __init__(self, module: nn.Module, mistake: str = "", at_end: bool = False, other: bool = False):
        super().__init__()
        self.module = copy.deepcopy(module) if mistake == "copy" else module
        self.mistake, self.at_end, self.other, self.passes, self.waiting = mistake, at_end, other, Counter(), []
        parameters = list(self.module.parameters())
        for name, tensors in (("start", parameters), ("buffers", self.module.buffers())):
            for tensor in [] if mistake == name and not other else tensors:
                dist.broadcast(tensor.detach(), src=dist.get_world_size() - 1 if mistake == name else 0)
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def forward(self, *inputs, **kwargs):
        if self.mistake == "drops":
            self.zero_grad()
        return self.module(*inputs, **kwargs)

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.at_end:
            self._average(parameter)
            return
        if not self.waiting:
            torch.autograd.Variable._execution_engine.queue_callback(self._average_all)
        self.waiting.append(parameter)

    def _average_all(self) -> None:
        while self.waiting:
            self._average(self.waiting.pop())

    def _average(self, parameter: nn.Parameter) -> None:
        self.passes[parameter] += 1
        left_out = {
            "local": not self.other,
            "last": parameter is list(self.module.parameters())[0 if self.other else -1],
            "once": self.passes[parameter] > 1,
        }
        if left_out.get(self.mistake):
            return
        if self.mistake != "sum":
            parameter.grad /= dist.get_world_size()
        if self.mistake == "local":
            dist.reduce(parameter.grad, dst=0)  # no other rank gets the mean
        else:
            dist.all_reduce(parameter.grad)


def course_replica(module: nn.Module) -> nn.Module:
    """The replica of lesson 07, imported where it is made: the ranks need it, this file does not."""
    from ddp_course.parallel import BucketedDDP

    return BucketedDDP(module)


def cases(rng: Random) -> list[Round]:
    """The right ones and the wrong ones, each in another order; a thorough test may need its time for each few."""
    right = [
        Trial(Replica, "a wrapper as in 06.3"),
        Trial(lambda module: Replica(module, at_end=True), "a wrapper that averages at the end of backward"),
        Trial(course_replica, "the course's BucketedDDP"),
        Trial(nn.parallel.DistributedDataParallel, "torch's DistributedDataParallel"),
    ]
    wrong = [
        Trial(partial(Replica, mistake=mistake, other=other), "a wrapper with that mistake", mistake)
        for mistake in WRONG
        for other in (False, True)[: 1 + (mistake in TWO_FORMS)]
    ]
    ranks, names = rng.choice((2, 3)), rng.sample(list(WRONG), len(WRONG))
    parts = [[trial for trial in wrong if trial.mistake in some] for some in (names[:4], names[4:])]
    return [trials(ranks, rng.sample(right, len(right)), []), *(trials(ranks, [], part) for part in parts)]


MISTAKES = """
always True | all | compare with one process | tests
    def trains_right(rank, world_size, wrap):
        return True
always False | all | a test that refuses what is right earns nothing
    return bool(verdict) => return False
equal on all ranks is taken for right | sum start buffers last drops | equal on all ranks is not right | tests
    def trains_right(rank, world_size, wrap):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        replica = wrap(model)
        for step in range(3):
            model.zero_grad()
            replica(torch.randn(5, 3)).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * (p.grad if p.grad is not None else 0)
            mine = torch.cat([p.detach().flatten() for p in model.parameters()])
            everyone = [torch.empty_like(mine) for _ in range(world_size)]
            dist.all_gather(everyone, mine)
            if not all(torch.equal(one, everyone[0]) for one in everyone):
                return False
        return True
equal to the bit | all | compare with a tolerance
    torch.allclose => torch.equal
starts equal by the seed | start | give each rank another module
    network(seed=rank) => network(seed=0)
a module without buffers | buffers | take a module with a buffer
    module.drawn_by.item() == 0 => True
one pass for each step | drops | call backward twice without zero_grad
    range(2) => range(1)
a single backward pass | once drops | try a second step, or more
    range(2) => range(1)
    range(3) => range(1)
the first parameters only | last | look at the gradients of all parameters
    alone.parameters(), strict=True) => list(alone.parameters())[:2])
looks into the replica | copy | look at the .grad of the module that you gave
    module.drawn_by => replica.module.drawn_by
    module.zero_grad() => replica.zero_grad()
    zip(module.parameters() => zip(replica.module.parameters()
counts on every .grad | copy | a test that raises says nothing
    mine.grad is not None and torch => torch
    (0 if mine.grad is None else mine.grad) => mine.grad
a verdict of each rank | buffers | the ranks do not agree
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN) => pass
nothing returned | all | return one verdict
    return bool(verdict) => print(verdict)
"""

OWN_TEST = exercise(
    *("06.5", "Write the test (stretch)", "trains_right", 30),
    cases=cases,
    act=act,
    mistakes=MISTAKES,
    checks={name: (words, 1, f"right {name}", verdict(cause), "") for name, (words, cause) in WRONG.items()},
    hints=WAITS,
)
