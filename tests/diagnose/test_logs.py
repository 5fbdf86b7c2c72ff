"""What jobs leave when they die, and what is read from it; what tells nothing is called unknown."""
# ruff: noqa: E501  (a log stays a line)

import pickle
import subprocess
import sys

import pytest

from ddp_course import cli
from ddp_course.commands import read as command
from ddp_course.diagnose.logs import read

WATCHDOG = (
    "[rank{rank}]:[E1123 04:10:0{rank}.1 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600013 "
    "milliseconds before timing out.\n"
    "[rank{rank}]:[E1123 04:10:0{rank}.2 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] failure "
    "detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {last}, last completed work: {done}\n"
)

# Name -> files, and what must be read from them: cause and rank.
JOBS = {
    "watchdog": (
        {"job.out": "".join(WATCHDOG.format(rank=r, seq=35, last=34 if r == 2 else 36, done=34) for r in range(4))},
        ("hang", 2),
    ),
    "out of memory, and the others lose their peer": (
        {
            "rank0.log": "2026-11-23 04:00:09 RuntimeError: Connection closed by peer [10.0.0.2]:4711\n",
            "rank1.log": "2026-11-23 04:00:08 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
        },
        ("gpu-out-of-memory", 1),
    ),
    "the earliest of two causes": (
        {
            "rank0.log": "2026-11-23 04:00:09 RuntimeError: No space left on device\n",
            "rank3.log": "2026-11-23 04:00:07 ERROR: Unexpected bus error encountered in worker. Bus error\n",
        },
        ("shared-memory", 3),
    ),
    "prefixes": ({"slurm-1.out": "0: step 10\n1: step 10\n1: ValueError: rows are missing\n0: Broken pipe\n"}, ("ValueError: rows are missing", 1)),
    "slurm's memory": ({"slurm-2.out": "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n"}, ("out-of-memory", None)),
    "time": ({"s.out": "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-23T04:00:00 DUE TO TIME LIMIT ***\n"}, ("time-limit", None)),
    "old launcher": ({"a.log": "train.py: error: unrecognized arguments: --local-rank=1\n"}, ("local-rank-argument", None)),
    "ready twice": ({"a.log": "[rank1]: RuntimeError: Expected to mark a variable ready only once. This error\n"}, ("marked-ready-twice", 1)),
    "in place": ({"a.log": "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation\n"}, ("in-place-modification", None)),
    "ordinal": ({"a.log": "[rank4]: RuntimeError: CUDA error: invalid device ordinal\n"}, ("invalid-device", 4)),
    "one GPU for two": ({"a.log": "init.cc:943 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000\n"}, ("duplicate-gpu", 1)),
    "the same, NCCL 2.30": ({"a.log": "NCCL WARN Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1\n"}, ("duplicate-gpu", None)),
    "libuv": ({"a.log": "RuntimeError: use_libuv was requested but PyTorch was built without libuv support\n"}, ("libuv", None)),
    "torn": ({"a.log": "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory\n"}, ("torn-checkpoint", None)),
    "pod": ({"pod-2.log": "step 4\n", "events.txt": "Warning  OOMKilling  pod/train-worker-2  OOMKilled\n"}, ("out-of-memory", None)),
    "killed": (
        {"a.log": "Root Cause (first observed failure):\n[0]:\n  time : 2026\n  host : a\n  rank      : 3 (local_rank: 3)\n  exitcode  : -9 (pid: 7)\n"},
        ("killed", 3),
    ),
    "gloo, one is silent": (
        {
            "attempt_0/0/stderr.log": "RuntimeError: gloo: Timed out waiting 5000ms for recv operation to complete\n",
            "attempt_0/1/stderr.log": "step 3\n",
            "attempt_0/2/stderr.log": "RuntimeError: gloo: Timed out waiting 5000ms for recv operation to complete\n",
        },
        ("hang", 1),
    ),
    "only lost peers, one is silent": (
        {
            "rank0.log": "RuntimeError: [pair.cc:561] Connection closed by peer [127.0.0.1]:10669. GLHF!\n",
            "rank1.log": "step 6\n",
            "rank2.log": "RuntimeError: [pair.cc:545] Read error [127.0.0.1]:9601: Connection reset by peer.\n",
        },
        ("connection-closed", 1),
    ),
    "a lost peer, two are silent": (
        {"rank0.log": "RuntimeError: Connection closed by peer [10.0.0.2]:4711\n", "rank1.log": "", "rank2.log": ""},
        ("connection-closed", None),
    ),
    "a good end": ({"a.log": "epoch 0: loss 0.5\nepoch 1: loss 0.4\ndone\n"}, (None, None)),
    "nothing": ({"a.log": ""}, (None, None)),
    "warnings": ({"a.log": "UserWarning: lr_scheduler.step() before optimizer.step()\n"}, (None, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_the_cause_and_the_rank_are_read(name, tmp_path):
    files, expected = JOBS[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = read([tmp_path])
    assert (found.cause, found.rank) == expected
    assert found.cure or expected[0] is None


def dump(folder, rank, calls):
    entries = [{"collective_seq_id": n, "profiling_name": f"gloo:{what}", "input_sizes": [[4]], "process_group": ("0", ""),
                "frames": [{"filename": "train.py", "line": 7, "name": "main"}]} for n, what in enumerate(calls, 1)]  # fmt: skip
    (folder / f"dump_rank{rank}").write_bytes(pickle.dumps({"version": "2.10", "rank": rank, "entries": entries}))


def test_a_dump_tells_who_fell_behind(tmp_path):
    for rank in range(3):
        dump(tmp_path, rank, ["all_reduce"] * (5 if rank == 1 else 6))
    found = read([tmp_path])
    assert (found.cause, found.rank, found.collective) == ("hang", 1, "all_reduce[[4]] #6")
    assert "rank 1 5" in found.evidence and "train.py:7" in found.evidence


def test_a_dump_tells_whose_call_differs(tmp_path):
    for rank in range(3):
        dump(tmp_path, rank, ["all_reduce", "broadcast" if rank == 2 else "all_reduce"])
    assert read([tmp_path]).rank == 2


def test_a_pickle_with_code_is_not_run(tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    (tmp_path / "dump_rank0").write_bytes(pickle.dumps({"entries": [], "x": Harm()}))
    assert read([tmp_path]).cause is None and not (tmp_path / "harm").exists()


def test_a_real_job_of_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nassert os.environ['RANK'] != '1', 'no rows for this rank'\nimport time\ntime.sleep(30)\n"
    )
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir"]
    subprocess.run(
        [*call, str(tmp_path / "logs"), "-r", "3", str(script)], capture_output=True, timeout=200, check=False
    )
    found = read([tmp_path / "logs"])
    assert (found.cause, found.rank) == ("AssertionError: no rows for this rank", 1)


REAL_HANG = """
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank = dist.get_rank()
try:
    for step in range(3):
        if rank != 1 or step != 2:
            dist.all_reduce(torch.ones(4))
    (dist.barrier if rank == 1 else dist.all_reduce)(*[torch.ones(4)] * (rank != 1))
finally:
    with open(f"dumps/torch_fr_{rank}", "wb") as file:
        file.write(torch._C._distributed_c10d._dump_fr_trace())
"""


@pytest.mark.slow
def test_dumps_of_a_real_hang_name_the_rank_that_did_something_else(tmp_path, monkeypatch):
    (tmp_path / "dumps").mkdir()
    (tmp_path / "train.py").write_text(REAL_HANG)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py"]
    subprocess.run(call, cwd=tmp_path, capture_output=True, timeout=200, check=False)
    found = read([tmp_path / "dumps"])
    assert (found.cause, found.rank) == ("hang", 1) and "rank 1: barrier" in found.evidence


def test_the_command(tmp_path, capsys):
    (tmp_path / "a.log").write_text(JOBS["ordinal"][0]["a.log"])
    assert command.main([str(tmp_path)]) == 0 and "rank: rank 4" in capsys.readouterr().out
    (tmp_path / "a.log").write_text("all is well\n")
    assert command.main([str(tmp_path), "--json"]) == 1 and '"cause": null' in capsys.readouterr().out
    assert cli.main(["read", str(tmp_path / "none")]) == 2
