"""What makes the same training faster, and what does each of these means ask for?

Four levers, each an option of `Config`. Workers read rows ahead in processes of their own. Pinned memory lets a copy
to the GPU run beside the computation. channels_last stores an image pixel by pixel, as a GPU's convolutions want it.
torch.compile fuses the small operations of a forward and backward pass into larger ones. Mixed precision is the fifth;
it is one line in `train_epoch`.

None of them changes what is learned. Some change the last bits, since sums are added in another order or with fewer
digits, so they belong to the run and are saved with it.

Left out on purpose: CUDA graphs, fused optimizers, float16 with a loss scaler. bfloat16 needs no scaler.
Read next: `images.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.parallel.syncbn import SyncBatchNorm
from ddp_course.train.config import Config


def reading(config: Config, device: torch.device) -> dict[str, Any]:
    """Return how a DataLoader should read; the batches are the same with any number of workers."""
    return {"num_workers": config.workers, "pin_memory": device.type == "cuda"}


def laid_out(model: nn.Module, config: Config) -> nn.Module:
    """Return the model with its filters stored as `config` wants them; the images follow the filters."""
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def compile_where_possible(replica: nn.Module, device: torch.device) -> list[str]:
    """Compile the forward and backward pass of `replica` in place, on all ranks or on none.

    Nothing is compiled yet: that happens in the first step, and once more when a batch has another size.

    Returns:
        Why it is not done, a sentence; empty if it is.
    Collective: one all_gather_object, every rank.
    """
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, why_not_compile(device))
    refusals = [f"compile was left out: rank {rank} {why}" for rank, why in enumerate(found) if why]
    if not refusals:
        compile_in_place(replica)
    return refusals[:1]


def compile_in_place(replica: nn.Module, **options: Any) -> None:
    """Compile all but the course's own SyncBatchNorm layers; they run as they are, between two compiled parts.

    torch 2.11 loses the gradients that pass through such a layer when it is compiled; 2.15 does not.

    Args:
        options: for torch.compile.
    """
    for layer in replica.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.forward = torch.compiler.disable(layer.forward)
    replica.compile(**options)  # unlike torch.compile(replica), keeps the names of the parameters


def why_not_compile(device: torch.device) -> str | None:
    """Return what is missing for torch.compile on this machine, found by compiling one addition."""
    try:
        torch.compile(lambda x: x + 1, fullgraph=True)(torch.zeros(2, device=device))
    except Exception as error:  # no C++ compiler, no Triton, an unwritable cache: each has a type of its own
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"cannot ({said}); on CPUs it needs a C++ compiler (g++ or clang), on GPUs Triton"
    return None
