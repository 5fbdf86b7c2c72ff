"""`process_groups.py` has the numbers of one process on any grid of ranks, and lesson 03 shows it as it is."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

from ddp_course import launch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "programs" / "process_groups.py"
LESSON = ROOT / "notebooks" / "03_process_groups.ipynb"


def printed(nodes: int, per_node: int) -> list[str]:
    """What the program is to print, computed in one process from the whole data set."""
    samples = torch.randn(1201, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    world_size = nodes * per_node
    places = [
        f"rank {rank}: node {rank // per_node}, local rank {rank % per_node}, {len(samples[rank::world_size])} samples"
        for rank in range(world_size)
    ]
    mean, deviation = samples.mean().item(), samples.std(correction=0).item()
    return [*places, f"result of 1201: mean {mean:.6f}, deviation {deviation:.6f}"]


def run_program(rank: int, world_size: int, per_node: int) -> str:
    """Run it as torchrun would on nodes of `per_node` ranks, in a process that has torch already."""
    os.environ.update(LOCAL_RANK=str(rank % per_node), LOCAL_WORLD_SIZE=str(per_node))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    return said.getvalue()


def test_the_lesson_shows_the_program_as_it_is():
    sources = [cell.source for cell in nbformat.read(LESSON, as_version=4).cells if cell.cell_type == "code"]
    assert "%%writefile process_groups.py\n" + PROGRAM.read_text().rstrip("\n") in sources
    assert "ddp_course" not in PROGRAM.read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_any_grid_of_ranks_has_the_numbers_of_one_process(nodes, per_node):
    options = {"init": False, "start_method": "forkserver", "quiet": True, "limit_s": 100}
    first, *others = launch(run_program, nodes * per_node, (per_node,), **options)
    assert first.splitlines() == printed(nodes, per_node)
    assert others == [""] * len(others)  # one rank prints


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_runs_it():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == printed(1, 2)
