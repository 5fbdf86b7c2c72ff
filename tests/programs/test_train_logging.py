"""`train_logging.py` logs the numbers of one process on any number of ranks, and lesson 09 shows it as it is."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from ddp_course import RankError, launch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "programs" / "train_logging.py"
LESSON = ROOT / "notebooks" / "09_logging.ipynb"
NAMES = {"loss", "accuracy", "grad_norm", "test_loss", "test_accuracy"}
pytestmark = pytest.mark.timeout(300)


def test_the_lesson_shows_the_program_as_it_is():
    sources = [cell.source for cell in nbformat.read(LESSON, as_version=4).cells if cell.cell_type == "code"]
    assert "%%writefile train_logging.py\n" + PROGRAM.read_text().rstrip("\n") in sources
    assert "ddp_course" not in PROGRAM.read_text()


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


def run_program(rank: int, world_size: int, program: Path, log: Path) -> str:
    """What torchrun does to a program, in a process that has torch already."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    sys.argv = [program.name, str(log)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(program), run_name="__main__")
    return said.getvalue()


def on_ranks(world_size: int, log: Path, program: Path = PROGRAM) -> list[str]:
    options = {"init": False, "start_method": "forkserver", "quiet": True, "limit_s": 100}
    return launch(run_program, world_size, (program, log), **options)


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


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_log_has_the_numbers_of_one_process_and_one_rank_writes(world_size, expected, tmp_path):
    first, *others = on_ranks(world_size, tmp_path / "run.jsonl")
    check(tmp_path / "run.jsonl", first, expected)
    assert others == [""] * (world_size - 1)
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.slow
def test_torchrun_runs_it(expected, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command.append(str(tmp_path / "run.jsonl"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path / "run.jsonl", done.stdout, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("    dist.all_reduce(totals)\n", ""),  # rank 0's numbers alone
        ("Subset(test, range(rank, len(test), world_size))", "Subset(test, range(len(test)))"),  # all on each rank
        ("    totals.zero_()\n", ""),  # every line has all steps from the first on
    ],
)
def test_a_broken_log_is_seen(right, wrong, expected, tmp_path):
    source = PROGRAM.read_text()
    assert source.count(right) == 1
    (tmp_path / "broken.py").write_text(source.replace(right, wrong))
    try:
        said = on_ranks(2, tmp_path / "run.jsonl", tmp_path / "broken.py")[0]
    except RankError as error:
        pytest.fail(f"it is to log wrong numbers without an error: {error}")
    with pytest.raises(AssertionError):
        check(tmp_path / "run.jsonl", said, expected)
