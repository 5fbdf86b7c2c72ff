"""How is JupyterLab opened? `ddp-course lab`: on a learner's copy, at the first lesson, with this environment's kernel.

ddp-course lab                      # the copy is work/ in the checkout
ddp-course lab --folder ~/ddp       # or wherever it should be
ddp-course lab --port 9000 --no-browser
ddp-course lab --formgrader         # on the checkout itself: the class that `make grade` has graded
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from ddp_course.cli import in_words
from ddp_course.grading.learner.workspace import bring
from ddp_course.grading.paths import GIVEN, INSTALLED, WORK, course_source, need_nbgrader

# Switches off what asks a learner about news, and nbgrader's panel, where that is installed.
CONFIG = Path(__file__).with_name("jupyter")
FIRST_LESSON = "/lab/tree/notebooks/00_start_here.ipynb"
FORMGRADER = "/formgrader"


def main(argv: list[str]) -> int:
    """Become JupyterLab. It prints its address with the token, and Ctrl-C reaches it directly."""
    parser = argparse.ArgumentParser(prog="ddp-course lab", description="Open JupyterLab on the first lesson.")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--folder", type=Path, help="your copy of lessons and exercises (work/ in the checkout)")
    where.add_argument("--formgrader", action="store_true", help="look through what `make grade` has graded")
    parser.add_argument("--port", type=int, help="the port, if it must be a certain one (Jupyter chooses)")
    options = parser.parse_args(argv)
    here = Path.cwd()
    is_copy = (here / GIVEN).exists()
    try:
        course = course_source()
    except RuntimeError as error:
        return fail(str(error))
    if importlib.util.find_spec("jupyterlab") is None:
        return fail("JupyterLab is not installed; run `make env`, or pip install 'ddp-course[course]'")
    if options.formgrader:  # it reads nbgrader_config.py where it starts, and finds the gradebook beside it
        if course == INSTALLED:
            return fail("Formgrader shows what `make grade` has graded; run this in a checkout of the course")
        try:
            need_nbgrader()
        except RuntimeError as error:
            return fail(str(error))
        os.chdir(course)
        become_lab(FORMGRADER, options.no_browser, options.port)
    if course == INSTALLED and not is_copy and not options.folder:
        return fail("where should your copy of the course be? ddp-course lab --folder FOLDER")
    work = (options.folder or (here if is_copy else course / WORK)).expanduser().resolve()
    try:
        for sentence in bring(course, work):
            print(sentence)
    except OSError as error:
        reason = f"{work} cannot be written ({in_words(error)})"
        return fail(f"{reason}; give another folder: ddp-course lab --folder FOLDER")
    os.chdir(work)  # served whole: lessons and exercises, and no solutions
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(
        filter(None, [str(CONFIG), os.environ.get("JUPYTER_CONFIG_PATH")])
    )
    become_lab(FIRST_LESSON, options.no_browser, options.port)


def become_lab(start: str, no_browser: bool, port: int | None) -> None:
    """Replace this process by JupyterLab, which opens at the address `start`."""
    # What a terminal in JupyterLab should find: this environment's ddp-course and torchrun.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    sys.stdout.flush()
    os.execv(sys.executable, lab_command(start, no_browser, os.geteuid() == 0, port))


def lab_command(start: str, no_browser: bool, as_root: bool, port: int | None = None) -> list[str]:
    """Return the command line: loopback only, with the token that Jupyter makes up, and kernels that talk encrypted."""
    import zmq

    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", "--log-level=ERROR"]
    command.append(f"--LabApp.default_url={start}")
    command += ["--KernelManager.transport_encryption=auto"] if zmq.has("curve") else []
    command += [f"--port={port}", "--ServerApp.port_retries=0"] if port else []
    return command + ["--no-browser"] * no_browser + ["--allow-root"] * as_root


def fail(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1
