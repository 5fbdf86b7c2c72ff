"""How is a class graded? `ddp-course grade submissions` (`make grade SUBMISSIONS=submissions`)

`submissions/<student>/<lesson>/<lesson>.ipynb` goes through nbgrader, one submission after the other: test cells are
put back as released, the notebook is run, the points go into gradebook.db, and feedback is written as HTML. A
submission that cannot be graded is named with the reason, and the rest goes on.

A submission is a program, and runs with your rights. Grade strangers' work under a user, or on a machine, that has
nothing to lose.

Left out so far: several at a time, going on after an interruption, CSV. Needs nbgrader.
Read next: `autograder.py`; nbgrader's `apps/api.py`.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_course.grading.execute import KERNEL_DIED, NOT_RUN, TIMEOUT, cell_role
from ddp_course.grading.places import need_nbgrader
from ddp_course.grading.registry import LESSONS, exercises_of


@dataclass
class Graded:
    """One submission and what came of it."""

    student: str
    lesson: str  # "03"
    points: dict[str, float] = field(default_factory=dict)  # by exercise
    reason: str = ""  # why there are no points
    notes: list[str] = field(default_factory=list)  # cells that ended or blocked the kernel
    feedback: Path | None = None


class Classroom:
    """nbgrader, set up for this course.

    Args:
        root: the course's folder, with solutions/ and nbgrader_config.py.
        submissions: a folder with one folder for each student.
        into: where gradebook.db, autograded/ and feedback/ are written.
        settings: further nbgrader settings, such as `{"SturdyExecute": {"timeout": 30}}`.
    Raises:
        RuntimeError: nbgrader is not installed.
    """

    def __init__(self, root: Path, submissions: Path, into: Path, settings: dict[str, Any] | None = None):
        need_nbgrader()
        from nbgrader.apps import NbGraderAPI
        from nbgrader.coursedir import CourseDirectory
        from traitlets.config import Config, PyFileConfigLoader

        warnings.filterwarnings("ignore", module="nbgrader")  # about SQLAlchemy, for nbgrader's authors
        self.root, self.submissions, self.into = root.resolve(), submissions.resolve(), into.resolve()
        self.into.mkdir(parents=True, exist_ok=True)
        self._release = tempfile.TemporaryDirectory(prefix="ddp_course_release_")  # exercises/ is left alone
        config = PyFileConfigLoader("nbgrader_config.py", path=str(self.root)).load_config()
        config.CourseDirectory.root = str(self.into)
        config.CourseDirectory.source_directory = str(self.root / "solutions")
        config.CourseDirectory.release_directory = self._release.name
        config.CourseDirectory.submitted_directory = str(self.submissions)
        config.merge(Config(settings or {}))
        self.coursedir = CourseDirectory(config=config)
        self.api = NbGraderAPI(self.coursedir, config=config, log_level=logging.WARNING)

    def grade_all(self) -> Iterator[Graded]:
        """Grade every submission for which there is a lesson with exercises, student by student.

        Raises:
            RuntimeError: the lesson itself cannot be prepared.
        """
        prepared = set()
        for student, lesson in self.found():
            if lesson not in prepared:
                self.prepare(lesson)
                prepared.add(lesson)
            yield self.grade(student, lesson)

    def found(self) -> list[tuple[str, str]]:
        """Return (student, lesson) for every submission."""
        lessons = {folder: lesson for lesson, folder in LESSONS.items()}
        folders = sorted(path for path in self.submissions.glob("*/*") if path.is_dir() and path.name in lessons)
        return [(path.parent.name, lessons[path.name]) for path in folders]

    def prepare(self, lesson: str) -> None:
        """Record the lesson's cells in the gradebook, so that they can be put back into submissions."""
        result = self.api.generate_assignment(LESSONS[lesson], force=True)
        if not result["success"]:
            raise RuntimeError(f"lesson {lesson} cannot be prepared for grading: {_reason(result)}")

    def grade(self, student: str, lesson: str) -> Graded:
        """Grade one submission and write its feedback."""
        folder, graded = LESSONS[lesson], Graded(student, lesson)
        graded.reason = unreadable(self.submissions / student / folder / f"{folder}.ipynb")
        if not graded.reason:
            result = self.api.autograde(folder, student)
            graded.reason = "" if result["success"] else f"could not be graded: {_reason(result)}"
        if graded.reason:
            return graded
        graded.points = self._points(student, folder, lesson)
        graded.notes = lost_cells(self.into / "autograded" / student / folder / f"{folder}.ipynb")
        result = self.api.generate_feedback(folder, student)
        if result["success"]:
            graded.feedback = self.into / "feedback" / student / folder / f"{folder}.html"
        else:
            graded.notes.append(f"no feedback: {_reason(result)}")
        return graded

    def _points(self, student: str, folder: str, lesson: str) -> dict[str, float]:
        from nbgrader.api import Gradebook

        with Gradebook(self.coursedir.db_url, self.coursedir.course_id) as gradebook:
            grades = gradebook.find_submission_notebook(folder, folder, student).grades
            earned = {grade.name: grade.score for grade in grades}
        return {exercise.id: earned.get(test_cell(exercise.id), 0.0) for exercise in exercises_of(lesson)}

    def __enter__(self) -> Classroom:
        return self

    def __exit__(self, *_: object) -> None:
        self._release.cleanup()


def test_cell(exercise_id: str) -> str:
    """Return the name of an exercise's test cell: "ex-03-1-test"."""
    return f"ex-{exercise_id.replace('.', '-')}-test"


def unreadable(path: Path) -> str:
    """Return why a file cannot be graded at all, or nothing."""
    import nbformat

    if not path.is_file():
        return f"no {path.name} in {path.parent.name}/"
    try:
        notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
        nbformat.validate(notebook)
    except (json.JSONDecodeError, nbformat.reader.NotJSONError, UnicodeDecodeError):
        return "the file is not JSON, so not a notebook"
    except Exception as error:  # whatever is wrong with a stranger's file
        return f"the file is not a notebook: {str(error).splitlines()[0][:100]}"
    return ""


def lost_cells(path: Path) -> list[str]:
    """Return a note for each of the learner's cells that ended or blocked the kernel."""
    import nbformat

    notes = []
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells, start=1):
        for output in cell.get("outputs", []):
            if output.output_type == "error" and output.ename in (KERNEL_DIED, TIMEOUT, NOT_RUN):
                name = cell.metadata.get("nbgrader", {}).get("grade_id", f"{cell_role(cell)} cell {number}")
                notes.append(f"{name}: {output.evalue}")
    return notes


def _reason(result: dict) -> str:
    """Return the last error that nbgrader logged or raised, in one line."""
    if "KeyboardInterrupt" in result.get("error", ""):
        raise KeyboardInterrupt  # nbgrader takes it for a failure of the submission
    lines = [line for line in result.get("log", "").splitlines() if line.strip() and not line.startswith("[")]
    lines = lines or result.get("error", "").strip().splitlines()
    return lines[-1].strip() if lines else "unknown"
