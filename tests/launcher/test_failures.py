"""What `test_faults` does not ask of the report on a failure: its form, its time, its limits."""

from __future__ import annotations

import time
from multiprocessing import Pipe

import pytest

from ddp_course import RankError, RankPool, launch
from ddp_course.launcher.processes import RankProcess
from ddp_course.launcher.rank_status import Whereabouts
from ddp_course.launcher.running_call import Call
from tests.launcher import on_ranks

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def failure_of(fn, world_size, args=(), timeout_s=20.0, **more) -> RankError:
    with pytest.raises(RankError) as caught:
        launch(fn, world_size, args, start_method="forkserver", quiet=True, timeout_s=timeout_s, **more)
    return caught.value


def test_the_rank_that_raised_leads_with_its_own_line_every_time():
    error, again = (failure_of(on_ranks.raise_on_one, 3) for _ in range(2))
    assert (error.code, error.rank, error.error_type) == ("raised", 1, "KeyError")
    assert str(error).startswith("rank 1 of 3 raised KeyError: 'missing weight'\n")
    assert 'in raise_on_one\n    raise KeyError("missing weight")' in str(error)
    assert "rank 0  waited in all_reduce #2 (float32 [2], 8 B)\n          on_ranks.py, line" in error.report
    assert "last collective all_reduce #1" in error.report  # of rank 1
    assert error.output == [f"last words of {rank}\n" for rank in range(3)]
    assert str(again) == str(error)


@pytest.mark.slow
def test_the_rank_that_never_came_is_named_in_time():
    launch(on_ranks.threads, 4, start_method="forkserver", quiet=True)  # the fork server is up
    start = time.monotonic()
    error = failure_of(on_ranks.skip_third, 4, timeout_s=2.0)
    took_s = time.monotonic() - start
    assert (error.code, error.rank) == ("absent", 2)
    assert "rank 2 never entered all_reduce #3 (float32 [1000], 4.0 kB); the others waited 2 s" in str(error)
    assert "rank 2 had returned" in str(error)
    for rank in (0, 1, 3):
        assert f"rank {rank}  gave up in all_reduce #3" in error.report
    assert "dist.all_reduce(x)" in error.report
    # The promise is part of the interface: timeout_s + 2 s, here with the start of four ranks.
    assert 2.0 < took_s < 2.0 + 2.0 + 2.0


def test_a_rank_that_goes_on_after_it_said_where_it_is_is_asked_again():
    ours, theirs = Pipe()
    rank = RankProcess(0, process=None, pipe=ours, error_file="")
    call = Call(1, [rank], relay=None)
    for word, content in (("where", Whereabouts(0, "running")), ("raised", "a failure")):
        theirs.send((1, word, content))
        call.hear(rank)
    assert (call.failures, call.where, theirs.recv()) == ({0: "a failure"}, {}, (1, "where", None))


def test_an_endless_loop_ends_at_the_limit():
    error = failure_of(on_ranks.loop_forever, 2, limit_s=1.0)
    assert (error.code, error.rank) == ("limit", 1)
    assert "no result after 1 s (limit_s) from rank 1" in str(error)
    assert "in loop_forever: while rank == 1:" in str(error) or "in loop_forever: pass" in str(error)


def test_a_failed_start_names_the_rank():
    def unknown_backend_on_one(rank, world_size):
        import torch.distributed as dist

        dist.init_process_group("gloo" if rank else "no such backend")

    error = failure_of(unknown_backend_on_one, 2, init=False)
    assert error.rank == 0
    assert "no such backend" in str(error).lower()


@pytest.mark.slow
def test_a_slow_rank_that_comes_in_time_is_not_a_hang():
    # Each wait is within the limit, all of them together are not; the next call must not see this one's waits.
    with RankPool(2, start_method="forkserver", timeout_s=1.0, quiet=True) as ranks:
        for _ in range(2):
            assert ranks.run(on_ranks.slow_but_in_time, (0.7,)) == [0, 1]
