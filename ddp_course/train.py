"""All of it together: one training program, for a notebook cell, for a terminal, and for torchrun.

    launch(train, 2, args=(Config(),))                       # from a cell
    ddp-course train --world-size 2                          # from a terminal; starts the ranks itself
    torchrun --nproc-per-node 2 -m ddp_course.train          # the ranks are there already; joins them

Each rank holds a replica of the model and trains it on its own shard of the rows. DistributedDataParallel
averages the gradients while the backward pass computes them, so every replica takes the same step. The loss is
reduced over the ranks by sum and count, the test rows are divided without a duplicate, and rank 0 writes the
checkpoints.

Left out on purpose: learning rate schedules, augmentation, and resuming within an epoch.
Read next: `terminal.py`, the same program from a terminal; or torch/nn/parallel/distributed.py.

Shapes: N rows of this rank's batch, C image channels, K classes.
"""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ddp_course.checkpoint import Checkpointer, CheckpointError
from ddp_course.data import DATASETS, Images, load
from ddp_course.data.sampler import exact_shard
from ddp_course.groups import my_device
from ddp_course.logs import progress_bar, rank0_print
from ddp_course.metrics import mean_over_ranks
from ddp_course.models import MLP, resnet18_small
from ddp_course.parallel.syncbn import SyncBatchNorm
from ddp_course.training_state import capture_state, restore_state

MODELS = ("mlp", "mlp_bn", "resnet18")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def option(default: Any, says: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": says, "choices": choices})


@dataclass(frozen=True)
class Config:
    """What to train, and how. Each field is also an option of the command line."""

    dataset: str = option("digits", "the images to learn", DATASETS)
    root: str | None = option(None, "the folder with the files of a dataset that is not built in")
    model: str = option("mlp", "the network", MODELS)
    hidden: int = option(256, "width of the MLP's hidden layers")
    epochs: int = option(20, "passes over the training rows, those of a resumed run included")
    local_batch: int = option(16, "rows in one rank's batch; the global batch is this times the world size")
    lr: float = option(0.1, "learning rate")
    momentum: float = option(0.9, "momentum of SGD")
    seed: int = option(0, "chooses the first weights and the order of the rows")
    dtype: str = option("float32", "number format of the model", tuple(DTYPES))
    checkpoint: str | None = option(None, "the folder in which rank 0 saves after every epoch")
    keep: int = option(3, "how many of the last checkpoints stay there")
    resume: bool = option(False, "go on from the latest checkpoint, at the epoch after the last one finished")
    progress: bool = option(True, "show a bar on rank 0")

    def __post_init__(self) -> None:
        for name in ("hidden", "epochs", "local_batch", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for each in fields(self):
            choices, value = each.metadata["choices"], getattr(self, each.name)
            if choices and value not in choices:
                raise ValueError(f"{each.name}={value!r} is not known; choose from {', '.join(choices)}")
        if self.resume and not self.checkpoint:
            raise ValueError("resume needs a checkpoint: say where it is (checkpoint=...)")


# A run may be resumed with other values of these; of all others, the checkpoint's must be kept.
FREE_ON_RESUME = ("root", "epochs", "checkpoint", "keep", "resume", "progress")


@dataclass(frozen=True)
class Result:
    """What one rank brings home. Plain numbers and texts, one list entry for each epoch of this run."""

    rank: int
    world_size: int
    device: str
    first_epoch: int  # 0, or where a resumed run went on
    losses: list[float]  # mean over all ranks' training rows; equal on every rank
    own_losses: list[float]  # mean over this rank's training rows
    accuracies: list[float]  # share of all test rows that is right; equal on every rank
    accuracy: float  # of the finished model, also when nothing was left to train
    seconds: float  # spent on the epochs, not on setting up
    checksum: str  # of the model's parameters and buffers; equal on every rank if the replicas are
    notes: list[str]  # what was done otherwise than asked for


def train(rank: int, world_size: int, config: Config) -> Result:
    """Train one replica on this rank's shard; every rank of the default group must call it.

    The same seed, world size and number of threads give the same bits on the CPU.

    Returns:
        This rank's result.
    Raises:
        DatasetError: the images cannot be had.
        CheckpointError: a checkpoint cannot be written; or a resume was asked for and there is none, or it belongs
            to another run.
    Collective: DDP's own at construction; in each step its all_reduce of every gradient bucket, and SyncBatchNorm's
        two for each layer; after each
        epoch two all_reduces (loss, accuracy) and one broadcast per buffer; those of `Checkpointer` and
        `capture_state` if a checkpoint is wanted.
    """
    device, dtype = my_device(), DTYPES[config.dtype]
    train_set, test_set = (load(config.dataset, split, config.root) for split in ("train", "test"))
    torch.manual_seed(config.seed)
    model = synchronised(build_model(config, train_set).to(device, dtype), world_size, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    checkpoints = Checkpointer(config.checkpoint, config.keep) if config.checkpoint else None
    first_epoch, notes = 0, []
    if config.resume:
        first_epoch, notes = resume(config, checkpoints, model, optimizer)
    rank0_print(*(f"note: {note}\n" for note in notes), sep="", end="", file=sys.stderr)

    replica = DistributedDataParallel(model)  # every rank starts from rank 0's weights
    sampler = DistributedSampler(train_set, world_size, rank, seed=config.seed)
    loader = DataLoader(train_set, config.local_batch, sampler=sampler)
    bar = progress_bar((config.epochs - first_epoch) * len(loader), shown=config.progress)
    losses, own_losses, accuracies = [], [], []
    started = time.perf_counter()
    for epoch in range(first_epoch, config.epochs):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        loss_sum, rows = train_epoch(replica, loader, optimizer, device, bar)
        own_losses.append(loss_sum / rows)
        losses.append(mean_over_ranks(loss_sum, rows, device))
        share_buffers(model)
        accuracies.append(evaluate(model, test_set, rank, world_size, device))
        bar.set_postfix_str(f"epoch {epoch + 1}, loss {losses[-1]:.4f}, test {accuracies[-1]:.1%}")
        if checkpoints:
            extra = {"config": asdict(config)}
            checkpoints.save(capture_state(model, optimizer, epoch=epoch + 1, extra=extra), step=epoch + 1)
    seconds = time.perf_counter() - started
    bar.close()
    if checkpoints:
        checkpoints.close()

    return Result(
        rank=rank,
        world_size=world_size,
        device=str(device),
        first_epoch=first_epoch,
        losses=losses,
        own_losses=own_losses,
        accuracies=accuracies,
        accuracy=accuracies[-1] if accuracies else evaluate(model, test_set, rank, world_size, device),
        seconds=seconds,
        checksum=checksum(model),
        notes=notes,
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
    replica: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device, bar: Any
) -> tuple[float, int]:
    """Pass over this rank's shard once.

    DistributedSampler makes the shards equal by repeating a row or two, so all ranks take the same number of
    steps, with batches of the same size. That makes the mean of the ranks' gradients the global batch's.

    Returns:
        The sum of this rank's losses, one for each row, and the number of its rows.
    Collective: DDP's all_reduces, in every step.
    """
    dtype = next(replica.parameters()).dtype
    loss_sum, rows = torch.zeros((), dtype=torch.float64, device=device), 0
    replica.train()
    for x_NCHW, label_N in loader:
        score_NK = replica(x_NCHW.to(device, dtype))
        loss = F.cross_entropy(score_NK, label_N.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach() * len(label_N)  # stays on the device: reading it would wait for the GPU
        rows += len(label_N)
        bar.update()
    return loss_sum.item(), rows


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


# --- Going on --------------------------------------------------------------------------------------


def resume(
    config: Config, checkpoints: Checkpointer, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, list[str]]:
    """Load the latest checkpoint into `model` and `optimizer`.

    Returns:
        The number of epochs it has behind it, and what could not be carried over.
    Raises:
        CheckpointError: there is none, none can be used, or it is of a run with other settings.
    Collective: see `Checkpointer.load_latest`.
    """
    found = checkpoints.load_latest()
    if found is None:
        raise CheckpointError(
            f"there is no checkpoint in {config.checkpoint} to resume from; leave resume out for the first run, and "
            "on several hosts use a folder that all of them see"
        )
    for name, wanted in asdict(config).items():
        was = found.state["extra"].get("config", {}).get(name)
        if name not in FREE_ON_RESUME and was != wanted:
            raise CheckpointError(
                f"{found.path} was written with {name}={was!r}, this run has {wanted!r}; "
                f"go on with {name}={was!r}, or train anew without resume"
            )
    return found.state["epoch"], restore_state(found.state, model, optimizer)


def main(argv: list[str] | None = None) -> int:
    """Train from a terminal, or as one of the ranks that torchrun has started; see `terminal.py`."""
    from ddp_course import terminal

    return terminal.main(argv)


if __name__ == "__main__":
    sys.exit(main())
