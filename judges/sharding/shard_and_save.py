"""17.3 `ShardedTraining`: is the model divided, one block whole at a time, and is the whole one that of one process?

What each rank holds is counted by the parameters' names; hooks in the blocks note who else is whole while one computes.
How many units there are beside the blocks, and along which dimension they are cut, is free.

Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py.
Read next: `programs/train_fsdp.py`, the program of the lesson.
"""

from __future__ import annotations

from collections import OrderedDict
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

BLOCKS, RATE, MAX_NORM = 2, 0.05, 2.0
SCALES = (0.1, 10.0, 0.1)  # of the targets, step by step: the gradients of the second step alone are clipped
Case = tuple[int, int, int, int, int]  # samples of a rank, widths, and a seed


def act(cls, case: Case, rank: int, world_size: int) -> Note:
    """Take three steps, and after the second the whole state; note who holds what on the way."""
    rows, inputs, width, outputs, seed = case
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(BLOCKS)]
    ends = nn.Linear(inputs, width), nn.Linear(width, outputs)
    model = nn.Sequential(OrderedDict(start=ends[0], blocks=nn.Sequential(*blocks), head=ends[1])).double()
    together, held, norms = _watched(blocks), {}, []
    training = cls(model, DeviceMesh.from_group(dist.group.WORLD, "cpu"), RATE, MAX_NORM)
    for step, scale in enumerate(SCALES):
        chance = torch.Generator().manual_seed(10 * seed + 100 * step + rank)
        x, y = (torch.randn(rows, size, generator=chance, dtype=torch.float64) for size in (inputs, outputs))
        norms.append(_shown(training.step(x, scale * (y + rank))))
        if step == 1:
            state = training.full_state()
            state = {name: _shown(value) for name, value in state.items()} if isinstance(state, dict) else None
        held = {name: max(held.get(name, 0), _local(p).numel()) for name, p in model.named_parameters()}
    return Note(
        held=held,
        sizes={name: p.numel() for name, p in model.named_parameters()},
        together=together,
        optimizer=_kept(model, getattr(training, "optimizer", None)),
        norms=norms,
        weights={name: plain(_whole(p)) for name, p in model.named_parameters()},
        state=state,
    )


def _watched(blocks: list[nn.Module]) -> dict[str, list[int]]:
    """Return what hooks fill in: the others that are whole while a block computes."""
    seen: dict[str, list[int]] = {
        f"while block {number} computes, others that are whole:": [] for number in range(BLOCKS)
    }

    def note(number: int, others: list[int]) -> None:
        for other, block in enumerate(blocks):
            whole = any(not isinstance(each, DTensor) for each in block.parameters())
            others += [other] * (whole and other not in (number, *others))

    for (number, block), others in zip(enumerate(blocks), seen.values(), strict=True):
        block[0].register_forward_pre_hook(lambda *_, call=(number, others): note(*call))
    return seen


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _shown(value: Any) -> Any:
    return f"a DTensor, with {_local(value).numel()} elements here" if isinstance(value, DTensor) else plain(value)


def _kept(model: nn.Module, optimizer: Any) -> dict[str, int] | str:
    """How many parameters of an optimizer are not the model's, and the elements of its averages, by parameter."""
    if not isinstance(optimizer, torch.optim.Adam):
        return type(optimizer).__name__
    names = {p: name for name, p in model.named_parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    found = {"": sum(p not in names for p in given), **dict.fromkeys(names.values(), 0)}
    for p in (p for p in given if p in names):
        found[names[p]] += sum(_local(each).numel() for each in optimizer.state[p].values() if each.dim())
    return found


def cases(rng: Random) -> list[Round]:
    """One, since it takes many collectives; the ranks do not divide the width of the blocks."""
    world_size, (rows, inputs, outputs) = rng.choice((2, 3, 4)), rng.sample(range(3, 9), 3)
    return [Round(world_size, [("train", (rows, inputs, 2 * world_size + 1, outputs, rng.randint(0, 10**6)))])]


def _divided(seen: Seen, note: str, times: int) -> dict[str, str]:
    """Say of each parameter who holds it, where one held once is so many times its size."""
    found = {}
    for name, size in seen["sizes"].items():
        n = sum(each[note][name] for each in seen.everyone)
        whole = {size * times: "divided among the ranks", size * times * seen.world_size: "whole on every rank"}
        found[name] = whole.get(n, f"{n} of {size * times} elements")
    return found


def optimizer(seen: Seen) -> Any:
    kept = seen["optimizer"]
    if isinstance(kept, str):
        return {"self.optimizer:": kept, "parameters that are not the model's:": 0, "Adam's averages of": {}}
    averages = _divided(seen, "optimizer", 2)
    return {"self.optimizer:": "Adam", "parameters that are not the model's:": kept[""], "Adam's averages of": averages}


def norms(seen: Seen) -> dict[str, Any]:
    return {f"in step {number}:": found for number, found in enumerate(seen["norms"], 1)}


def weights(seen: Seen) -> dict[str, Any]:
    return {f"after the last step, {name}": found for name, found in seen["weights"].items()}


def state(seen: Seen) -> Any:
    if seen.rank:
        return {"full_state() of another rank:": f"{len(seen['state'])} tensors" if seen["state"] else "nothing"}
    return {"names of the state": sorted(seen["state"]), "in the state,": seen["state"]}


WHOLE = "every rank has the whole model that was given: fully_shard that one, and no copy of it"
GATHER = "every rank takes part in the gather: call it on all ranks, and keep it on rank 0"
FIRST = "the order is: each block, the whole model, the optimizer"
MISTAKES = f"""
the whole model alone | blocks | in one unit all blocks are gathered together: call fully_shard for each block first
    for block in model.blocks: => for block in ():
the blocks stay whole | blocks | reshard_after_forward=False leaves a block whole until backward: leave it out
    fully_shard(block, mesh=mesh) => fully_shard(block, mesh=mesh, reshard_after_forward=False)
the blocks alone | all | what belongs to no block is not sharded: call fully_shard for the whole model, too
    fully_shard(model, mesh=mesh) =>
the whole model first | all | {FIRST}
    fully_shard(model, mesh=mesh) =>
    for block in => fully_shard(model, mesh=mesh)
    for block in
the optimizer first | optimizer norm weights state
| it holds the parameters of before fully_shard: {FIRST}
    self.optimizer = torch.optim.Adam(model.parameters(), lr=lr) =>
    for block in => self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for block in
a copy is sharded | held blocks optimizer weights | {WHOLE}
    for block in => model = __import__("copy").deepcopy(model)
    for block in
clipped by each rank's norm | norm weights state
| this is the norm of one rank's shards; clip_grad_norm_ on the DTensors has that of all
    norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm) =>
    shards = [p.grad.to_local() for p in self.model.parameters()]
    norm = nn.utils.get_total_norm(shards)
    for shard in shards:
        shard *= (self.max_norm / norm).clamp(max=1.0)
    norm.full_tensor() => norm
the norm is a DTensor | norm | return a float: norm.full_tensor().item()
    norm.full_tensor().item() => norm
clipped after the step | norm weights state
| the large gradients of the second step are not clipped: clip after backward, before the optimizer's step
    self.optimizer.step() =>
    loss.backward() => loss.backward()
    self.optimizer.step()
divided once more | norm weights state | fully_shard divides by the number of ranks already: no division of your own
    loss.backward() => (loss / dist.get_world_size()).backward()
gradients add up | norm weights state | the last step's gradients are still there: zero_grad() before backward
    self.optimizer.zero_grad() =>
the shards of rank 0 | state | state_dict() has the shards of this rank: gather them, with full_state_dict=True
    return states.get_model_state_dict(self.model, options=whole) =>
    return self.model.state_dict() if dist.get_rank() == 0 else {{}}
the whole model on every rank | state | with cpu_offload=True as well, rank 0 alone keeps what is gathered
    , cpu_offload=True =>
gathered on rank 0 alone | all | {GATHER} | hangs
    return states. => if dist.get_rank() != 0:
        return {{}}
    return states.
DDP | held blocks optimizer state | DDP leaves the whole model on every rank: fully_shard stands in its place
    class ShardedTraining:
        def __init__(self, model, mesh, lr, max_norm):
            self.model, self.max_norm = nn.parallel.DistributedDataParallel(model), max_norm
            self.optimizer = torch.optim.Adam(model.parameters(), lr)

        def step(self, x, y):
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            return norm.item()

        def full_state(self):
            return self.model.state_dict() if dist.get_rank() == 0 else {{}}
each rank by itself | all | {WHOLE} | tests
    class ShardedTraining:
        def __init__(self, model, mesh, lr, max_norm):
            self.model, self.max_norm, self.optimizer = model, max_norm, torch.optim.SGD(model.parameters(), lr)

        def step(self, x, y):
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
            return float(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm))

        def full_state(self):
            return self.model.state_dict()
"""

RIGHT = """
gathered by hand, smaller units, clipped by hand
    for block in model.blocks: => for block in [*model.blocks, model.start, model.head]:
    return states.get_model_state_dict(self.model, options=whole) =>
    found = {name: p.full_tensor() for name, p in self.model.named_parameters()}
    return found if dist.get_rank() == 0 else {}
    norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm) =>
    gradients = [p.grad.full_tensor() for p in self.model.parameters()]
    norm = torch.cat([each.flatten() for each in gradients]).norm()
    for p in self.model.parameters():
        p.grad *= min(1.0, self.max_norm / norm.item())
    norm.full_tensor() => norm
item() of a DTensor that every rank has
    norm.full_tensor().item() => norm.item()
"""

SHARD_AND_SAVE = exercise(
    *("17.3", "Shard a model and save it", "ShardedTraining", 25),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.world_size} ranks,",
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "held": ("the ranks divide every parameter among them", 1, "train",
                 lambda seen: _divided(seen, "held", 1), WHOLE),
        "blocks": ("one block is whole at a time", 1, "train", lambda seen: seen["together"],
                   "a block is gathered for its own forward, and freed after it, if it is a unit of its own"),
        "optimizer": ("the optimizer has the shards", 1, "train", optimizer,
                      f"self.optimizer = torch.optim.Adam(...), with all parameters of the model; {FIRST}"),
        "norm": ("the norm of the whole gradient, on every rank", 1, "train", norms,
                 "clip_grad_norm_ returns the norm from before the clipping: full_tensor(), on all ranks, and item()"),
        "weights": ("the weights are those of one process", 2, "train", weights,
                    "zero_grad, the mean squared error of this rank's samples, backward, clip, step"),
        "state": ("rank 0 has the whole model, with its own names", 2, "train", state,
                  "get_model_state_dict of the model, on all ranks, with full_state_dict and cpu_offload"),
    },
    hints={
        r"mixed torch.Tensor and DTensor": "what belongs to no block is not sharded: call fully_shard for the whole "
        "model, too",
        r"has no attribute 'full_tensor'": "nothing here is a DTensor: is the model sharded?",
        r"(?s)fully_shard.*not_none": FIRST,
        "disagree|absent|limit|cut-off": GATHER,
    },
)  # fmt: skip
