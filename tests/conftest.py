"""What the tests share: one live pool of two ranks, and the proof that nothing is left behind."""

from __future__ import annotations

import os

import psutil
import pytest

from ddp_course import RankPool
from ddp_course.grading import progress

os.environ[progress.VARIABLE] = ""  # the tests' checks are nobody's progress


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seed", type=int, action="append", default=[], help="run this random program; repeatable")


@pytest.fixture(scope="session")
def two_ranks():
    """Two quiet ranks for tests that need a group and leave it in step."""
    with RankPool(2, start_method="forkserver", timeout_s=20, quiet=True) as ranks:
        yield ranks


def rank_processes(parent: psutil.Process | None = None) -> list[psutil.Process]:
    """Every live descendant that is a rank or started by one; multiprocessing's two helpers are neither."""
    helpers = ("forkserver import main", "resource_tracker import main", "/pymp-")  # the last: the server's janitor
    found = []
    for process in (parent or psutil.Process()).children(recursive=True):
        try:
            main_helper = (
                any(h in " ".join(process.cmdline()) for h in helpers) and process.ppid() == psutil.Process().pid
            )
            if process.status() != psutil.STATUS_ZOMBIE and not main_helper:
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


@pytest.fixture
def nothing_left():
    """Fail when a test leaves a rank behind."""
    before = set(rank_processes())
    yield
    assert set(rank_processes()) - before == set()
