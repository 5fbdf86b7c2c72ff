"""A whole training program in one page, healthy, of which each silent fault changes one part.

`train` draws rows, takes steps, evaluates, saves and loads, with a `TrainingObserver` beside it that notes all of
this. Its parts are arguments, and their defaults are right. A fault of `silent_*.py` gives it one part that is wrong.
The observer is the same in every run: it is not told which part that is.

The data are made up, four clouds of points, so that a run takes a fraction of a second on a CPU.

Left out on purpose: GPUs. What is wrong here is wrong there too; `silent_files.py` says what only a GPU shows.
Read next: `silent_rows.py`.

Shapes: N rows of a batch, 16 features, 4 classes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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
from ddp_course.launcher import RankPool
from ddp_course.metrics import mean_over_ranks
from ddp_course.parallel.syncbn import SyncBatchNorm

LOCAL_BATCH = 16
REFERENCE = Reference(global_batch=LOCAL_BATCH, lr=0.05)  # found good by one process, before there were ranks
CPU = torch.device("cpu")


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


def shard_of_rows(rank: int, world_size: int) -> DataLoader:
    """Draw from this rank's own rows."""
    return DataLoader(TRAIN_ROWS, LOCAL_BATCH, sampler=DistributedSampler(TRAIN_ROWS, world_size, rank))


def tell_the_epoch(loader: DataLoader, epoch: int) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


def exact_test_rows(rank: int, world_size: int) -> DataLoader:
    """Evaluate each row on exactly one rank, though the ranks then have 16 and 15."""
    return DataLoader(Subset(TEST_ROWS, exact_shard(len(TEST_ROWS), world_size, rank)), batch_size=8)


def sum_and_count(loss_sum: float, rows: int) -> float:
    return mean_over_ranks(loss_sum, rows, CPU)


def save_on_rank_0(replica: nn.Module, path: Path, observer: TrainingObserver) -> None:
    """Let rank 0 write, with the model's own names."""
    if dist.get_rank() == 0:
        with observer.writing(path):
            torch.save(replica.module.state_dict(), path)


def load_strictly(path: Path, observer: TrainingObserver) -> nn.Module:
    """Put the file into a model that is not wrapped."""
    model = build()
    state = torch.load(path, map_location=CPU, weights_only=True)
    observer.loaded(state, model)
    model.load_state_dict(state)
    return model


# --- The program -----------------------------------------------------------------------------------


def train(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    synchronise: Callable[[nn.Module], nn.Module] = SyncBatchNorm.convert,
    lr: float = REFERENCE.lr * 2,  # the linear rule, for two ranks
    rows: Callable[[int, int], DataLoader] = shard_of_rows,
    begin_epoch: Callable[[DataLoader, int], None] = tell_the_epoch,
    test_rows: Callable[[int, int], DataLoader] = exact_test_rows,
    mean: Callable[[float, int], float] = sum_and_count,
    save: Callable[[nn.Module, Path, TrainingObserver], None] = save_on_rank_0,
    load: Callable[[Path, TrainingObserver], nn.Module] = load_strictly,
) -> list[Finding]:
    """Train two epochs, evaluate, save and load, and look at it all together with the other ranks.

    Returns:
        What the observer finds wrong, the same on every rank.
    Collective: DDP's and SyncBatchNorm's; one all_reduce of the loss; one barrier; `TrainingObserver.look`.
    """
    torch.manual_seed(0)
    replica = DistributedDataParallel(synchronise(build()))
    optimizer = torch.optim.SGD(replica.parameters(), lr)
    loader, test_loader = rows(rank, world_size), test_rows(rank, world_size)
    observer = TrainingObserver(replica, optimizer, reference=REFERENCE)
    observer.training_rows(loader)
    observer.evaluation_rows(test_loader)
    for epoch in range(2):
        begin_epoch(loader, epoch)
        for x_NF, label_N in loader:
            optimizer.zero_grad()
            F.cross_entropy(replica(x_NF), label_N).backward()
            optimizer.step()
    evaluate(replica.module, test_loader, mean, observer)
    save(replica, folder / "model.pt", observer)
    dist.barrier()  # nobody reads before it is written
    load(folder / "model.pt", observer)
    return observer.look()


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader, mean: Callable[[float, int], float], observer: TrainingObserver
) -> float:
    """Report the loss of the test rows over all ranks, and tell the observer of each batch."""
    loss_sum, rows = 0.0, 0
    model.eval()
    for x_NF, label_N in loader:
        loss = F.cross_entropy(model(x_NF), label_N)
        observer.batch("test loss", loss, len(label_N))
        loss_sum, rows = loss_sum + loss.item() * len(label_N), rows + len(label_N)
    reported = mean(loss_sum, rows)
    observer.reported("test loss", reported)
    return reported


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


def diagnosis(findings: list[Finding], seconds: float, harm: str = "") -> Diagnosis:
    """Return the first finding as the diagnosis; its report holds what else was found, and what the fault costs."""
    report = "\n".join([*map(str, findings[1:]), *([harm] if harm else [])])
    if not findings:
        return Diagnosis(None, None, "the observer found nothing wrong", seconds, report)
    return Diagnosis(findings[0].fault, findings[0].rank, findings[0].evidence, seconds, report)
