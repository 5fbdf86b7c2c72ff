"""A whole training program in one page, healthy, of which each silent fault changes one part.

`train` draws rows, takes steps, evaluates, saves and loads, with a `TrainingObserver` beside it that notes all of
this. Its parts are arguments, and their defaults are right. A fault of `silent_*.py` gives it one part that is wrong;
to fix it is to take the part that stands here. The observer is the same in every run: it is not told which part
that is.

The data are made up, four clouds of points, so that a run takes a fraction of a second on a CPU.

Left out on purpose: GPUs. What is wrong here is wrong there too; `silent_files.py` says what only a GPU shows.
Read next: `silent_rows.py`.

Shapes: N rows of a batch, 16 features, 4 classes.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from ddp_course.data.sampler import exact_shard
from ddp_course.diagnose.faults.fault import Diagnosis
from ddp_course.diagnose.observer import TrainingObserver
from ddp_course.diagnose.training_facts import Finding, Reference
from ddp_course.groups import usable_cores
from ddp_course.launcher import RankPool
from ddp_course.parallel.syncbn import SyncBatchNorm

LOCAL_BATCH = 16
REFERENCE = Reference(global_batch=LOCAL_BATCH, lr=0.05)  # found good by one process, before there were ranks


def made_up_rows(n: int, seed: int) -> TensorDataset:
    """Return `n` points of four overlapping clouds, the same on every rank."""
    centres = 1.2 * torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    label_N = torch.randint(4, (n,), generator=source)
    return TensorDataset(centres[label_N] + torch.randn(n, 16, generator=source), label_N)


TRAIN_ROWS = made_up_rows(202, seed=1)
TEST_ROWS = made_up_rows(31, seed=2)  # 31 rows cannot be divided by two


# --- The parts, each as it should be ---------------------------------------------------------------


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def take_a_share_of_the_cores(world_size: int) -> None:
    torch.set_num_threads(max(1, usable_cores() // world_size))


def normalise_by_all_rows(model: nn.Module) -> nn.Module:
    return SyncBatchNorm.convert(model)  # on GPUs: nn.SyncBatchNorm.convert_sync_batchnorm


def scale_the_rate(world_size: int) -> float:
    return REFERENCE.lr * world_size  # the linear rule


def draw_a_shard_on_each_rank(rank: int, world_size: int) -> DataLoader:
    return DataLoader(TRAIN_ROWS, LOCAL_BATCH, sampler=DistributedSampler(TRAIN_ROWS, world_size, rank))


def tell_every_epoch(loader: DataLoader, epoch: int) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


def evaluate_each_row_once(rank: int, world_size: int) -> DataLoader:  # the ranks then have 16 and 15 rows
    return DataLoader(Subset(TEST_ROWS, exact_shard(len(TEST_ROWS), world_size, rank)), batch_size=8)


def divide_sum_by_count(loss_sum: float, rows: int) -> float:
    """Collective: one all_reduce, every rank."""
    sum_and_count = torch.tensor([loss_sum, rows], dtype=torch.float64)
    dist.all_reduce(sum_and_count)
    return (sum_and_count[0] / sum_and_count[1]).item()


def save_on_rank_0(replica: nn.Module, path: Path, observer: TrainingObserver) -> None:
    if dist.get_rank() == 0:
        with observer.writing(path):
            torch.save(replica.module.state_dict(), path)  # the model's own names, without DDP's prefix


def load_strictly(path: Path, observer: TrainingObserver) -> None:
    model, state = build(), torch.load(path, map_location="cpu", weights_only=True)
    observer.loaded(state, model)
    model.load_state_dict(state)


# --- The program -----------------------------------------------------------------------------------


def train(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    threads: Callable[[int], None] = take_a_share_of_the_cores,
    synchronise: Callable[[nn.Module], nn.Module] = normalise_by_all_rows,
    rate: Callable[[int], float] = scale_the_rate,
    rows: Callable[[int, int], DataLoader] = draw_a_shard_on_each_rank,
    begin_epoch: Callable[[DataLoader, int], None] = tell_every_epoch,
    test_rows: Callable[[int, int], DataLoader] = evaluate_each_row_once,
    mean: Callable[[float, int], float] = divide_sum_by_count,
    save: Callable[[nn.Module, Path, TrainingObserver], None] = save_on_rank_0,
    load: Callable[[Path, TrainingObserver], None] = load_strictly,
) -> list[Finding]:
    """Train two epochs, evaluate, save and load, and return what the observer finds wrong, the same on every rank.

    Collective: those of its parts; one barrier; `TrainingObserver.look`.
    """
    torch.manual_seed(0)
    threads(world_size)
    replica = DistributedDataParallel(synchronise(build()))
    optimizer = torch.optim.SGD(replica.parameters(), rate(world_size))
    loader, test_loader = rows(rank, world_size), test_rows(rank, world_size)
    observer = TrainingObserver(replica, optimizer, reference=REFERENCE)
    observer.training_rows(loader)
    observer.evaluation_rows(test_loader)
    for epoch in range(2):
        begin_epoch(loader, epoch)
        take_steps(replica, optimizer, loader)
    evaluate(replica.module, test_loader, mean, observer)
    save(replica, folder / "model.pt", observer)
    dist.barrier()  # nobody reads before it is written
    load(folder / "model.pt", observer)
    return observer.look()


def take_steps(replica: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    """Collective: DDP's and SyncBatchNorm's."""
    for x_NF, label_N in loader:
        optimizer.zero_grad()
        F.cross_entropy(replica(x_NF), label_N).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, mean: Callable, observer: TrainingObserver) -> None:
    """Report the loss of the test rows over all ranks, and tell the observer of each batch."""
    loss_sum, rows = 0.0, 0
    model.eval()
    for x_NF, label_N in loader:
        loss = F.cross_entropy(model(x_NF), label_N)
        observer.batch("test loss", loss, len(label_N))
        loss_sum, rows = loss_sum + loss.item() * len(label_N), rows + len(label_N)
    observer.reported("test loss", mean(loss_sum, rows))


# --- Watching it -----------------------------------------------------------------------------------


def watch_training(
    program: Callable[[int, int, Path], list[Finding]],
    world_size: int = 2,
    harm: Callable[[int, int, Path], str] | None = None,
) -> Diagnosis:
    """Run `program(rank, world_size, folder)` on fresh ranks and return what the observer found there.

    Args:
        harm: run on the same ranks afterwards; shows what the fault costs, in a sentence for the end of the report.
            It has no part in the diagnosis.
    Raises:
        RankError: the program failed; these programs should not.
    """
    pool = RankPool(world_size, backend="gloo", timeout_s=20.0, start_method="forkserver", quiet=True)
    with pool as ranks, tempfile.TemporaryDirectory(prefix="ddp_course_") as name:
        begin = time.monotonic()
        findings = ranks.run(program, (Path(name),), limit_s=60.0)[0]
        seconds = time.monotonic() - begin
        return diagnosis(findings, seconds, ranks.run(harm, (Path(name),), limit_s=60.0)[0] if harm else "")


def healthy(part: str, **how: Any) -> Callable[[], Diagnosis]:
    """Return the healthy training as the fixed program of a fault; its source is that of the part that was broken."""

    @functools.wraps(train.__kwdefaults__[part])
    def fix() -> Diagnosis:
        return watch_training(train, **how)

    return fix


def diagnosis(findings: list[Finding], seconds: float, harm: str = "") -> Diagnosis:
    """Return the first finding as the diagnosis; its report holds what else was found, and what the fault costs."""
    report = "\n".join([*map(str, findings[1:]), *([harm] if harm else [])])
    if not findings:
        return Diagnosis(None, None, "the observer found nothing wrong", seconds, report)
    return Diagnosis(findings[0].fault, findings[0].rank, findings[0].evidence, seconds, report)
