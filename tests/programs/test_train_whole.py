"""`train_whole.py`, lesson 11's program: exact on any ranks, and stopped or not the same run, also in bfloat16."""

import math
import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from ddp_course import RankError
from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "train_whole.py"
STEPS, WARMUP = 150, 30
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def share(step: int) -> float:
    if step < WARMUP:
        return (step + 1) / WARMUP
    return (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


@pytest.fixture(scope="module")
def alone() -> list[tuple]:
    """Epoch, loss, share of right answers and last norm of a loop without ranks, sampler, DDP, scheduler and file."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float(), torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    found, step = [], 0
    for epoch in range(5):
        total = 0.0
        for batch in torch.randperm(1440, generator=torch.Generator().manual_seed(epoch)).split(48):
            optimizer.param_groups[0]["lr"] = 0.003 * share(step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
            for p in model.parameters():
                p.grad *= min(1.0, 1 / (norm + 1e-6))
            optimizer.step()
            total, step = total + loss.item() / 30, step + 1
        with torch.no_grad():
            right = (model(x[1440:]).argmax(dim=1) == y[1440:]).float().mean().item()
        found.append(
            (epoch, pytest.approx(total, abs=2e-4), pytest.approx(right, abs=1e-4), pytest.approx(norm, abs=2e-3))
        )
    return found


@pytest.fixture(scope="module")
def precise(tmp_path_factory) -> Path:
    """The program, which prints more digits of the norm."""
    return edited(PROGRAM, tmp_path_factory.mktemp("program"), ("{norm:.2f}", "{norm:.6f}"))


def numbers(said: str) -> list[tuple]:
    lines = re.findall(r"^epoch (\d): loss (\d\.\d{4}), right (\d\.\d{4}), norm (\d\.\d{2,6})$", said, re.MULTILINE)
    assert len(lines) == len(said.splitlines()), said
    return [(int(epoch), *map(float, rest)) for epoch, *rest in lines]


def lines(folder: Path, world_size: int, *words: str, program: Path = PROGRAM) -> list[tuple]:
    """What rank 0 prints; the others print nothing."""
    first, *others = on_ranks(program, world_size, *words, folder=folder)
    assert others == [""] * len(others)
    return numbers(first)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_exact_they_have_the_numbers_of_one_process(alone, precise, world_size, tmp_path):
    assert lines(tmp_path, world_size, "--exact", program=precise) == alone
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_a_stopped_run_resumes_with_the_bits_of_an_uninterrupted_one(tmp_path):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    straight.mkdir(), stopped.mkdir()
    whole = lines(straight, 2)
    assert lines(stopped, 2, "--stop", "100") == whole[:3]
    assert lines(stopped, 2) == whole[3:]
    kept = [torch.load(folder / "run.pt", weights_only=True) for folder in (straight, stopped)]
    torch.testing.assert_close(*kept, rtol=0, atol=0)
    assert kept[0]["epoch"] == 5 and kept[0]["rate"]["last_epoch"] == STEPS


def test_an_exact_run_resumes_on_another_number_of_ranks(alone, precise, tmp_path):
    assert lines(tmp_path, 4, "--exact", "--stop", "70", program=precise) == alone[:2]
    assert lines(tmp_path, 3, "--exact", program=precise) == alone[2:]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('        rate.load_state_dict(state["rate"])\n', ""),
        ("hash((SEED, epoch, rank))", "hash((SEED, first, rank))"),
    ],
    ids=["no schedule", "no seed of the epoch"],
)
def test_without_a_part_of_the_state_the_resumed_run_is_another(old, new, tmp_path):
    broken = edited(PROGRAM, tmp_path, (old, new))
    straight = lines(tmp_path, 2, program=broken)
    (tmp_path / "run.pt").unlink()
    assert lines(tmp_path, 2, "--stop", "100", program=broken) == straight[:3]
    resumed = lines(tmp_path, 2, program=broken)
    assert [epoch for epoch, *_ in resumed] == [3, 4] and resumed != straight[3:]


def test_a_batch_that_the_ranks_cannot_share_is_refused(tmp_path):
    broken = edited(PROGRAM, tmp_path, ("GLOBAL_BATCH, WARMUP, SEED = 5, 48", "GLOBAL_BATCH, WARMUP, SEED = 5, 45"))
    with pytest.raises(RankError, match="2 ranks can't share 45 images evenly"):
        lines(tmp_path, 2, program=broken)


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it(alone, precise, tmp_path):
    assert numbers(by_torchrun(precise, 2, "--exact", folder=tmp_path)) == alone
