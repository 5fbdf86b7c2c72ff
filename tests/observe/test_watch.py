"""What is made of the time that passes and of connections that end: processes fed by hand, without a program."""

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
