"""06.1 `same_start(rank, world_size, model)`: does every rank hold rank 0's model, and is it still its own model?

The models hold what is easily forgotten: frozen and tied parameters, counters, a buffer that is not saved. Every rank
begins with other values. Read next: `average.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import nn

from ddp_course.grading import observe
from ddp_course.grading.compare import flat, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.ddp_from_scratch.nets import WORLDS

BIG = 2**53 + 1  # the first whole number that float64 cannot hold
HANGS = (
    (
        r"(?s)no result after.*waited in",
        "some ranks wait in a collective that another one skips, or calls at another place; look for a branch on the "
        "rank, or on what only this rank has",
    ),
)
REFUSED = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.distributed.utils._sync_module_states",
    "torch.distributed.utils._sync_params_and_buffers",
    "ddp_course.parallel.naive.NaiveDDP",
    "ddp_course.parallel.ddp.BucketedDDP",
    "ddp_course.parallel.replicas.broadcast_module",
    "ddp_course.parallel.replicas.broadcast_buffers",
)


class Mixed(nn.Module):
    """Parameters and buffers of every kind, drawn from a seed; `seen` counts in whole numbers."""

    def __init__(self, width: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layer, self.norm, self.tied = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)
        self.tied.weight = self.layer.weight
        self.frozen = nn.Parameter(torch.empty(width), requires_grad=False)
        self.register_buffer("seen", torch.tensor([0, 0]))
        self.register_buffer("scratch", torch.empty(3), persistent=False)
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.is_floating_point():
                tensor.data = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            else:
                count = torch.randint(1, 10**6, tensor.shape, generator=generator)
                tensor.copy_(BIG + 2 * count)  # odd, so that float64 would lose it


def start_driver(rank: int, world_size: int, function: Callable, width: int, seeds: list[int]) -> dict:
    """Call the function on a model of the rank's own; note what the model holds then."""
    model = Mixed(width, seeds[rank])
    held, flags = dict(model.named_parameters()), [p.requires_grad for p in model.parameters()]
    with observe.Collectives() as seen:
        result = function(rank, world_size, model)
    now = dict(model.named_parameters())
    return {
        **_values(model),
        "calls": len(seen.calls),
        "other": [name for name, parameter in held.items() if now.get(name) is not parameter],
        "untied": model.tied.weight is not model.layer.weight,
        "flags": [p.requires_grad for p in model.parameters()] == flags,
        "dirty": [name for name, p in now.items() if p.grad is not None or p.grad_fn is not None],
        "new": isinstance(result, nn.Module) and result is not model,
    }


def _values(model: nn.Module) -> dict:
    return {
        "parameters": {name: p.detach().tolist() for name, p in model.named_parameters()},
        "buffers": {name: b.tolist() for name, b in model.named_buffers()},
    }


def start_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Start with two numbers of ranks; every rank must end with rank 0's values, bit by bit."""
    runs = []
    for world_size in rng.choice(WORLDS):
        width, seeds = rng.randint(3, 6), rng.sample(range(1, 10**6), world_size)
        notes = answer.run(start_driver, world_size, width, seeds, init=True)
        runs.append(([_values(Mixed(width, seed)) for seed in seeds], notes))
    for key, kind in (("parameters", "parameters"), ("buffers", "buffers")):
        faults = (_value_fault(kind, begun, notes, rank) for begun, notes in runs for rank in range(len(notes)))
        yield key, next(filter(None, faults), None)
    faults = (_model_fault(note, rank) for _, notes in runs for rank, note in enumerate(notes))
    yield "model", next(filter(None, faults), None)


def _value_fault(kind: str, begun: list[dict], notes: list[dict], rank: int) -> Fault | None:
    wanted, found = begun[0][kind], notes[rank][kind]
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    if not wrong:
        return None
    name = wrong[0]
    mine, all_own = begun[rank][kind], all(found.get(n) == begun[rank][kind][n] for n in wanted)
    expected = f"rank 0's {name}: {short(wanted[name], 2)}"
    cause = _value_cause(kind, wrong, found, begun, rank)
    if notes[rank]["new"]:
        cause = "this model is unchanged; write into the model that was given, the optimizer holds its parameters"
    elif all_own and not notes[rank]["calls"]:
        cause = "this rank took part in no collective: dist.broadcast must be called by every rank, also by receivers"
    elif all_own and kind == "parameters":
        cause = (
            "nothing arrived in the parameters; broadcast writes into the tensor that it is given: give it "
            "parameter.detach(), not a copy"
        )
    elif found.get(name) == mine[name]:
        cause = _left_out(kind, wrong, all_own)
    return Fault(expected, short(found.get(name, []), 2), rank, cause)


def _left_out(kind: str, wrong: list[str], all_own: bool) -> str:
    if kind == "parameters" and wrong == ["frozen"]:
        return "frozen parameters belong to the start, too: do not ask for requires_grad"
    if kind == "buffers" and all_own:
        return "buffers are no parameters: go through model.buffers(), too"
    if wrong == ["scratch"]:
        return "state_dict() leaves out a buffer with persistent=False; model.buffers() has them all"
    if kind == "buffers" and all(name in ("seen", "norm.num_batches_tracked") for name in wrong):
        return "buffers of whole numbers were left out; they belong to the start, too"
    return f"{', '.join(wrong)} kept the rank's own values; go through all parameters and all buffers"


def _value_cause(kind: str, wrong: list[str], found: dict, begun: list[dict], rank: int) -> str:
    name = wrong[0]
    ours = torch.tensor(flat(found.get(name, [])), dtype=torch.float64)
    theirs = torch.tensor([flat(model[kind][name]) for model in begun], dtype=torch.float64)
    if ours.numel() != theirs[0].numel():
        return "its shape is another now; write the values into the tensor that is there"
    if torch.allclose(ours, theirs.mean(0)) and not torch.allclose(ours, theirs[0]):
        return "this is the mean over the ranks; the start is rank 0's, copied"
    if torch.allclose(ours, theirs.sum(0)):
        return "this is the sum over the ranks; the start is rank 0's, copied"
    for other in range(1, len(begun)):
        if found[name] == begun[other][kind][name] and other != rank:
            return f"this is rank {other}'s value; the source is rank 0: src=0"
    if torch.allclose(ours, theirs[0]):
        return "nearly, but not exactly: the numbers went through another dtype; send each tensor in its own"
    return "the values of other tensors, or of no rank: the pieces came into the wrong places, or were never sent"


def _model_fault(note: dict, rank: int) -> Fault | None:
    if note["new"] and not note["calls"]:
        return Fault("the model that was given, changed", "a new model", rank, "write into the model that was given")
    if note["other"]:
        return Fault(
            "the same Parameter objects as before",
            f"{', '.join(note['other'])} replaced by another object",
            rank,
            "an optimizer made before would go on with the old ones; write into the tensor: copy_, or broadcast itself",
        )
    if note["untied"]:
        return Fault("tied weights are one object still", "two objects", rank, "write into the tensors that are there")
    if not note["flags"]:
        cause = "leave requires_grad as it was: use detach(), or torch.no_grad()"
        return Fault("each requires_grad as before", "another one", rank, cause)
    if note["dirty"]:
        cause = "copy the values where autograd does not see it: parameter.detach(), or torch.no_grad()"
        return Fault("no gradient, no history", f"a .grad or a grad_fn in {note['dirty'][0]}", rank, cause)
    if not note["calls"]:
        return Fault("a start that was sent", "no collective", rank, "this rank took part in no collective")
    return None


START = Exercise(
    "06.1",
    "The same start",
    "same_start",
    10,
    (
        Check("parameters", "every rank has rank 0's parameters", 2),
        Check("buffers", "every rank has rank 0's buffers", 2),
        Check("model", "the model is still the same object inside, ready for its optimizer", 1),
    ),
    start_judge,
    refused=REFUSED,
    hints=(
        *HANGS,
        (
            r"leaf Variable that requires grad|view of a leaf",
            "autograd is not to record this: use parameter.detach(), or torch.no_grad()",
        ),
        (
            r"(?i)different sizes|enforce fail|Connection closed",
            "the ranks sent tensors of different sizes, or in another order",
        ),
    ),
)
