"""`train_checkpoint.py`, lesson 10's program: a killed run that resumes is the uninterrupted run, bit for bit.

Without dropout, whose masks differ by rank, any number of ranks has the losses of one process.
"""

import math
import os
import re
import signal
from itertools import count
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_course import RankError, launch
from tests.programs.running import PROGRAMS, RANKS, by_torchrun, run_program

PROGRAM = PROGRAMS / "train_checkpoint.py"
STEP_IN_EPOCH_3 = 150  # an epoch has 45 steps
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(rank: int, world_size: int, checkpoint: Path, kill_in_step: int, dropout: bool) -> str:
    """Run the program; rank 1 may be killed in a step."""
    steps = count(1)

    def die(*_: object) -> None:
        if next(steps) == kill_in_step and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_pre_hook(die)
    if not dropout:
        nn.Dropout.forward = lambda self, x: x
    return run_program(rank, world_size, PROGRAM, (str(checkpoint),), checkpoint.parent, world_size)


def on_ranks(world_size: int, checkpoint: Path, kill_in_step: int = 0, dropout: bool = True) -> dict[int, float]:
    """Return the losses that the ranks printed, by epoch."""
    settings = {"init": False, "start_method": "forkserver", "quiet": True, "limit_s": 100}
    said = "".join(launch(run, world_size, (checkpoint, kill_in_step, dropout), **settings))
    return {int(epoch): float(loss) for epoch, loss in re.findall(r"epoch (\d): loss (\d\.\d{4})\n", said)}


def content(checkpoint: Path) -> dict:
    return torch.load(checkpoint, weights_only=True)


def test_a_killed_run_that_resumes_is_the_uninterrupted_run(tmp_path):
    straight = on_ranks(2, tmp_path / "straight.pt")
    with pytest.raises(RankError, match="SIGKILL"):
        on_ranks(2, tmp_path / "killed.pt", STEP_IN_EPOCH_3)
    assert content(tmp_path / "killed.pt")["epoch"] == 3
    resumed = on_ranks(2, tmp_path / "killed.pt")
    assert resumed == {epoch: straight[epoch] for epoch in (3, 4)}

    expected, found = content(tmp_path / "straight.pt"), content(tmp_path / "killed.pt")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found["rng_states"][0]["cpu"], found["rng_states"][1]["cpu"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.pt", "straight.pt"]


@pytest.fixture(scope="module")
def alone() -> dict[int, float]:
    """The losses of one process that has no ranks, no sampler, no DDP, no schedule object and no dropout."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = {}
    for epoch in range(5):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * epoch / 5))
        total = 0.0
        for batch in torch.randperm(1440, generator=torch.Generator().manual_seed(epoch)).split(32):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * 32
        losses[epoch] = total / 1440
    assert losses[4] < losses[0] / 5
    return losses


@pytest.mark.parametrize("world_size", RANKS)
def test_ranks_have_the_losses_of_one_process(alone, tmp_path, world_size):
    found = on_ranks(world_size, tmp_path / "run.pt", dropout=False)
    assert found == pytest.approx(alone, abs=2e-4)


def test_a_run_resumes_on_another_number_of_ranks(alone, tmp_path):
    with pytest.raises(RankError, match="SIGKILL"):
        on_ranks(2, tmp_path / "run.pt", STEP_IN_EPOCH_3, dropout=False)
    found = on_ranks(4, tmp_path / "run.pt", dropout=False)
    assert found == pytest.approx({epoch: alone[epoch] for epoch in (3, 4)}, abs=2e-4)


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it(tmp_path):
    said = by_torchrun(PROGRAM, 2, "run.pt", folder=tmp_path)
    assert re.findall(r"epoch (\d):", said) == list("01234")
    assert content(tmp_path / "run.pt")["epoch"] == 5
