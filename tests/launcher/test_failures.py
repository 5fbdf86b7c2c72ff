"""A rank that raises, dies or hangs: the report names the rank, the reason and the line."""

from __future__ import annotations

import signal
import time
from multiprocessing import Pipe

import pytest

from ddp_course import RankError, RankPool, launch
from ddp_course.launcher.call import Call
from ddp_course.launcher.calls import Whereabouts
from ddp_course.launcher.processes import RankProcess
from tests.launcher import on_ranks

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def failure_of(fn, world_size, args=(), timeout_s=20.0, **more) -> RankError:
    with pytest.raises(RankError) as caught:
        launch(fn, world_size, args, start_method="forkserver", quiet=True, timeout_s=timeout_s, **more)
    return caught.value


def test_the_rank_that_raised_leads_with_its_own_line():
    error = failure_of(on_ranks.raise_on_one, 3)
    assert (error.kind, error.rank, error.error_type) == ("raised", 1, "KeyError")
    assert str(error).startswith("rank 1 of 3 raised KeyError: 'missing weight'\n")
    assert 'in raise_on_one\n    raise KeyError("missing weight")' in str(error)
    assert "rank 0  waited in all_reduce #2 (float32 [2], 8 B)\n          on_ranks.py, line" in error.report
    assert "last collective all_reduce #1" in error.report  # of rank 1


def test_the_message_is_the_same_every_time():
    assert len({str(failure_of(on_ranks.raise_on_one, 3)) for _ in range(3)}) == 1


def test_a_cause_is_told():
    assert "caused by KeyError: 'key'\nRuntimeError: no such weight" in str(failure_of(on_ranks.caused, 1))


def test_sys_exit_is_reported_not_obeyed():
    error = failure_of(on_ranks.leave_by_exit, 2)
    assert (error.kind, error.rank, error.error_type, error.message) == ("raised", 1, "SystemExit", "done early")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_rank_is_named_not_its_peers(number):
    error = failure_of(on_ranks.die_by_signal, 3, (int(number),))
    assert (error.kind, error.rank) == ("died", 1)
    assert f"rank 1 of 3 died: killed by {signal.Signals(number).name}" in str(error)
    assert ("memory" in str(error)) == (number == signal.SIGKILL)
    if number == signal.SIGSEGV:  # faulthandler tells where
        assert "in die_by_signal: os.kill(os.getpid(), number)" in str(error)


def test_os_exit_is_named_with_its_status():
    error = failure_of(on_ranks.die_by_exit, 2)
    assert (error.kind, error.rank) == ("died", 0)
    assert "exit status 7" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "says"),
    [(on_ranks.skip_third, "rank 2 had returned"), (on_ranks.loop_before_third, "in loop_before_third:")],
)
def test_the_rank_that_never_came_is_named_in_time(fn, says):
    launch(on_ranks.threads, 4, start_method="forkserver", quiet=True)  # the fork server is up
    start = time.monotonic()
    error = failure_of(fn, 4, timeout_s=2.0)
    took_s = time.monotonic() - start
    assert (error.kind, error.rank) == ("hung", 2)
    assert "rank 2 never entered all_reduce #3 (float32 [1000], 4.0 kB); the others waited 2 s" in str(error)
    assert says in str(error)
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


def test_a_rank_whose_interpreter_is_held_is_found_by_its_stack():
    error = failure_of(on_ranks.hold_the_interpreter, 2, timeout_s=2.0)
    assert (error.kind, error.rank) == ("hung", 1)
    assert "in hold_the_interpreter: re.match(" in str(error)


def test_different_orders_are_shown_side_by_side():
    error = failure_of(on_ranks.other_order, 2, timeout_s=2.0)
    assert (error.kind, error.rank) == ("hung", None)  # of two ranks, none stands alone
    assert "ranks disagree about collective #2:\n  rank 0 called broadcast #2 from rank 0" in str(error)
    assert "rank 1 called all_reduce #2" in str(error)
    assert "in other_order: dist.broadcast(x, 0)" in str(error)


def test_different_shapes_are_named():
    error = failure_of(on_ranks.other_shape, 2, timeout_s=5.0)
    assert "ranks disagree about collective #1" in str(error)
    assert "all_reduce #1 (float32 [4], 16 B)" in str(error) and "all_reduce #1 (float32 [5], 20 B)" in str(error)


def test_a_subgroup_without_time_limit_is_watched_too():
    error = failure_of(on_ranks.hang_in_subgroup, 4, timeout_s=2.0)
    assert (error.kind, error.rank) == ("hung", 3)
    assert "rank 3 never entered all_reduce #2 (float32 [3], 12 B) on subgroup" in str(error)


def test_an_endless_loop_ends_at_the_limit():
    error = failure_of(on_ranks.loop_forever, 2, limit_s=1.0)
    assert (error.kind, error.rank) == ("hung", 1)
    assert "no result after 1 s (limit_s) from rank 1" in str(error)
    assert "in loop_forever: while rank == 1:" in str(error) or "in loop_forever: pass" in str(error)


def test_output_so_far_comes_with_the_error():
    def speak_and_fail(rank, world_size):
        print("last words of", rank)
        raise ValueError

    assert failure_of(speak_and_fail, 2).output == ["last words of 0\n", "last words of 1\n"]


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


def test_a_result_that_cannot_be_rebuilt_is_named():
    error = failure_of(on_ranks.return_unreadable, 2)
    assert (error.kind, error.rank, error.error_type) == ("result", 0, "ValueError")


def test_a_rank_that_ends_its_group_early_is_not_called_missing():
    error = failure_of(on_ranks.leave_while_others_talk, 2, timeout_s=5.0)
    assert (error.kind, error.rank) == ("hung", 0)
    assert "rank 0 never entered all_reduce #1 (float32 [2], 8 B)" in str(error)
    assert "ended a process group: on_ranks.py, line" in str(error)
    assert "call dist.barrier() before it, on every rank" in str(error)
    assert "rank 0  had returned" in error.report
