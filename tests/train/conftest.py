"""What the tests of training share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def two_cores():
    """One thread for each of two ranks: `launch` shares out the cores that it may use."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    yield
    os.sched_setaffinity(0, cores)
