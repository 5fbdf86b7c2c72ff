"""What is made of the answers of processes: of gloo's records, of NCCL's, and of ranks that say nothing."""

import socket

import pytest

from ddp_course.observe import report
from ddp_course.observe.watch import Process, Watch, incomplete


def call(operation: str, number: int = 1, done: bool = False, size: int = 4, **other) -> dict:
    """An entry as torch's Flight Recorder has it."""
    return {
        "process_group": ("0", "default_pg"), "profiling_name": operation, "collective_seq_id": number, "is_p2p": False,
        "retired": done, "state": "scheduled", "input_sizes": [[size]], "input_dtypes": ["Float"],
        "time_created_ns": number, "at": ["/home/me/train.py", 10 + number, "main", "dist.all_reduce(x)"],
    } | other  # fmt: skip


@pytest.fixture
def watch(tmp_path):
    with socket.socket() as link:
        made = Watch(tmp_path, 5)

        def add(rank: int, calls: list[dict] | None, at: str = "step()", **other) -> Process:
            told = {"line": ["/home/me/train.py", 9, "main", at], "groups": {"0": [0, 1, 2]}, "made": calls}
            each = Process(link, 100 + rank, 1, rank, 3, told={} if calls is None else told | {"pending": {}})
            each.__dict__.update(other)
            made.processes.append(each)
            return each

        made.add = add
        yield made
        made.close()


def test_the_rank_that_did_not_come_is_named_with_its_line(watch):
    for rank in range(3):
        watch.add(rank, [call("gloo:all_reduce", 1, True), *[call("gloo:all_reduce", 2)] * (rank != 1)])
    said = report.hung(watch)
    assert (said.rank, said.facts["line"], said.facts["number"]) == (1, "train.py:9", 2)
    assert "rank 0 called it at train.py, line 12, in main" in str(said)
    assert "raise --limit" in " ".join(str(said).split())


def test_messages_of_nccl_show_who_waits_for_whom(watch):
    watch.add(0, [call("nccl:recv 0<-1", is_p2p=True)])
    watch.add(1, [call("nccl:recv 1<-2", is_p2p=True)])
    watch.add(2, [call("nccl:send 2->0", is_p2p=True, state="completed"), call("nccl:recv 2<-0", is_p2p=True)])
    said = report.hung(watch)
    assert said.code == "circle" and said.rank is None
    assert [f"rank {a} waits for rank {b} in recv" in str(said) for a, b in ((0, 1), (1, 2), (2, 0))] == [True] * 3


def test_a_message_whose_both_ends_have_come_lacks_nobody(watch):
    watch.add(0, [call("nccl:send 0->1", is_p2p=True)])
    watch.add(1, [call("nccl:recv 1<-0", is_p2p=True)])
    watch.add(2, [])
    assert (report.hung(watch).code, report.hung(watch).rank) == ("stuck", None)


def test_other_sizes_are_a_difference_only_where_a_rank_still_waits(watch):
    sizes = {"size": 5}, {"size": 6}, {"size": 6}
    for rank, size in enumerate(sizes):
        watch.add(rank, [call("nccl:all_gather", 1, True, **size), call("nccl:all_reduce", 2, **size)])
    said = report.hung(watch)
    assert said.code == "disagree" and said.rank == 0 and "all_reduce #2 (float32 [5], 20 B)" in str(said)


@pytest.mark.parametrize("at", ["dist.irecv(x, 1).wait()", "store.get('ready')"])
def test_a_rank_that_waits_for_what_no_recorder_shows_is_not_accused(watch, at):
    for rank in range(3):
        watch.add(rank, [call("gloo:barrier", 1)] * (rank != 1), at=at)
    said = report.hung(watch)
    assert said.rank is None and "cannot be told" in str(said)


def test_a_rank_that_says_nothing_or_not_all_is_not_accused(watch):
    for rank in range(3):
        watch.add(rank, None if rank == 1 else [call("gloo:barrier", 1)])
    assert report.hung(watch).rank is None
    watch.processes[1].told = {"line": ["/home/me/train.py", 9, "main", "step()"], "unknown": "KeyError: 7"}
    assert report.hung(watch).rank is None


def test_ranks_on_other_machines_are_not_accused(watch):
    watch.add(0, [call("nccl:all_reduce", 1)])
    watch.add(2, [])
    said = report.hung(watch)
    assert not watch.all_seen() and said.rank is None and "ranks 0 and 2" in str(said)


def test_an_abort_or_a_caught_error_is_no_proof(watch):
    for code in (1, -6):
        watch.processes.clear()
        for rank in range(3):
            watch.add(rank, [], ended=rank == 2, code=code if rank == 2 else None, order=1.0)
        assert report.failed(watch).rank is None
    watch.processes[-1].code = -9
    assert report.failed(watch).rank == 2


SPAWNED = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/home/me/train.py", line 3, in inner
    x = 1 / 0
ZeroDivisionError: division by zero

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/site-packages/torch/multiprocessing/spawn.py", line 90, in _wrap
    fn(i, *args)
  File "/home/me/train.py", line 9, in main
    dist.all_reduce(x)
    ^^^^^^^^^^^^^^^^^^
"""


@pytest.mark.parametrize(
    ("shown", "kind", "text", "talking"),
    [
        ("torch.distributed.DistBackendError: NCCL error\nnote: see\nLast error: gone", "DistBackendError",
         "NCCL error\nnote: see\nLast error: gone", True),
        ("torch.distributed.DistStoreError: wait timeout", "DistStoreError", "wait timeout", True),
        ("ValueError: two lines\n\nTry: this", "ValueError", "two lines\n\nTry: this", False),
        ("KeyboardInterrupt", "KeyboardInterrupt", "", False),
        ("train.Stop\na note: of it", "Stop", "a note: of it", False),
    ],
)  # fmt: skip
def test_the_exception_of_a_spawned_rank_is_read_from_its_traceback(watch, shown, kind, text, talking):
    watch.add(0, [])
    said = {"kinds": ["ProcessRaisedException", "ProcessException", "Exception"], "text": SPAWNED + shown, "at": None,
            "frames": [], "shown": "", "child": 101}  # fmt: skip
    failure = report._failure(watch.add(1, [], raised=said), 1)
    assert (failure.error_type, failure.message, failure.talking) == (kind, text, talking)
    assert (failure.line.filename, failure.line.number) == ("/home/me/train.py", 9)


def test_a_message_in_a_group_of_which_nothing_is_known_is_left_out(watch):
    strange = call("nccl:send 0->1", is_p2p=False, process_group=("7", "mine"))
    assert report.collective(strange, {"0": [0, 1, 2]}, 0, (0, 1, 2)) is None


@pytest.mark.parametrize(("state", "waiting"), [("completed", 0), ("started", 1)])
def test_messages_of_a_batch_have_the_state_of_the_whole(watch, state, waiting):
    batch = {"is_p2p": True, "p2p_seq_id": 3}
    whole = call("nccl:coalesced", state=state, **batch)
    rank = watch.add(0, [call("nccl:send 0->1", **batch), whole, call("nccl:recv 0<-1", is_p2p=True, p2p_seq_id=4)])
    found = report.whereabouts(rank, watch.folder).recent
    assert [each.op for each in found] == ["send"] * waiting + ["recv"]


def test_a_signal_without_a_name_has_its_number(watch):
    watch.add(0, [], ended=True, code=-59, order=1.0)
    assert "signal 59" in str(report.failed(watch))


def test_a_worker_of_a_rank_is_no_rank(watch):
    rank = watch.add(0, [])
    worker = watch.add(0, [])
    worker.pid, worker.parent = 77, rank.pid
    assert watch.ranks() == {0: rank}


def test_a_recorder_knows_of_a_call_that_is_not_complete():
    words = '{{"pg_status": {{"0": {{"last_enqueued_collective": "{}", "last_completed_collective": "12"}}}}}}'
    assert [incomplete(words.format(number)) for number in (12, 13)] == [False, True]
    assert not incomplete('{"pg_status": {}}')
