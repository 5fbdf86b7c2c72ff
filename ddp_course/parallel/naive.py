"""What is the least that keeps replicas equal?

Start equal, average the gradients after every backward pass, take the same step. Here the averaging comes after
backward and is called by hand: one all_reduce per parameter, or one for all of them in a flat tensor. Both are right.
Neither uses the time in which backward still computes.

Left out on purpose: overlap, which is what `ddp.py` is about.
Read next: `bucketing.py`.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.parallel import replicas


@torch.no_grad()
def average_gradients(
    module: nn.Module, group: dist.ProcessGroup | None = None, find_unused_parameters: bool = False
) -> int:
    """Replace every gradient by its mean over the ranks of `group`.

    Args:
        find_unused_parameters: take a missing gradient for zero, unless it is missing on every rank.
    Returns:
        Payload bytes this rank contributed (not bytes on the wire).
    Raises:
        RuntimeError: a trainable parameter has no gradient, and that was not allowed; names it.
    Collective: one all_reduce per parameter, in parameter order; to find unused ones, one more before. Every rank of
        the group.
    Source: Li et al. 2020 (arXiv 2006.15704), section 3.2.1.
    """
    world_size = dist.get_world_size(group)
    gradients = _gradients(module, group, find_unused_parameters)
    for gradient in gradients:
        gradient.div_(world_size)  # before the sum, which then stays in the range of a half-precision number
        dist.all_reduce(gradient, group=group)
    return sum(gradient.nbytes for gradient in gradients)


@torch.no_grad()
def average_gradients_flat(
    module: nn.Module, group: dist.ProcessGroup | None = None, find_unused_parameters: bool = False
) -> int:
    """Do as `average_gradients`, with neighbouring gradients of one dtype laid end to end in one tensor.

    Args, Returns, Raises: as `average_gradients`.
    Collective: one all_reduce per run of parameters of one dtype and device; to find unused ones, one more before.
        Every rank of the group.
    """
    world_size, sent = dist.get_world_size(group), 0
    for _, run in groupby(
        _gradients(module, group, find_unused_parameters), key=lambda gradient: (gradient.dtype, gradient.device)
    ):
        gradients = list(run)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(world_size)
        dist.all_reduce(flat, group=group)
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
        sent += flat.nbytes
    return sent


def _gradients(module: nn.Module, group: dist.ProcessGroup | None, find_unused: bool) -> list[torch.Tensor]:
    """The gradients to average. Where one is missing, this rank raises, or fills in zeros: to leave out its all_reduce
    would pair the next one with another parameter's of the other ranks.
    """
    named = replicas.trainable(module)
    if find_unused:
        used = torch.tensor(
            [param.grad is not None for _, param in named], dtype=torch.int32, device=named[0][1].device
        )
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        # What no rank has used stays None, as in one process: with zeros, weight decay and momentum would move it.
        named = [pair for pair, somewhere in zip(named, used.tolist(), strict=True) if somewhere]
        for _, param in named:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
    if without := [name for name, param in named if param.grad is None]:
        raise RuntimeError(
            f"rank {dist.get_rank(group)}: no gradient for {', '.join(without)}; call backward() first, and let every "
            "parameter take part in the loss, or say find_unused_parameters=True on every rank"
        )
    return [param.grad for _, param in named]


class NaiveDDP(nn.Module):
    """A replica that begins as rank 0's, and averages its gradients when told to.

        replica(x).mean().backward()
        replica.average_gradients()
        optimizer.step()

    Args:
        flat: one all_reduce for neighbouring gradients of one dtype and device, instead of one for each.
        broadcast_buffers: give every rank rank 0's buffers before each forward pass in training, with gradients.
        find_unused_parameters: see `average_gradients`.
    Raises:
        ValueError: nothing to train, or a layer with sparse gradients.
        RuntimeError: the models differ between ranks.
    Collective: at construction one all_gather_object, one broadcast per parameter and buffer; in a forward pass in
        training one broadcast per dtype and device of the buffers; every rank of the group.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        flat: bool = False,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        replicas.trainable(module)  # refuses a module without any
        replicas.refuse_sparse(module)
        replicas.check_same_model(module, process_group)
        replicas.broadcast_module(module, process_group)
        self.module, self.process_group = module, process_group
        self.flat, self.broadcast_buffers = flat, broadcast_buffers
        self.find_unused_parameters = find_unused_parameters

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.broadcast_buffers and self.training and torch.is_grad_enabled():
            replicas.broadcast_buffers(self.module, self.process_group)
        return self.module(*inputs, **kwargs)

    def average_gradients(self) -> int:
        """Call it after backward, before the optimizer's step.

        Returns, Raises: as `average_gradients`.
        Collective: that of `average_gradients_flat` if `flat`, else of `average_gradients`; every rank of the group.
        """
        average = average_gradients_flat if self.flat else average_gradients
        return average(self.module, self.process_group, self.find_unused_parameters)
