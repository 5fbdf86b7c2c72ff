"""`train_watchdog.py`, lesson 12's program: the numbers of one process, or the rank and the line of a hang."""

import os
import re
import subprocess
import sys

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "train_watchdog.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process that has no ranks, no sampler, no DDP and no watchdog."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for epoch in range(3):
        total = 0.0
        for batch in torch.randperm(1440, generator=torch.Generator().manual_seed(epoch)).split(32):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * 32
        losses.append(total / 1440)
    assert losses[-1] < losses[0] / 3
    return losses


def printed(said: str, epochs: str = "012") -> list[float]:
    assert re.findall(r"epoch (\d):", said) == list(epochs)
    return [float(loss) for loss in re.findall(r"loss (\d\.\d{4})\n", said)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_print_the_losses_of_one_process_and_write_no_stack(alone, world_size, tmp_path):
    assert printed("".join(on_ranks(PROGRAM, world_size, folder=tmp_path))) == pytest.approx(alone, abs=2e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank{rank}.stack" for rank in range(world_size)]
    assert all(path.read_text() == "" for path in tmp_path.iterdir())


def test_torchrun_runs_it(alone, tmp_path):
    assert printed(by_torchrun(PROGRAM, 2, folder=tmp_path)) == pytest.approx(alone, abs=2e-4)


def hang(program, world_size: int, *words: str, folder) -> tuple[str, str, list[list[str]]]:
    """Return both outputs of a run that must fail, and the innermost two functions of each rank's first stack."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [*start, str(program), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    stacks = [(folder / f"rank{rank}.stack").read_text() for rank in range(world_size)]
    return done.stdout, done.stderr, [re.findall(r" in (\S+)$", stack, re.MULTILINE)[:2] for stack in stacks]


WAITS, STUCK = ["monitored_barrier", "check"], ["read_slowly", "<module>"]


def test_a_hang_names_the_rank_and_leaves_the_line_of_each(alone, tmp_path):
    said, errors, innermost = hang(PROGRAM, 4, "--stuck", "2", "--limit", "10", folder=tmp_path)
    assert printed(said, "0") == pytest.approx(alone[:1], abs=2e-4)
    assert "RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 20000 ms" in errors
    assert innermost == [WAITS, WAITS, STUCK, WAITS]


def test_rank_0_that_hangs_at_the_first_batch_leaves_its_line_and_the_others_point_to_it(tmp_path):
    program = edited(PROGRAM, tmp_path, ("if epoch == 1 and", "if epoch == 0 and"))
    said, errors, innermost = hang(program, 2, "--stuck", "0", "--limit", "5", folder=tmp_path)
    assert printed(said, "") == []
    assert "Rank 1 successfully reached monitoredBarrier, but received errors while waiting" in errors
    assert innermost == [STUCK, WAITS]
