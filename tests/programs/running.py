"""How do tests run a program of `programs/`? On ranks that have torch already, in a second; and by torchrun."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from ddp_course import launch
from tests.warm.plugin import start_of

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "programs"
RANKS = [1, 2, pytest.param(4, marks=pytest.mark.nightly)]  # for programs of which four take long


def on_ranks(program: Path, world_size: int, *words: str, folder: Path = PROGRAMS, per_node: int = 0) -> list[str]:
    """Return what each rank prints.

    Args:
        words: the program's own arguments.
        folder: in which it runs.
        per_node: ranks of one node, where there are several.
    Raises:
        RankError: as it does on the ranks.
    """
    arguments = (program, words, folder, per_node or world_size)
    return launch(run_program, world_size, arguments, init=False, start_method="forkserver", quiet=True, limit_s=200)


def run_program(rank: int, world_size: int, program: Path, words: tuple[str, ...], folder: Path, per_node: int) -> str:
    """What torchrun does to a program."""
    local = {"LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    os.environ.update({name: str(value) for name, value in {"RANK": rank, "WORLD_SIZE": world_size, **local}.items()})
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.path.insert(0, str(program.parent))
    sys.argv = [program.name, *words]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(program), run_name="__main__")
    return said.getvalue()


def by_torchrun(program: Path, world_size: int, *words: str, folder: Path = PROGRAMS) -> str:
    """Return what all ranks print, started by the line of the program's docstring, with so many ranks."""
    options = re.search(rf"^ *torchrun (.*){re.escape(program.name)}", program.read_text(), re.MULTILINE)[1].split()
    start = [start_of("torchrun"), *options, "--standalone", f"--nproc-per-node={world_size}"]
    command, environment = [*start, str(program), *words], os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def edited(program: Path, folder: Path, *edits: tuple[str, str]) -> Path:
    """Write the program with other text into a folder; each text that is replaced is there once."""
    source = program.read_text()
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (folder / program.name).write_text(source)
    return folder / program.name


def losses_in(said: str, epochs: str) -> list[float]:
    """Return the losses of lines that begin with `epoch N: loss`, which must be these epochs'."""
    found = re.findall(r"epoch (\d): loss (\d\.\d{4})\n", said)
    assert [epoch for epoch, _ in found] == list(epochs)
    return [float(loss) for _, loss in found]


@functools.cache
def losses_of_one_process(epochs: int) -> tuple[float, ...]:
    """Lesson 00's training in a process that has no ranks, no sampler and no DDP: the mean loss of each epoch."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for epoch in range(epochs):
        total = 0.0
        for batch in torch.randperm(1440, generator=torch.Generator().manual_seed(epoch)).split(32):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * 32
        losses.append(total / 1440)
    assert losses[-1] < losses[0] / 2
    return tuple(losses)
