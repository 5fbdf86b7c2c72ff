"""What is made of the time that passes and of connections that end: processes fed by hand, without a program."""

import json
import selectors
import socket
import subprocess
import time

import pytest

from ddp_course.observe.watch import Process, Watch


@pytest.fixture
def watch(tmp_path):
    with socket.socket() as link:
        made = Watch(tmp_path, 5)

        def add(rank: int | None, pid: int, **other) -> Process:
            made.processes.append(Process(link, pid, 1, rank, 2))
            made.processes[-1].__dict__.update(other)
            return made.processes[-1]

        made.add = add
        yield made
        made.close()


def test_a_job_that_was_suspended_is_not_called_hung(watch):
    now = time.monotonic()
    ranks = [watch.add(rank, 1 << 30 | rank, moved=now - 100) for rank in range(2)]
    watch._next = now - 98
    assert watch.found() == "" and all(1.9 < now - each.moved < 2.1 for each in ranks)
    watch._next = now
    assert watch.found() == ""
    for each in ranks:
        each.moved -= 98
    watch._next = now
    assert watch.found() == "hung"


def test_half_a_line_is_skipped(watch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b'{"what": "mov{"what": "where", "pid": 7}\n{"what": "ends", "pid": 7}\n{"wh')
        assert Process(ours).read() == [{"what": "ends", "pid": 7}]


def test_a_limit_of_years_can_be_waited(watch):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(f"{watch.folder}/socket")
        watch.listen(1e12)
    assert len(watch.processes) == 1


def test_no_signal_goes_to_a_process_that_has_not_said_who_it_is(watch, monkeypatch):
    sent = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append(pid))
    for pid in (0, 7):
        watch.add(None, pid, answered=False)
    watch.where()
    assert sent == [7]


def test_who_said_where_it_is_and_waits_is_not_taken_to_move(watch):
    rank = watch.add(0, 7, waits=True, moved=1.0, _checked=1.0)
    rank.ask(b"L")
    rank.note({"what": "where", "pid": 7, "parent": 1})
    rank.computes(1e6)
    assert rank.moved == 1.0


def test_a_rank_that_becomes_another_program_has_not_failed(watch):
    with subprocess.Popen(["sleep", "60"]) as other:
        for pid, code in ((other.pid, None), (1 << 30, 1)):
            ours, theirs = socket.socketpair()
            rank = watch.add(0, pid, link=ours)
            watch.selector.register(ours, selectors.EVENT_READ, rank)
            theirs.close()
            watch.finish()
            assert (rank in watch.processes, watch.failed_at is not None) == (code == 1, code == 1)
        other.kill()


def says(watch, process: Process, **facts) -> None:
    """Have a process say something, or end if it says nothing."""
    process.link, theirs = socket.socketpair()
    watch.selector.register(process.link, selectors.EVENT_READ, process)
    with theirs:
        if facts:
            line = {"what": "starts", "pid": process.pid, "parent": process.parent} | facts
            theirs.sendall(json.dumps(line).encode() + b"\n")
            watch.listen(1)
            watch.selector.unregister(process.link)
    if facts:
        process.link.close()
    watch.finish()


def test_the_second_launch_of_a_command_takes_the_place_of_the_first(watch):
    first = [watch.add(rank, (1 << 30) + rank) for rank in range(3)]
    watch.attempt = first[0].attempt = first[1].attempt = first[2].attempt = 2
    for each in first:
        says(watch, each)
    assert watch.failed_at is not None and [each.died for each in first] == [True] * 3
    second = [watch.add(None, (1 << 30) + 7 + rank) for rank in range(2)]
    says(watch, second[1], rank=1, world=2, attempt=0)
    says(watch, second[0], rank=0, world=2, attempt=0)
    assert watch.ranks() == dict(enumerate(second)) and watch.all_seen()
    assert watch.failed_at is None and watch.processes == second


def test_of_two_with_one_number_the_living_is_the_rank_and_a_failure_is_kept(watch):
    lives, dead, late = watch.add(0, (1 << 30) + 1), watch.add(0, (1 << 30) + 2), watch.add(None, 1 << 30)
    says(watch, dead)
    says(watch, late, rank=1, world=2)
    assert watch.ranks() == {0: lives, 1: late} and watch.failed_at is None
    lives.ended = True
    watch.failed_at = 1.0
    says(watch, watch.add(None, (1 << 30) + 3), rank=2, world=3)
    assert watch.failed_at == 1.0 and sorted(watch.ranks()) == [0, 1, 2]


def test_that_no_rank_was_seen_is_told_once(watch):
    for rank, told in ((None, ["none", ""]), (0, ["", ""])):
        watch.processes.clear()
        watch.add(rank, 1 << 30)
        watch._began = time.monotonic() - 6
        assert [watch.found(), watch.found()] == told
