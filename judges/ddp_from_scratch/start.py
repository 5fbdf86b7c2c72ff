"""06.1 `same_start(rank, world_size, model)`: does every rank hold rank 0's model, and is it still its own model?

The models hold what is easily forgotten: frozen and tied parameters, counters, a buffer that is not saved. Every rank
begins with other values, and must end with rank 0's, bit for bit. Read next: `nets.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import nn

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.rounds import Note, Round
from judges.ddp_from_scratch.nets import READY, WAITS, WORLDS

BIG = 2**53 + 1  # the first whole number that float64 cannot hold


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
        self.frozen.data[0] = -0.0

    def form(self) -> dict[str, Any]:
        """Return all of a model that is not its values: an optimizer, or a layer with the same weight, counts on it."""
        parameters, buffers = dict(self.named_parameters()), dict(self.named_buffers())
        return {
            "the Parameter objects": {name: id(p) for name, p in parameters.items()},
            "the memory of each parameter": {name: p.data_ptr() for name, p in parameters.items()},
            "the buffers": {name: (id(b), b.data_ptr()) for name, b in buffers.items()},
            "the shared weight": self.tied.weight is self.layer.weight,
            "requires_grad": {name: p.requires_grad for name, p in parameters.items()},
            "neither .grad nor history": all(p.grad is None and p.grad_fn is None for p in parameters.values()),
        }


def cases(rng: Random) -> list[Round]:
    """Start with two numbers of ranks, each rank from a seed of its own."""
    return [
        Round(ranks, [(name, (rng.randint(3, 6), rng.sample(range(1, 10**6), ranks)))])
        for name, ranks in zip(("one", "two"), rng.choice(WORLDS), strict=True)
    ]


def act(function, case: tuple[int, list[int]], rank: int, world_size: int) -> Note:
    """Call the function on a model of the rank's own; note what the model holds then, and what has become of it."""
    width, seeds = case
    model = Mixed(width, seeds[rank])
    before = model.form()
    with Collectives() as seen:
        function(rank, world_size, model)
    parameters = {name: p.tolist() for name, p in model.named_parameters(remove_duplicate=False)}
    return Note(
        parameters={**parameters, "frozen[0] as text:": str(model.frozen[0].item())},
        buffers={name: b.tolist() for name, b in model.named_buffers()},
        kept={**{what: was == model.form()[what] for what, was in before.items()}, "something sent": bool(seen.calls)},
    )


MISTAKES = """
only parameters | buffers | buffers are no parameters: go through model.buffers(), too
    (*model.parameters(), *model.buffers()) => model.parameters()
only what is saved | buffers | state_dict() leaves out a buffer with persistent=False; model.buffers() has them all
    (*model.parameters(), *model.buffers()) => model.state_dict().values()
state_dict as an object | buffers | state_dict() leaves out a buffer with persistent=False; model.buffers() has them all
| tests
    def same_start(rank, world_size, model):
        state = [model.state_dict()]
        dist.broadcast_object_list(state, src=0)
        model.load_state_dict(state[0])
only what is trained | parameters | frozen parameters belong to the start, too: do not ask for requires_grad
    *model.parameters() => *filter(lambda p: p.requires_grad, model.parameters())
no counters | buffers | buffers of whole numbers were left out; they belong to the start, too
    dist.broadcast => tensor.is_floating_point() and dist.broadcast
through float64 | buffers | the whole numbers went through floating point, which rounds them; send each in its own dtype
    dist.broadcast(tensor.detach(), src=0) => sent = tensor.detach().double()
    dist.broadcast(sent, src=0)
    tensor.data.copy_(sent)
the mean | parameters buffers | this is the mean over the ranks; the start is rank 0's, copied
    dist.broadcast(tensor.detach(), src=0) => dist.all_reduce(tensor.detach())
    tensor.data.copy_(tensor.detach() / world_size)
from the last rank | parameters buffers | this is the last rank's value; the source is rank 0: src=0
    src=0 => src=world_size - 1
zeros from the others, summed | parameters | -0.0 and 0.0 add up to 0.0; a sum is no copy: broadcast
    dist.broadcast(tensor.detach(), src=0) => rank == 0 or tensor.data.zero_()
    dist.all_reduce(tensor.detach())
broadcast into copies | parameters buffers
| nothing arrived: broadcast writes into the tensor that it is given, so give it this model's own, no copy
    detach() => detach().clone()
other Parameter objects | model
| an optimizer holds the tensors that are there
| tests
    def same_start(rank, world_size, model):
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            value = parameter.detach().clone()
            dist.broadcast(value, src=0)
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Parameter(value, requires_grad=parameter.requires_grad))
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
assigned to .data | model
| write into the tensors that are there: copy_, or broadcast itself; what is assigned is another tensor
    dist.broadcast(tensor.detach(), src=0) => received = tensor.detach().clone()
    dist.broadcast(received, src=0)
    tensor.data = received
all are trained | model | leave requires_grad as it was: use detach(), or torch.no_grad()
    dist.broadcast => tensor.requires_grad_(tensor.is_floating_point())
    dist.broadcast
nothing sent | all | this rank took part in no collective; every rank must call dist.broadcast, also receivers
    dist.broadcast(tensor.detach(), src=0) => pass
only rank 0 sends | all | look for a branch on the rank | hangs
    dist.broadcast => if rank == 0: dist.broadcast
"""

ARRIVED = "every rank must get all of rank 0's values, each tensor in its own dtype, in its own place"
HERE = (
    "an optimizer holds the tensors that are there: write into them, where autograd does not see it: "
    "parameter.detach(), or torch.no_grad()"
)

START = exercise(
    *("06.1", "The same start", "same_start", 10),
    cases=cases,
    act=act,
    said=lambda seen: f"rank 0 of {seen.world_size} has",
    tolerance=1e-12,
    mistakes=MISTAKES,
    checks={
        "parameters": ("every rank has rank 0's parameters", 2, "one two", lambda seen: seen["parameters"], ARRIVED),
        "buffers": ("every rank has rank 0's buffers", 2, "one two", lambda seen: seen["buffers"], ARRIVED),
        "model": ("the model is still the same object inside, ready for its optimizer", 1, "one two",
                  lambda seen: seen["kept"], HERE),
    },
    refused=READY,
    hints=WAITS,
)  # fmt: skip
