"""How do several ranks compute one layer together?

A linear layer is a matrix, and a matrix can be cut. Cut by columns, each rank computes some of the outputs, from the
whole input. Cut by rows, each computes a part of every output, from some of the inputs, and the parts are summed. One
of each, with an activation between, needs a single all_reduce forward and a single one backward.

All ranks see the same rows. What they share is the layer, so its memory and its work shrink with their number. The
all_reduce carries activations, in the middle of the computation: nothing can hide it. So it wants the fastest links.

Left out on purpose: attention by heads, embeddings by words, sequence parallelism, and layers in a `DTensor`.
Read next: `pipeline.py`; torch/distributed/tensor/parallel/style.py.

Shapes: N rows, I input and O output features of the whole layer, W ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_course.beyond.one_process import Trained, bytes_held
from ddp_course.groups import my_device

# --- Two functions, each the other's backward ----------------------------------------------------------


class _Enter(torch.autograd.Function):
    """Forward: the same values. Backward: each rank has the gradient through its part; the sum is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may hold the same memory elsewhere
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """Forward: each rank has a part of the sum; the sum is the value. Backward: the same gradient for each part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def enter_parallel(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return `x`, whose gradient will be summed over the ranks.

    Collective: one all_reduce of the size of `x` in backward; every rank of `group`.
    Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3, where this is f.
    """
    return _Enter.apply(x, group)


def leave_parallel(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the sum of `x` over the ranks; its gradient passes to each rank as it is.

    Collective: one all_reduce of the size of `x` in forward; every rank of `group`.
    Source: as `enter_parallel`, where this is g.
    """
    return _Leave.apply(x, group)


# --- Two layers ----------------------------------------------------------------------------------------


class ColumnParallelLinear(nn.Module):
    """This rank's O/W outputs of a linear layer.

    Args:
        linear: the whole layer, the same on every rank; a copy of a part of it is kept.
    Raises:
        ValueError: the outputs cannot be shared equally.
    Collective: in backward one all_reduce of the gradient of x_NI, if that is asked for; every rank of `group`.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.weight = _part(linear.weight, 0, group, "output features")  # (O/W, I), as torch stores it: transposed
        self.bias = None if linear.bias is None else _part(linear.bias, 0, group, "output features")

    def forward(self, x_NI: torch.Tensor) -> torch.Tensor:
        return F.linear(enter_parallel(x_NI, self.group), self.weight, self.bias)  # (N, O/W)


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs come in parts, I/W of them on each rank.

    The bias is whole on each rank, and is added once, after the sum.

    Args:
        linear: as in `ColumnParallelLinear`.
    Raises:
        ValueError: the inputs cannot be shared equally.
    Collective: in forward one all_reduce of the output; every rank of `group`.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.weight = _part(linear.weight, 1, group, "input features")  # (O, I/W)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def forward(self, x_part: torch.Tensor) -> torch.Tensor:
        y_NO = leave_parallel(F.linear(x_part, self.weight), self.group)
        return y_NO if self.bias is None else y_NO + self.bias


def _part(param: nn.Parameter, dim: int, group: dist.ProcessGroup | None, what: str) -> nn.Parameter:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if param.shape[dim] % world_size:
        raise ValueError(
            f"rank {rank}: {param.shape[dim]} {what} cannot be shared equally by {world_size} ranks; choose a width "
            f"that {world_size} divides, or another number of ranks"
        )
    return nn.Parameter(param.detach().chunk(world_size, dim)[rank].clone(), requires_grad=param.requires_grad)


# --- A whole model -------------------------------------------------------------------------------------


def linear_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Return the names of the linear layers, two by two, in order; a last one without a partner stays whole.

    Between the two of a pair there may be only what treats each feature by itself: an activation, dropout.
    """
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return list(zip(names[::2], names[1::2], strict=False))


def parallelize(model: nn.Module, pairs: list[tuple[str, str]], group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replace each pair of linear layers in `model` by a column-parallel and a row-parallel one.

    What is not in a pair stays whole on every rank. Its inputs and gradients are the same everywhere, so it needs no
    collective to stay the same.

    Collective: none; then in each pass one all_reduce forward and one backward per pair. The first pair has none in
        backward if its input needs no gradient.
    """
    for first, second in pairs:
        for name, parallel in ((first, ColumnParallelLinear), (second, RowParallelLinear)):
            model.set_submodule(name, parallel(model.get_submodule(name), group))
    return model


def parallelize_by_torch(model: nn.Module, pairs: list[tuple[str, str]]) -> nn.Module:
    """Do what `parallelize` does with torch's own `parallelize_module`, over all ranks.

    Collective: those of `init_device_mesh` and `parallelize_module`, which sends rank 0's weights; every rank.
    """
    from torch.distributed.device_mesh import init_device_mesh  # slow to import
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        name: style() for pair in pairs for name, style in zip(pair, (ColwiseParallel, RowwiseParallel), strict=True)
    }
    return parallelize_module(model, init_device_mesh(my_device().type, (dist.get_world_size(),)), plan)


def train_steps(
    rank: int,
    world_size: int,
    model: nn.Module,
    x_NI: torch.Tensor,
    y_N: torch.Tensor,
    steps: int = 5,
    lr: float = 0.01,
    by: str = "course",
) -> Trained:
    """Train a copy of `model` with its linear layers cut in pairs; every rank works on all rows.

    Args:
        by: "course" for this file's layers, "torch" for torch's.
    Raises:
        ValueError: a layer cannot be cut equally.
    Collective: those of `parallelize`; at the end one all_gather per parameter that was cut; every rank.
    """
    shapes = {name: param.shape for name, param in model.named_parameters()}
    device = my_device()
    model, x_NI, y_N = copy.deepcopy(model).to(device), x_NI.to(device), y_N.to(device)
    pairs = linear_pairs(model)
    (parallelize if by == "course" else parallelize_by_torch)(model, pairs)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x_NI), y_N)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held = bytes_held(model.parameters(), optimizer)
    whole = {name: _whole(param.detach(), shapes[name]).cpu() for name, param in model.named_parameters()}
    return Trained(tuple(losses), whole, held)


def _whole(part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if hasattr(part, "full_tensor"):
        return part.full_tensor()
    if part.shape == shape:
        return part.clone()
    dim = next(dim for dim, size in enumerate(shape) if part.shape[dim] != size)
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts, dim)
