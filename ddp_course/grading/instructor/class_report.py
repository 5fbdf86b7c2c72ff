"""What does a teacher look at after a class? class_report.html: marks, checks that fail and why, and time.

All of it is read again from what grading has left on disk, so it is whole after an interruption, too. A check that most
of a class fails, with one cause above all, is a lesson that should be improved.

Read next: `class_report.html.j2`, the page.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import nbformat
from nbformat import NotebookNode

from ddp_course.grading.answer.execute import cell_role
from ddp_course.grading.instructor.classroom import Graded
from ddp_course.grading.registry import LESSONS, exercise_of, exercises_of
from ddp_course.grading.sandbox.boxed import VERDICTS

REPORT = "class_report.html"
CAUSES, SLOWEST = 3, 5  # how many are shown of each


def write_report(submissions: list[Graded], into: Path) -> Path:
    """Write the page about these submissions; return where it is.

    Args:
        into: where autograded/ is, and the page will be.
    """
    from jinja2 import Environment, FileSystemLoader

    pages = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    lessons = sorted({graded.lesson for graded in submissions})
    facts = [lesson_facts(lesson, [g for g in submissions if g.lesson == lesson], into) for lesson in lessons]
    path, scratch = into / REPORT, into / f"{REPORT}.part"
    scratch.write_text(pages.get_template("class_report.html.j2").render(lessons=facts), encoding="utf-8")
    return scratch.replace(path)


def lesson_facts(lesson: str, submissions: list[Graded], into: Path) -> dict[str, Any]:
    """Return what the page says about one lesson."""
    graded = [each for each in submissions if not each.reason]
    notebooks = {each.student: _read(into / "autograded" / each.student, lesson) for each in graded}
    marks = [sum(each.points.values()) for each in graded]
    counted, of = Counter(map(round, marks)), sum(exercise.points for exercise in exercises_of(lesson))
    timed = sorted((each for each in graded if each.seconds), key=lambda each: -each.seconds)
    return {
        "name": LESSONS[lesson],
        "of": of,
        "unread": sum(each.question is None for each in graded),
        "graded": len(graded),
        "not_graded": [(each.student, each.reason) for each in submissions if each.reason],
        "mean": mean(marks) if marks else None,
        "median": median(marks) if marks else None,
        "marks": [counted[points] for points in range(of + 1)],
        "exercises": [(e, mean(each.points[e.id] for each in graded)) for e in exercises_of(lesson)] if graded else [],
        "checks": failed_checks(lesson, list(notebooks.values())),
        "seconds": median(each.seconds for each in timed) if timed else None,
        "slowest": timed[:SLOWEST],
    }


def failed_checks(lesson: str, notebooks: list[NotebookNode]) -> list[dict[str, Any]]:
    """Return for each check how many failed it, were not judged on it, and why; what fails most comes first."""
    found: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for notebook in notebooks:
        for cell in notebook.cells:
            if cell_role(cell) == "test":
                exercise = exercise_of(cell.metadata.nbgrader.grade_id)
                for verdict in cell.metadata.get(VERDICTS, []):
                    found[exercise, verdict["check"]].append(verdict)
    rows = []
    for (exercise, check), verdicts in found.items():
        failed = [v for v in verdicts if v["reached"] and v["points"] < v["of"]]
        causes = Counter(v["cause"] for v in failed if v["cause"]).most_common(CAUSES)
        unreached = sum(not v["reached"] for v in verdicts)
        rows.append({"exercise": exercise, "check": check, "failed": len(failed), "unreached": unreached,
                     "judged": len(verdicts), "causes": causes})  # fmt: skip
    return sorted((row for row in rows if row["failed"]), key=lambda row: -row["failed"] / row["judged"])


def _read(folder: Path, lesson: str) -> NotebookNode:
    return nbformat.read(folder / LESSONS[lesson] / f"{LESSONS[lesson]}.ipynb", as_version=4)
