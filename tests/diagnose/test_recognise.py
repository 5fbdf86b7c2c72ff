"""What is read from a report: the words of launch, torch, gloo, NCCL, torchrun and mp.spawn."""

import datetime
import os

import pytest
import torch
import torch.distributed as dist

from ddp_course import RankError, RankPool, launch
from ddp_course.diagnose.recognise import odd_one_out, recognise
from ddp_course.groups import join_group, read_place
from ddp_course.rendezvous import free_port, listen_on

# --- Texts as they are found in logs ---------------------------------------------------------------

RULE = "Every rank must call the same collectives, in the same order, with the same shapes."

GLOO_ENDED_IT = f"""ranks brought tensors of different sizes to one collective, and gloo ended rank 0: \
rank 0 called all_reduce #1 (float [4], 16 B); rank 1 called all_reduce #1 (float [4], 16 B); \
rank 2 called all_reduce #1 (float [3], 12 B)
{RULE}
ddp-course: {{"code": "sizes", "rank": null, "calls": {{"0": "all_reduce #1 (float [4], 16 B)", \
"1": "all_reduce #1 (float [4], 16 B)", "2": "all_reduce #1 (float [3], 12 B)"}}}}"""

IN_THE_LOOP = f"""ranks disagree about collective #4: rank 0 called all_reduce #4 (float [2], 8 B); \
rank 1 called all_reduce #4 (float [10], 40 B)
{RULE}

Where the ranks were:
  rank 0  gave up in all_reduce #4 (float [2], 8 B); train.py, line 7, in evaluate: dist.all_reduce(right)
  rank 1  gave up in all_reduce #4 (float [10], 40 B); train.py, line 21, in step: loss.backward()
ddp-course: {{"code": "sizes", "rank": null, "calls": {{"0": "all_reduce #4 (float [2], 8 B)", \
"1": "all_reduce #4 (float [10], 40 B)"}}}}"""

ALL_SAVE = """rank 1 never entered barrier #4; the others waited 5 s
  rank 1 was at train.py, line 30, in save: torch.save(state, path)

Where the ranks were:
  rank 0  gave up in barrier #4; train.py, line 31, in save: dist.barrier()
  rank 1  was running; last collective all_reduce #3; train.py, line 30, in save: torch.save(state, path)
ddp-course: {"code": "absent", "rank": 1, "op": "barrier", "number": 4}"""

TOLD_BY_A_COMMENT = """rank 1 never entered all_reduce #4; the others waited 5 s
  rank 1 had returned

Where the ranks were:
  rank 0  gave up in all_reduce #4; train.py, line 31, in step: dist.all_reduce(g)  # before we validate and save
  rank 1  had returned
ddp-course: {"code": "absent", "rank": 1, "op": "all_reduce", "number": 4}"""

FOREVER = """rank 1 never entered all_reduce #9; the others waited 5 s
  rank 1 was at train.py, line 8, in train: while busy():

Where the ranks were:
  rank 0  gave up in all_reduce #9; train.py, line 9, in train: loss.backward()
  rank 1  was running; last collective all_reduce #8; train.py, line 8, in train: while busy():
ddp-course: {"code": "absent", "rank": 1, "op": "all_reduce", "number": 9}"""

RAN_OUT = """rank 2 never entered all_reduce #9; the others waited 5 s
  rank 2 had returned

Where the ranks were:
  rank 0  gave up in all_reduce #9; train.py, line 9, in train: loss.backward()
  rank 1  gave up in all_reduce #9; train.py, line 9, in train: loss.backward()
  rank 2  had returned
ddp-course: {"code": "absent", "rank": 2, "op": "all_reduce", "number": 9}"""

BESIDE_A_QUEUE = """rank 1 of 2 raised KeyError: 'label'

Where the ranks were:
  rank 0  was running; train.py, line 5, in feed: batch = queue.get()
  rank 1  raised KeyError; train.py, line 9, in train: row["label"]
ddp-course: {"code": "raised", "rank": 1, "error": "KeyError: 'label'"}"""

TORCHRUN = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2025-03-01_12:00:02
  rank      : 0 (local_rank: 0)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-03-01_12:00:01
  host      : node-b
  rank      : 3 (local_rank: 1)
  exitcode  : 1 (pid: 4711)
============================================================"""

SPAWNED = """-- Process 2 terminated with the following error:
Traceback (most recent call last):
  File "train.py", line 12, in train
ValueError: sample 17 has no label"""

NO_SHM = "[0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-pZafXL to 7340384 bytes"
NO_SHM_2 = "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-pZafXL (size 7340384)"
FORKED = "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must"
IN_A_CHILD = "no result after 5 s (limit_s) from rank 1\n  rank 1 was running; a.py, line 3, in f: child.join()\n"
IN_A_CHILD += 'ddp-course: {"code": "limit", "rank": 1}'
LOOPING = "no result after 5 s (limit_s) from rank 1\n  rank 1 was running; a.py, line 3, in f: x = compute(x)\n"
LOOPING += 'ddp-course: {"code": "limit", "rank": 1}'
PREFIX = 'Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "a.weight".\n\t'
PREFIX += 'Unexpected key(s) in state_dict: "module.a.weight".'


@pytest.mark.parametrize(
    "text, fault, rank",
    [
        (GLOO_ENDED_IT, "collective-shape", 2),
        (IN_THE_LOOP, "rank0-only-validation", 0),
        (ALL_SAVE, "skipped-collective", 1),  # every rank is in save: no branch of rank 0
        (TOLD_BY_A_COMMENT, "skipped-collective", 1),  # a comment proves nothing
        (FOREVER, "skipped-collective", 1),  # in backward too, but nobody has run out of batches
        (RAN_OUT, "uneven-inputs", 2),
        (BESIDE_A_QUEUE, "one-rank-raises", 1),
        (TORCHRUN, "one-rank-raises", 3),
        (SPAWNED, "one-rank-raises", 2),
        (NO_SHM, "nccl-in-docker", None),
        (NO_SHM_2, "nccl-in-docker", None),
        (FORKED, "forked-cuda", None),
        (IN_A_CHILD, "forked-cuda", 1),
        (LOOPING, None, None),
        (PREFIX, "module-prefix", None),
        ("", None, None),
        ("epoch 1: loss 0.3, rank 0 saved everything", None, None),
    ],
)
def test_texts(text, fault, rank):
    found = recognise(text)
    assert (found.fault, found.rank, found.report) == (fault, rank, text)


def test_a_log_of_torchruns_with_its_words_before_each_line():
    log = "\n".join(f"[rank0]: {line}" for line in IN_THE_LOOP.splitlines())
    found = recognise(f"W1121 13:00:01 torch/distributed/run.py:774\n{log}\nE1121 13:00:09 failed (exitcode: 124)")
    assert (found.fault, found.rank) == ("rank0-only-validation", 0)


@pytest.mark.parametrize(
    "text, word",
    [
        ("gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 2000ms for recv operation", "Flight Recorder"),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=35)", "Flight Recorder"),
        ("[rank=2] Operation timed out after 600794 ms", "Flight Recorder"),
        ("DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//cpu//0/2", "never signed in"),
        ("RuntimeError: gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:28048", "no last word"),
    ],
)
def test_what_names_nobody_is_not_guessed(text, word):
    found = recognise(text)
    assert (found.fault, found.rank) == (None, None) and word in found.evidence
    reported = f'{text}\nddp-course: {{"code": "raised", "rank": 0, "error": "DistBackendError: {text}"}}'
    assert recognise(reported).fault is None


@pytest.mark.parametrize(
    "calls, rank",
    [
        ({0: "a", 1: "b", 2: "a"}, 1),
        ({0: "b", 1: "a", 2: "a", 3: "a"}, 0),
        ({0: "a", 1: "b"}, None),
        ({0: "a", 1: "b", 2: "c"}, None),
        ({0: "a", 1: "a", 2: "b", 3: "b"}, None),
        ({}, None),
    ],
)
def test_the_odd_one_out_needs_a_majority(calls, rank):
    assert odd_one_out(calls) == rank


# --- torch's own words, on ranks -------------------------------------------------------------------


def skip(rank: int) -> None:
    for step in range(3):
        if (rank, step) != (1, 1):
            dist.all_reduce(torch.ones(4))


def swap(rank: int) -> None:
    calls = [lambda: dist.all_reduce(torch.ones(4)), lambda: dist.broadcast(torch.ones(4), 0)]
    for call in reversed(calls) if rank == 1 else calls:
        call()


def reshape(rank: int) -> None:
    dist.all_reduce(torch.ones(3 if rank == 1 else 4))


def validate_on_0(rank: int) -> None:
    def validate():
        dist.all_reduce(torch.ones(2))

    if rank == 0:
        validate()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "mistake, fault, rank",
    [
        (skip, "skipped-collective", 1),
        (swap, "collective-order", 1),  # torch's own words show two ranks, and of two nobody can tell
        (reshape, "collective-shape", 1),
        (validate_on_0, "rank0-only-validation", 0),
    ],
)
def test_in_torchs_detail_mode(mistake, fault, rank, nothing_left):
    """torch compares every collective before it runs, so that other words come, and mostly sooner."""

    def in_detail(rank, world_size):
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does when torch is imported
        join_group(read_place(), timeout_s=3)
        mistake(rank)  # and no barrier after it: a rank that skipped would be found there instead

    with RankPool(3, init=False, start_method="forkserver", quiet=True) as ranks:
        ranks.run(lambda rank, world_size, mistake: None, (mistake,))  # imports this file, which takes long
        with pytest.raises(RankError) as failed:
            ranks.run(in_detail, limit_s=20)
    found = recognise(failed.value)
    assert (found.fault, found.rank) == (fault, rank), found.report
    assert "monitoredBarrier" in found.report or "Detected mismatch" in found.report


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "trouble, fault, rank",
    [
        ("taken", "port-taken", 0),
        ("nobody", "rendezvous-unreachable", None),  # torch counts who came, and names nobody
        ("another port", "rendezvous-unreachable", 1),
        ("another size", None, None),  # torch's words do not tell a missing rank from a wrong count
    ],
)
def test_meeting_by_torch_alone(trouble, fault, rank, nothing_left):
    def start_by_torch_alone(rank: int, world_size: int, port: int) -> None:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # with it, torch 2.11 lets nobody host a store
        if trouble == "nobody" and rank == 1:
            return
        port = port + 1 if trouble == "another port" and rank == 1 else port
        size = world_size + (trouble == "another size" and rank == 1)
        waits_longer = trouble == "another port" and rank == 0  # or both might lose patience, in either order
        address, patience = f"tcp://127.0.0.1:{port}", datetime.timedelta(seconds=6 if waits_longer else 2)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=patience)

    settings = {"init": False, "start_method": "forkserver", "quiet": True, "limit_s": 10}
    with pytest.raises(RankError) as failed, listen_on() as other_job:
        port = other_job.getsockname()[1] if trouble == "taken" else free_port()
        launch(start_by_torch_alone, 2, (port,), **settings)
    found = recognise(failed.value)
    assert (found.fault, found.rank) == (fault, rank), found.report
    assert fault or "counts more ranks than there are" in found.evidence


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_barrier_of_torchs_that_names_who_is_missing():
    def wait(rank, world_size):
        if rank != 1:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=1))

    with pytest.raises(RankError) as failed:
        launch(wait, 3, start_method="forkserver", quiet=True, timeout_s=5)
    found = recognise(failed.value)
    assert (found.fault, found.rank) == ("skipped-collective", 1), found.report
