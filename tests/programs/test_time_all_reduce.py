"""The benchmark of lesson 04 is the file that the lesson writes; its sums, sizes and formulas hold on 1, 2 and 4 ranks.

What it measures varies, and so nothing here compares a time.
"""

import contextlib
import io
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_course import launch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "programs" / "time_all_reduce.py"
OPTIONS = ("--largest", str(2**18), "--warmup", "1", "--repeat", "2")
SIZES = [2**12, 2**14, 2**16, 2**18]
BY_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
pytestmark = pytest.mark.timeout(300)


def test_the_lesson_writes_this_very_program():
    cells = json.loads((ROOT / "notebooks/04_collectives.ipynb").read_text(encoding="utf-8"))["cells"]
    written = ["".join(cell["source"]) for cell in cells if "".join(cell["source"]).startswith("%%writefile")]
    assert [text.partition("\n")[2].rstrip() for text in written] == [PROGRAM.read_text().rstrip()]
    assert "ddp_course" not in PROGRAM.read_text()


def rows(said: str, world_size: int) -> list[list[float]]:
    """The table's numbers, which name the ranks that made them, and whose bandwidths follow from bytes and time."""
    title, columns, *lines = said.strip().splitlines()
    assert title == f"all_reduce, float32, {world_size} ranks, gloo"
    assert columns.split() == ["bytes", "time", "(us)", "algbw", "(GB/s)", "busbw", "(GB/s)", "#wrong"]
    found = [[float(word) for word in line.split()] for line in lines]
    for n_bytes, time_us, algbw, busbw, _ in found:
        assert algbw == pytest.approx(n_bytes / time_us / 1e3, rel=1e-2, abs=1e-4)
        factor = {1: 0.0, 2: 1.0, 4: 1.5}[world_size]  # 2(W-1)/W
        assert busbw == pytest.approx(factor * algbw, abs=2e-4)
    return found


def run_program(rank: int, world_size: int, path: Path) -> str:
    """What torchrun does to a program, in a process that has torch already."""
    sys.argv = [path.name, *OPTIONS]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(path), run_name="__main__")
    return said.getvalue()


def on_ranks(world_size: int, path: Path = PROGRAM) -> list[str]:
    return launch(run_program, world_size, (path,), init=False, start_method="forkserver", quiet=True, limit_s=100)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 4])
def test_each_size_is_summed_and_one_rank_prints_the_table(world_size):
    said, *others = on_ranks(world_size)
    assert [(n_bytes, wrong) for n_bytes, *_, wrong in rows(said, world_size)] == [(size, 0) for size in SIZES]
    assert others == [""] * (world_size - 1)


@pytest.mark.slow
def test_torchrun_runs_it_as_it_stands():
    command = [*BY_TORCHRUN, "2", str(PROGRAM), *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(n_bytes, wrong) for n_bytes, *_, wrong in rows(done.stdout, 2)] == [(size, 0) for size in SIZES]


@pytest.mark.slow
def test_elements_that_are_not_the_sum_are_counted_on_all_ranks(tmp_path):
    source = PROGRAM.read_text()
    right = "    dist.all_reduce(x)\n    wrong ="
    assert source.count(right) == 1
    broken = tmp_path / "broken.py"
    broken.write_text(source.replace(right, "    dist.all_reduce(x[:100])\n    wrong ="))
    said = on_ranks(2, broken)[0]
    assert [wrong for *_, wrong in rows(said, 2)] == [2 * (size // 4 - 100) for size in SIZES]
