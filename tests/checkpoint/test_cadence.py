"""All ranks come to the same answer, whoever got the signal and whosever clock rang; and no signal is lost."""

import itertools
import os
import signal
import sys
import threading

import pytest
import torch.distributed as dist

from ddp_course import launch
from ddp_course.checkpoint.cadence import Cadence, Wish

pytestmark = pytest.mark.timeout(60)

GO_ON, SAVE, STOP = (int(wish) for wish in Wish)


# --- Two ranks -------------------------------------------------------------------------------------


def wishes(rank: int, world_size: int, sent: dict, steps: int) -> list[int]:
    """Return what this rank was told in steps 1 to 6; `sent` has the signals by rank and step."""
    told = []
    with Cadence(steps=steps) as cadence:
        for step in range(1, 7):
            for number in sent.get((rank, step), ()):
                signal.raise_signal(number)
            told.append(int(cadence.next(step)))
        cadence.finish()
    return told


@pytest.mark.parametrize(
    ("sent", "steps", "expected"),
    [
        ({}, 0, [GO_ON] * 6),
        ({}, 2, [GO_ON, SAVE] * 3),
        # A signal in step 2 finds the question of step 2 asked already, and is said in that of step 3.
        ({(1, 2): [signal.SIGUSR1]}, 0, [GO_ON, GO_ON, SAVE, GO_ON, GO_ON, GO_ON]),
        ({(1, 2): [signal.SIGUSR1] * 3}, 0, [GO_ON, GO_ON, SAVE, GO_ON, GO_ON, GO_ON]),
        ({(1, 2): [signal.SIGUSR1], (0, 3): [signal.SIGUSR1]}, 0, [GO_ON, GO_ON, SAVE, SAVE, GO_ON, GO_ON]),
        ({(0, 2): [signal.SIGUSR1]}, 3, [GO_ON, GO_ON, SAVE, GO_ON, GO_ON, SAVE]),
        # Who does not leave at once is told again.
        ({(1, 3): [signal.SIGTERM]}, 0, [GO_ON, GO_ON, GO_ON, STOP, STOP, STOP]),
        ({(0, 3): [signal.SIGTERM], (1, 3): [signal.SIGUSR1]}, 4, [GO_ON, GO_ON, GO_ON, STOP, STOP, STOP]),
        ({(1, 3): [signal.SIGTERM, signal.SIGUSR1]}, 0, [GO_ON, GO_ON, GO_ON, STOP, STOP, STOP]),
        ({(1, 3): [signal.SIGUSR1, signal.SIGTERM]}, 0, [GO_ON, GO_ON, GO_ON, STOP, STOP, STOP]),
    ],
)
def test_both_ranks_do_at_the_same_step_what_one_was_asked_to(two_ranks, sent, steps, expected):
    assert two_ranks.run(wishes, args=(sent, steps)) == [expected] * 2


def by_planted_clocks(rank: int, world_size: int, clocks: list[list[float]], steps: int) -> list[int]:
    """As `wishes`, with `seconds=10` and a clock of each rank's own, which shows the given time during each step."""
    import ddp_course.checkpoint.cadence as module

    now, told = 0.0, []
    real, module.time = module.time, type("Clock", (), {"monotonic": staticmethod(lambda: now)})
    try:
        with Cadence(steps=steps, seconds=10) as cadence:
            for step, now in enumerate(clocks[rank], start=1):  # noqa: B007  (read by the clock)
                told.append(int(cadence.next(step)))
            cadence.finish()
    finally:
        module.time = real
    return told


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # Asked at the end of step 2, when the clock shows 11, answered in step 3, and counted again from there, 12.
        (0, [GO_ON, GO_ON, SAVE, GO_ON, GO_ON, SAVE]),
        (2, [GO_ON, SAVE, GO_ON, SAVE, GO_ON, SAVE]),  # saved in step 2, so the clock does not ring
    ],
)
def test_rank_0s_clock_rings_for_all_and_no_other_does(two_ranks, steps, expected):
    clocks = [[5, 11, 12, 13, 22, 23], [50, 100, 150, 200, 250, 300]]
    assert two_ranks.run(by_planted_clocks, args=(clocks, steps)) == [expected] * 2


def in_another_thread(rank: int, world_size: int) -> tuple:
    told, before = [], signal.getsignal(signal.SIGTERM)

    def run() -> None:
        with Cadence(steps=2) as cadence:
            told.append(signal.getsignal(signal.SIGTERM) is before)
            told.extend(int(cadence.next(step)) for step in (1, 2))
            cadence.finish()

    thread = threading.Thread(target=run)
    thread.start(), thread.join()
    return told


def test_outside_the_main_thread_there_are_no_handlers_and_the_rest_works(two_ranks):
    assert two_ranks.run(in_another_thread) == [[True, GO_ON, SAVE]] * 2


def thirty_runs(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return the numbers of threads and of open files after one, and after thirty more."""
    found = []
    for runs in (1, 30):
        for _ in range(runs):
            wishes(rank, world_size, {}, steps=1)
        found.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's /proc")
def test_a_process_may_train_many_times_and_nothing_piles_up(two_ranks):
    for once, again in two_ranks.run(thirty_runs):
        assert [after <= before + 2 for before, after in zip(once, again, strict=True)] == [True, True], (once, again)


def never_answered(rank: int, world_size: int) -> str:
    if rank == 0:
        Cadence(timeout_s=1)
        return ""
    cadence = Cadence(timeout_s=1)
    try:
        cadence.next(1), cadence.next(2)  # rank 0 answered once, when it was made
    except RuntimeError as error:
        dist.destroy_process_group()  # or the launcher would report the call that was left over
        return str(error).lower()


@pytest.mark.filterwarnings("ignore:rank 0 had returned")  # rank 1 leaves the group without it
def test_who_is_not_answered_waits_no_longer_than_it_was_told():
    _, said = launch(never_answered, 2, start_method="forkserver", timeout_s=20, quiet=True)
    assert "1000ms" in said.replace(" ", ""), said


# --- One process -----------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_handlers_that_were_are_put_back_also_after_an_error(alone):
    heard = []
    before = {
        number: signal.signal(number, lambda n, _: heard.append(n)) for number in (signal.SIGUSR1, signal.SIGTERM)
    }
    try:
        with pytest.raises(KeyError), Cadence():
            signal.raise_signal(signal.SIGTERM)
            assert heard == []
            raise KeyError
        signal.raise_signal(signal.SIGTERM), signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGTERM, signal.SIGUSR1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("number", "wish"), [(signal.SIGTERM, Wish.STOP), (signal.SIGUSR1, Wish.SAVE)])
def test_a_signal_between_any_two_instructions_is_said_once_and_never_lost(alone, number, wish):
    """The handler is called after the n-th instruction of `next` and what it calls, for every n there is."""
    for n in itertools.count():
        cadence, count, came = Cadence(), 0, False

        def trace(frame, event, argument, cadence=cadence, n=n):
            nonlocal count, came
            if frame.f_code.co_filename != Cadence.next.__code__.co_filename or frame.f_code.co_name == "_note":
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                count += 1
                if count == n:
                    came = True
                    cadence._note(number, None)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            first = cadence.next(1)
        finally:
            sys.settrace(before)
        told = [first, cadence.next(2), cadence.next(3), cadence.next(4)]
        if not came and n:
            break
        if wish == Wish.STOP:
            assert told[-1] == (Wish.STOP if came else Wish.GO_ON), f"instruction {n}"
        else:
            assert told.count(Wish.SAVE) == came, f"instruction {n}"
    assert n > 50
