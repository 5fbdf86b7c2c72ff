"""The DDP of lesson 06's program ends with the numbers of one process and of torch's; the lesson has its text."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys

import nbformat
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch
from tests.notebooks.execute import ROOT

PROGRAM = ROOT / "programs" / "own_ddp.py"
LINE = re.compile(r"(one process|own DDP|torch's DDP) +loss (\S+) +ranks apart (\S+) +from one process (\S+)")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_lesson_writes_this_program():
    cells = nbformat.read(ROOT / "notebooks" / "06_ddp_from_scratch.ipynb", as_version=4).cells
    written = [cell.source.partition("\n")[2] for cell in cells if cell.source.startswith("%%writefile own_ddp.py")]
    assert written == [PROGRAM.read_text().rstrip("\n")]


def numbers(printed: str) -> dict[str, tuple[float, ...]]:
    return {name: tuple(map(float, found)) for name, *found in LINE.findall(printed)}


def run_program(rank: int, world_size: int, path: str) -> str:
    """What torchrun does to a program, in a process that has torch already."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(path, run_name="__main__")
    return said.getvalue()


def on_ranks(ranks: int, path: object) -> dict[str, tuple[float, ...]]:
    settings = {"init": False, "start_method": "forkserver", "quiet": True, "limit_s": 100}
    printed = launch(run_program, ranks, (str(path),), **settings)
    assert not any(printed[1:]), "rank 0 alone prints"
    return numbers(printed[0])


def agree(found: dict[str, tuple[float, ...]]) -> bool:
    loss = found["one process"][0]
    right = [pytest.approx((loss, 0, 0), rel=1e-9) == numbers for numbers in found.values()]
    return all(right) and loss < 0.5


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_replicas_end_equal_and_with_the_numbers_of_one_process(ranks):
    found = on_ranks(ranks, PROGRAM)
    assert len(found) == 3 and agree(found)


def test_torchrun_runs_it_too():
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM))
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert agree(numbers(done.stdout))


@pytest.mark.parametrize(
    "edits",
    [
        {"(*module.parameters(), *module.buffers())": "module.buffers()"},
        {"dist.broadcast(buffer, src=0)": "pass"},
        {"parameter.grad /= dist.get_world_size()": "pass"},
        {"            work.wait()\n": "            pass\n"},
    ],
    ids=["parameters", "buffers", "mean", "wait"],
)
def test_each_part_of_the_wrapper_is_needed(tmp_path, edits):
    source = PROGRAM.read_text()
    for old, new in edits.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    (tmp_path / "broken.py").write_text(source)
    assert not agree(on_ranks(2, tmp_path / "broken.py"))


def states(rank: int, world_size: int, path: str) -> list[dict[str, torch.Tensor]]:
    """Train a module with BatchNorm in both wrappers; their states after a last pass without gradients."""
    found = []
    for wrap in (runpy.run_path(path)["OwnDDP"], DistributedDataParallel):
        torch.manual_seed(rank)
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        replica = wrap(module)
        for _ in range(3):
            module.zero_grad()
            replica(torch.randn(8, 4).double()).square().mean().backward()
            torch.manual_seed(rank + 7)
        found.append({**module.state_dict(), **{name: p.grad for name, p in module.named_parameters()}})
    return found


def test_buffers_are_as_in_torch():
    for own, theirs in launch(states, 2, (str(PROGRAM),), start_method="forkserver", quiet=True, backend="gloo"):
        for name, tensor in theirs.items():
            torch.testing.assert_close(own[name], tensor, msg=name)


def test_it_is_short_and_uses_torch_alone():
    source = PROGRAM.read_text()
    assert len(source.splitlines()) < 110 and "ddp_course" not in source
