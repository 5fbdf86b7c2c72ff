"""Ranks that stay: answers find nothing that another one has left, and whoever changes a process ends it."""

import os
import signal
import subprocess
import threading

import pytest
import torch
import torch.distributed as dist

from ddp_course import RankPool
from ddp_course.grading.answer.isolated import Answer
from ddp_course.grading.answer.process_changes import looked_after
from ddp_course.grading.answer.worker_pool import KEPT
from ddp_course.grading.exercise import AnswerFailed
from ddp_course.grading.registry import find_exercise

HARMS = {
    "threads": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
    "child processes": lambda: subprocess.Popen(["sleep", "20"]),
    "environment": lambda: os.environ.update(LEFT="1"),
    "working directory": lambda: os.chdir("/"),
    "torch's settings": lambda: torch.set_num_threads(3),
    "hooks and modes": lambda: torch.nn.modules.module.register_module_forward_hook(lambda *args: None),
    "signal handlers": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "process groups": lambda: dist.new_group([0]),
    "functions": lambda: setattr(torch.Tensor, "item", lambda tensor: 3),
}


def harms_on(rank: int, world_size: int, changes: dict) -> dict[str, list[str]]:
    """Return what is found changed after each change, one after the other in one process."""
    return {name: looked_after(rank, world_size, make, (change,), True)[1] for name, change in changes.items()}


def make(rank, world_size, change):
    change()


def test_whatever_changes_a_process_is_found_by_its_name():
    ranks = RankPool(2, backend="gloo", start_method="forkserver", quiet=True)
    try:
        assert ranks.run(harms_on, (HARMS,), limit_s=60) == [{name: [name] for name in HARMS}] * 2
    finally:
        ranks.kill()  # they are past ending in order


def call(rank, world_size, function):
    return function(), os.getpid()


def run(function, world_size=2, **more):
    """Return what the function returned on each rank, and the processes that it ran in."""
    return zip(
        *Answer(function, find_exercise("03.1"), limit_s=5).run(call, world_size, init=True, **more), strict=True
    )


def waiting_ranks():
    """Return the processes of ranks that wait; a fixture would have pytest's environment of another moment."""
    _, pids = run(lambda: None)
    KEPT.thrown_away.clear()
    return pids


def test_ranks_that_an_answer_has_changed_are_thrown_away():
    kept = waiting_ranks()
    assert list(run(lambda: os.chdir("/"))) == [(None, None), kept]
    assert list(KEPT.thrown_away) == [["working directory"]]
    assert not set(kept) & set(list(run(lambda: None))[1])


def test_ranks_stay_for_the_next_run_and_draw_the_same_numbers_again():
    kept = waiting_ranks()
    torch_and_numpy = lambda: (torch.rand(1).item(), __import__("numpy").random.rand())  # noqa: E731
    first, second = list(run(torch_and_numpy)), list(run(torch_and_numpy))
    assert first == second
    assert first[1] == kept and not KEPT.thrown_away


def test_a_run_that_asks_for_fresh_ranks_has_them_to_itself():
    kept = waiting_ranks()
    _, fresh = run(lambda: None, fresh=True)
    assert not set(fresh) & set(kept)
    assert list(run(lambda: None))[1] == kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        lambda: os._exit(3),
        lambda: threading.Event().wait(),
        lambda: dist.get_rank() == 0 and 1 / 0 or dist.barrier(),
        lambda: os.environ.update(LEFT="1") or 1 / 0,
    ],
)
def test_ranks_that_died_wait_or_are_changed_by_an_answer_that_failed_are_thrown_away(fault):
    kept = waiting_ranks()
    with pytest.raises(AnswerFailed):
        run(fault)
    values, pids = run(lambda: "as before")
    assert values == ("as before", "as before") and not set(pids) & set(kept)


def test_ranks_that_have_all_raised_stay():
    kept = waiting_ranks()
    with pytest.raises(AnswerFailed):
        run(lambda: 1 / 0)
    assert list(run(lambda: dist.barrier() or "as before")) == [("as before",) * 2, kept]


def test_ranks_that_were_killed_while_they_waited_are_replaced():
    kept = waiting_ranks()
    os.kill(kept[0], signal.SIGKILL)
    assert list(run(lambda: "here"))[0] == ("here", "here")


def test_new_ranks_are_started_when_the_environment_is_another(monkeypatch):
    waiting_ranks()
    monkeypatch.setenv("DDP_COURSE_TEST", "seen")
    assert list(run(lambda: os.environ["DDP_COURSE_TEST"]))[0] == ("seen", "seen")


def test_what_an_answer_prints_comes_from_kept_ranks_too():
    answer = Answer(lambda: print("hello"), find_exercise("03.1"))
    for _ in range(2):
        answer.run(call, 2, init=True)
    assert answer.printed == ["rank 0 | hello", "rank 1 | hello"] * 2


def test_few_ranks_wait_at_a_time(monkeypatch):
    monkeypatch.setattr("ddp_course.grading.answer.worker_pool.MOST_RANKS", 3)
    for world_size in (2, 1):
        for init in (True, False):
            Answer(lambda: None, find_exercise("03.1")).run(call, world_size, init=init)
    assert [pool.world_size for pool, _ in KEPT.idle.values()] == [1, 1]
