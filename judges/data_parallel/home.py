"""02.2 `replicate(model, count)`: do the gradients of all replicas come home to the model?

Judged by what replicas are for: they compute as the model does, have memory of their own, and backward through all of
them leaves on the model what one pass over the whole batch leaves. Read next: `judges/process_groups/`.
"""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import NamedTuple

import torch
from torch import nn

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen


class Case(NamedTuple):
    """A small network in float64: "plain", "tied" (one weight in two layers) or "frozen" (first layer), and rows."""

    kind: str
    seed: int
    rows: int
    count: int

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        nested = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
        model = nn.Sequential(nn.Linear(4, 4), nn.RNNCell(4, 4), nested)  # the cell's weights have names of their own
        nested[1].running_mean.normal_()
        if self.kind == "tied":
            model[2][0].weight = model[0].weight
        model[0].requires_grad_(self.kind != "frozen")
        return model.double().eval()


def cases(rng: Random) -> list[Round]:
    """Rows do not divide evenly."""
    seed, count = rng.randrange(10**6), rng.choice((3, 4))
    kinds = ("plain", "tied", "frozen")
    return [Round(1, [(kind, Case(kind, seed, 3 * count - 1, count)) for kind in kinds], init=False)]


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Make replicas, first of other weights; train through the last ones, and note all that a mistake would show."""
    model, generator = case.model(), torch.Generator().manual_seed(case.seed + 1)
    x, y = torch.randn(2, case.rows, 4, generator=generator, dtype=torch.float64)
    parameters, before = list(model.parameters()), _parts(model)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    for times in (2, 0.5):
        for parameter in parameters:
            parameter.data *= times
        replicas = list(function(model, case.count))
    output = torch.cat([replica(chunk) for replica, chunk in zip(replicas, x.chunk(case.count), strict=False)])
    known = _train(output, y, [parameter for parameter in parameters if parameter.requires_grad])
    own, *held = [_places(each) for each in (model, *(r for r in replicas[1:] if isinstance(r, nn.Sequential)))]
    shared = "the model" if any(own & each for each in held) else ""
    return Note(
        count=len(replicas),
        output=output.detach().flatten().tolist(),
        gradients=[None if p.grad is None else (p.grad - 1).flatten().tolist() for p in parameters],
        shared=shared or ("another replica" if any(one & other for one, other in combinations(held, 2)) else ""),
        changed=_parts(model) != before,
        known=known,
    )


def _parts(model: nn.Module) -> list:
    return [(id(p), p.requires_grad) for p in model.parameters()] + [part.training for part in model.modules()]


def _places(module: nn.Module) -> set[int]:
    """Where the weights of a module, or of a replica of it, lie in memory."""
    held = [value for part in module.modules() for value in (*vars(part).values(), *part._parameters.values())]
    return {value.data_ptr() for value in held if isinstance(value, torch.Tensor)}


def _train(output: torch.Tensor, y: torch.Tensor, parameters: list[nn.Parameter]) -> bool:
    """Call backward once; return whether autograd itself knows what came home, which no hook has added."""
    if not output.requires_grad:
        return False
    loss = (output - y).square().mean()
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    loss.backward()
    return all(g is not None and torch.allclose(g, p.grad - 1) for g, p in zip(found, parameters, strict=True))


def outputs(seen: Seen) -> dict:
    return {"replicas": seen["count"], "outputs": seen["output"]}


def memory(seen: Seen) -> list[str]:
    shared = f"memory that {seen['shared']} has, too" if seen["shared"] else "memory of their own"
    return [shared, "the model has other parameters" if seen["changed"] else "the model is as it was"]


def home(seen: Seen) -> dict:
    return {"gradients": seen["gradients"], "added by": "autograd" if seen["known"] else "something else"}


MISTAKES = """
deep copies | home awkward | nothing came home: autograd must know that a weight was computed from the model's
    [model, *(replica_of(model) for _ in range(count - 1))] => [copy.deepcopy(model) for _ in range(count)]
detached | home awkward
| only some replicas' gradients came home; deepcopy, detach and nn.Parameter(...) cut the tie that clone() makes
    parameter.clone() => parameter.detach().clone()
weights and biases only | home awkward | some parameters have other names than weight and bias
    if parameter is not None: => if parameter is not None and name in ("weight", "bias"):
the model's children only | home awkward | modules may be nested; model.modules() has all of them
    .modules() => .children()
a tied weight once | awkward | a weight used in two layers is one tensor, which stands in both
    if parameter is not None: => if clones.get(parameter) is not None:
    setattr(module, name, clones[parameter]) => setattr(module, name, clones[parameter])
    clones[parameter] = None
divided by the replicas | home awkward | the loss is one mean over all rows already, so gradients add up
    [model, *(replica_of(model) for _ in range(count - 1))] => [replica_of(model, count) for _ in range(count)]
    replica_of(model): => replica_of(model, count):
    replica = copy => for clone in clones.values():
        clone.requires_grad and clone.register_hook(lambda gradient: gradient / count)
    replica = copy
clears .grad | home awkward | backward adds to the gradients that are there, and these are gone: leave .grad alone
    return [model => model.zero_grad()
    return [model
the replicas of the first call | outputs home awkward | a replica has the model's weights of this call
    [model, *(replica_of(model) for _ in range(count - 1))] => globals().setdefault("made", [
        model, *(replica_of(model) for _ in range(count - 1))])
the replicas of the first call, without the model | outputs home awkward
| a replica has the model's weights of this call: copy them again
    [model, *(replica_of(model) for _ in range(count - 1))] => globals().setdefault("made", {}).setdefault(
        model, [replica_of(model) for _ in range(count)])
one too many | outputs | return a list with one replica for each device
    count - 1 => count
the model itself | memory | replicas 1, 2, ... stand for other devices: their weights must be copies, made with clone()
    replica_of(model) for => model for
frozen weights are shared | memory | replicas 1, 2, ... need copies of frozen weights, too
    parameter.clone() => parameter.clone() if parameter.requires_grad else parameter
one copy for all devices | memory | replicas 1, 2, ... share one copy: clone the weights for each again
    *(replica_of(model) for _ in range(count - 1)) => *[replica_of(model)] * (count - 1)
changes the model | all | the model was changed: set the copies on a copy of each module, not on the model itself
    replica = copy.deepcopy(model) => replica = model
    original._parameters.items() => list(original._parameters.items())
hooks that add to .grad | home awkward | a hook is no step of autograd
    def replicate(model, count):
        def home(parameter):
            def hook(gradient):
                parameter.grad = parameter.grad + gradient
            return hook

        replicas = [copy.deepcopy(model) for _ in range(count)]
        for replica in replicas:
            for mine, parameter in zip(replica.parameters(), model.parameters()):
                if parameter.requires_grad:
                    mine.register_hook(home(parameter))
        return replicas
a plain tensor set on a module | all | take the name out of there | tests
    def replicate(model, count):
        replica = copy.deepcopy(model)
        replica[0].weight = model[0].weight.clone()
        return [replica] * count
a functional call | all | this exercise is to write what it does | tests
    def replicate(model, count):
        weights = [{name: p.clone() for name, p in model.named_parameters()} for _ in range(count)]
        return [lambda x, each=each: torch.func.functional_call(model, each, x) for each in weights]
"""

WORDS = "every replica's weights must be computed from the model's, as clone() does; a hook is no step of autograd"
HOME = exercise(
    *("02.2", "Gradients come home (stretch)", "replicate", 30),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.case.count} replicas of the {seen.case.kind} model:",
    mistakes=MISTAKES,
    tolerance=1e-9,
    checks={
        "outputs": ("replicas compute what the model computes", 1, "plain", outputs,
                    "a replica has the model's weights and buffers, of the time of the call"),
        "memory": ("each replica has memory of its own, the model is left alone", 1, "plain frozen", memory,
                   "set copies of the weights on a copy of each module, for each replica again"),
        "home": ("the gradients come home to the model", 2, "plain", home, WORDS),
        # Plain too: what is wrong there is no matter of ties.
        "awkward": ("tied and frozen weights", 1, "plain tied frozen", home, WORDS),
    },
    hints={
        r"cannot assign .* as parameter|does not require grad": "a module keeps its parameters in _parameters; take "
        "the name out of there, then set the plain tensor as an attribute",
    },
    refused=(
        "torch._functorch.functional_call.functional_call",  # the lesson shows it; a replica is a module here
        *("torch.nn.parallel.replicate.replicate", "torch.nn.parallel.data_parallel.DataParallel"),
    ),
    right="""
a deep copy with clones in its memo
    def replicate(model, count):
        return [copy.deepcopy(model, {id(p): p.clone() for p in model.parameters()}) for _ in range(count)]
""",
)  # fmt: skip
