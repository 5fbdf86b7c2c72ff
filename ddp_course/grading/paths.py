"""Where are the course's files, and is nbgrader there?"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

WORK = "work"  # the learner's copy, in the course's folder
GIVEN = ".given.json"  # in a copy: which version of each file was given last
CHECKOUT = Path(__file__).parents[2]
INSTALLED = Path(__file__).parents[1] / "share"  # where a wheel has the course's notebooks


def course_root() -> Path:
    """Return the course's folder: the working folder or one above it that has exercises/, else the package's own.

    Raises:
        RuntimeError: there is none; says where to go.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, CHECKOUT):
        if (folder / "exercises").is_dir() or (folder / "solutions").is_dir():
            return folder
    raise RuntimeError("no folder exercises/ here or above; go to the course's folder (the one with exercises/ in it)")


def course_source() -> Path:
    """Return the folder that copies are made of: the checkout around the working folder, the package's, or a wheel's.

    Raises:
        RuntimeError: there is none; says where to go.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, CHECKOUT, INSTALLED):
        if (folder / "notebooks").is_dir() and (folder / "exercises").is_dir() and not (folder / GIVEN).exists():
            return folder
    raise RuntimeError("the course's notebooks are not here; go to a checkout of the course")


def learners_root() -> Path:
    """Return the folder whose exercises a learner works on: their copy, if there is one, else the course's.

    Raises:
        RuntimeError: as `course_root`.
    """
    root = course_root()
    return root / WORK if (root / WORK / "exercises").is_dir() else root


def need_nbgrader() -> None:
    """Make sure that nbgrader can run.

    Raises:
        RuntimeError: it is not installed; says how to get it.
    """
    if find_spec("nbgrader") is None:
        raise RuntimeError("grading a class needs nbgrader: run `make env`, or pip install 'ddp-course[instructor]'")
    programs = str(Path(sys.executable).parent)  # nbgrader calls `alembic` by name
    if programs not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", "")])
