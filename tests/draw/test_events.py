"""Do dumps and logs become the same plain events, with the right rank, place, size and line?"""

from datetime import datetime

from ddp_course.diagnose.flight import Dump
from ddp_course.diagnose.log_lines import Log
from ddp_course.draw import events
from ddp_course.draw.events import Event

GROUP, OTHER = ("0", "default_pg"), ("1", "halves")


def call(number, made_ns, op="all_reduce", group=GROUP, **more):
    frames = [{"filename": "/lib/torch/x.py", "line": 1}, {"filename": "/a/train.py", "line": number, "name": "main"}]
    about = {"collective_seq_id": number, "profiling_name": f"gloo:{op}", "input_sizes": [[10, 2]]}
    times = {"time_created_ns": made_ns, "time_discovered_started_ns": None, "time_discovered_completed_ns": None}
    return {**about, **times, "input_dtypes": ["Half"], "process_group": group, "frames": frames, **more}


def test_dumps_without_times_stand_in_order_and_a_call_that_was_not_made_leaves_its_column_empty():
    # Rank 1's clock is 3 ns late, it makes no call in the other group, and has lost its first call.
    dumps = {
        0: Dump(0, [call(1, 10), call(1, 20, "broadcast", OTHER), call(2, 30), call(3, 40)]),
        1: Dump(1, [call(2, 33)]),
    }
    found = events.of_dumps(dumps)
    assert not found.timed and "do not say how long" in found.note
    assert found.events == [
        Event(0, "#1 all_reduce[[10, 2]]", 0, 1, "all-reduce", 40, "train.py, line 1, in main"),
        Event(0, "#1 broadcast[[10, 2]]", 1, 2, "other collective", 40, "train.py, line 1, in main"),
        Event(0, "#2 all_reduce[[10, 2]]", 2, 3, "all-reduce", 40, "train.py, line 2, in main"),
        Event(0, "#3 all_reduce[[10, 2]]", 3, 4, "all-reduce", 40, "train.py, line 3, in main"),
        Event(1, "#2 all_reduce[[10, 2]]", 2, 3, "all-reduce", 40, "train.py, line 2, in main"),
    ]


def test_messages_share_no_column_and_have_no_number():
    entries = [call(0, at, op, is_p2p=True, record_id=at) for at, op in enumerate(("send 0->1", "recv 0<-1"))]
    found = events.of_dumps({0: Dump(0, entries), 1: Dump(1, [call(0, 5, "recv 1<-0", is_p2p=True, record_id=0)])})
    assert [(event.rank, event.name, event.start) for event in found.events] == [
        (0, "send 0->1[[10, 2]]", 0),
        (0, "recv 0<-1[[10, 2]]", 1),
        (1, "recv 1<-0[[10, 2]]", 2),
    ]


def test_dumps_with_times_use_them_and_what_is_not_over_lasts_to_the_end():
    times = {"time_discovered_started_ns": 3_000_000_000, "time_discovered_completed_ns": 5_000_000_000}
    found = events.of_dumps({0: Dump(0, [call(1, 1_000_000_000, **times), call(2, 2_000_000_000)])})
    assert found.timed
    assert [(event.start, event.end) for event in found.events] == [(1.0, 3.0), (0.0, 3.0)]


def test_an_old_dump_that_says_little_is_read():
    found = events.of_dumps({None: Dump(None, [{"seq_id": 4, "profiling_name": "nccl:allreduce"}])})
    assert found.events == [Event(None, "#4 allreduce", 0, 1, "all-reduce")]


LINES = {
    0: ["2026-11-23 04:00:01 step 1", "2026-11-23 04:00:09 RuntimeError: Connection closed by peer [10.0.0.2]:4711"],
    1: ["2026-11-23 04:00:05 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "Broken pipe"],
}


def test_of_logs_the_lines_that_speak_of_a_failure_are_taken_with_their_times():
    found = events.of_logs([Log(f"rank{rank}.log", rank, lines) for rank, lines in LINES.items()])
    assert found.timed and found.events == [
        Event(0, LINES[0][1], 4.0, 4.0, "log", None, "rank0.log:2"),
        Event(1, "gpu-out-of-memory", 0.0, 0.0, "log", None, "rank1.log:1"),
        Event(1, "Broken pipe", 0.0, 0.0, "log", None, "rank1.log:2"),  # it has the time of the line before
    ]


def test_logs_without_all_times_stand_in_the_order_of_each_rank():
    logs = [Log("a.log", None, ["[rank1]: ValueError: no rows", "[rank0]: Broken pipe", "[rank1]: Broken pipe"])]
    found = events.of_logs(logs)
    assert not found.timed and logs[0].times == [None] * 3
    assert [(e.rank, e.start, e.end, e.line) for e in found.events] == [
        (1, 0, 1, "a.log:1"),
        (0, 0, 1, "a.log:2"),
        (1, 1, 2, "a.log:3"),
    ]
    logs[0].times[0] = datetime(2000, 1, 1)
    assert not events.of_logs(logs).timed


def test_a_job_is_its_dumps_if_there_are_any():
    logs = [Log("rank0.log", 0, LINES[0])]
    assert events.of_job(logs, {0: Dump(0, [call(1, 10)])}).events[0].name == "#1 all_reduce[[10, 2]]"
    assert events.of_job(logs, {0: Dump(0, [])}).events[0].lane == "log"
