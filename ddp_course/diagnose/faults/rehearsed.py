"""How is a fault shown that stops nothing? By a rehearsal of one healthy training program with an edit of it.

`PROGRAM` trains, saves, loads and evaluates as it should. A silent fault replaces one part of its text, most of them
one line. `ddp-course rehearse` runs the program on one rank and on two and compares them. It is not told which part
that was, or whether any was.

Read next: `silent.py`, the faults; `rehearsal/rehearse.py`, the tool.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ddp_course.diagnose.faults.fault import Diagnosis
from ddp_course.rehearsal.rehearse import rehearse

PROGRAM = '''\
"""Train a small classifier on all ranks, save it, and report the loss of what was saved."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from ddp_course.parallel.syncbn import SyncBatchNorm  # torch's own needs GPUs


def make_data(samples, seed):
    """Points of four overlapping clouds."""
    centres = 1.2 * torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (samples,), generator=source)
    return TensorDataset(centres[label] + torch.randn(samples, 16, generator=source), label)


def make_model():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    loss_sum, count = 0.0, 0
    for x, y in loader:
        loss_sum += F.cross_entropy(model(x), y, reduction="sum").item()
        count += len(x)
    both = torch.tensor([loss_sum, count])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test = make_data(200, seed=1), make_data(31, seed=2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world_size)), batch_size=16)
    model = SyncBatchNorm.convert(make_model())
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world_size)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")
    dist.barrier()  # no rank reads the file before it is whole
    saved = make_model()
    saved.load_state_dict(torch.load("model.pt", map_location="cpu", weights_only=True))
    loss = evaluate(saved, test_loader)
    if rank == 0:
        print(f"loss {loss:.3f}")
    dist.destroy_process_group()


main()
'''
# What `rehearse` calls the faults that have another name here.
NAMES = {"same-rows": "missing-sampler", "unguarded-save": "several-writers", "local-batchnorm": "batchnorm-drift"}


@dataclass(frozen=True)
class Rehearsed:
    """A program; calling it rehearses it on one rank and on two, and returns the first finding as the diagnosis."""

    text: str

    def __call__(self) -> Diagnosis:
        """Collective: the program's own, on fresh ranks.

        Raises:
            RuntimeError: the program failed; a silent one should not.
        """
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder:
            script = Path(folder, "train.py")
            script.write_text(self.text)
            found = rehearse(script)
        seconds = time.monotonic() - begin
        if found.failure:
            raise RuntimeError(f"the rehearsed program did not run to its end: {found.failure}")
        if not found.findings:
            return Diagnosis(None, None, "rehearsed on 1 rank and on 2: nothing wrong was seen", seconds)
        first = found.findings[0]
        report = "\n".join(each.show("train.py") for each in found.findings)
        evidence = f"`ddp-course rehearse` says {first.fault}: {first.evidence}"
        return Diagnosis(NAMES.get(first.fault, first.fault), None, evidence, seconds, report)


def edited(*edits: tuple[str, str]) -> Rehearsed:
    """Return the program with these parts of its text replaced."""
    text = PROGRAM
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return Rehearsed(text)


HEALTHY = Rehearsed(PROGRAM)
