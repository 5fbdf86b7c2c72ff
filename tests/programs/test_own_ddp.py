"""The DDP of lesson 06's program ends with the numbers of one process and of torch's."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch
from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "own_ddp.py"
LINE = re.compile(r"(one process|own DDP|torch's DDP) +loss (\S+) +ranks apart (\S+) +from one process (\S+)")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def numbers(printed: str) -> dict[str, tuple[float, ...]]:
    return {name: tuple(map(float, found)) for name, *found in LINE.findall(printed)}


def numbers_of(program: Path, world_size: int) -> dict[str, tuple[float, ...]]:
    first, *others = on_ranks(program, world_size)
    assert not any(others), "rank 0 alone prints"
    return numbers(first)


def agree(found: dict[str, tuple[float, ...]]) -> bool:
    loss = found["one process"][0]
    right = [pytest.approx((loss, 0, 0), rel=1e-9) == numbers for numbers in found.values()]
    return all(right) and loss < 0.5


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_replicas_end_equal_and_with_the_numbers_of_one_process(ranks):
    found = numbers_of(PROGRAM, ranks)
    assert len(found) == 3 and agree(found)


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it_too():
    assert agree(numbers(by_torchrun(PROGRAM, 2)))


@pytest.mark.parametrize(
    "edit",
    [
        ("(*module.parameters(), *module.buffers())", "module.buffers()"),
        ("dist.broadcast(buffer, src=0)", "pass"),
        ("parameter.grad /= dist.get_world_size()", "pass"),
        ("            work.wait()\n", "            pass\n"),
    ],
    ids=["parameters", "buffers", "mean", "wait"],
)
def test_each_part_of_the_wrapper_is_needed(tmp_path, edit):
    assert not agree(numbers_of(edited(PROGRAM, tmp_path, edit), 2))


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
