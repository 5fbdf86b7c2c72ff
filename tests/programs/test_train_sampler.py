"""`train_sampler.py`, lesson 05's program: any ranks, stopped or not, print the numbers of one process."""

import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_course import RankError
from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "train_sampler.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def alone() -> list[tuple]:
    """Epoch, test loss, right answers and test images of a loop without ranks, sampler, DDP and checkpoint."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float(), torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for epoch in range(4):
        for batch in torch.randperm(1440, generator=torch.Generator().manual_seed(epoch)).split(48):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            logits = model(x[1440:])
        right = (logits.argmax(dim=1) == y[1440:]).sum().item()
        found.append((epoch, pytest.approx(cross_entropy(logits, y[1440:]).item(), abs=5e-4), right, 357))
    return found


def numbers(said: str) -> list[tuple]:
    lines = re.findall(r"^epoch (\d): loss (\d\.\d{4}), (\d+) of (\d+) right$", said, re.MULTILINE)
    assert len(lines) == len(said.splitlines()), said
    return [(int(epoch), float(loss), int(right), int(count)) for epoch, loss, right, count in lines]


def lines(folder: Path, world_size: int, *words: str, program: Path = PROGRAM) -> list[tuple]:
    """What rank 0 prints; the others print nothing."""
    first, *others = on_ranks(program, world_size, *words, folder=folder)
    assert others == [""] * len(others)
    return numbers(first)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_they_have_the_numbers_of_one_process(alone, world_size, tmp_path):
    assert lines(tmp_path, world_size) == alone
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_a_stopped_run_resumes_with_other_numbers_of_ranks(alone, tmp_path):
    assert lines(tmp_path, 4, "--stop", "45") == alone[:1]
    assert lines(tmp_path, 3, "--stop", "75") == alone[1:2]
    assert lines(tmp_path, 2) == alone[2:]


def test_without_the_position_an_epoch_begins_again(alone, tmp_path):
    edit = ("set_epoch(epoch, consumed)\n        for", "set_epoch(epoch)\n        for")
    broken = edited(PROGRAM, tmp_path, edit)
    assert lines(tmp_path, 2, "--stop", "75") == alone[:2]
    found = lines(tmp_path, 2, program=broken)
    assert [epoch for epoch, *_ in found] == [2, 3] and all(a != b for a, b in zip(found, alone[2:], strict=True))


def test_a_batch_that_the_ranks_cannot_share_is_refused(tmp_path):
    edit = ("GLOBAL_BATCH, SAVE_EVERY = 4, 48", "GLOBAL_BATCH, SAVE_EVERY = 4, 49")
    with pytest.raises(RankError, match="2 ranks can't share 49 images evenly"):
        lines(tmp_path, 2, program=edited(PROGRAM, tmp_path, edit))


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it(alone, tmp_path):
    assert numbers(by_torchrun(PROGRAM, 2, folder=tmp_path)) == alone
