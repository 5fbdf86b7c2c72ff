"""What do the course's notebooks give for an exercise: its hint, its empty answer, its solution?

Read next: `places.py`, where they lie.
"""

from __future__ import annotations

import re

from ddp_course.grading.learner.terminal import notebook_of, read_notebook
from ddp_course.grading.places import course_source, learners_root
from ddp_course.grading.registry import LESSONS, answer_cell, find_exercise

_HINT = re.compile(r"<summary>Hint</summary>\s*(.*?)\s*</details>", re.DOTALL)


def hint(exercise: str) -> str:
    """Return the hint in an exercise's text.

    Raises:
        ValueError: there is no such exercise. RuntimeError: the course's notebooks are not here.
    """
    return _HINT.search(_cell("exercises", exercise, "text"))[1]


def solution(exercise: str) -> str:
    """Return the course's answer.

    Raises:
        ValueError: there is no such exercise, or the course was given without solutions. RuntimeError: as `hint`.
    """
    # nbgrader's marks of what it takes out are for the source alone.
    return re.sub(r"(?m)^ *### (BEGIN|END) SOLUTION\n?", "", _cell("solutions", exercise, "answer"))


def tried(exercise: str) -> bool:
    """Return whether the learner's saved answer is another one than the empty one.

    Raises:
        ValueError: there is no such exercise, or no notebook. RuntimeError: as `hint`.
    """
    find_exercise(exercise)
    mine = read_notebook(notebook_of(exercise, learners_root()))
    return _source(mine, answer_cell(exercise)).strip() != _cell("exercises", exercise, "answer").strip()


def _cell(folder: str, exercise: str, part: str) -> str:
    find_exercise(exercise)
    lesson = LESSONS[exercise.partition(".")[0]]
    notebook = read_notebook(course_source() / folder / lesson / f"{lesson}.ipynb")
    return _source(notebook, answer_cell(exercise).replace("answer", part))


def _source(notebook, name: str) -> str:
    cells = (cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade_id") == name)
    return next((cell.source for cell in cells), "")
