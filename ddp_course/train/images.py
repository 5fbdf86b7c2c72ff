"""All of it together: one training program, for a notebook cell, for a terminal, and for torchrun.

    launch(train, 2, args=(Config(),))                       # from a cell
    ddp-course train --world-size 2                          # from a terminal; starts the ranks itself
    torchrun --nproc-per-node 2 -m ddp_course.train          # the ranks are there already; joins them

Each rank holds a replica of the model and trains it on its own shard of the rows. DistributedDataParallel
averages the gradients while the backward pass computes them, so every replica takes the same step. The loss is
reduced over the ranks by sum and count, the test rows are divided without a duplicate, and rank 0 writes the
checkpoints, from which a run that was killed goes on as if it had not been (`run.py`).

Everything beyond that is an option: the learning rate's way (`schedule.py`), random changes of the images
(`data/augment.py`), mixed precision in `train_epoch`, and what makes a step faster (`speed.py`).

Left out on purpose: optimizers other than SGD, and other tasks than telling classes apart.
Read next: `program.py`, the same from a terminal; or torch/nn/parallel/distributed.py.

Shapes: N rows of this rank's batch, C image channels, K classes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from ddp_course.checkpoint.state import checksum
from ddp_course.data import Images, load
from ddp_course.data.augment import Augmented
from ddp_course.data.sampler import ShardSampler, exact_shard
from ddp_course.groups import my_device
from ddp_course.logs import progress_bar
from ddp_course.metrics import mean_over_ranks
from ddp_course.models import MLP, resnet18_small
from ddp_course.parallel.syncbn import SyncBatchNorm
from ddp_course.train.config import DTYPES, Config
from ddp_course.train.epochs import EpochCurves
from ddp_course.train.run import Run, settle_buckets
from ddp_course.train.speed import compile_where_possible, laid_out, reading


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
    device = my_device()
    train_set, test_set = (load(config.dataset, split, config.root) for split in ("train", "test"))
    replica, optimizer = build_replica(config, train_set, device)
    model = replica.module
    loader = build_loader(config, train_set, rank, world_size, device)
    curves = EpochCurves(config, optimizer, loader.sampler)
    steps_in_epoch = len(loader)  # a resumed sampler is shorter

    with Run(config, model, optimizer, loader.sampler, curves) as run:
        if config.compile:
            run.note(*compile_where_possible(replica, device))
        if config.resume:
            run.resume()
        curves.set_rate()
        run.bar = progress_bar(config.epochs * steps_in_epoch, initial=run.step, shown=config.progress)
        started = time.perf_counter()
        while curves.epoch < config.epochs and not run.stopping:
            for part in (loader.sampler, loader.dataset):
                part.set_epoch(curves.epoch)  # without it, every epoch has the same order and the same shifts
            train_epoch(replica, loader, optimizer, device, run.after_step, amp=config.amp)
            if len(loader.sampler):  # stopped within the epoch
                break
            loss = mean_over_ranks(curves.loss_sum.item(), curves.rows, device)
            share_buffers(model)
            curves.end_epoch(loss, evaluate(model, test_set, rank, world_size, device))
            run.save()
            run.bar.set_postfix_str(f"epoch {curves.epoch}, loss {loss:.4f}, test {curves.accuracies[-1]:.1%}")
        run.finish()
        seconds = time.perf_counter() - started

    return Result(
        rank=rank,
        world_size=world_size,
        device=str(device),
        first_epoch=curves.first_epoch,
        first_step=run.first_step,
        steps=run.step,
        stopped=run.stopping,
        losses=curves.losses,
        own_losses=curves.own_losses,
        accuracies=curves.accuracies,
        accuracy=evaluate(model, test_set, rank, world_size, device),
        seconds=seconds,
        checksum=checksum(model),
        notes=run.notes,
    )


def build_replica(
    config: Config, images: Images, device: torch.device
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Return the wrapped model, its buckets settled, and its optimizer; every rank starts from rank 0's weights.

    Collective: DDP's own at construction, and those of `settle_buckets`; every rank.
    """
    torch.manual_seed(config.seed)
    dtype = DTYPES[config.dtype]
    model = synchronised(build_model(config, images).to(device, dtype), dist.get_world_size(), device)
    model = laid_out(model, config)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    replica = DistributedDataParallel(model)
    settle_buckets(replica, torch.zeros(2, *images.image_shape, dtype=dtype, device=device))
    return replica, optimizer


def build_loader(config: Config, images: Images, rank: int, world_size: int, device: torch.device) -> DataLoader:
    """Return a loader of this rank's shard."""
    rows = Augmented(images, config.seed) if config.augment else Augmented(images, shift=0, mirror=False)
    sampler = ShardSampler(rows, world_size, rank, seed=config.seed)
    # With a generator of its own, so that beginning an epoch twice draws nothing from the model's.
    return DataLoader(rows, config.local_batch, sampler=sampler, generator=torch.Generator(), **reading(config, device))


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
