"""Submissions for the tests: a released notebook with answers filled in, whole or damaged."""

from pathlib import Path

import nbformat
from nbformat import NotebookNode

from ddp_course.grading.answer.execute import cell_role
from ddp_course.grading.registry import LESSONS

ROOT = Path(__file__).parents[2]


def released(lesson: str) -> Path:
    """Return where the exercises of a lesson are."""
    return ROOT / "exercises" / LESSONS[lesson] / f"{LESSONS[lesson]}.ipynb"


def source_of(lesson: str) -> Path:
    """Return where the solutions of a lesson are."""
    return ROOT / "solutions" / LESSONS[lesson] / f"{LESSONS[lesson]}.ipynb"


def filled(lesson: str, answers: dict[str, str]) -> NotebookNode:
    """Return the released notebook with the answer cells of these exercises ("03.1") replaced."""
    notebook = nbformat.read(released(lesson), as_version=4)
    for exercise, source in answers.items():
        cell_of(notebook, f"ex-{exercise.replace('.', '-')}-answer").source = source
    return notebook


def cell_of(notebook: NotebookNode, grade_id: str) -> NotebookNode:
    """Return the cell with this name."""
    return next(c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)


def answer_cells(path: Path) -> dict[str, str]:
    """Return the answer cells of a notebook, by exercise."""
    cells = [c for c in nbformat.read(path, as_version=4).cells if cell_role(c) == "answer"]
    return {c.metadata.nbgrader.grade_id[3:7].replace("-", "."): c.source for c in cells}


def solutions(lesson: str) -> dict[str, str]:
    """Return the answers of the solution notebook, by exercise."""
    return answer_cells(source_of(lesson))


def submit(folder: Path, student: str, notebook: NotebookNode | str, lesson: str = "03") -> Path:
    """Write a submission where nbgrader looks for it; text is written as it is."""
    path = folder / student / LESSONS[lesson] / f"{LESSONS[lesson]}.ipynb"
    path.parent.mkdir(parents=True)
    path.write_text(notebook if isinstance(notebook, str) else nbformat.writes(notebook), encoding="utf-8")
    return path
