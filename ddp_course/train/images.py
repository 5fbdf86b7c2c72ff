"""All of it together: one training program, for a notebook cell, for a terminal, and for torchrun.

    launch(train, 2, args=(Config(),))                       # from a cell
    ddp-course train --world-size 2                          # from a terminal; starts the ranks itself
    torchrun --nproc-per-node 2 -m ddp_course.train.images          # the ranks are there already; joins them

Each rank holds a replica of the model and trains it on its own shard of the rows. DistributedDataParallel
averages the gradients while the backward pass computes them, so every replica takes the same step. The loss is
reduced over the ranks by sum and count, the test rows are divided without a duplicate, and rank 0 writes the
checkpoints, from which a run that was killed goes on as if it had not been (`run.py`).

Everything beyond that is an option: the learning rate's way (`schedule.py`), random changes of the images
(`data/augment.py`), mixed precision in `train_epoch`, and what makes a step faster (`speed.py`).

Left out on purpose: optimizers other than SGD, and other tasks than telling classes apart.
Read next: `terminal.py`, the same program from a terminal; or torch/nn/parallel/distributed.py.

Shapes: N rows of this rank's batch, C image channels, K classes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from ddp_course.data import Images, load
from ddp_course.data.augment import Augmented
from ddp_course.data.sampler import ShardSampler, exact_shard
from ddp_course.groups import my_device
from ddp_course.logs import progress_bar
from ddp_course.metrics import mean_over_ranks
from ddp_course.models import MLP, resnet18_small
from ddp_course.parallel.syncbn import SyncBatchNorm
from ddp_course.train.config import DTYPES, Config
from ddp_course.train.run import Run, settle_buckets
from ddp_course.train.speed import compile_where_possible, laid_out, reading

__all__ = ["Config", "Result", "train"]


@dataclass(frozen=True)
class Result:
    """What one rank brings home. Plain numbers and texts, one list entry for each epoch, those before a resume too."""

    rank: int
    world_size: int
    device: str
    first_epoch: int  # 0, or the epoch in which a resumed run went on
    first_step: int  # 0, or the steps that a resumed run had behind it
    steps: int  # behind the run now
    stopped: bool  # by a signal, before the last epoch's end
    losses: list[float]  # mean over all ranks' training rows; equal on every rank
    own_losses: list[float | None]  # mean over this rank's training rows; None where other ranks trained
    accuracies: list[float]  # share of all test rows that is right; equal on every rank
    accuracy: float  # of the model as it is now, also when nothing was left to train
    seconds: float  # spent on the epochs, not on setting up
    checksum: str  # of the model's parameters and buffers; equal on every rank if the replicas are
    notes: list[str]  # what was done otherwise than asked for


def train(rank: int, world_size: int, config: Config) -> Result:
    """Train one replica on this rank's shard; every rank of the default group must call it.

    The same seed, world size and number of threads give the same bits on the CPU, however often the run was killed
    and resumed. With a checkpoint folder, SIGTERM ends it at the same step on every rank, saved; SIGUSR1 only saves.

    Returns:
        This rank's result.
    Raises:
        DatasetError: the images cannot be had.
        CheckpointError: a checkpoint cannot be written; or those there are of another run, or none can be used.
    Collective: DDP's own at construction; in each step its all_reduce of every gradient bucket, and SyncBatchNorm's
        two for each layer; after each epoch two all_reduces (loss, accuracy) and one broadcast per buffer; those of
        `Run` if a checkpoint is wanted, of `settle_buckets`, and of `compile_where_possible` if that is wanted.
    """
    device, dtype = my_device(), DTYPES[config.dtype]
    train_set, test_set = (load(config.dataset, split, config.root) for split in ("train", "test"))
    torch.manual_seed(config.seed)
    model = synchronised(build_model(config, train_set).to(device, dtype), world_size, device)
    model = laid_out(model, config)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    rows = Augmented(train_set, config.seed) if config.augment else Augmented(train_set, shift=0, mirror=False)
    sampler = ShardSampler(rows, world_size, rank, seed=config.seed)
    # With a generator of its own, so that beginning an epoch twice draws nothing from the model's.
    loader = DataLoader(
        rows, config.local_batch, sampler=sampler, generator=torch.Generator(), **reading(config, device)
    )
    replica = DistributedDataParallel(model)  # every rank starts from rank 0's weights
    settle_buckets(replica, train_set.image_shape)
    steps_in_epoch = len(loader)  # a resumed sampler is shorter

    with Run(config, model, optimizer, sampler) as run:
        if config.compile:
            run.note(*compile_where_possible(replica, device))
        if config.resume:
            run.resume()
        run.set_rate()
        run.bar = progress_bar(config.epochs * steps_in_epoch, initial=run.step, shown=config.progress)
        started = time.perf_counter()
        while run.epoch < config.epochs:
            sampler.set_epoch(run.epoch)  # without it, every epoch has the same order
            rows.set_epoch(run.epoch)  # and the same shifts
            train_epoch(replica, loader, optimizer, device, run.after_step, amp=config.amp)
            if run.stopping and len(sampler):
                break
            loss = mean_over_ranks(run.loss_sum.item(), run.rows, device)
            share_buffers(model)
            run.end_epoch(loss, evaluate(model, test_set, rank, world_size, device))
            run.bar.set_postfix_str(f"epoch {run.epoch}, loss {loss:.4f}, test {run.accuracies[-1]:.1%}")
            if run.stopping:
                break
        run.finish()
        seconds = time.perf_counter() - started
        run.bar.close()

    return Result(
        rank=rank,
        world_size=world_size,
        device=str(device),
        first_epoch=run.first_epoch,
        first_step=run.first_step,
        steps=run.step,
        stopped=run.stopped,
        losses=run.losses,
        own_losses=run.own_losses,
        accuracies=run.accuracies,
        accuracy=evaluate(model, test_set, rank, world_size, device),
        seconds=seconds,
        checksum=checksum(model),
        notes=run.notes,
    )


# --- The model and its replicas --------------------------------------------------------------------


def build_model(config: Config, images: Images) -> nn.Module:
    channels, height, width = images.image_shape
    if config.model == "resnet18":
        return resnet18_small(len(images.classes), channels)
    in_features = channels * height * width
    return MLP(in_features, config.hidden, len(images.classes), batchnorm=config.model == "mlp_bn")


def synchronised(model: nn.Module, world_size: int, device: torch.device) -> nn.Module:
    """Return the model with BatchNorm layers that use the statistics of the global batch.

    On GPUs torch's own, whose kernels are fused; it refuses CPUs, so there the course's. Both have the same state.
    """
    if world_size == 1:
        return model
    if device.type == "cpu":
        return SyncBatchNorm.convert(model)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers.

    DDP does so at the start of each forward pass in training, so after the last one the ranks may differ: a BatchNorm
    that is not synchronised follows its own rows.

    Collective: one broadcast per buffer, every rank.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def checksum(model: nn.Module) -> str:
    """Return a short hash of all parameters and buffers: equal bits, equal text."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# --- One epoch, and what it was worth --------------------------------------------------------------


def train_epoch(
    replica: nn.Module,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    after_step: Callable[[torch.Tensor, int], bool | None],
    *,
    amp: bool = False,
) -> None:
    """Pass over what is left of this rank's shard once.

    The sampler makes the shards equal by repeating a row or two, so all ranks take the same number of steps, with
    batches of the same size. That makes the mean of the ranks' gradients the global batch's.

    Args:
        after_step: told this rank's loss (mean over its rows, detached) and its number of rows; says whether to stop.
        amp: compute the scores in bfloat16 where that is safe; weights, loss and gradients stay in their own dtype.
    Collective: DDP's all_reduces, in every step.
    """
    dtype = next(replica.parameters()).dtype
    replica.train()
    for x_NCHW, label_N in loader:
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            score_NK = replica(x_NCHW.to(device, dtype, non_blocking=True))
        loss = F.cross_entropy(score_NK.to(dtype), label_N.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if after_step(loss.detach(), len(label_N)):
            break


@torch.no_grad()
def evaluate(
    model: nn.Module, images: Images, rank: int, world_size: int, device: torch.device, batch: int = 256
) -> float:
    """Return the share of all rows that `model` gets right; each row is seen by exactly one rank.

    `model` is the bare module, not DDP: the shards may differ by a row, so ranks may differ in their number of
    batches, and DDP's forward pass would wait for a peer that has none left.

    Collective: one all_reduce, every rank.
    """
    dtype = next(model.parameters()).dtype
    shard = Subset(images, exact_shard(len(images), world_size, rank))
    correct = 0
    model.eval()
    for x_NCHW, label_N in DataLoader(shard, batch):
        guess_N = model(x_NCHW.to(device, dtype)).argmax(dim=1)
        correct += (guess_N == label_N.to(device)).sum().item()
    return mean_over_ranks(correct, len(shard), device)


def main(argv: list[str] | None = None) -> int:
    """Train from a terminal, or as one of the ranks that torchrun has started; see `terminal.py`."""
    from ddp_course.commands import train as terminal

    return terminal.main(argv)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # in the interpreter's own teardown, DDP's last threads may abort the process
