"""The bucketed DDP of lesson 07's program ends with the numbers of one process and of torch's, and sends as it says."""

import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_course import launch
from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "bucketed_ddp.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def numbers(printed: str) -> tuple[list[float], list[float], list[int]]:
    """Norms, largest differences and counts of all-reduces."""
    norms = [float(found) for found in re.findall(r"norm (\S+?)[,;]", printed)]
    differences = [float(found) for found in re.findall(r"largest difference (\S+)", printed)]
    return norms, differences, [int(found) for found in re.findall(r"(\d+) all-reduces", printed)]


def numbers_of(program: Path, world_size: int) -> tuple[list[float], list[float], list[int]]:
    first, *others = on_ranks(program, world_size)
    assert not any(others), "rank 0 alone prints"
    return numbers(first)


def agree(found: tuple[list[float], list[float], list[int]]) -> bool:
    norms, differences, sent = found
    assert (len(norms), len(differences), len(sent)) == (3, 2, 1)
    return norms == [pytest.approx(norms[-1], rel=1e-8)] * 3 and differences == [0, 0] and sent == [56]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_replicas_end_with_the_weights_of_one_process(ranks):
    assert agree(numbers_of(PROGRAM, ranks))


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it_too():
    assert agree(numbers(by_torchrun(PROGRAM, 2)))


@pytest.mark.parametrize(
    "edit",
    [
        ("dist.broadcast(tensor.detach(), src=0)", "pass"),
        (" / dist.get_world_size()", ""),
        ("            work.wait()\n", "            pass\n"),
        ("self.send = self.sync if", "self.send = True if"),
        ("                param.grad.copy_(mean.view_as(param))\n", "                pass\n"),
    ],
    ids=["broadcast", "mean", "wait", "no_sync", "copy"],
)
def test_each_part_of_the_wrapper_is_needed(tmp_path, edit):
    assert not agree(numbers_of(edited(PROGRAM, tmp_path, edit), 2))


class Crossed(nn.Module):
    """Backward finishes `two` first on rank 0, and `one` first on rank 1."""

    def __init__(self, rank: int):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.rank = nn.Linear(4, 4), nn.Linear(4, 4), rank

    def forward(self, x):
        return self.two(self.one(x)) if self.rank == 0 else self.one(self.two(x))


def crossed(rank: int, world_size: int, path: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of the program's wrapper with a bucket for each, and averages of those without it."""
    plain, replica = Crossed(rank), runpy.run_path(path)["BucketDDP"](Crossed(rank), 1)
    for module in (plain, replica):
        module(torch.full((1, 4), 1.0 + rank)).square().sum().backward()
    dist.barrier()
    for param in plain.parameters():
        dist.all_reduce(param.grad.div_(world_size))
    return [(a.grad, b.grad) for a, b in zip(replica.parameters(), plain.parameters(), strict=True)]


def test_ranks_whose_layers_finish_in_another_order_meet():
    for pairs in launch(crossed, 2, (str(PROGRAM),), start_method="forkserver", quiet=True, backend="gloo"):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected)


def quiet_forward(rank: int, world_size: int, path: str) -> int:
    replica = runpy.run_path(path)["BucketDDP"](nn.Linear(2, 1), 1)
    with pytest.raises(ZeroDivisionError), replica.no_sync():
        replica(torch.ones(1, 2)).sum().backward()
        raise ZeroDivisionError
    replica(torch.ones(1, 2)).sum().backward()
    return replica.sent


def evaluated_between(rank: int, world_size: int, path: str) -> tuple[int, float]:
    replica = runpy.run_path(path)["BucketDDP"](nn.Linear(2, 1), 1)
    loss = replica(torch.full((1, 2), 1.0 + rank)).sum()
    with torch.no_grad():
        replica(torch.ones(1, 2))
    loss.backward()
    return replica.sent, replica.module.weight.grad[0, 0].item()


def test_an_evaluation_between_forward_and_backward_does_not_stop_the_averaging():
    arguments = (str(PROGRAM),)
    found = launch(evaluated_between, 2, arguments, start_method="forkserver", quiet=True, backend="gloo")
    assert found == [(2, 1.5), (2, 1.5)]


def test_an_error_inside_no_sync_does_not_keep_it_quiet():
    assert launch(quiet_forward, 2, (str(PROGRAM),), start_method="forkserver", quiet=True, backend="gloo") == [2, 2]
