"""`check_ranks.py`, of lesson 11: equal weights, and samples of its own on each rank? It says so in figures."""

import contextlib
import io
import runpy

import pytest
import torch
from torch import nn

from ddp_course import launch
from tests.programs.running import PROGRAMS

pytestmark = pytest.mark.slow


def checked(rank: int, world_size: int, case: tuple[float, int]) -> str:
    """Check a model whose weights differ by a step on the last rank, and batches that overlap by some samples."""
    apart, shared = case
    check = runpy.run_path(str(PROGRAMS / "check_ranks.py"))["check"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    if rank == world_size - 1:
        model[0].weight.data[1, 2] += apart
    model[1].running_mean += rank  # statistics may differ
    x = torch.arange(12.0).view(4, 3) + 100 * rank
    x[:shared] = torch.arange(3.0)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        check(model, x)
    return printed.getvalue()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ((0.0, 1), "weights differ by up to 0; 12 samples were read, 10 of them different\n"),
        ((0.0, 0), "weights differ by up to 0; 12 samples were read, 12 of them different\n"),
        ((0.25, 0), "weights differ by up to 0.25; 12 samples were read, 12 of them different\n"),
    ],
)
def test_it_says_how_far_and_how_many(case, said):
    assert launch(checked, 3, (case,), backend="gloo", start_method="forkserver", quiet=True) == [said, "", ""]
