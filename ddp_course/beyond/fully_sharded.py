"""What if even one copy of the parameters does not fit?

FSDP2 cuts every parameter along its first dimension, and each rank keeps one piece of it, of its gradient and of its
optimizer state. A layer is made whole just before it computes, by an all_gather, and is cut again right after. Its
gradients leave by a reduce_scatter, which averages them over the ranks and gives each rank its own piece.

So a rank holds 1/W of everything and, for the moment, one layer in whole. The price is an all_gather more in forward
and one more in backward, for each layer: half as many bytes again as DDP sends.

Left out on purpose: mixed precision, offloading to the CPU, a mesh of two dimensions. `fully_shard` has them.
Read next: `tensor_parallel.py`, where the layers stay cut; torch/distributed/fsdp/_fully_shard/.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_course.beyond.one_process import Trained, bytes_held, my_rows
from ddp_course.groups import my_device


def shard_layers(model: nn.Module, reshard_after_forward: bool = True) -> list[nn.Module]:
    """Shard `model` in place over all ranks, one unit per layer that has parameters of its own.

    A unit is what is gathered together: the smaller, the less memory at once, and the more messages. Large models take
    a transformer block for a unit.

    Args:
        model: with the same values on every rank: each keeps its pieces of its own values, nothing is sent.
        reshard_after_forward: cut again after forward. False keeps the layers whole until backward is over: that saves
            an all_gather per unit. It is `FSDP (kept)` in `memory.py`.
    Returns:
        The units, in the order of `model.modules()`.
    Collective: none when training is on the CPU; each unit's forward and backward, see `expected_collectives`.
    """
    from torch.distributed.device_mesh import init_device_mesh  # slow to import
    from torch.distributed.fsdp import fully_shard

    # Named, since fully_shard would take the GPU for the ranks of a host that has one, also under gloo.
    mesh = init_device_mesh(my_device().type, (dist.get_world_size(),))
    units = [layer for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))]
    for layer in units:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    if model not in units:
        fully_shard(
            model, mesh=mesh, reshard_after_forward=reshard_after_forward
        )  # the root, which waits for what is under way
    return units


def expected_collectives(units: int, reshard_after_forward: bool = True) -> dict[str, int]:
    """Return how often each collective runs in one step of a model whose `units` compute once each."""
    return {"all_gather": units * (2 if reshard_after_forward else 1), "reduce_scatter": units}


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters that this rank could compute with at this moment: pieces, or whole layers."""
    return sum(_here(param).nbytes for param in model.parameters())


def _here(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if hasattr(param, "to_local") else param


def watch_step(model: nn.Module, units: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[tuple[str, int]]:
    """Run one forward and backward and return what was held when: pairs of a moment and bytes of parameters.

    Collective: those of one step.
    """
    names = {layer: name for name, layer in model.named_modules()}
    seen = [("before", held_bytes(model))]

    def note(moment: str) -> None:
        seen.append((moment, held_bytes(model)))

    def before_forward(unit: nn.Module, _: tuple) -> None:
        note(f"forward of {names[unit]}")

    def after_forward(unit: nn.Module, _: tuple, output: torch.Tensor) -> None:
        output.register_hook(lambda _: note(f"backward of {names[unit]}"))

    # Registered later than fully_shard's own hooks, these run later: the unit that is about to compute is whole.
    handles = [unit.register_forward_pre_hook(before_forward) for unit in units]
    handles += [unit.register_forward_hook(after_forward) for unit in units]
    loss = F.cross_entropy(model(x), y)
    note("between")
    loss.backward()
    note("after")
    for handle in handles:
        handle.remove()
    return seen


def train_steps(
    rank: int,
    world_size: int,
    model: nn.Module,
    x_NF: torch.Tensor,
    y_N: torch.Tensor,
    steps: int = 5,
    lr: float = 0.01,
    reshard_after_forward: bool = True,
) -> Trained:
    """Train a copy of `model` fully sharded, each rank on its share of the rows.

    Raises:
        ValueError: the rows cannot be shared equally.
    Collective: in each step those of `expected_collectives`; at the end one all_reduce of the losses and one all_gather
        per parameter; every rank.
    """
    device = my_device()
    x, y = my_rows(x_NF, rank, world_size).to(device), my_rows(y_N, rank, world_size).to(device)
    model = copy.deepcopy(model).to(device)
    shard_layers(model, reshard_after_forward)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)  # after sharding: its state is made of pieces too
    losses = torch.zeros(steps, dtype=x.dtype, device=device)
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # leaves the mean over the ranks, in pieces
        optimizer.step()
        losses[step] = loss.detach() / world_size
    dist.all_reduce(losses)
    held = bytes_held(model.parameters(), optimizer)
    whole = {name: param.detach().full_tensor().cpu() for name, param in model.named_parameters()}
    return Trained(tuple(losses.tolist()), whole, held)
