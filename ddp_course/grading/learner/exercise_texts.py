"""What do the course's notebooks give for an exercise: its hint, its empty answer, its solution?

Read next: `paths.py`, where they lie.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ddp_course.grading.paths import course_source, learners_root
from ddp_course.grading.registry import LESSONS, answer_cell, find_exercise, notebook_of

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
        ValueError: there is no such exercise. OSError: the course was given without solutions. RuntimeError: as `hint`.
    """
    # nbgrader's marks of what it takes out are for the source alone.
    return re.sub(r"(?m)^ *### (BEGIN|END) SOLUTION\n?", "", _cell("solutions", exercise, "answer"))


def tried(exercise: str) -> bool:
    """Return whether the learner's saved answer is another one than the empty one.

    Raises:
        ValueError: there is no such exercise. OSError: there is no notebook. RuntimeError: as `hint`.
    """
    answer = _cell("exercises", exercise, "answer")
    return _sources(notebook_of(exercise, learners_root())).get(answer_cell(exercise), "").strip() != answer.strip()


def _cell(folder: str, exercise: str, part: str) -> str:
    name, lesson = answer_cell(exercise), LESSONS.get(exercise.partition(".")[0])
    found = _sources(course_source() / folder / lesson / f"{lesson}.ipynb") if lesson else {}
    if name not in found:
        find_exercise(exercise)  # says which there are
    return found[name.replace("answer", part)]


def _sources(path: Path) -> dict[str, str]:
    """The text of each cell that has a name of nbgrader's. Read as JSON, because importing nbformat takes seconds."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        named = ((cell["metadata"].get("nbgrader", {}).get("grade_id"), cell["source"]) for cell in cells)
        return {name: "".join(source) for name, source in named if name}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{path} is not a notebook") from None
