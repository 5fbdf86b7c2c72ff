"""How is one submission graded? nbgrader does it; here it is set up, and given something that it can grade.

`submissions/<student>/<lesson>/<lesson>.ipynb` is copied, and the copy goes through nbgrader: test cells are put back
as released, the notebook is run, the points go into gradebook.db, and feedback is written as HTML. In the place of a
file that cannot be graded an untouched notebook is graded, with the reason at its top. So every submission has its row
in the gradebook, and every student a page that says why.

A submission is a program: it runs in a box (`sandbox/box.py`), and who judges it is outside.

Needs nbgrader. Read next: `whole_class.py`, which grades many at a time; `sandbox/boxed.py`; nbgrader/apps/api.py.
"""

from __future__ import annotations

import logging
import re
import shutil
import stat
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from ddp_course.grading.answer.execute import KERNEL_DIED, NOT_GRADED, NOT_JUDGED, NOT_RUN, TIMEOUT, cell_role
from ddp_course.grading.instructor.restore import MOST_BYTES, read, restored, unreadable
from ddp_course.grading.paths import need_nbgrader
from ddp_course.grading.registry import LESSONS, exercises_of, question_cell, test_cell

MOST_LETTERS = 2000  # of a reason
NAME = re.compile(r"\w[\w.@+ -]{0,99}")  # of a student


@dataclass
class Graded:
    """One submission and what came of it."""

    student: str
    lesson: str  # "03"
    points: dict[str, float] = field(default_factory=dict)  # by exercise
    question: float | None = None  # points of the question; None until a person has read the answer
    reason: str = ""  # why there are no points
    notes: list[str] = field(default_factory=list)  # cells that ended or blocked the kernel
    seconds: float = 0.0  # that grading took
    again: bool = False  # whether the reason is this machine's, and the submission is to be graded again


class Classroom:
    """nbgrader, set up for this course.

    Args:
        root: the course's folder, with solutions/ and nbgrader_config.py.
        submissions: a folder with one folder for each student; nothing in it is changed.
        into: where gradebook.db, autograded/ and feedback/ are written.
        scratch: a folder for copies, shared by all who grade this class, and removed by whoever made it.
        settings: further nbgrader settings, such as `{"SturdyExecute": {"timeout": 30}}`.
    Raises:
        RuntimeError: nbgrader is not installed.
    """

    def __init__(
        self, root: Path, submissions: Path, into: Path, scratch: Path, settings: dict[str, Any] | None = None
    ):
        need_nbgrader()
        from nbgrader.apps import NbGraderAPI
        from nbgrader.coursedir import CourseDirectory
        from traitlets.config import Config, PyFileConfigLoader

        warnings.filterwarnings("ignore", module="nbgrader")  # about SQLAlchemy, for nbgrader's authors
        self.root, self.submissions, self.into = root.resolve(), submissions.resolve(), into.resolve()
        self.into.mkdir(parents=True, exist_ok=True)
        self.release, self.staged = scratch / "release", scratch / "submitted"  # exercises/ is left alone
        config = PyFileConfigLoader("nbgrader_config.py", path=str(self.root)).load_config()
        config.CourseDirectory.root = str(self.into)
        config.CourseDirectory.source_directory = str(self.root / "solutions")
        config.CourseDirectory.release_directory = str(self.release)
        config.CourseDirectory.submitted_directory = str(self.staged)
        config.CourseDirectory.autograded_directory = "autograded"
        config.CourseDirectory.feedback_directory = "feedback"
        # Several write at a time, each for a moment; SQLite makes the others wait up to a minute.
        config.CourseDirectory.db_url = f"sqlite:///{self.into / 'gradebook.db'}?timeout=60"
        config.merge(Config(settings or {}))
        self.coursedir = CourseDirectory(config=config)
        self.api = NbGraderAPI(self.coursedir, config=config, log_level=logging.WARNING)

    def found(self) -> list[tuple[str, str]]:
        """Return (student, lesson) for every submission."""
        lessons = {folder: lesson for lesson, folder in LESSONS.items()}
        folders = sorted(path for path in self.submissions.glob("[!.]*/*") if path.is_dir() and path.name in lessons)
        return [(path.parent.name, lessons[path.name]) for path in folders if NAME.fullmatch(path.parent.name)]

    def misnamed(self) -> list[str]:
        """Return what stands in the place of students' folders and has a name that tables and commands misread."""
        folders = sorted(
            {path.parent.name for path in self.submissions.glob("[!.]*/*") if path.name in LESSONS.values()}
        )
        return [name for name in folders if not NAME.fullmatch(name)]

    def prepare(self, lesson: str) -> None:
        """Record the lesson's cells in the gradebook, so that they can be put back into submissions.

        Raises:
            RuntimeError: the lesson's solutions cannot be released.
        """
        result = self.api.generate_assignment(LESSONS[lesson], force=True)
        if not result["success"]:
            raise RuntimeError(f"lesson {lesson} cannot be prepared for grading: {_reason(result)}")

    def try_solutions(self, lesson: str) -> None:
        """Grade the course's own solutions, without a row in the gradebook.

        Raises:
            RuntimeError: they do not get full marks, so this machine cannot grade; says what it found.
        """
        from nbgrader.utils import determine_grade

        from ddp_course.grading.instructor.autograder import BoxedExecute

        folder = LESSONS[lesson]
        notebook = restored(self._released(folder), read(self.root / "solutions" / folder / f"{folder}.ipynb"))
        notebook, _ = BoxedExecute(config=self.coursedir.config).preprocess(notebook, {})
        for cell in notebook.cells:
            if cell_role(cell) == "test" and f"{determine_grade(cell)[0]:g}" != f"{cell.metadata.nbgrader.points:g}":
                said = "".join(out.get("text", "") or f"{out.get('evalue', '')}\n" for out in cell.outputs)
                raise RuntimeError(
                    f"this machine cannot grade: the course's own solution does not get the points of "
                    f"{cell.metadata.nbgrader.grade_id}. Close other programs, or take fewer --workers; "
                    f"`ddp-course doctor` may know more.\n{said}"
                )

    def grade(self, student: str, lesson: str, reason: str = "") -> Graded:
        """Grade one submission and write its feedback.

        Args:
            reason: why this submission cannot be graded, if that is known already.
        """
        folder, graded, began_s = LESSONS[lesson], Graded(student, lesson), time.monotonic()
        graded.reason = reason or unreadable(self.submissions / student / folder / f"{folder}.ipynb")
        if not graded.reason:
            self._stage(student, folder)
            graded.reason = self._autograded(student, folder)
            path = self.into / "autograded" / student / folder / f"{folder}.ipynb"
            graded.notes = [] if graded.reason else lost_cells(path)
            if not graded.reason and (slow := not_judged(path)):
                graded.reason, graded.again = f"run the same command again; {slow}", True
        if graded.reason:
            graded.reason = plain(graded.reason)
            self._stage_reason(student, folder, graded.reason)
            if trouble := self._autograded(student, folder):
                graded.notes.append(f"no row in the gradebook: {trouble}")
                return graded
            self._comment(student, folder, graded.reason)
        else:
            graded.points = self.points(student, lesson)
        result = self.api.generate_feedback(folder, student)
        if not result["success"]:
            graded.notes.append(f"no feedback: {_reason(result)}")
        self._keep_the_page_alone(student, folder)
        graded.seconds = round(time.monotonic() - began_s, 1)
        return graded

    def points(self, student: str, lesson: str) -> dict[str, float]:
        """Return what the gradebook says, by exercise; what a person entered there comes before a check's points."""
        with self._gradebook() as gradebook:
            grades = gradebook.find_submission_notebook(LESSONS[lesson], LESSONS[lesson], student).grades
            earned = {grade.name: grade.score for grade in grades}
        return {exercise.id: earned.get(test_cell(exercise.id), 0.0) for exercise in exercises_of(lesson)}

    def question(self, student: str, lesson: str) -> float | None:
        """Return the points of the lesson's question; None while nobody has read the answer."""
        folder = LESSONS[lesson]
        with self._gradebook() as gradebook:
            grade = gradebook.find_grade(question_cell(lesson), folder, folder, student)
            return None if grade.needs_manual_grade else grade.score

    def _autograded(self, student: str, folder: str) -> str:
        result = self.api.autograde(folder, student)
        return "" if result["success"] else f"could not be graded: {_reason(result)}"

    def _stage(self, student: str, folder: str) -> None:
        """Copy the submission's plain files; links, pipes and very large files stay behind."""
        target = self.staged / student / folder
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.submissions / student / folder, target, ignore=_strangers)
        path = target / f"{folder}.ipynb"
        nbformat.write(restored(self._released(folder), read(path)), path)

    def _stage_reason(self, student: str, folder: str, reason: str) -> None:
        """Put an untouched notebook in the submission's place, with the reason at its top."""
        notebook = self._released(folder)
        notebook.metadata[NOT_GRADED] = reason
        notebook.cells.insert(0, nbformat.v4.new_markdown_cell(f"**This submission was not graded:** {reason}"))
        target = self.staged / student / folder
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        nbformat.write(notebook, target / f"{folder}.ipynb")

    def _keep_the_page_alone(self, student: str, folder: str) -> None:
        """Remove from the feedback what nbgrader copies there: files that a student put beside the notebook."""
        pages = self.into / "feedback" / student / folder
        for path in pages.iterdir() if pages.is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != f"{folder}.html":
                path.unlink()

    def _released(self, folder: str) -> NotebookNode:
        return nbformat.read(self.release / folder / f"{folder}.ipynb", as_version=4)

    def _comment(self, student: str, folder: str, reason: str) -> None:
        """Note the reason in the gradebook, at every answer."""
        with self._gradebook() as gradebook:
            for comment in gradebook.find_submission_notebook(folder, folder, student).comments:
                comment.auto_comment = f"not graded: {reason}"
            gradebook.db.commit()

    def _gradebook(self):
        from nbgrader.api import Gradebook

        return Gradebook(self.coursedir.db_url, self.coursedir.course_id)


def plain(text: str) -> str:
    """Return a student's words, as an error may repeat them, in a form that no page or terminal takes for more."""
    shown = "".join(each if each.isprintable() or each == "\n" else "�" for each in text[:MOST_LETTERS])
    return shown.replace("<", "‹").replace(">", "›")


def _strangers(folder: str, names: list[str]) -> set[str]:
    """Which files of a submission are not copied."""
    found = {name: (Path(folder) / name).lstat() for name in names}
    return {
        name
        for name, facts in found.items()
        if not (stat.S_ISDIR(facts.st_mode) or stat.S_ISREG(facts.st_mode)) or facts.st_size > MOST_BYTES
    }


def lost_cells(path: Path) -> list[str]:
    """Return a note for each of the learner's cells that ended or blocked the kernel."""
    notes = []
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells, start=1):
        for output in cell.get("outputs", []):
            if output.output_type == "error" and output.ename in (KERNEL_DIED, TIMEOUT, NOT_RUN):
                name = cell.metadata.get("nbgrader", {}).get("grade_id", f"{cell_role(cell)} cell {number}")
                notes.append(f"{name}: {output.evalue}")
    return notes


def not_judged(path: Path) -> str:
    """Return why the judge could not judge a test cell, or nothing; what a learner's own cell says does not count."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell_role(cell) == "test"]
    outputs = (output for cell in cells for output in cell.outputs if output.output_type == "error")
    return next((output.evalue for output in outputs if output.ename == NOT_JUDGED), "")


def _reason(result: dict) -> str:
    """Return the last error that nbgrader logged or raised, in one line."""
    if "KeyboardInterrupt" in result.get("error", ""):
        raise KeyboardInterrupt  # nbgrader takes it for a failure of the submission
    lines = [line for line in result.get("log", "").splitlines() if line.strip() and not line.startswith("[")]
    lines = lines or result.get("error", "").strip().splitlines()
    return lines[-1].strip() if lines else "unknown"
