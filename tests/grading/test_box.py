"""A submission sees, changes and reaches nothing outside its box, leaves nothing, and cannot give itself marks."""

import copy
import ctypes
import json
import os
import secrets
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbgrader.utils import determine_grade

from ddp_course.grading.answer import limits
from ddp_course.grading.answer.execute import cell_role
from ddp_course.grading.answer.limits import own_file
from ddp_course.grading.sandbox import box
from ddp_course.grading.sandbox.boxed import BoxedClient
from tests.grading import tricks
from tests.grading.submissions import ROOT, cell_of, filled, solutions

HERE = {way: box._trouble(way) for way in box.WAYS}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
VICTIMS = ("gradebook.db", "submitted.ipynb", "class_secret")


@pytest.fixture(params=box.WAYS)
def way(request):
    if HERE[request.param]:
        pytest.skip(f"no box by {request.param}: {HERE[request.param]}")
    return request.param


@pytest.fixture
def places(tmp_path, monkeypatch):
    """What a submission might want, outside of its box: files, a server, a process, shared memory."""
    victims = tmp_path / "victims"
    victims.mkdir()
    for name in VICTIMS:
        (victims / name).write_text(secrets.token_hex(8))
    monkeypatch.setenv("GRADERS_TOKEN", "a secret of the grader")
    abstract, shm = secrets.token_hex(8), f"grader_{secrets.token_hex(4)}"
    key = secrets.randbits(30)
    segment = ctypes.CDLL(None).shmget(key, 8, 0o1600)
    Path("/dev/shm", shm).write_text("shared")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{abstract}")
        local.listen()
        yield {
            "root": ROOT,
            "victims": victims,
            "home": Path.home(),
            "packages": sysconfig.get_path("purelib"),
            "shm": shm,
            "port": server.getsockname()[1],
            "abstract": abstract,
            "pid": os.getpid(),
            "bystander": bystander.pid,
            "ipc": key,
        }
    bystander.kill()
    bystander.wait()
    Path("/dev/shm", shm).unlink()
    ctypes.CDLL(None).shmctl(segment, 0, None)


def tried(way: str, places: dict) -> dict[str, str]:
    """Return what came of each trick, by its name: what it got, or its error."""
    lines = ["import json", "found = {}"]
    for number, (name, body) in enumerate(tricks.ALL.items()):
        for place, value in places.items():
            body = body.replace("{" + place + "}", str(value))
        body = body.strip().replace("\n", "\n    ")
        lines += [
            f"def trick{number}():\n    {body}",
            f"try:\n    found[{name!r}] = 'got ' + repr(trick{number}())[:99]",
        ]
        lines += [
            f"except BaseException as error:\n    found[{name!r}] = type(error).__name__ + ': ' + str(error)[:99]"
        ]
    with box.Box(way) as here:
        script = here.home / "script.py"
        script.write_text("\n".join([*lines, "print('FOUND' + json.dumps(found))"]))
        command = here.command([sys.executable, str(script)])
        environment = here.environment() if way else {**os.environ, **here.environment()}
        done = subprocess.run(command, env=environment, cwd=here.home, capture_output=True, text=True, timeout=200)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND")), "")
    assert line, done.stderr[-2000:]
    return json.loads(line.removeprefix("FOUND"))


def fingerprint(places: dict) -> dict[str, object]:
    packages = Path(places["packages"])
    return {
        **{name: (places["victims"] / name).read_text() for name in VICTIMS},
        "beside them": sorted(os.listdir(places["victims"])),
        "packages": sorted(os.listdir(packages)),
        "torch": (packages / "torch" / "__init__.py").stat().st_mtime,
        "the course": [(p.name, p.stat().st_mtime) for p in sorted((ROOT / "ddp_course").rglob("*.py"))],
        "etc": sorted(os.listdir("/etc")),
        "kernels": sorted(os.listdir(Path(sys.prefix, "share/jupyter/kernels"))),
        "python": os.stat(os.path.realpath(sys.executable)).st_mode,
    }


def test_no_trick_sees_changes_or_reaches_anything(way, places):
    before = fingerprint(places)
    found = tried(way, places)
    assert len(found) == len(tricks.ALL) >= 40
    assert {name: got for name, got in found.items() if got.startswith("got")} == {}
    assert fingerprint(places) == before


def test_the_tricks_are_real(places, monkeypatch):
    """Without a box, those that only look get what they look for."""
    monkeypatch.setattr(tricks, "ALL", {**tricks.SEE, **tricks.REACH})
    found = tried("", places)
    got = {name for name, what in found.items() if what.startswith("got")}
    of_the_machine = {
        "talk to the world",
        "look a name up",
        "trace the grader",
        "read the memory of the disk",
        "read the kernel's log",
    }
    of_the_machine |= {"read the instructor's files by the home of the user"}
    of_the_machine |= {"go up by the working folder of the first process", "go up by the root of the first process"}
    assert set(tricks.ALL) - got <= of_the_machine, found


def test_judges_that_lie_among_the_packages_are_not_there(way, monkeypatch):
    places = [ROOT, *(place for place in box.readable() if ROOT not in place.parents)]
    monkeypatch.setattr(box, "readable", lambda: places)
    with box.Box(way) as here:
        command = here.command(
            [sys.executable, "-c", "import tests, os, judges; print(os.listdir(judges.__path__[0]))"]
        )
        done = subprocess.run(command, env=here.environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_no_mode_of_a_device_is_changed_and_devices_work():
    source = "open('/dev/null', 'w').write('x'); import os; os.chmod('/dev/null', 0o600)"
    before = os.stat("/dev/null").st_mode
    with box.Box(box.way_here()[0]) as here:
        command = here.command([sys.executable, "-c", source])
        done = subprocess.run(command, env=here.environment(), capture_output=True, text=True, timeout=60)
    assert os.stat("/dev/null").st_mode == before and "in <module>" in done.stderr
    assert (
        done.stderr.splitlines()[-1].startswith(("OSError: [Errno 30]", "PermissionError")) and "'w'" not in done.stderr
    )


def test_a_box_ends_with_all_that_is_in_it(way):
    mark = secrets.token_hex(8)
    with box.Box(way) as here:
        source = tricks.OUTLIVE.replace("{mark}", mark) + "import time; print('up', flush=True); time.sleep(600)"
        command = here.command([sys.executable, "-c", source])
        process = subprocess.Popen(command, env=here.environment(), stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "up\n" and len(marked(mark)) > 1
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked(mark) == [] and not here.folder.exists()


def marked(mark: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or [])]


TOO_MUCH = {
    "memory": ("x = [bytes(range(256)) * 2**14 for _ in range(400)]; import time; time.sleep(60)", "GiB of memory"),
    "processes": (
        "import os, time\nfor _ in range(60):\n    os.fork() or time.sleep(60)\ntime.sleep(60)",
        "processes, where",
    ),
    "files": ("open('f', 'wb').write(bytes(2**27)); import time; time.sleep(60)", "GiB of files"),
    "shared memory": ("open('/dev/shm/f', 'wb').write(bytes(2**27)); import time; time.sleep(60)", "GiB of files"),
    "shared pages": (
        "import mmap, time\nx = mmap.mmap(-1, 2**28)\nx.write(bytes(2**28))\ntime.sleep(60)",
        "GiB of memory",
    ),
    "a file without a name": (
        "import os, time\nfile = open('f', 'wb', 0)\nos.unlink('f')\nfile.write(bytes(2**27))\ntime.sleep(60)",
        "GiB of files",
    ),
    "a file of memory": (
        "import os, time\nos.write(os.memfd_create('f'), bytes(2**27))\ntime.sleep(60)",
        "GiB of files",
    ),
    "a file of memory that is mapped and closed": (
        "import mmap, os, time\nfile = os.memfd_create('f')\nos.write(file, bytes(2**27))\n"
        "x = mmap.mmap(file, 2**27)\n"
        "os.close(file)\ntime.sleep(60)",
        "GiB of files",
    ),
    "threads": (
        "import threading, time\nfor _ in range(60):\n    threading.Thread(target=time.sleep, args=(60,)).start()",
        "threads, where",
    ),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_who_uses_too_much_is_ended_and_told(way, what, monkeypatch):
    monkeypatch.setattr(limits, "MOST_PROCESSES", 40)
    monkeypatch.setattr(limits, "MOST_THREADS", 50)
    monkeypatch.setattr(limits, "MOST_BYTES", 2**29 if what == "memory" else 2**26)
    source, words = TOO_MUCH[what]
    with box.Box(way) as here:
        command = here.command([sys.executable, "-c", source])
        process = subprocess.Popen(command, env=here.environment(), start_new_session=True)
        watch = limits.Watch(process.pid, here.folder)
        process.wait(60)
        watch.stop()
    assert words in watch.reason


def test_no_forgery_earns_points(way, tmp_path):
    """Every forgery of 03.1 in one kernel, each with the graded check after it; then the right answer."""
    (tmp_path / "gradebook.db").write_text("a gradebook")
    notebook = filled("03", solutions("03"))
    right, test = cell_of(notebook, "ex-03-1-answer"), cell_of(notebook, "ex-03-1-test")
    cells = [cell_of(notebook, "setup"), right, test]
    for source in tricks.FORGE.values():
        answer = nbformat.v4.new_code_cell(source.replace("{victims}", str(tmp_path)))
        cells += [answer, copy.deepcopy(test)]
    cells += [copy.deepcopy(right), copy.deepcopy(test)]
    notebook.cells = cells
    BoxedClient(notebook, way=way, seed="secret").execute()
    earned = [determine_grade(cell)[0] for cell in cells if cell_role(cell) == "test"]
    assert dict(zip(["first", *tricks.FORGE], earned, strict=False)) == {"first": 5} | dict.fromkeys(tricks.FORGE, 0)
    assert os.listdir(tmp_path) == ["gradebook.db"] and (tmp_path / "gradebook.db").read_text() == "a gradebook"
    kinds = {kind for cell in cells for out in cell.outputs for kind in out.get("data", {})}
    assert kinds == {"text/plain"}


def test_no_way_to_a_box_is_a_sentence(monkeypatch, capsys, tmp_path):
    from ddp_course.commands.grade import main

    monkeypatch.setattr(box, "way_here", lambda: ("", "bwrap: not installed; unshare: Operation not permitted"))
    (tmp_path / "ada" / "03_process_groups").mkdir(parents=True)
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "bwrap: not installed" in said and "apt install bubblewrap" in said and "--trust-submissions" in said


def test_a_judge_reads_no_file_that_leads_out_of_the_box(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    secret, link, pipe, own = tmp_path / "secret", *(tmp_path / "scratch" / name for name in ("link", "pipe", "own"))
    secret.write_text("a class's")
    own.write_text("an answer's")
    link.symlink_to(secret)
    os.mkfifo(pipe)
    assert own_file(own).read_text() == "an answer's"
    for path in (link, pipe, secret):
        with pytest.raises(OSError, match="leads elsewhere|no plain file"):
            own_file(path)
