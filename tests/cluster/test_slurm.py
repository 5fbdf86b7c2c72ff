"""The script of `ddp-course submit --slurm`, unchanged, on a real SLURM: what interrupts a job changes no bit of it."""

from __future__ import annotations

import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from ddp_course.commands import submit
from ddp_course.launcher import janitor
from tests.cluster.slurm import Slurm, slurm, why_not
from tests.programs.running import PROGRAMS, edited, on_ranks
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

EPOCHS, GRACE_S = 12, 60
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
LIMIT_S = 240  # far more than needed: a machine that does other things too


@pytest.fixture(scope="module")
def cluster():
    if reason := why_not():
        pytest.skip(reason)
    with slurm() as built:
        yield built
    assert not janitor.marked(built.mark) and not built.folder.exists()


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict:
    """What the same training on this machine leaves, that nothing interrupts."""
    folder = tmp_path_factory.mktemp("expected")
    on_ranks(program(folder), 2, str(folder / "run.pt"))
    return content(folder)


def program(folder: Path) -> Path:
    """The lessons' program, with more epochs."""
    old = "EPOCHS, GLOBAL_BATCH, SAVE_EVERY = 3,"
    return edited(PROGRAMS / "train_resumable.py", folder, (old, old.replace("3", str(EPOCHS))))


def content(folder: Path) -> dict:
    return torch.load(folder / "run.pt", weights_only=True)


def submitted(cluster: Slurm, folder: Path, *options: str) -> str:
    """Hand a training on two nodes in, and return the number of its job."""
    folder.mkdir(exist_ok=True)
    words = ["--slurm", f"--output={folder / 'job'}", "--gpus-per-node=0", "--cpus-per-rank=1", f"--grace={GRACE_S}"]
    script = ["--", "python", str(program(folder)), str(folder / "run.pt")]
    assert submit.main([*words, "--python", sys.executable, *options, *script]) == 0
    return cluster.ask("sbatch", "--parsable", "job", cwd=folder)


def in_training(cluster: Slurm, folder: Path) -> None:
    wait_for((folder / "run.pt").exists, cluster.up, "a checkpoint", LIMIT_S)


def told(rank: int) -> bool:
    """SIGTERM waits for this rank, which stands still; or it has been let go, and has ended."""
    with suppress(FileNotFoundError):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{rank}/status").read_text().splitlines())
        return bool(int(status["ShdPnd"], 16) >> signal.SIGTERM - 1 & 1)
    return True


def assert_same(cluster: Slurm, job: str, folder: Path, expected: dict, restarts: int) -> str:
    """The job ended well, after so many restarts, with the bits of the undisturbed one; return its log."""
    wait_for(lambda: cluster.job(job)["JobState"] in ENDED, cluster.up, "the job's end", LIMIT_S, every_s=0.2)
    log, now = (folder / f"ddp-course-{job}.log").read_text(), cluster.job(job)
    assert (now["JobState"], now["Restarts"]) == ("COMPLETED", str(restarts)), log
    starts = [int(step) for step in re.findall(r"2 ranks start after step (\d+)", log)]
    assert starts[0] == 0 and (starts[-1] > 0) == (restarts > 0), log
    torch.testing.assert_close(content(folder), expected, rtol=0, atol=0)
    wait_for(lambda: not cluster.ranks(), cluster.up, "the ranks' end")
    return log


def assert_saved_in_time(log: str) -> None:
    """Both ranks left after one step, and continued from there."""
    left = re.findall(r"rank (\d) leaves after step (\d+)", log)
    assert sorted(rank for rank, _ in left) == ["0", "1"] and len({step for _, step in left}) == 1
    assert f"2 ranks start after step {left[0][1]}\n" in log


def test_a_node_is_lost(cluster, expected, tmp_path):
    job = submitted(cluster, tmp_path)
    in_training(cluster, tmp_path)
    with cluster.held():
        cluster.switch_off(2)
    cluster.ask("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")  # in time SLURM would see by itself
    cluster.boot(2, "slurmd", "-D", "-N", "n2")
    assert_same(cluster, job, tmp_path, expected, restarts=1)


def test_the_time_is_up(cluster, expected, tmp_path):
    job = submitted(cluster, tmp_path)
    in_training(cluster, tmp_path)
    with cluster.held() as ranks:
        end = time.localtime(time.time() + GRACE_S + 30)  # SLURM looks every 30 s
        cluster.ask("scontrol", "update", f"JobId={job}", time.strftime("EndTime=%Y-%m-%dT%H:%M:%S", end))
        wait_for(lambda: all(map(told, ranks)), cluster.up, "SIGTERM")
        cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=10")  # enough for the second start
    assert_saved_in_time(assert_same(cluster, job, tmp_path, expected, restarts=1))


def test_a_job_of_higher_priority_comes(cluster, expected, tmp_path):
    job = submitted(cluster, tmp_path / "low")
    in_training(cluster, tmp_path / "low")
    with cluster.held() as ranks:
        other = submitted(cluster, tmp_path / "high", "--partition=high")
        wait_for(lambda: all(map(told, ranks)), cluster.up, "SIGTERM")
    assert_same(cluster, other, tmp_path / "high", expected, restarts=0)
    assert_saved_in_time(assert_same(cluster, job, tmp_path / "low", expected, restarts=1))
    assert cluster.job(job)["PreemptTime"] == "None"  # it is of the last start: a later failure is no preemption


def test_a_cancelled_job_stays_away(cluster, tmp_path):
    job = submitted(cluster, tmp_path)
    wait_for(lambda: cluster.ask("squeue", "--steps", "-h", "-j", job), cluster.up, "a step", every_s=0.2)
    cluster.ask("scancel", job)
    wait_for(lambda: cluster.job(job)["JobState"] in ("CANCELLED", "PENDING"), cluster.up, "the end", every_s=0.2)
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("CANCELLED", "0")
