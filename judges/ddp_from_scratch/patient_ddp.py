"""06.4 `PatientDDP(module)`: what if a parameter takes part on some ranks only?

Hooks run on those ranks alone, so a collective in each hook hangs. Used and noted as in 06.3.
Read next: `own_test.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round, Seen
from judges.ddp_from_scratch.nets import READY, TOLERANCE, WORLDS, Task, gradients, uneven
from judges.ddp_from_scratch.own_ddp import HINTS, act, trained, weights


def cases(rng: Random) -> list[Round]:
    """All parameters on all ranks first; then steps that differ, with another number of ranks."""
    first, second = rng.choice(WORLDS)
    used = Task(24, rng.choice((5, 6, 7)), rng.randint(1, 10**6), (((0, 1, 2),) * first,) * 3, thrice=2)
    seed, (before, alone), (after, later) = rng.randint(1, 10**6), uneven(second, rng), uneven(second, rng)
    steps = (*before, ((0, 1, 2),) * second, *after)
    some = Task(4, used.rows, seed, steps, blank=((1, alone), (4, later)), thrice=3)
    return [Round(first, [("used", used)]), Round(second, [("uneven", some)])]


def as_own_ddp(seen: Seen) -> dict[str, Any]:
    return {"the start:": seen["start"], **trained(seen)}


MISTAKES = """
no broadcast | used some steps | the replicas did not start from rank 0's parameters and buffers
    dist.broadcast(tensor.detach(), src=0) => pass
what is saved | used | not all of rank 0's buffers arrived; state_dict() leaves out those with persistent=False
    (*module.parameters(), *module.buffers()) => module.state_dict().values()
sum | used some steps | gradients are summed over the ranks, not averaged: divide by the world size
    parameter.grad /= dist.get_world_size() => pass
divided by the ranks that have it | some steps
| this is the mean over the ranks that have the gradient; divide by the number of all ranks
    /= dist.get_world_size() => /= ranks
zeros, always | none steps
| no rank has this gradient, so it must stay None; with zeros, momentum or weight decay would move the weight
    if ranks == 0: => if False:
a mean of zeros is taken for None | steps | a rank that has zeros has a gradient: it counts, and .grad is the mean
    int(parameter.grad is not None) => int(parameter.grad is not None and bool(parameter.grad.any()))
the end is asked for once for ever | used steps
| step 1 is right, step 2 is not: the call at the end is asked for once in each backward pass
    self.queued = False => pass
begun again by forward | used steps
| a step may have three backward passes before one update: ask for the call at the end once in each of them
    self.queued = False => pass
    return self.module( => self.queued = False
    return self.module(
the first step's parameters for ever | steps
| step 1 is right, step 2 is not: which ranks have a gradient may change, so ask again in each pass
    dist.all_reduce(used) => dist.all_reduce(used)
    self.plan = used = getattr(self, "plan", used)
zeros for what another pass brought | steps
| three backward passes before one update: their means add up, in each parameter that any of them used
    def average(self): => def average(self):
        now = self.__dict__.pop("now")
    if not self.queued: => self.__dict__.setdefault("now", set()).add(parameter)
    if not self.queued:
    if parameter.grad is None: => if parameter not in now:
    int(parameter.grad is not None) => int(parameter in now)
0 times all parameters | none steps | no rank has this gradient, so it must stay None | tests
    class PatientDDP(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.missing = module, set(module.parameters())
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(self.ready)

        def ready(self, parameter):
            self.missing.discard(parameter)
            if not self.missing:
                self.missing = set(self.module.parameters())
                for parameter in self.module.parameters():
                    parameter.grad /= dist.get_world_size()
                    dist.all_reduce(parameter.grad)

        def forward(self, *inputs, **kwargs):
            return self.module(*inputs, **kwargs) + 0 * sum(p.sum() for p in self.module.parameters())
only what this rank has | some none steps
| hooks run, and gradients are there, on some ranks only, so the ranks do not call the same collectives
| hangs
    if ranks == 0: => if parameter.grad is None:
a collective in each hook | some none steps
| hooks run, and gradients are there, on some ranks only, so the ranks do not call the same collectives
| hangs
    if not self.queued: => parameter.grad /= dist.get_world_size()
    dist.all_reduce(parameter.grad)
    if False:
"""

MEAN = "a gradient that is missing on some ranks counts as zero there; .grad is the mean over all ranks"
STEP = "nothing of the step before may be left over, and the means of backward passes add up"
UNUSED = exercise(
    *("06.4", "A parameter that some ranks do not use (stretch)", "PatientDDP", 25),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.world_size} ranks,",
    tolerance=TOLERANCE,
    mistakes=MISTAKES,
    checks={
        "used": ("with all parameters in use, it is the DDP of 06.3", 1, "used", as_own_ddp, STEP),
        "some": ("a gradient that is missing on some ranks counts as zero there, and nobody hangs", 2, "uneven",
                 lambda seen: gradients(seen, 1, missing=False), MEAN),
        "none": ("a gradient that is missing on all ranks stays None", 1, "uneven",
                 lambda seen: gradients(seen, 1, missing=True), "no rank has this gradient, so it must stay None"),
        "steps": ("five steps, each with other parameters: the weights are those of one process", 1, "uneven",
                  weights, STEP),
    },
    refused=READY,
    hints={
        "absent|cut-off|disagree|sizes; limit: waited in": "hooks "
        "run, and gradients are there, on some ranks only, so the ranks do not call the same collectives; talk to "
        "no rank in the hooks, and at the end of backward let all ranks agree on who has what. The call at the end "
        "is asked for once in each pass, by whichever hook runs first",
        r"Final callbacks can only be installed": "ask for the call at the end of backward in a parameter's hook, not "
        "in forward or in the constructor",
        r"NoneType": "the .grad of a parameter that this rank has not used is None: put zeros there if another rank "
        "used it",
        **HINTS,
    },
)  # fmt: skip
