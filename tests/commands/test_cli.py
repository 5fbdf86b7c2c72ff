"""What the commands say, and the exit status they end with."""

import errno
import io
import os
import re
import resource
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ddp_course import cli
from ddp_course.commands import grade, lab
from ddp_course.grading import paths

pytestmark = pytest.mark.timeout(120)


def test_help_names_every_command_and_needs_no_torch(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ddp-course", "--help"])
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it now fails
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(cli.__file__, run_name="__main__")
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(f"\n  {word} " in told for word in cli.COMMANDS)


@pytest.mark.parametrize(
    "argv", ["--help", "--version", "lint programs/ddp.py", "hint 03.2", "read LICENSE", "problems 14"]
)
def test_what_needs_no_torch_answers_at_once(argv):
    bare = [sys.executable, "-c", "pass"]
    told = [sys.executable, "-X", "importtime", "-m", "ddp_course.cli", *argv.split()]
    said = subprocess.run(told, capture_output=True, text=True, timeout=60, cwd=paths.CHECKOUT)
    assert said.stdout and "Traceback" not in said.stderr
    assert not re.search(r"\| +(torch|nbformat|numpy)$", said.stderr, re.MULTILINE)
    # 0.3 s of processor time where Python alone takes 0.025 s; with torch it was 3 s.
    assert processor_time([sys.executable, *told[3:]]) < 12 * processor_time(bare)


def processor_time(command: list[str]) -> float:
    """The least of five runs: what a busy machine adds differs from run to run."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, timeout=60, cwd=paths.CHECKOUT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(5))


def test_names_that_import_torch_are_listed_and_found():
    import ddp_course
    from ddp_course import grading, launcher

    for module in (ddp_course, launcher, grading):
        assert set(module.__all__) <= set(dir(module))
        assert all(getattr(module, name).__name__ == name for name in module.__all__)
        assert not hasattr(module, "lunch")
    assert ddp_course.launch is launcher.launch


def test_every_word_has_a_file_and_every_file_a_word():
    files = {path.stem for path in Path(lab.__file__).parent.glob("[a-z]*.py")}
    assert files == set(cli.COMMANDS)


@pytest.mark.parametrize("argv", [[], ["dance"]])
def test_no_command_or_an_unknown_one_is_a_wrong_use(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def give(monkeypatch, error: BaseException) -> int:
    def command(argv):
        raise error

    monkeypatch.setattr(grade, "main", command)
    return cli.main(["grade", "folder"])


def test_a_missing_package_is_one_sentence(monkeypatch, capsys):
    assert give(monkeypatch, ModuleNotFoundError("No module named 'nbgrader'", name="nbgrader")) == 1
    assert capsys.readouterr().err == "ddp-course grade needs nbgrader, which is not installed; run `make env`\n"


def test_a_missing_module_of_our_own_is_not_disguised(monkeypatch):
    with pytest.raises(ModuleNotFoundError):
        give(monkeypatch, ModuleNotFoundError("No module named 'ddp_course.x'", name="ddp_course.x"))


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"ddp-course {metadata.version('ddp-course')}\n"


def test_ctrl_c_ends_with_130(monkeypatch):
    assert give(monkeypatch, KeyboardInterrupt()) == 130


def test_a_reader_that_has_had_enough_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ddp_course.cli", "solution", "03.1"]
    told = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (told.returncode, told.stderr) == (141, "")


def test_options_after_the_command_are_the_commands_own(capsys):
    for word in cli.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            cli.main([word, "--help"])
        assert ended.value.code == 0
        told = capsys.readouterr().out
        assert f"usage: ddp-course {word} " in told and "COMMAND" not in told


SILENT = {"lab", "new", "hint", "submit"}  # nothing but done, not done, not understood


@pytest.mark.parametrize(
    "argv", [[], *([word] for word in cli.COMMANDS if word not in SILENT)], ids=lambda argv: "".join(argv) or "all"
)
def test_its_help_says_what_the_statuses_mean(argv, capsys):
    with pytest.raises(SystemExit):
        cli.main([*argv, "--help"])
    assert "exit status: 0" in capsys.readouterr().out.lower()


def test_what_a_terminal_cannot_show_is_named(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")  # as with PYTHONIOENCODING=ascii
    monkeypatch.setattr(sys, "stdout", shown)
    cli.main(["drill", "--level", "1", "--answer", "drift:1"])
    shown.seek(0)
    assert shown.readline().startswith("\\N{BALLOT X} drift, rank 1: ")


# --- lab -------------------------------------------------------------------------------------------


def test_lab_serves_loopback_alone_and_keeps_its_token():
    command = lab.lab_command(lab.FIRST_LESSON, no_browser=True, as_root=False)
    assert "--ip=127.0.0.1" in command and "--no-browser" in command and "--allow-root" not in command
    assert "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb" in command
    assert "--KernelManager.transport_encryption=auto" in command
    assert not any("token" in part.lower() or "password" in part.lower() for part in command)


def test_formgrader_opens_where_the_gradebook_is(monkeypatch, tmp_path):
    class Became(Exception):
        pass

    def execv(program, command):
        raise Became(command, Path.cwd(), os.environ.get("JUPYTER_CONFIG_PATH"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.delenv("JUPYTER_CONFIG_PATH", raising=False)
    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(Became) as caught:
        cli.main(["lab", "--formgrader"])
    command, folder, config = caught.value.args
    assert "--LabApp.default_url=/formgrader" in command and "--ip=127.0.0.1" in command
    assert (folder / "nbgrader_config.py").exists() and config is None
    monkeypatch.setattr(lab, "course_source", lambda: paths.INSTALLED)
    assert cli.main(["lab", "--formgrader"]) == 1  # a wheel has no gradebook


def test_without_the_lessons_there_is_nothing_to_copy(monkeypatch, tmp_path, capsys):
    for name in ("CHECKOUT", "INSTALLED"):
        monkeypatch.setattr(paths, name, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lab"]) == cli.main(["new", "copy"]) == 1
    assert capsys.readouterr().err.count("the course's notebooks are not here; go to a checkout of the course") == 2


# --- files that are not what they should be --------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "name", "said"),
    [
        ("lint", "none.py", "there is no such file or folder"),
        ("lint", "folder", "this is a folder, not a file"),
        ("lint", "binary", "this is no text: it is not encoded as UTF-8"),
        ("lint", "broken.py", "this is no Python: line 2, invalid syntax"),
        ("lint", "locked", "you have no permission"),
        ("rehearse", "none.py", "cannot be rehearsed: there is no such file or folder"),
        ("rehearse", "binary", "cannot be rehearsed: this is no text: it is not encoded as UTF-8"),
        ("read", "none.py", "there is no such file or folder"),
        ("read", "locked", "you have no permission"),
        ("check 03 --notebook", "folder", "this is a folder, not a file"),
        ("check 03 --notebook", "locked", "you have no permission"),
        ("drill --into", "binary/x", "a folder in this path is a file"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_sentence_in_words(command, name, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\x80\x02\xd0")
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "locked").write_text("x = 1\n")

    def refuse(path: Path, *args, **more):  # as for anybody but root, who may run these tests
        if path.name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **more)

    opened = Path.open
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: refuse(path, encoding=encoding).read())
    monkeypatch.setattr("nbformat.read", lambda path, as_version: refuse(path))
    path = str(tmp_path / name)
    assert cli.main([*command.split(), path]) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if said in line] == [f"{path}: {said}"]


def test_an_error_that_is_not_of_a_file_keeps_its_traceback(monkeypatch):
    with pytest.raises(OSError, match="no space"):
        give(monkeypatch, OSError(errno.ENOSPC, "no space"))
