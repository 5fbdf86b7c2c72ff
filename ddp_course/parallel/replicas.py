"""Do all ranks hold the same model, and how do they come to?

In distributed data parallel training, DDP, each rank has a replica of the model and rows of its own. Replicas stay
equal if they begin equal and take equal steps: by the mean of the ranks' gradients. So the ranks first compare what
they have built, name by name, and then take rank 0's values. A difference found here is a sentence; found later, it is
a hang or a wrong model.

Left out on purpose: keeping replicas equal afterwards, which is the gradients' part.
Read next: `naive.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that get gradients, by name, each once, also if the module uses it in two places.

    Raises:
        ValueError: there is none, so there is nothing to average.
    """
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    if not named:
        raise ValueError("the module has no parameter that requires a gradient: call it without DDP")
    return named


def refuse_sparse(module: nn.Module) -> None:
    """Raise ValueError for a layer whose gradients are sparse: what is averaged here is dense; names the layer."""
    if sparse := [name or "the module" for name, layer in module.named_modules() if getattr(layer, "sparse", False)]:
        raise ValueError(f"{sparse[0]} has sparse gradients, which are not averaged here: build it with sparse=False")


def check_same_model(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Refuse models that differ between ranks in a name, a shape, a dtype, or in what is trained.

    Raises:
        RuntimeError: on every rank; names the first difference and its rank.
    Collective: one all_gather_object, of a list with a text for each tensor; every rank of `group`.
    """
    mine = list(_described(module))
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for expected, found in zip_longest(everyone[0], theirs, fillvalue="nothing"):
            if expected != found:
                raise RuntimeError(
                    f"the models differ: rank 0 has {expected}, rank {rank} has {found}; build the model identically "
                    "on every rank (the same code, the same arguments, the same order)"
                )


def _described(module: nn.Module) -> Iterable[str]:
    for name, param in module.named_parameters():
        yield f"{name} {tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ', frozen'}"
    for name, buffer in module.named_buffers():
        yield f"{name} {tuple(buffer.shape)} {buffer.dtype}, a buffer"


@torch.no_grad()
def broadcast_module(
    module: nn.Module, group: dist.ProcessGroup | None = None, src: int = 0, buffers: bool = True
) -> None:
    """Give every rank the parameters of the group's rank `src`, and its buffers, if `buffers`.

    Collective: one broadcast per parameter and per buffer; every rank of `group`.
    """
    _broadcast(module.parameters(), group, src)
    if buffers:
        _broadcast(module.buffers(), group, src)


@torch.no_grad()
def broadcast_buffers(module: nn.Module, group: dist.ProcessGroup | None = None, src: int = 0) -> None:
    """Give every rank the buffers of the group's rank `src`, such as BatchNorm's running statistics.

    Each rank's BatchNorm follows its own rows, so a replica that wants equal buffers asks for this again and again.
    They are many and small: those of one dtype and device travel together.
    Two forward passes may come before one backward. The graph of the first stays valid: in training BatchNorm's
    backward does not read the running statistics that it has saved, and in eval mode they do not change.

    Collective: one broadcast per dtype and device of the buffers; every rank of `group`.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in module.buffers():
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    flats = [torch.cat([buffer.reshape(-1) for buffer in buffers]) for buffers in kinds.values()]
    works = [dist.broadcast(flat, group=group, group_src=src, async_op=True) for flat in flats]
    for work, flat, buffers in zip(works, flats, kinds.values(), strict=True):
        work.wait()
        if dist.get_rank(group) != src:
            pieces = flat.split([buffer.numel() for buffer in buffers])
            shaped = [piece.view(buffer.shape) for piece, buffer in zip(pieces, buffers, strict=True)]
            # Autograd counts the writes to a tensor that it has saved, and would refuse that graph: "modified by an
            # inplace operation". torch's own DDP does the same.
            with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
                torch._foreach_copy_(buffers, shaped)


def _broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None, src: int) -> None:
    # All under way before the first is waited for, so that their latencies overlap.
    pairs = [(tensor, tensor.detach().contiguous()) for tensor in tensors]
    works = [dist.broadcast(sent, group=group, group_src=src, async_op=True) for _, sent in pairs]
    for work, (tensor, sent) in zip(works, pairs, strict=True):
        work.wait()
        if sent.data_ptr() != tensor.data_ptr():  # other strides, so what travelled was a copy
            tensor.copy_(sent)
