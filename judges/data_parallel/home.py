"""02.3 `replicate(model, count)`: do the gradients of all replicas come home to the model?

Judged by what replicas are for: they compute as the model does, have memory of their own, and backward through all of
them leaves on the model what one pass over the whole batch leaves. Read next: `judges/process_groups/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import nn

from ddp_course.grading.compare import close, factor, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer


def make_model(kind: str, seed: int) -> nn.Module:
    """Return a small network in float64: "plain", "tied" (one weight in two layers) or "frozen" (first layer)."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).double().eval()
    if kind == "tied":
        model[2][0].weight = model[0].weight
    if kind == "frozen":
        model[0].requires_grad_(False)
    return model


def home_driver(rank: int, world_size: int, function: Callable, seed: int, rows: int, count: int) -> dict:
    """Make replicas of each kind of model, train through them once, and note all that a mistake would show."""
    return {kind: _try(function, kind, seed, rows, count) for kind in ("plain", "tied", "frozen")}


def _try(function: Callable, kind: str, seed: int, rows: int, count: int) -> dict:
    model, x, y = make_model(kind, seed), *make_rows(seed, rows)
    with torch.no_grad():
        direct = model(x)
    parameters = list(model.parameters())
    replicas = list(function(model, count))
    outputs = [replica(chunk) for replica, chunk in zip(replicas, x.chunk(count), strict=False)]
    if torch.cat(outputs).requires_grad:
        (torch.cat(outputs) - y).square().mean().backward()
    return {
        "count": len(replicas),
        "outputs": torch.cat(outputs).detach().flatten().tolist(),
        "direct": direct.flatten().tolist(),
        "grads": [None if p.grad is None else p.grad.flatten().tolist() for p in parameters],
        "itself": any(replica is model for replica in replicas[1:]),
        "shares": any(_weight(replica).data_ptr() == parameters[0].data_ptr() for replica in replicas[1:]),
        "parameters": all(isinstance(p, nn.Parameter) for p in (model[0].weight, model[0].bias)),
    }


def _weight(replica: nn.Module) -> torch.Tensor:
    layer = replica[0] if isinstance(replica, nn.Sequential) else None
    return layer.weight if layer is not None else torch.empty(0)


def make_rows(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of shape (rows, 4)."""
    chance = torch.Generator().manual_seed(seed + 1)
    return (torch.randn(rows, 4, generator=chance, dtype=torch.float64) for _ in range(2))


def gradients_of(kind: str, seed: int, rows: int) -> list[list[float] | None]:
    """Return the gradients of one pass over the whole batch, parameter by parameter."""
    model, x, y = make_model(kind, seed), *make_rows(seed, rows)
    (model(x) - y).square().mean().backward()
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def home_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """A plain model, one with a tied weight, one with a frozen layer; rows that do not divide evenly."""
    seed, count = rng.randrange(10**6), rng.choice((3, 4))
    rows = 3 * count - 1
    notes = answer.run(home_driver, 1, seed, rows, count)[0]
    yield "outputs", _outputs_fault(notes["plain"], count)
    yield "memory", _memory_fault(notes["plain"])
    yield "home", _grads_fault("plain", notes["plain"], seed, rows, count)
    faults = (_grads_fault(kind, notes[kind], seed, rows, count) for kind in ("plain", "tied", "frozen"))
    yield "awkward", next(filter(None, faults), None)  # plain too: what is wrong there is no matter of ties


def _outputs_fault(note: dict, count: int) -> Fault | None:
    if note["count"] != count:
        return Fault(f"{count} replicas", str(note["count"]), cause="return a list with one replica for each device")
    if close(note["outputs"], note["direct"], 1e-12):
        return None
    return Fault(
        "what the model computes", short(note["outputs"]), cause="a replica has the model's weights and buffers"
    )


def _memory_fault(note: dict) -> Fault | None:
    if not note["parameters"]:
        cause = "the model was changed: set the copies on a copy of each module, not on the model itself"
        return Fault("the model's own parameters as before", "something else in their place", cause=cause)
    if note["itself"] or note["shares"]:
        cause = "replicas 1, 2, ... stand for other devices: their weights must be copies, made with clone()"
        return Fault("weights in memory of their own", "the model's own memory", cause=cause)
    return None


def _grads_fault(kind: str, note: dict, seed: int, rows: int, count: int) -> Fault | None:
    right = gradients_of(kind, seed, rows)
    for index, (found, wanted) in enumerate(zip(note["grads"], right, strict=True)):
        if found == wanted is None or close(found, wanted, 1e-9):
            continue
        expected = f"{short(wanted)} on parameter {index} of the {kind} model, as after one pass over all rows"
        return Fault(expected, short(found), cause=_cause(kind, found, wanted, count))
    return None


def _cause(kind: str, found: object, wanted: object, count: int) -> str:
    if wanted is None:
        return "a frozen parameter gets no gradient; a clone of it needs none either"
    if found is None:
        return (
            "nothing came home: autograd must know that the replica's weight was computed from the model's, as clone() "
            "tells it; deepcopy, detach and nn.Parameter(...) cut that tie"
        )
    ratio = factor(found, wanted)
    if ratio is not None and abs(ratio * count - 1) < 1e-3:
        return "divided by the number of replicas; the loss is one mean over all rows already, so gradients add up"
    if kind == "tied":
        return "a weight used in two layers is one tensor: clone it once for each replica"
    return (
        "only some replicas' gradients came home; every replica's weights must be clones of the model's parameters, "
        "and nn.Parameter(...), deepcopy or detach cuts the tie of a clone"
    )


HOME = Exercise(
    "02.3",
    "Gradients come home (stretch)",
    "replicate",
    30,
    (
        Check("outputs", "replicas compute what the model computes", 1),
        Check("memory", "each replica has memory of its own, the model is left alone", 1),
        Check("home", "the gradients come home to the model", 2),
        Check("awkward", "tied and frozen weights", 1),
    ),
    home_judge,
    hints=(
        (
            r"cannot assign .* as parameter|does not require grad",
            "a module keeps its parameters in _parameters; take the name out of there, then set the plain tensor as an "
            "attribute",
        ),
    ),
    refused=(
        "torch.nn.parallel.replicate.replicate",
        "ddp_course.parallel.data_parallel.replicate",
        "ddp_course.parallel.data_parallel.DataParallel",
        "torch.nn.parallel.data_parallel.DataParallel",
    ),
)
