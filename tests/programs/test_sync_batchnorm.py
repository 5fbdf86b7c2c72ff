"""`sync_batchnorm.py`, lesson 08's program: with the statistics of all ranks it prints the numbers of one process."""

import re

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_course import RankError
from tests.programs.running import PROGRAMS, RANKS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "sync_batchnorm.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def alone(parts: int = 1, steps: int = 90) -> list[tuple]:
    """Step, test loss and right answers of a loop without ranks; each part of a batch has its own statistics."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).view(-1, 1, 8, 8), torch.tensor(labels)
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(8), nn.BatchNorm2d(16)]
    model = [nn.Conv2d(1, 8, 3, stride=2), norms[0], nn.ReLU(), nn.Conv2d(8, 16, 3), norms[1], nn.ReLU()]
    model = nn.Sequential(*model, nn.Flatten(), nn.Linear(16, 10)).double()
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step, batch in enumerate(torch.randperm(1440)[: 4 * steps].split(4), start=1):
        optimizer.zero_grad()
        for place, part in enumerate(batch.chunk(parts)):
            for norm in norms:
                norm.momentum = 0.0 if place else 0.1  # rank 0's running statistics are those of the first part
            (cross_entropy(model(x[part]), y[part]) / parts).backward()
        optimizer.step()
        if step % (steps // 3) == 0:
            with torch.no_grad():
                logits = model.eval()(x[1440:])
            model.train()
            right = (logits.argmax(dim=1) == y[1440:]).sum().item()
            found.append((step, pytest.approx(cross_entropy(logits, y[1440:]).item(), abs=2e-6), right))
    return found


def numbers(said: str) -> list[tuple]:
    lines = re.findall(r"^step (\d+): test loss (\d\.\d{6}), (\d+) of 357 right$", said, re.MULTILINE)
    assert len(lines) == len(said.splitlines()), said
    return [(int(step), float(loss), int(right)) for step, loss, right in lines]


def lines(world_size: int, *words: str, program=PROGRAM, per_node: int = 0) -> list[tuple]:
    """What rank 0 prints; the others print nothing."""
    first, *others = on_ranks(program, world_size, *words, per_node=per_node)
    assert others == [""] * len(others)
    return numbers(first)


@pytest.mark.parametrize("world_size", RANKS)
def test_any_number_of_ranks_has_the_numbers_of_one_process(world_size):
    assert lines(world_size) == alone()


def test_statistics_of_a_node_and_of_a_rank_are_those_of_parts(tmp_path):
    """In few steps: with two numbers for each channel training is chaotic, and 1e-15 becomes 1e-3 in 30 steps."""
    short = edited(PROGRAM, tmp_path, ("STEPS, GLOBAL_BATCH = 90", "STEPS, GLOBAL_BATCH = 9"), ("% 30", "% 3"))
    parts = alone(parts=2, steps=9)
    assert all(part != whole for part, whole in zip(alone(parts=2), alone(), strict=True))
    assert lines(2, "--statistics", "rank", program=short) == parts
    assert lines(4, "--statistics", "node", program=short, per_node=2) == parts


def test_a_sum_that_sends_no_gradient_back_shows(tmp_path):
    edit = ("        dist.all_reduce(total, group=ctx.group)\n", "")
    found = lines(2, program=edited(PROGRAM, tmp_path, edit))
    assert all(one != other for one, other in zip(found, alone(), strict=True))


def test_a_batch_that_the_ranks_cannot_share_is_refused():
    with pytest.raises(RankError, match="3 ranks can't share 4 images evenly"):
        lines(3)


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it():
    assert numbers(by_torchrun(PROGRAM, 2)) == alone()
