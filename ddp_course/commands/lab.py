"""How is JupyterLab opened on the first lesson? `ddp-course lab`: with the kernel and commands of this environment."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

COURSE = Path(__file__).resolve().parents[2]
FIRST_LESSON = Path("notebooks", "00_start_here.ipynb")


def main(argv: list[str]) -> int:
    """Become JupyterLab. It prints its address with the token, and Ctrl-C reaches it directly."""
    parser = argparse.ArgumentParser(prog="ddp-course lab", description="Open JupyterLab on the first lesson.")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    options = parser.parse_args(argv)
    course = next((folder for folder in (Path.cwd(), COURSE) if (folder / FIRST_LESSON).exists()), None)
    if course is None:
        return fail(f"there is no {FIRST_LESSON} here or in {COURSE}; run this in a checkout of the course")
    if importlib.util.find_spec("jupyterlab") is None:
        return fail("JupyterLab is not installed; run `make env`, or pip install 'ddp-course[course]'")
    os.chdir(course)  # served whole: lessons and exercises
    # What a terminal in JupyterLab should find: this environment's ddp-course and torchrun.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    sys.stdout.flush()
    os.execv(sys.executable, lab_command(options.no_browser, as_root=os.geteuid() == 0))


def lab_command(no_browser: bool, as_root: bool) -> list[str]:
    """Return the command line: loopback only, with the token that Jupyter makes up."""
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", "--log-level=ERROR"]
    command.append(f"--LabApp.default_url=/lab/tree/{FIRST_LESSON.as_posix()}")
    return command + ["--no-browser"] * no_browser + ["--allow-root"] * as_root


def fail(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1
