"""Ranks for the strategies: one pool per number of ranks, shared by all files of this folder."""

from __future__ import annotations

import pytest

from ddp_course import RankPool


@pytest.fixture(scope="session", params=[2, 3, 4])
def ranks(request):
    """Two, three, then four quiet ranks."""
    with RankPool(request.param, start_method="forkserver", timeout_s=60, quiet=True) as pool:
        yield pool
