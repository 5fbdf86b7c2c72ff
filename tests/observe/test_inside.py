"""What a process finds of itself that is watched, and of those that it starts."""

import os
import socket
import subprocess
import sys

import pytest

from ddp_course.observe.program import INSIDE, VARIABLE


def printed(program: str, folder: object, **other: str) -> str:
    """What a program prints that is watched from `folder`, where nobody may listen."""
    environment = os.environ | {VARIABLE: str(folder), "PYTHONPATH": str(INSIDE)} | other
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize("before", [[], ["/the/script's", "/second"]])
def test_the_own_path_is_kept_whatever_stands_before_ours(before, tmp_path):
    path = os.pathsep.join([*before, str(INSIDE), "/mine"])
    program = "import os; print(os.environ['PYTHONPATH'])"
    assert printed(program, tmp_path, RANK="0", PYTHONPATH=path).split(os.pathsep) == [*before, "/mine"]


@pytest.fixture
def door(tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/socket")
        listening.listen(128)
        listening.setblocking(False)
        yield listening


def connections(door: socket.socket) -> int:
    count = 0
    try:
        while True:
            door.accept()[0].close()
            count += 1
    except BlockingIOError:
        return count


def test_each_generation_of_forks_connects_once(door, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    program = "import os\nfor _ in range(4):\n    if pid := os.fork():\n        os.waitpid(pid, 0), os._exit(0)\n"
    assert printed(program, tmp_path) == "" and connections(door) == 5


def test_nothing_is_written_into_another_socket_with_our_number(door, tmp_path):
    program = """if True:
        import gc, os, socket
        watching = next(o for o in gc.get_objects() if type(o).__name__ == "Observer")
        here, there = socket.socketpair()
        os.dup2(there.fileno(), watching.link.fileno())
        here.setblocking(False)
        watching.say("ends")
        try:
            print(here.recv(100))
        except BlockingIOError:
            print("nothing")
    """
    assert printed(program, tmp_path) == "nothing"


def test_an_error_of_ours_does_not_hide_the_own_file(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("OWN = 1\n")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "struct.py").write_text("raise RuntimeError('not here')\n")
    path = os.pathsep.join([str(tmp_path / "first"), str(INSIDE), str(tmp_path / "own")])
    assert printed("import sitecustomize; print(sitecustomize.OWN)", tmp_path, PYTHONPATH=path) == "1"
