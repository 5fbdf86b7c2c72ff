"""What the ranks do in the tests of checkpoints and of the state in them."""

from __future__ import annotations

import hashlib
import os
import random
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_course.checkpoint.folder import Checkpointer, CheckpointError
from ddp_course.checkpoint.state import capture_state, load_model, restore_state
from ddp_course.data.sampler import ShardSampler


def state_at(step: int) -> dict:
    return {"w": torch.full((1000,), float(step)), "step": step}


def tear(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


# --- Who writes, who reads -------------------------------------------------------------------------


def save_then_look(rank: int, world_size: int, folder: Path) -> list:
    """Save three times; return what this rank sees at once after each, and what it loads in the end."""
    seen = []
    with Checkpointer(folder, keep=2) as checkpoints:
        assert checkpoints.load_latest() is None
        for step in (5, 10, 15):
            path = checkpoints.save(state_at(step) if rank == 0 else None, step)
            seen.append((path.name, path.exists(), checkpoints.steps()))
            dist.barrier()  # or rank 0 would be at the next step before rank 1 has looked
        found = checkpoints.load_latest()
    return [*seen, found.step, found.state["w"].unique().tolist(), found.passed_over]


def load_with_warnings(rank: int, world_size: int, folders: list[Path]) -> tuple:
    """Load from this rank's own folder; return the step or the error, and what it warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = Checkpointer(folders[rank]).load_latest()
            outcome = (found.step, found.state["step"], found.passed_over)
        except CheckpointError as error:
            outcome = str(error)
    return outcome, [str(warning.message) for warning in said]


def save_with_an_error(rank: int, world_size: int, folder: Path) -> list[str]:
    """Fail for two reasons on rank 0; then show that the ranks are still in step."""
    problems = []
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(state_at(1), 1)
        (folder / ".step-0000000002.pt.unfinished").symlink_to("/dev/full") if rank == 0 else None
        for state in (state_at(2), {"code": load_with_warnings}):
            try:
                checkpoints.save(state, 2)
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")
        checkpoints.save(state_at(3), 3)
        return [*problems, str(checkpoints.load_latest().step)]


# --- Exactly the same run --------------------------------------------------------------------------

ROWS, LOCAL_BATCH = 60, 6  # on two ranks: 5 steps an epoch


class Run:
    """A run in which every part of the state matters."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.set_num_threads(1)
        random.seed(rank), np.random.seed(rank), torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.model = DistributedDataParallel(bare)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        self.sampler = ShardSampler(ROWS, mode="streaming")
        self.batches = iter(())
        torch.manual_seed(100 + rank)  # each rank has a dropout of its own
        self.x, self.y = torch.linspace(-1, 1, 6 * ROWS).view(ROWS, 6).sin(), torch.linspace(0, 1, ROWS)[:, None]

    def next_rows(self) -> torch.Tensor:
        loader = DataLoader(range(ROWS), LOCAL_BATCH, sampler=self.sampler, generator=torch.Generator())
        if self.sampler.consumed == ROWS:
            self.sampler.set_epoch(self.sampler.epoch + 1)
        rows = next(self.batches, None)
        if rows is None:
            self.batches = iter(loader)
            rows = next(self.batches)
        self.sampler.advance(len(rows))
        return rows

    def step(self) -> float:
        rows = self.next_rows()
        x = self.x[rows] + 0.1 * random.random() + 0.1 * float(np.random.normal()) + 0.1 * torch.randn(6)
        loss = nn.functional.mse_loss(self.model(x), self.y[rows])
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss.item()

    def parts(self) -> dict:
        return {name: getattr(self, name) for name in ("optimizer", "scheduler", "scaler", "sampler")}

    def digest(self) -> str:
        tensors = [*self.model.state_dict().values(), *(s for p in self.optimizer.state.values() for s in p.values())]
        scale = torch.tensor(self.scaler.get_scale())  # a power of two: it leaves no trace in the weights
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in [*tensors, scale])).hexdigest()


def straight(rank: int, world_size: int, steps: int) -> tuple[list[float], str]:
    run = Run(rank, world_size)
    return [run.step() for _ in range(steps)], run.digest()


def first_part(rank: int, world_size: int, folder: Path, steps: int) -> list[float]:
    run = Run(rank, world_size)
    losses = [run.step() for _ in range(steps)]
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(capture_state(run.model, **run.parts(), step=steps), steps)
    return losses


def second_part(
    rank: int, world_size: int, folder: Path, steps: int, without: str = ""
) -> tuple[list[float], str, list[str]]:
    """Go on to `steps` in all; leave one part of the state behind if told so."""
    run = Run(rank, world_size)
    state = Checkpointer(folder).load_latest().state
    before, parts = torch.get_rng_state(), run.parts()
    if without in parts:
        del state[without], parts[without]
    notes = restore_state(state, run.model, **parts)
    if without == "generators":
        torch.set_rng_state(before)
    return [run.step() for _ in range(state["step"], steps)], run.digest(), notes


def go_on_alone(rank: int, world_size: int, folder: Path) -> list[str]:
    """Restore what two ranks saved on another number of ranks."""
    run = Run(rank, world_size)
    before = torch.get_rng_state()
    notes = restore_state(Checkpointer(folder).load_latest().state, run.model, **run.parts())
    untouched = torch.equal(before, torch.get_rng_state())
    return [*notes, run.sampler.state_dict(), untouched, run.scheduler.last_epoch]


def bare_and_wrapped(rank: int, world_size: int) -> list:
    """Load the weights of a bare and of a wrapped model into both; return the names captured, and if all is equal."""
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped_source, outcomes = DistributedDataParallel(source), []
    for state in (source.state_dict(), wrapped_source.state_dict()):
        for wrap in (lambda model: model, DistributedDataParallel):
            torch.manual_seed(1)
            target = wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
            load_model(target, state)
            outcomes.append(all(map(torch.equal, target.state_dict().values(), source.state_dict().values())))
    names = [list((capture_state(model) or {"model": []})["model"]) for model in (source, wrapped_source)]
    return [*outcomes, *names]
