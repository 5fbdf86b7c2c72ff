"""`process_groups.py` has the numbers of one process on any grid of ranks."""

import pytest
import torch

from tests.programs.running import PROGRAMS, by_torchrun, on_ranks

PROGRAM = PROGRAMS / "process_groups.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


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


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_any_grid_of_ranks_has_the_numbers_of_one_process(nodes, per_node):
    first, *others = on_ranks(PROGRAM, nodes * per_node, per_node=per_node)
    assert first.splitlines() == printed(nodes, per_node)
    assert others == [""] * len(others)  # one rank prints


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it():
    assert by_torchrun(PROGRAM, 2).splitlines() == printed(1, 2)
