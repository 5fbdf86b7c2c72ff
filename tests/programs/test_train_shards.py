"""`train_shards.py`, lesson 01's program: any ranks and any micro-batches print the losses of one process."""

import re

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "train_shards.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def alone() -> list:
    """The mean losses of a loop without ranks, micro-batches and LinearLR: a mean loss of each whole batch."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels[:1437] / 16).float(), torch.tensor(labels[:1437])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    order = torch.Generator().manual_seed(0)
    found, step = [], 0
    for _ in range(3):
        total = 0.0
        for batch in torch.randperm(1437, generator=order).split(64):
            step += 1
            optimizer.param_groups[0]["lr"] = 0.4 * min(1, step / 20)
            loss = cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        found.append(pytest.approx(total / 1437, abs=5e-4))
    return found


def losses(said: str) -> list[float]:
    lines = re.findall(r"^epoch (\d): loss (\d\.\d{4})$", said, re.MULTILINE)
    assert len(lines) == len(said.splitlines()) and [int(epoch) for epoch, _ in lines] == [0, 1, 2], said
    return [float(loss) for _, loss in lines]


# 3 and 5 divide neither the batch of 64 nor the last one of 29.
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 64), (1, 5), (2, 8), (3, 64), (4, 5)])
def test_it_has_the_losses_of_one_process(alone, world_size, micro_batch):
    first, *others = on_ranks(PROGRAM, world_size, "--micro-batch", str(micro_batch))
    assert losses(first) == alone and others == [""] * len(others)


def test_a_rank_without_samples_adds_nothing():
    options = ("--batch", "1436", "--rate", "0.1")  # the last batch is one sample, and rank 0's
    (alone,), (together, _) = on_ranks(PROGRAM, 1, *options), on_ranks(PROGRAM, 2, *options)
    assert losses(together) == pytest.approx(losses(alone), abs=2e-4)


def test_without_the_weight_of_a_sample_the_shards_are_not_the_batch(alone, tmp_path):
    broken = edited(PROGRAM, tmp_path, ("loss / len(batch)", "loss / len(part) / dist.get_world_size()"))
    found = losses(on_ranks(broken, 2, "--micro-batch", "20")[0])
    assert all(abs(loss - right.expected) > 5e-3 for loss, right in zip(found, alone, strict=True))


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it(alone):
    assert losses(by_torchrun(PROGRAM, 2, "--micro-batch", "8")) == alone


def test_dropout_leaves_the_order_alone_however_many_micro_batches_a_rank_has(alone, tmp_path):
    changed = edited(PROGRAM, tmp_path, ("nn.ReLU(),", "nn.ReLU(), nn.Dropout(1e-9),"))  # draws, and drops nothing
    assert losses(on_ranks(changed, 3, "--micro-batch", "7")[0]) == alone
