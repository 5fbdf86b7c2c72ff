"""Submissions for the tests: the released notebook with answers filled in, whole or damaged."""

import copy
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
FOLDER = "03_process_groups"
RELEASED = ROOT / "exercises" / FOLDER / f"{FOLDER}.ipynb"
SOLUTION = ROOT / "solutions" / FOLDER / f"{FOLDER}.ipynb"


def filled(answers: dict[str, str]) -> NotebookNode:
    """Return the released notebook with the answer cells of these exercises ("03.1") replaced."""
    notebook = nbformat.read(RELEASED, as_version=4)
    for exercise, source in answers.items():
        cell_of(notebook, f"ex-{exercise.replace('.', '-')}-answer").source = source
    return notebook


def cell_of(notebook: NotebookNode, grade_id: str) -> NotebookNode:
    """Return the cell with this name."""
    return next(c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)


def solutions() -> dict[str, str]:
    """Return the answer cells of the solution notebook, by exercise."""
    notebook = nbformat.read(SOLUTION, as_version=4)
    cells = [c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("solution")]
    return {c.metadata.nbgrader.grade_id[3:7].replace("-", "."): copy.deepcopy(c.source) for c in cells}


def submit(folder: Path, student: str, notebook: NotebookNode | str) -> Path:
    """Write a submission where nbgrader looks for it; text is written as it is."""
    path = folder / student / FOLDER / f"{FOLDER}.ipynb"
    path.parent.mkdir(parents=True)
    path.write_text(notebook if isinstance(notebook, str) else nbformat.writes(notebook), encoding="utf-8")
    return path
