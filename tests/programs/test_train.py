"""`train.py`, lesson 00's program: 1, 2 or 4 ranks print what one process computes.

And what the lesson takes away from it shows in the losses.
"""

import re

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "train.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


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


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_print_the_losses_of_one_process(alone, world_size):
    assert printed("".join(on_ranks(PROGRAM, world_size))) == pytest.approx(alone, abs=2e-4)


def test_torchrun_runs_it(alone):
    assert printed(by_torchrun(PROGRAM, 2)) == pytest.approx(alone, abs=2e-4)


def test_with_the_model_in_place_of_its_replica_only_the_losses_differ(alone, tmp_path):
    broken = edited(PROGRAM, tmp_path, ("replica(x.to(device))", "model(x.to(device))"))
    found = printed("".join(on_ranks(broken, 2)))
    assert found[-1] < found[0] / 2 and all(abs(a - b) > 0.01 for a, b in zip(found, alone, strict=True))
