"""What the tests share: ranks that stay, for starting them is what costs, and the proof that nothing is left behind."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import torch

from ddp_course import RankPool
from ddp_course.grading.learner import progress
from ddp_course.launcher import processes
from tests.warm.server import OF_PROGRAMS

# Imported once by the server from which ranks are forked: what programs need, too, or each of their ranks takes
# seconds for it.
processes._PRELOADED += ["ddp_course.rehearsal.stage", *OF_PROGRAMS]
os.environ[progress.VARIABLE] = ""  # the tests' checks are nobody's progress


def pytest_configure() -> None:
    """A shell's background job starts with Ctrl-C ignored, and so would all that the tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seed", type=int, action="append", default=[], help="run this random program; repeatable")


@pytest.fixture(scope="session")
def two_ranks():
    """Two quiet ranks for tests that need a group and leave it in step."""
    with RankPool(2, start_method="forkserver", timeout_s=20, quiet=True) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks():
    """A function that returns so many quiet ranks of one thread, as under torchrun; more add up in another order."""
    pools: dict[int, RankPool] = {}

    def of(world_size: int) -> RankPool:
        if world_size not in pools or not pools[world_size].alive:
            pools[world_size] = RankPool(world_size, backend="gloo", start_method="forkserver", quiet=True)
            pools[world_size].run(on_one_thread)
        return pools[world_size]

    yield of
    for pool in pools.values():
        pool.close()


def on_one_thread(rank: int, world_size: int) -> None:
    torch.set_num_threads(1)


@pytest.fixture
def one_thread():
    """For tensors so small that more threads gain nothing, and are waited for on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    """Fail when a test leaves a rank behind.

    A rank's own child, such as a DataLoader's worker, is killed with it but reaped by another process: a killed one may
    take a moment to be gone. A worker that nobody killed looks for its parent every 5 seconds only.
    """
    before = set(rank_processes())
    yield
    psutil.wait_procs(set(rank_processes()) - before, timeout=2)
    assert set(rank_processes()) - before == set()
