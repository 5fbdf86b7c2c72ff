"""`train_fsdp.py`, lesson 17's program: any ranks, resumed on others or not, have one process's numbers."""

import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_course import launch
from tests.programs.running import PROGRAMS, RANKS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "train_fsdp.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def built() -> nn.Module:
    torch.manual_seed(0)
    parts = [(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*(nn.Sequential(*part) for part in parts), nn.Linear(64, 10))


def trained(model: nn.Module, rank: int = 0, world_size: int = 1) -> list[tuple]:
    """Epoch, loss and last norm of a loop without shards, DCP and sampler; a rank takes each W-th image."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    found = []
    for epoch in range(3):
        total = 0.0
        for batch in torch.randperm(1440, generator=torch.Generator().manual_seed(epoch)).split(48):
            optimizer.zero_grad()
            loss = cross_entropy(model(x[batch[rank::world_size]]), y[batch[rank::world_size]])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item() * 48
        found.append((epoch, total / 1440, norm.item()))
    return found


@pytest.fixture(scope="module")
def alone() -> list[tuple]:
    return [near(*numbers) for numbers in trained(built())]


def near(epoch: int, loss: float, norm: float) -> tuple:
    return epoch, pytest.approx(loss, abs=3e-4), pytest.approx(norm, rel=2e-3)


def numbers(said: str) -> list[tuple]:
    lines = re.findall(r"^epoch (\d): loss (\d\.\d{4}), norm (\d+\.\d{4})$", said, re.MULTILINE)
    assert len(lines) == len(said.splitlines()), said
    return [(int(epoch), float(loss), float(norm)) for epoch, loss, norm in lines]


def run(folder: Path, world_size: int, *words: str, program: Path = PROGRAM) -> list[tuple]:
    """What rank 0 prints; the others print nothing."""
    first, *others = on_ranks(program, world_size, *words, folder=folder)
    assert others == [""] * len(others)
    return numbers(first)


@pytest.mark.parametrize("world_size", RANKS)
def test_any_number_of_ranks_has_the_numbers_of_one_process(alone, world_size, tmp_path):
    assert run(tmp_path, world_size, "3") == alone
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["0000", "0001", "0002"]


def ddp_losses(rank: int, world_size: int) -> list[tuple]:
    torch.set_num_threads(1)
    return trained(nn.parallel.DistributedDataParallel(built()), rank, world_size)


def test_and_those_of_ddp(alone):
    ranks = launch(ddp_losses, 2, backend="gloo", start_method="forkserver", quiet=True)
    for (epoch, *_, norm), *others in zip(*ranks, strict=True):
        loss = (ranks[0][epoch][1] + ranks[1][epoch][1]) / 2
        assert (epoch, loss, norm) == alone[epoch] and others[0][2] == norm


def test_a_checkpoint_is_resumed_on_another_number_of_ranks(alone, tmp_path):
    assert run(tmp_path, 2, "1") == alone[:1]
    assert run(tmp_path, 4, "2") == alone[1:2]
    assert run(tmp_path, 1, "3") == alone[2:]


def test_without_the_optimizers_state_the_resumed_numbers_differ(alone, tmp_path):
    broken = edited(
        PROGRAM,
        tmp_path,
        ("set_state_dict(model, optimizer, **state)", 'set_model_state_dict(model, state["model_state_dict"])'),
    )
    broken = edited(
        broken,
        tmp_path,
        (
            "    state = state_of(model, optimizer, 0)\n",
            '    state = {"model_state_dict": states.get_model_state_dict(model), "epoch": 0}\n',
        ),
    )
    assert run(tmp_path, 2, "1") == alone[:1]
    assert run(tmp_path, 2, "2", program=broken) != alone[1:2]


def test_bfloat16_is_near_and_not_equal(alone, tmp_path):
    ((_, loss, norm),) = run(tmp_path, 2, "1", "bf16")
    assert (0, loss, norm) != alone[0] and loss == pytest.approx(trained(built())[0][1], rel=0.02)


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it(alone, tmp_path):
    assert numbers(by_torchrun(PROGRAM, 2, "3", folder=tmp_path)) == alone
