"""`train_parallel.py`, lesson 18's program: each mesh of data and tensor parallel has one process's numbers."""

import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, gelu

from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "train_parallel.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def alone() -> list[tuple]:
    """Epoch, loss and last norm of a loop without mesh, shards and sampler."""
    torch.manual_seed(0)
    layers = [nn.Linear(*shape) for _ in range(3) for shape in ((64, 256), (256, 64))]
    model = nn.ModuleList([*layers, nn.Linear(64, 256), nn.Linear(256, 10)])
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    found = []
    for epoch in range(2):
        total = 0.0
        for batch in torch.randperm(1440, generator=torch.Generator().manual_seed(epoch)).split(48):
            x = images[batch]
            for up, down in zip(model[:6:2], model[1:6:2], strict=True):
                x = x + down(gelu(up(x)))
            loss = cross_entropy(model[7](gelu(model[6](x))), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item() * 48
        found.append((epoch, pytest.approx(total / 1440, abs=3e-4), pytest.approx(norm.item(), rel=2e-3)))
    return found


def numbers(said: str) -> list[tuple]:
    lines = re.findall(r"^epoch (\d): loss (\d\.\d{4}), norm (\d+\.\d{4})$", said, re.MULTILINE)
    return [(int(epoch), float(loss), float(norm)) for epoch, loss, norm in lines]


@pytest.mark.parametrize(
    ("world_size", "tensor_size", "shape"),
    [
        *((1, 1, (256, 64)), (2, 2, (128, 64)), (4, 2, (64, 64))),
        *(pytest.param(4, size, (64, 64), marks=pytest.mark.nightly) for size in (1, 4)),
    ],
)
def test_each_mesh_has_the_numbers_of_one_process(alone, world_size, tensor_size, shape, tmp_path):
    first, *others = on_ranks(PROGRAM, world_size, str(tensor_size), folder=tmp_path)
    assert numbers(first) == alone and others == [""] * len(others)
    assert first.splitlines()[-1] == (
        f"mesh ({world_size // tensor_size}, {tensor_size}), rank 0 has {shape} of (256, 64)"
    )


def test_samples_dealt_to_all_ranks_give_other_numbers_and_no_error(alone, tmp_path):
    wrong = edited(PROGRAM, tmp_path, ("**place, ", ""))
    assert numbers(on_ranks(wrong, 4, "2", folder=tmp_path)[0]) != alone


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it(alone, tmp_path: Path):
    assert numbers(by_torchrun(PROGRAM, 4, "2", folder=tmp_path)) == alone
