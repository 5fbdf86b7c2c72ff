"""A Python that stands for the real one has to be told from it by nothing but its speed."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.waiting import wait_for
from tests.warm.plugin import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAMS = {  # what each is about: its words
    "arguments": ["-c", "import sys; print(sys.argv, sys.path[:1], __name__, sys.stdin.read())", "a", "-b"],
    "a status": ["-c", "raise SystemExit(3)"],
    "a sentence as a status": ["-c", "raise SystemExit('no such run')"],
    "an error": ["-c", "def f():\n  1 / 0\nf()"],
    "an interrupt of its own": ["-c", "import signal; signal.raise_signal(signal.SIGINT)"],
    "a signal that kills": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    "a thread that goes on": ["-c", "import threading, time\nthreading.Timer(0.2, print, ['last']).start()"],
    "atexit": ["-c", "import atexit; atexit.register(print, 'left')"],
    "a module": ["-m", "platform"],
    "a file": ["program.py", "one"],
    "a file that is not there": ["nothing.py"],
    "an environment read at the start": ["-W", "error", "-c", "import warnings; warnings.warn('said')"],
    "threads": ["-c", "import torch; torch.manual_seed(0); print(torch.get_num_threads(), torch.rand(1))"],
    "children": ["-c", "import os; print(os.system('exit 3'), os.popen('echo said').read())"],
    "ranks": ["program.py", "ranks"],
}
PROGRAM = """
import sys
import time
import torch.multiprocessing as mp

def rank(number):
    print(f"rank {number}", flush=True)

if __name__ == "__main__":
    print(sys.argv, __file__)
    if sys.argv[1] == "ranks":
        sys.stdout.flush()
        mp.spawn(rank, nprocs=1)
"""
FRESH = "import sys; print('torch' in sys.modules)"


@pytest.fixture(scope="module")
def warm():
    with Warm() as server:
        yield server


def told(command: list, folder, **environment: str) -> tuple[int, str, str]:
    """Return a program's status and both outputs."""
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run(command, cwd=folder, env=environ, input="said", capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_says_and_ends_as_under_the_real_python(warm, words, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    python = str(warm.folder / "python")
    found, real = (told([start, *words], tmp_path, OMP_NUM_THREADS="3") for start in (python, sys.executable))
    assert (found[0], found[1], found[2].replace(python, sys.executable)) == real


def test_it_has_torch_already_unless_torch_would_read_another_environment(warm, tmp_path):
    start = [str(warm.folder / "python"), "-c", FRESH]
    assert told(start, tmp_path)[1] == "True\n"
    assert told(start, tmp_path, TORCH_CPP_LOG_LEVEL="INFO")[1] == "False\n"


def test_its_streams_can_be_set_as_those_of_a_terminal_can(warm, tmp_path):
    script = "import sys; sys.stdout.reconfigure(errors='namereplace'); print(sys.stdout.isatty(), sys.stdout.errors)"
    ours, theirs = os.openpty()
    subprocess.run([str(warm.folder / "python"), "-c", script], cwd=tmp_path, stdout=theirs, check=True, timeout=60)
    assert os.read(ours, 100) == b"True namereplace\r\n"
    os.close(ours), os.close(theirs)


def test_two_programs_draw_other_numbers(warm, tmp_path):
    script = "import torch, random, numpy; print(torch.initial_seed(), random.random(), numpy.random.rand())"
    drawn = [told([str(warm.folder / "python"), "-c", script], tmp_path)[1].split() for _ in range(2)]
    assert all(a != b for a, b in zip(*drawn, strict=True)) and len(drawn[0]) == 3


def test_torchrun_finds_ranks_that_have_torch(warm, tmp_path):
    (tmp_path / "program.py").write_text(FRESH + "; import os; print(os.environ['WORLD_SIZE'], flush=True)")
    start = [str(warm.folder / "torchrun"), "--standalone", "--nproc-per-node=2", "program.py"]
    status, said, _ = told(start, tmp_path)
    assert status == 0 and sorted(said.split()) == ["2", "2", "True", "True"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_program_and_what_it_started(warm, sent, tmp_path):
    script = "import os, subprocess, time\nprint(os.getpid(), subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
    start = [str(warm.folder / "python"), "-c", f"{script}time.sleep(60)"]
    program = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    pids = [int(pid) for pid in program.stdout.readline().split()]
    os.killpg(program.pid, sent)
    assert program.wait(20) == -sent
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), lambda: True, "both to end", 20)


BLOCKED = """
import os
for thread in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{thread}/status") as file:
        (mask,) = (line.split()[1] for line in file if line.startswith("SigBlk"))
    print("main" if int(thread) == os.getpid() else "other", mask)
"""


def test_the_main_thread_alone_takes_signals(warm, tmp_path):
    lines = told([str(warm.folder / "python"), "-c", BLOCKED], tmp_path)[1].splitlines()
    takes = [(which, not int(mask, 16) & 1 << signal.SIGINT - 1) for which, mask in map(str.split, lines)]
    assert set(takes) == {("main", True), ("other", False)}


def test_all_end_with_the_server():
    with Warm() as server:
        start = [str(server.folder / "python"), "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
        program = subprocess.Popen(start, stdout=subprocess.PIPE)
        pid = int(program.stdout.readline())
    assert program.wait(20) == 1
    wait_for(lambda: not psutil.pid_exists(pid), lambda: True, "its end", 20)
    assert not server.folder.exists()


def test_the_server_outlives_those_that_are_killed_while_they_ask(warm):
    start = [str(warm.folder / "python"), "-c", "import time; time.sleep(0.01)"]
    for wave in range(20):
        asking = [subprocess.Popen(start, start_new_session=True) for _ in range(6)]
        time.sleep(wave / 200)
        for program in asking[:3]:
            program.kill()
        assert {program.wait(20) for program in asking} <= {0, -signal.SIGKILL}
    assert told([*start[:2], "print('served')"], warm.folder)[1] == "served\n"
