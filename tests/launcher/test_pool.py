"""Ranks that stay: state between calls, and which failures they survive."""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor

import psutil
import pytest

from ddp_course import RankError, RankPool, launch
from tests.launcher import on_ranks

pytestmark = pytest.mark.timeout(120)


def test_ranks_stay_the_same_processes(two_ranks):
    pids = [two_ranks.run(lambda r, w: os.getpid()) for _ in range(3)]
    assert pids[0] == pids[1] == pids[2]
    assert len(set(pids[0])) == 2
    assert two_ranks.run(on_ranks.add_ranks, (1.0,)) == [[3.0] * 3] * 2


def test_prints_of_one_call_do_not_leak_into_the_next(capsys):
    with RankPool(2, start_method="forkserver") as ranks:
        ranks.run(on_ranks.talk, (1,))
        first = capsys.readouterr().out
        ranks.run(lambda rank, w: print("again", end="") if rank else None)
        assert capsys.readouterr().out == "rank 1 | again\n"
    assert first.count("line 0 of") == 2


def test_a_mistake_on_every_rank_leaves_the_ranks_alive(two_ranks):
    before = two_ranks.run(lambda r, w: os.getpid())
    with pytest.raises(RankError, match="rank 0 of 2 raised ValueError: same on all 2"):
        two_ranks.run(on_ranks.raise_on_all)
    with pytest.raises(RankError, match="rank 1 of 2 raised ValueError: only me"):
        two_ranks.run(on_ranks.raise_on_one_in_step)
    assert two_ranks.run(lambda r, w: os.getpid()) == before
    assert two_ranks.run(on_ranks.add_ranks) == [[1.0] * 3] * 2  # the group is still whole


@pytest.mark.usefixtures("nothing_left")
def test_ranks_out_of_step_are_ended():
    ranks = RankPool(2, start_method="forkserver", timeout_s=5, quiet=True)
    with pytest.raises(RankError, match="rank 1 of 2 raised KeyError"):
        ranks.run(on_ranks.raise_on_one)
    assert not ranks.alive
    with pytest.raises(ValueError, match="have ended; start a new RankPool"):
        ranks.run(on_ranks.add_ranks)
    ranks.close()  # a second end is harmless


@pytest.mark.usefixtures("nothing_left")
def test_a_pool_that_is_forgotten_ends():
    ranks = RankPool(2, start_method="forkserver", quiet=True)
    folder = ranks._folder
    assert folder.is_dir()
    del ranks
    gc.collect()
    assert not folder.exists()


@pytest.mark.usefixtures("nothing_left")
def test_children_of_ranks_end_with_them():
    with RankPool(2, start_method="forkserver", quiet=True) as ranks:
        children = ranks.run(on_ranks.start_a_child)
        assert all(psutil.pid_exists(pid) for pid in children)
    psutil.wait_procs([psutil.Process(pid) for pid in children if psutil.pid_exists(pid)], timeout=5)
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in children)


def test_every_socket_is_on_loopback_while_ranks_run():
    def listening() -> set:
        return {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}

    for rendezvous in ("file", "env"):
        before = listening()  # such as a debugger's, or an earlier test's
        with RankPool(2, start_method="forkserver", rendezvous=rendezvous, quiet=True) as ranks:
            heard = [ip for of_rank in ranks.run(on_ranks.listening) for ip in of_rank]
            ours = [address.ip for address in listening() - before]
        assert heard, "gloo listens somewhere"
        assert set(heard + ours) == {"127.0.0.1"}
        assert bool(ours) == (rendezvous == "env")


def trained(i: int) -> list[float]:
    """Train on new ranks; their number, and the way that they are started, depend on `i`."""
    warnings.simplefilter("error", RuntimeWarning)  # a rank that aborts after its work was done
    world_size, settings = 2 + i % 3, {"start_method": "forkserver" if i else "spawn", "quiet": True}
    if i % 2:
        with RankPool(world_size, **settings) as ranks:
            assert ranks.run(on_ranks.add_ranks)[0][0] == sum(range(world_size))
            answers = ranks.run(on_ranks.train_ddp)
    else:
        answers = launch(on_ranks.train_ddp, world_size, **settings)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("nothing_left")
def test_two_hundred_launches_in_a_row():
    """By two processes: a launch is mostly waiting."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as launchers:
        found = list(launchers.map(trained, range(200)))
    assert all(answer == found[i % 3] for i, answer in enumerate(found))
