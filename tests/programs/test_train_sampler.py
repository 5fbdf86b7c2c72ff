"""`train_sampler.py`: lesson 05 shows it as it is, and any ranks, stopped or not, print the numbers of one process."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_course import RankError, launch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "programs" / "train_sampler.py"
LESSON = ROOT / "notebooks" / "05_samplers.ipynb"
ranks_start = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_lesson_shows_the_program_as_it_is():
    sources = [cell.source for cell in nbformat.read(LESSON, as_version=4).cells if cell.cell_type == "code"]
    assert "%%writefile train_sampler.py\n" + PROGRAM.read_text().rstrip("\n") in sources
    assert "ddp_course" not in PROGRAM.read_text()


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


def on_ranks(world_size: int, folder: Path, *words: str, program: Path = PROGRAM) -> list[tuple]:
    """What rank 0 prints; the others print nothing."""
    options = {"init": False, "start_method": "forkserver", "quiet": True, "limit_s": 100}
    first, *others = launch(run_program, world_size, (folder, program, words), **options)
    assert others == [""] * len(others)
    return numbers(first)


def run_program(rank: int, world_size: int, folder: Path, program: Path, words: tuple[str, ...]) -> str:
    """What torchrun does to it, in a process that has torch already."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    os.chdir(folder)
    sys.argv = [str(program), *words]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(program), run_name="__main__")
    return said.getvalue()


class TestOnRanks:
    pytestmark = ranks_start

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_they_have_the_numbers_of_one_process(self, alone, world_size, tmp_path):
        assert on_ranks(world_size, tmp_path) == alone
        assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]

    def test_a_stopped_run_resumes_with_other_numbers_of_ranks(self, alone, tmp_path):
        assert on_ranks(4, tmp_path, "--stop", "45") == alone[:1]
        assert on_ranks(3, tmp_path, "--stop", "75") == alone[1:2]
        assert on_ranks(2, tmp_path) == alone[2:]

    def test_without_the_position_an_epoch_begins_again(self, alone, tmp_path):
        broken = tmp_path / "broken.py"
        old = "set_epoch(epoch, consumed)\n        for"
        assert PROGRAM.read_text().count(old) == 1
        broken.write_text(PROGRAM.read_text().replace(old, "set_epoch(epoch)\n        for"))
        assert on_ranks(2, tmp_path, "--stop", "75") == alone[:2]
        found = on_ranks(2, tmp_path, program=broken)
        assert [epoch for epoch, *_ in found] == [2, 3] and all(a != b for a, b in zip(found, alone[2:], strict=True))

    def test_a_batch_that_the_ranks_cannot_share_is_refused(self, tmp_path):
        edited = tmp_path / "edited.py"
        edited.write_text(
            PROGRAM.read_text().replace("GLOBAL_BATCH, SAVE_EVERY = 4, 48", "GLOBAL_BATCH, SAVE_EVERY = 4, 49")
        )
        with pytest.raises(RankError, match="2 ranks can't share 49 images evenly"):
            on_ranks(2, tmp_path, program=edited)

    def test_the_second_line_of_its_docstring_runs(self, alone, tmp_path):
        (words,) = re.findall(r"^ +torchrun (.*)train_sampler\.py$", PROGRAM.read_text(), re.MULTILINE)
        command = [sys.executable, "-m", "torch.distributed.run", *words.split(), str(PROGRAM)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        assert numbers(done.stdout) == alone
