"""`train_logging.py` logs the numbers of one process on any number of ranks."""

import json
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "train_logging.py"
NAMES = {"loss", "accuracy", "grad_norm", "test_loss", "test_accuracy"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def expected() -> list[dict[str, float]]:
    """Every line of the log, computed in one process without a group, each number from whole batches."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float(), torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer, lines, step = torch.optim.SGD(model.parameters(), lr=0.2), [], 0
    losses, right = [], []
    for epoch in range(3):
        order = torch.randperm(1440, generator=torch.Generator().manual_seed(epoch))  # as DistributedSampler has it
        for batch in order.split(32):
            logits = model(x[batch])
            each = nn.functional.cross_entropy(logits, y[batch], reduction="none")
            optimizer.zero_grad()
            each.mean().backward()
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            assert norm < 5  # so that nothing is clipped
            optimizer.step()
            losses, right = [*losses, each.detach()], [*right, logits.argmax(dim=1) == y[batch]]
            step += 1
            if step % 15 == 0:
                loss, accuracy = torch.cat(losses).mean().item(), torch.cat(right).double().mean().item()
                lines.append({"step": step, "loss": loss, "accuracy": accuracy, "grad_norm": norm.item()})
                losses, right = [], []
        with torch.no_grad():
            logits = model(x[1440:])
        loss, hits = nn.functional.cross_entropy(logits, y[1440:]).item(), logits.argmax(dim=1) == y[1440:]
        lines.append({"step": step, "test_loss": loss, "test_accuracy": hits.double().mean().item()})
    assert len(lines) == 12 and lines[-1]["test_loss"] < lines[3]["test_loss"] / 2
    return lines


def check(log: Path, said: str, expected: list[dict[str, float]]) -> None:
    """The file has a JSON object for each line, and what is printed is the same without the speed."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    shown = [{name: line[name] for name in line if name in NAMES | {"step"}} for line in lines]
    assert shown == [pytest.approx(line, abs=2e-5) for line in expected]
    assert [line["samples"] for line in lines if "test_loss" in line] == [357] * 3  # each sample once
    assert all(line["samples_per_s"] > 0 for line in lines if "loss" in line)
    for line, printed in zip(lines, said.splitlines(), strict=True):
        numbers = ", ".join(f"{name} {line[name]:.4f}" for name in line if name in NAMES)
        assert printed == f"step {line['step']:3}: {numbers}"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_log_has_the_numbers_of_one_process_and_one_rank_writes(world_size, expected, tmp_path):
    first, *others = on_ranks(PROGRAM, world_size, str(tmp_path / "run.jsonl"))
    check(tmp_path / "run.jsonl", first, expected)
    assert others == [""] * (world_size - 1)
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it(expected, tmp_path):
    said = by_torchrun(PROGRAM, 2, str(tmp_path / "run.jsonl"))
    check(tmp_path / "run.jsonl", said, expected)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("    dist.all_reduce(totals)\n", ""),  # rank 0's numbers alone
        ("Subset(test, range(rank, len(test), world_size))", "Subset(test, range(len(test)))"),  # all on each rank
        ("    totals.zero_()\n", ""),  # every line has all steps from the first on
    ],
)
def test_a_broken_log_is_seen(right, wrong, expected, tmp_path):
    said = on_ranks(edited(PROGRAM, tmp_path, (right, wrong)), 2, str(tmp_path / "run.jsonl"))[0]  # without an error
    with pytest.raises(AssertionError):
        check(tmp_path / "run.jsonl", said, expected)
