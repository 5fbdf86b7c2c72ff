"""`train.py`, lesson 00's program: the lesson has the same text, and 1, 2 or 4 ranks print what one process computes.

And what the lesson takes away from it shows in the losses.
"""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from ddp_course import launch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "programs" / "train.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_the_lesson_writes_this_program():
    cells = nbformat.read(ROOT / "notebooks" / "00_start_here.ipynb", as_version=4).cells
    (written,) = (cell.source for cell in cells if cell.source.startswith("%%writefile train.py\n"))
    assert written.partition("\n")[2].strip() == PROGRAM.read_text().strip()


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process that has no ranks, no sampler and no DDP."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for epoch in range(5):
        total = 0.0
        for batch in torch.randperm(1440, generator=torch.Generator().manual_seed(epoch)).split(32):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * 32
        losses.append(total / 1440)
    assert losses[-1] < losses[0] / 5
    return losses


def printed(said: str) -> list[float]:
    assert re.findall(r"epoch (\d):", said) == list("01234")
    return [float(loss) for loss in re.findall(r"loss (\d\.\d{4})\n", said)]


def on_ranks(world_size: int, program: Path) -> str:
    return "".join(launch(run_program, world_size, (program,), init=False, start_method="forkserver", limit_s=100))


def run_program(rank: int, world_size: int, program: Path) -> str:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(program), run_name="__main__")
    return said.getvalue()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_print_the_losses_of_one_process(alone, world_size):
    assert printed(on_ranks(world_size, PROGRAM)) == pytest.approx(alone, abs=2e-4)


def test_it_runs_by_the_line_of_its_docstring(alone):
    (words,) = re.findall(r"^torchrun (.*)train\.py$", PROGRAM.read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "torch.distributed.run", *words.split(), str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    assert printed(done.stdout) == pytest.approx(alone, abs=2e-4)


def test_with_the_model_in_place_of_its_replica_only_the_losses_differ(alone, tmp_path):
    old, new = "replica(x.to(device))", "model(x.to(device))"
    assert PROGRAM.read_text().count(old) == 1
    broken = tmp_path / "train.py"
    broken.write_text(PROGRAM.read_text().replace(old, new))
    found = printed(on_ranks(2, broken))
    assert found[-1] < found[0] / 2 and all(abs(a - b) > 0.01 for a, b in zip(found, alone, strict=True))
