"""06.3 `MyDDP(module)`: do replicas become and stay equal, when the training loop does not ask for it?

Used as a module first, without backward; then trained in the plain loop. Gradients are read as soon as backward has
returned, and in the first step the last rank is late, so an average that is not waited for is not there.
Read next: `patient_ddp.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import nn

from ddp_course.grading.differential import exercise
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.ddp_from_scratch.nets import READY, TOLERANCE, WAITS, WORLDS, Net, Task, gradients, sent_in, travels

STEPS, LATE_S = 3, 0.05


def cases(rng: Random) -> list[Round]:
    """Use the class as a module; train a plain network with SGD; then one with tied and frozen parameters with Adam."""
    first, second = rng.choice(WORLDS)
    used = Task(rng.randint(3, 6), 0, rng.randint(1, 10**6), (), tied=True)
    plain = Task(rng.randint(4, 6), rng.choice((5, 6, 7)), rng.randint(1, 10**6), (((),) * first,) * STEPS)
    plain = replace(plain, blank=((1, rng.randrange(first)),), thrice=2)
    tied = Task(24, plain.rows, rng.randint(1, 10**6), (((),) * second,) * STEPS, tied=True, adam=True, thrice=2)
    return [Round(first, [("module", used)]), Round(first, [("plain", plain)]), Round(second, [("tied", tied)])]


def act(cls, task: Task, rank: int, world_size: int) -> Note:
    """Wrap and train a model of the rank's own; note what was sent within each backward pass.

    A task without steps is for a replica that is used, and not trained.
    """
    model, within = task.model(rank), []
    with Collectives() as seen:
        replica = cls(model)
        start = {name: tensor.tolist() for name, tensor in (*model.named_buffers(), *model.named_parameters())}
        trouble = "" if task.uses else _trouble(replica, model)

        def backward(step: int) -> None:
            replica.train(step != 1)  # gradients are averaged in eval mode, too
            losses = []
            for number, loss in enumerate(task.losses(replica, rank, step)):
                losses.append(loss)
                while losses and number != 1:  # the second loss waits for the third
                    backward_pass(losses.pop(0), late=step == 0 and rank == world_size - 1)

        def backward_pass(loss: torch.Tensor, late: bool) -> None:
            time.sleep(LATE_S * late)
            before = len(seen.calls)
            loss.backward()
            within.append([call for call in seen.calls[before:] if call.in_backward])

        found = task.train(model, backward)
    weights = {name: p.flatten().tolist() for name, p in model.named_parameters()}
    return Note(start=start, trouble=trouble, gradients=found, sent=within, weights=weights)


def _trouble(replica: nn.Module, model: nn.Module) -> str:
    try:
        return next((words for fine, words in _uses(replica, model) if not fine), "")
    except NotImplementedError:
        raise
    except Exception as error:  # the learner's; told in one line, so that the other checks go on
        return f"{type(error).__name__}: {error}"


def _uses(replica: nn.Module, model: Net) -> Iterator[tuple[bool, str]]:
    """Use the replica as a module is used; yield after each use whether it went well, and what is wrong if not."""
    yield isinstance(replica, nn.Module), "the replica is no nn.Module"
    inside = [{id(p) for p in module.parameters()} for module in (replica, model)]
    yield inside[0] == inside[1], "replica.parameters() does not give the module's own parameters"
    x = torch.ones(2, model.first.in_features, dtype=torch.float64)
    found, right = replica(x, named=True), model(x, named=True)["scores"]
    same = isinstance(found, dict) and torch.equal(found["scores"], right)
    yield same, "replica(x, named=True) does not return what module(x, named=True) returns"
    kept = {name: value.clone() for name, value in replica.state_dict().items()}
    names = [sorted(name.split(".")[-1] for name in state) for state in (kept, model.state_dict())]
    yield names[0] == names[1], f"replica.state_dict() holds {sorted(kept)}"
    model.first.weight.data.zero_()
    replica.load_state_dict(kept)
    replica.eval()
    reached = bool(model.first.weight.any()) and not model.training
    yield reached, "load_state_dict or eval does not reach the module"


def as_module(seen: Seen) -> Fault | str:
    cause = "call super().__init__(), keep the module itself (no copy) as an attribute, and let "
    cause += "forward(*inputs, **kwargs) return what the module returns"
    return seen["trouble"] and Fault("a replica is used as its module is", seen["trouble"], seen.rank, cause)


def weights(seen: Seen) -> dict[str, Any]:
    """View the weights in the end, and the gradients of the steps on the way, which say where they left it."""
    return {**gradients(seen, *range(1, len(seen.case.uses) + 1)), "the weights at last:": seen["weights"]}


def trained(seen: Seen) -> dict[str, Any]:
    return {**gradients(seen, 1), **travels(seen), **weights(seen)}


MISTAKES = """
no broadcast | start gradients steps tied
| no broadcast reached the module: broadcast its own tensors, those of the module that was given, no copies
    dist.broadcast(tensor.detach(), src=0) => pass
what is saved | start | not all of rank 0's buffers arrived; state_dict() leaves out those with persistent=False
    (*module.parameters(), *module.buffers()) => module.state_dict().values()
trained parameters alone | start tied | every rank must get all of rank 0's parameters, also the frozen ones
    (*module.parameters(), => (*filter(lambda p: p.requires_grad, module.parameters()),
a copy of the module | start module gradients steps tied | keep the module that was given, not a copy
    super().__init__() => super().__init__()
    module = __import__("copy").deepcopy(module)
forgets the module | module | keep the module itself
    self.module = module => self.inner = [module]
    self.module( => self.inner[0](
sum | gradients steps tied | gradients are summed over the ranks, not averaged: divide by the world size
    parameter.grad /= dist.get_world_size() => pass
own gradients | gradients steps hooks tied
| these are the rank's own gradients: a hook of register_hook runs before .grad is filled, so it must return the mean
    register_post_accumulate_grad_hook(self.average) => register_hook(self.average)
    parameter.grad /= dist.get_world_size() => return
what the hook returns is forgotten | gradients steps tied
| this is the rank's own gradient: a hook of register_hook must return the mean of what it is given
    register_post_accumulate_grad_hook(self.average) => register_hook(self.average)
    parameter.grad /= dist.get_world_size() => dist.all_reduce(parameter / dist.get_world_size())
    dist.all_reduce(parameter.grad) => return
not waited for | gradients steps tied | this is the rank's own gradient, divided: the sum was not waited for
    dist.all_reduce(parameter.grad) => dist.all_reduce(parameter.grad.clone())
matrices only | gradients steps tied | some gradients are averaged, and others are not: go through all parameters
    if parameter.requires_grad: => if parameter.requires_grad and parameter.dim() > 1:
averaged in training mode only | steps hooks tied | gradients are averaged in eval mode, too
    parameter.grad /= => if not self.training:
        return
    parameter.grad /=
hooks work once | steps hooks tied | step 1 is right, step 2 is not: what hooks count must begin from zero again
    parameter.grad /= => if parameter in self.__dict__.setdefault("done", set()):
        return
    self.done.add(parameter)
    parameter.grad /=
forward forgets the gradients | steps tied
| step 3 has three backward passes before one update: their means add up
    return self.module( => self.module.zero_grad()
    return self.module(
the mean of a tied weight goes out twice | tied
| some gradient travels twice: a tied weight has two names, and is one parameter in parameters()
    parameter in module.parameters() => _, parameter in module.named_parameters(remove_duplicate=False)
each forward pass registers hooks | tied
| the first time each gradient travelled once: is something registered once more?
    return self.module( => for parameter in self.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self.average)
    return self.module(
    for parameter in module.parameters(): => for parameter in ():
averaged in the next forward | gradients steps hooks tied | these are the rank's own gradients | tests
    class MyDDP(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)

        def forward(self, *inputs, **kwargs):
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    gradient /= dist.get_world_size()
                    dist.all_reduce(gradient)
            return self.module(*inputs, **kwargs)
backward of all tensors replaced | hooks tied | these are the rank's own gradients | tests
    class MyDDP(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), src=0)
            plain = torch.Tensor.backward

            def backward(tensor, *args, **kwargs):
                plain(tensor, *args, **kwargs)
                for parameter in filter(lambda p: p.grad is not None, module.parameters()):
                    parameter.grad /= dist.get_world_size()
                    dist.all_reduce(parameter.grad)

            torch.Tensor.backward = backward

        def forward(self, *inputs, **kwargs):
            return self.module(*inputs, **kwargs)
zeros are not sent | gradients steps hooks tied | the ranks sent tensors of different sizes | hangs
    parameter.grad /= => if not parameter.grad.any():
        return
    parameter.grad /=
frozen parameters get hooks | start module tied | a frozen parameter gets no gradient
    if parameter.requires_grad: => if True:
"""

HINTS = {
    r"cannot register a hook on a tensor that doesn't require gradient|without requires_grad|requires_grad=False":
        "a frozen parameter gets no gradient and takes no hook: ask for requires_grad first",
    r"'NoneType' object has no attribute|NoneType": "a .grad is None: a hook of register_hook runs before .grad is "
    "filled (take register_post_accumulate_grad_hook, or change the gradient that it is given), and a frozen parameter "
    "has none, and no hook that runs",
    r"expected Variable, but hook returned": "a post-accumulate hook must return None",
    r"before Module.__init__|has no attribute '_(parameters|modules|buffers|backward_hooks|forward)":
        "call super().__init__() first",
    r"forward\(\)|_forward_unimplemented|missing the required \"forward\"": "forward passes all inputs on",
    **WAITS,
}  # fmt: skip
STARTS = "every rank must get all of rank 0's parameters and buffers, as in 06.1"
MEAN = "after backward, the mean over all ranks must be in the .grad of each of the module's own parameters"
STEP = "nothing of the step before may be left over, and the means of backward passes add up"

OWN_DDP = exercise(
    *("06.3", "Your own DDP", "MyDDP", 30),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.world_size} ranks,",
    tolerance=TOLERANCE,
    mistakes=MISTAKES,
    checks={
        "start": ("all replicas begin as rank 0's", 1, "module", lambda seen: seen["start"], STARTS),
        "module": ("the replica is used as its module is", 1, "module", as_module, ""),
        "gradients": ("backward leaves the gradients of the whole batch", 2, "plain",
                      lambda seen: gradients(seen, 1), MEAN),
        "steps": ("three steps: the weights are those of one process", 1, "plain", weights, STEP),
        "hooks": ("the gradients travel while backward runs", 2, "plain", sent_in,
                  "register a hook with each parameter, once; what travels after backward is too late"),
        "tied": ("tied and frozen parameters, with Adam", 1, "tied", trained, STEP),
    },
    refused=READY,
    hints=HINTS,
)  # fmt: skip
