"""Programs that hang, die and do neither, under `ddp-course run`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.observe import cases

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("nothing_left")]
COMMAND = [sys.executable, "-m", "ddp_course.cli", "run"]
ALWAYS = {"sleeps_before_a_step", "raises"}
OFTEN = {"both_receive_first", "is_killed", "spawned_and_raises", "other_order"}


def marked(name: str):
    marks = [] if name in ALWAYS else [pytest.mark.slow] if name in OFTEN else [pytest.mark.slow, pytest.mark.nightly]
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name) for name in cases.read()])
def test_who_is_to_blame_or_that_it_cannot_be_told(name, tmp_path, folders):
    case = cases.read()[name]
    status, facts, said = cases.told_of(case, tmp_path)
    assert cases.judged(case, facts) in ("right", "right, cannot tell", "cannot tell"), said
    assert (status == 124) == (case.hangs and "left to run" not in said) and status != 0, said
    assert "sitecustomize" not in said, said
    assert status != 124 or said.rstrip().splitlines()[-1].startswith("ddp-course: "), "the report is not the last word"


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """Where a run makes its folder; it must be gone at the end."""
    (tmp_path / "folders").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "folders"))
    yield
    assert not [path for path in (tmp_path / "folders").iterdir() if path.name.startswith("ddp-run-")]


def under(*words: str, **other) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120, **other)


def test_a_program_that_is_well_finds_all_as_it_is_without_us(tmp_path, folders):
    program = tmp_path / "whole.py"
    program.write_text(
        "import os, sys, threading, sitecustomize\n"
        "print(sorted(os.environ.items()), sys.path, threading.active_count(), sitecustomize.OWN, sys.stdin.read())\n"
        "print('a warning', file=sys.stderr)\nsys.exit(5)\n"
    )
    (tmp_path / "sitecustomize.py").write_text("OWN = 'the own one'\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, str(program)]
    plain = subprocess.run(command, capture_output=True, text=True, env=environment, input="yes", timeout=60)
    found = under("--", *command, env=environment, input="yes")
    assert "the own one yes" in plain.stdout and (found.stdout, found.returncode) == (plain.stdout, 5)
    assert found.stderr.startswith(plain.stderr)


def test_a_command_that_is_no_python_passes_its_status_on(folders):
    assert [under("--", "sh", "-c", words).returncode for words in ("exit 0", "exit 9", "kill -9 $$")] == [0, 9, 137]
    missing = under("--", "no-such-command")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1) and "no-such-command: cannot" in missing.stderr
    wrong = [[], *(["--limit", limit, "--", "true"] for limit in ("0", "inf", "nan"))]
    assert [under(*words).returncode for words in wrong] == [2] * 4
    assert under("--limit", "1e12", "--", "sh", "-c", "exit 9").returncode == 9


def test_a_signal_is_passed_on_when_watching_has_failed(monkeypatch, folders):
    from ddp_course.observe import program

    monkeypatch.setattr(program.Watch, "listen", lambda *_: 1 / 0)
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, *program.PASSED_ON)}
    said = []
    try:
        command = ["sh", "-c", "trap 'exit 4' TERM; kill -TERM $PPID; for i in 1 2 3 4 5 6 7 8 9; do sleep 1; done"]
        assert program.run(command, 60, said.append) == 4
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(said) == 1 and "ZeroDivisionError" in said[0]


def test_a_long_path_to_temporary_files_is_no_hindrance(tmp_path):
    long = tmp_path / ("long" * 25)
    long.mkdir()
    assert under("--", "sh", "-c", "exit 9", env=os.environ | {"TMPDIR": str(long)}).returncode == 9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_program_and_is_no_failure_of_it(number, folders):
    program = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: exit(3))\nprint('up', flush=True)"
    program += "\ntime.sleep(60)"
    command = [*COMMAND, "--", sys.executable, "-c", program]
    environment = os.environ | {"RANK": "0"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                          stdin=subprocess.DEVNULL) as run:  # fmt: skip
        assert run.stdout.readline() == "up\n"
        run.send_signal(number)
        said = run.stderr.read()
    assert run.returncode == {signal.SIGTERM: 3, signal.SIGINT: 130}[number] and "ddp-course run:" not in said


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train.py", pytest.param("ddp_spawn.py", marks=pytest.mark.nightly)])
def test_a_training_says_what_it_says_without_us(program, folders):
    path = Path(__file__).parents[2] / "programs" / program
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] * (program == "train.py")
    command = [sys.executable, *torchrun, str(path)]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = under("--", *command)
    assert plain.returncode == found.returncode == 0 and found.stdout == plain.stdout and "loss" in plain.stdout
    assert "ddp-course run:" not in found.stderr
