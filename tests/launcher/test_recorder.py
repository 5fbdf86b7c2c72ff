"""Whoever calls a collective, and however, it is noted once and for what it is."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddp_course import launch
from ddp_course.launcher import lines
from ddp_course.launcher.group_facts import GroupFacts
from ddp_course.launcher.recorder import Note, Recorder
from tests.launcher import on_ranks

pytestmark = pytest.mark.timeout(60)


def test_every_collective_is_recorded_with_number_shape_and_size(two_ranks):
    two_ranks.run(on_ranks.add_ranks)  # an earlier call does not count
    expected = [
        (1, "all_reduce", "float32", ((10,),), 40, False),
        (2, "broadcast", "float64", ((2, 3),), 48, False),
        (3, "all_reduce", "float32", ((5,),), 20, False),
        (1, "new_group", "", (), 0, False),
        (1, "all_reduce", "float32", ((1,),), 4, True),
        (4, "barrier", "", (), 0, False),
    ]
    message = (1, "float32", ((1,),), 4, False)
    sender, receiver = ([*expected[:3], (1, op, *message[1:]), *expected[3:]] for op in ("send", "recv"))
    assert two_ranks.run(on_ranks.collectives) == [sender, receiver]


def test_a_collective_under_way_is_not_finished(two_ranks):
    (before, after), (_, after_other) = two_ranks.run(on_ranks.in_flight)
    assert (before, after, after_other) == (False, True, True)


def test_the_recorder_keeps_no_tensor_alive_and_knows_that_a_reduce_scatter_is_complete(two_ranks):
    for found in two_ranks.run(on_ranks.what_is_kept):
        assert found == {"reduce_scatter_tensor": (True, True), "all_gather_into_tensor": (True, True)}


def test_a_call_that_has_failed_keeps_no_connection_open(tmp_path):
    """Rank 3 is no neighbour of rank 1 in gloo's ring: it is told when ranks 0 and 2 have let go of their group."""
    told = launch(
        on_ranks.end_group_after_an_error, 4, args=(str(tmp_path),), init=False, start_method="forkserver", quiet=True
    )
    assert told[1] is None
    assert all("gloo" in said and "imed out" not in said for said in (told[0], told[2], told[3])), told


def test_a_hook_in_a_thread_of_autograds_is_told_of_with_the_line_at_which_the_program_waits():
    space = {"lines": lines, "sys": sys}  # so that no frame of the thread is ours, as where autograd made it
    with ThreadPoolExecutor(1) as autograd:
        place = autograd.submit(eval, "lines.own_place(sys._getframe())", space).result()
    assert place[0] == __file__ and place[2].startswith("test_a_hook_in_a_thread")


class Unfinished:
    asked = 0

    def is_completed(self):
        Unfinished.asked += 1
        return False


@pytest.mark.parametrize(("gloo", "asked"), [(True, sum(range(30))), (False, 29)])
def test_of_calls_that_end_in_order_only_the_first_is_asked_about(monkeypatch, gloo, asked):
    monkeypatch.setattr(Unfinished, "asked", 0)
    recorder, group = Recorder(), GroupFacts("", 0, "", (0, 1), 0, gloo)
    for _ in range(30):
        note = Note(group, "all_reduce", (0, 1), None)
        recorder.enter(note)
        note.work = Unfinished()
    assert Unfinished.asked == asked
    assert [call.seq for call in recorder.recorded()] == list(range(1, 31))
