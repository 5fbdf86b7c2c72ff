"""02.2 `replicate(model, count)`: do the gradients of all replicas come home to the model?

Judged by what replicas are for: they compute as the model does, have memory of their own, and backward through all of
them leaves on the model what one pass over the whole batch leaves. Read next: `judges/process_groups/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from random import Random

import torch
from torch import nn

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import close, factor, short
from ddp_course.grading.vocabulary.expect import exercise, first_fault, first_mistake
from ddp_course.grading.vocabulary.play import Note, Round, Seen


@dataclass(frozen=True)
class Case:
    """A small network in float64: "plain", "tied" (one weight in two layers) or "frozen" (first layer), and rows."""

    kind: str
    seed: int
    rows: int
    count: int

    def model(self) -> nn.Module:
        """Return the network."""
        torch.manual_seed(self.seed)
        nested = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
        model = nn.Sequential(nn.Linear(4, 4), nn.RNNCell(4, 4), nested)  # the cell's weights have names of their own
        nested[1].running_mean.normal_()
        if self.kind == "tied":
            model[2][0].weight = model[0].weight
        model[0].requires_grad_(self.kind != "frozen")
        return model.double().eval()

    def batch(self) -> torch.Tensor:
        """Return inputs and targets, each of shape (rows, 4)."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(2, self.rows, 4, generator=generator, dtype=torch.float64)

    def trained(self) -> tuple[list, list]:
        """Return the outputs and the gradients of one pass over the whole batch."""
        model, (x, y) = self.model(), self.batch()
        output = model(x)
        (output - y).square().mean().backward()
        return output.flatten().tolist(), gradients(model.parameters())


def gradients(parameters) -> list[list[float] | None]:
    """Return the gradients as plain data."""
    return [None if p.grad is None else p.grad.flatten().tolist() for p in parameters]


def _places(module: nn.Module) -> set[int]:
    """Return where the weights of a module, or of a replica of it, lie in memory."""
    held = [value for part in module.modules() for value in (*vars(part).values(), *part._parameters.values())]
    return {value.data_ptr() for value in held if isinstance(value, torch.Tensor)}


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Make replicas, first of other weights; train through the last ones, and note all that a mistake would show."""
    model, (x, y) = case.model(), case.batch()
    parameters, before = list(model.parameters()), _parts(model)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    for times in (2, 0.5):
        for parameter in parameters:
            parameter.data *= times
        replicas = list(function(model, case.count))
    output = torch.cat([replica(chunk) for replica, chunk in zip(replicas, x.chunk(case.count), strict=False)])
    known = train(output, y, [parameter for parameter in parameters if parameter.requires_grad])
    held = [_places(each) for each in (model, *(r for r in replicas[1:] if isinstance(r, nn.Sequential)))]
    return Note(
        count=len(replicas),
        output=output.detach().flatten().tolist(),
        gradients=[None if p.grad is None else (p.grad - 1).flatten().tolist() for p in parameters],
        shared=any(one & other for one, other in combinations(held, 2)),  # also with the model itself
        changed=_parts(model) != before,
        known=known,
    )


def _parts(model: nn.Module) -> list:
    return [(id(p), p.requires_grad) for p in model.parameters()] + [part.training for part in model.modules()]


def train(output: torch.Tensor, y: torch.Tensor, parameters: list[nn.Parameter]) -> bool:
    """Call backward once; return whether autograd itself knows what came home, which no hook has added."""
    if not output.requires_grad:
        return False
    loss = (output - y).square().mean()
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    loss.backward()
    return all(g is not None and torch.allclose(g, p.grad - 1) for g, p in zip(found, parameters, strict=True))


def rounds(rng: Random) -> list[Round]:
    """A plain model, one with a tied weight, one with a frozen layer; rows that do not divide evenly."""
    seed, count = rng.randrange(10**6), rng.choice((3, 4))
    cases = [(kind, Case(kind, seed, 3 * count - 1, count)) for kind in ("plain", "tied", "frozen")]
    return [Round(1, cases, init=False)]


def outputs(seen: Seen) -> Fault | None:
    """The replicas compute what the model computes."""
    count, right = seen.case.count, seen.case.trained()[0]
    wrong = not close(seen["output"], right, 1e-12)
    return first_mistake(f"{count} replicas, which compute {short(right)}, as the model does", {
        "return a list with one replica for each device": seen["count"] != count and f"{seen['count']} replicas",
        "a replica has the model's weights and buffers": wrong and short(seen["output"]),
    })  # fmt: skip


def memory(seen: Seen) -> Fault | None:
    """Each replica has its own."""
    return first_mistake("weights in memory of their own, and the model's own parameters as before", {
        "the model was changed: set the copies on a copy of each module, not on the model itself":
            seen["changed"] and "something else in place of the model's parameters",
        "replicas 1, 2, ... stand for other devices: their weights must be copies, made with clone(), for each again":
            seen["shared"] and "memory that the model has, or another replica",
    })  # fmt: skip


def home(seen: Seen) -> Fault | None:
    """The gradients are those of one pass over all rows."""
    kind, count = seen.case.kind, seen.case.count

    def fault(index: int, found: list | None, right: list | None) -> Fault | None:
        if found == right is None or close(found, right, 1e-9):
            return None
        shown = short(found)
        divided = found and right and abs((factor(found, right) or 0) * count - 1) < 1e-3
        words = f"{short(right)} on parameter {index} of the {kind} model, as after one pass over all rows"
        return first_mistake(words, {
            "a frozen parameter gets no gradient; a clone of it needs none either": right is None and shown,
            "nothing came home: autograd must know that the replica's weight was computed from the model's, as clone() "
            "tells it; deepcopy, detach and nn.Parameter(...) cut that tie": not any(found or []) and shown,
            "backward adds to the gradients that are there, and these are gone: replicate leaves .grad alone":
                found and close([value + 1 for value in found], right, 1e-9) and shown,
            "divided by the number of replicas; the loss is one mean over all rows already, so gradients add up":
                divided and shown,
            "a weight used in two layers is one tensor: clone it once for each replica": kind == "tied" and shown,
            "only some replicas' gradients came home; every replica's weights must be clones of the model's "
            "parameters, and nn.Parameter(...), deepcopy or detach cuts the tie of a clone": shown,
        })  # fmt: skip

    pairs = zip(seen["gradients"], seen.case.trained()[1], strict=True)
    faults = [fault(index, found, right) for index, (found, right) in enumerate(pairs)]
    cause = "the replica's weights must be computed from the model's, as clone() does; a hook is no step of autograd"
    by_hand = not seen["known"] and "gradients that something else has added"
    return first_fault([*faults, first_mistake("gradients that autograd brings home", {cause: by_hand})])


HOME = exercise(
    "02.2",
    "Gradients come home (stretch)",
    "replicate",
    30,
    act=act,
    rounds=rounds,
    checks={
        "outputs": ("replicas compute what the model computes", 1, outputs, "plain"),
        "memory": ("each replica has memory of its own, the model is left alone", 1, memory, "plain frozen"),
        "home": ("the gradients come home to the model", 2, home, "plain"),
        # Plain too: what is wrong there is no matter of ties.
        "awkward": ("tied and frozen weights", 1, home, "plain tied frozen"),
    },
    hints={
        r"cannot assign .* as parameter|does not require grad": "a module keeps its parameters in _parameters; take "
        "the name out of there, then set the plain tensor as an attribute",
    },
    refused=(
        "torch._functorch.functional_call.functional_call",  # the lesson shows it; a replica is a module here
        *("torch.nn.parallel.replicate.replicate", "torch.nn.parallel.data_parallel.DataParallel"),
    ),
)
