"""A class is graded through nbgrader: gradebook, feedback, and bad submissions that stop nothing.

Everything is in one run: starting nbgrader and a kernel for each submission is what costs.
"""

import contextlib
import io
from pathlib import Path

import nbformat
import pytest

from ddp_course.grading.classroom import Classroom, unreadable
from ddp_course.grading.cli import print_grades
from ddp_course.grading.registry import LESSONS
from tests.grading.bank_03 import IMPORTS, WRONG
from tests.grading.submissions import ROOT, cell_of, filled, released, solutions, submit

FOLDER = LESSONS["03"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LIMITS = {"SturdyExecute": {"answer_timeout": 5, "total_timeout": 120}}
WRONG_DEVICE = next(answer.source for answer in WRONG if answer.mistake == "device by global rank")


def tampered() -> nbformat.NotebookNode:
    """A submission that helps itself: every test cell changed or gone; one answer is nearly right."""
    notebook = filled("03", {"03.1": IMPORTS + WRONG_DEVICE})
    cell_of(notebook, "ex-03-1-test").source = "5"
    cell_of(notebook, "ex-03-2-test").source = "check = lambda *args: 5\n5"
    cell_of(notebook, "ex-03-2-test").metadata.nbgrader.points = 500
    notebook.cells.remove(cell_of(notebook, "ex-03-3-test"))
    return notebook


def broken() -> nbformat.NotebookNode:
    """Two cells that lose their kernel, one answer that hangs when it is called, and one that is right."""
    answers = solutions("03")
    hanging = "def node_sum(*args):\n    while True:\n        pass"
    return filled(
        "03",
        {"03.1": "import os\nos._exit(1)", "03.2": "while True:\n    pass", "03.3": hanging, "03.4": answers["03.4"]},
    )


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The whole class, graded once: the submissions' results by student, the folder, and what was printed."""
    base = tmp_path_factory.mktemp("class")
    submit(base / "in", "ada", filled("03", solutions("03")))
    submit(base / "in", "ben", filled("03", {}))
    submit(base / "in", "cleo", broken())
    submit(base / "in", "dan", tampered())
    submit(base / "in", "eve", "Dear teacher, my dog ate it.")
    (base / "in" / "fred" / FOLDER).mkdir(parents=True)
    submit(base / "in", "gus", '{"cells": 3, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    results, printed = {}, io.StringIO()
    with Classroom(ROOT, base / "in", base / "out", LIMITS) as classroom, contextlib.redirect_stdout(printed):
        grade = classroom.grade

        def noted(student: str, lesson: str):
            results[student] = grade(student, lesson)
            return results[student]

        classroom.grade = noted
        print_grades(classroom)
        release = release_of(classroom)
    return results, base, printed.getvalue(), release


def release_of(classroom: Classroom) -> str:
    """What nbgrader itself, with its database, makes of the solutions."""
    return (Path(classroom.coursedir.release_directory) / FOLDER / f"{FOLDER}.ipynb").read_text(encoding="utf-8")


def test_points(graded):
    results, _, _, _ = graded
    assert results["ada"].points == {"03.1": 5, "03.2": 5, "03.3": 5, "03.4": 3} and not results["ada"].notes
    assert results["ben"].points == {"03.1": 0, "03.2": 0, "03.3": 0, "03.4": 0}


def test_what_breaks_costs_only_itself_and_is_named(graded):
    cleo = graded[0]["cleo"]
    assert cleo.points == {"03.1": 0, "03.2": 0, "03.3": 0, "03.4": 3}
    assert cleo.notes == [
        "ex-03-1-answer: the kernel died while this cell ran",
        "ex-03-2-answer: the cell ran past its time limit and was interrupted",
    ]


def test_tampered_and_missing_tests_are_put_back(graded):
    results, base, _, _ = graded
    assert results["dan"].points == {"03.1": 4, "03.2": 0, "03.3": 0, "03.4": 0}
    notebook = nbformat.read(base / "out" / "autograded" / "dan" / FOLDER / f"{FOLDER}.ipynb", as_version=4)
    for name in ("ex-03-1-test", "ex-03-2-test", "ex-03-3-test"):
        assert f'check("{name[3:5]}.{name[6]}", ' in cell_of(notebook, name).source
    assert cell_of(notebook, "ex-03-2-test").metadata.nbgrader.points == 5


def test_bad_submissions_are_named_with_the_reason(graded):
    results, _, printed, _ = graded
    assert results["eve"].reason == "the file is not JSON, so not a notebook"
    assert results["fred"].reason == f"no {FOLDER}.ipynb in {FOLDER}/"
    assert results["gus"].reason.startswith("the file is not a notebook: ")
    assert [line.split()[0] for line in printed.splitlines() if "not graded" in line] == ["eve", "fred", "gus"]
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if "/" in line}
    assert rows["ada"] == ["5/5", "5/5", "5/5", "3/3", "18/18"]
    assert rows["cleo"] == ["0/5", "0/5", "0/5", "3/3", "3/18"]


def test_the_gradebook_has_the_points(graded):
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{graded[1] / 'out' / 'gradebook.db'}", "ddp_course") as gradebook:
        scores = {s.student.id: (s.score, s.max_score) for s in gradebook.assignment_submissions(FOLDER)}
        manual = [grade.name for s in gradebook.assignment_submissions(FOLDER) for grade in s.notebooks[0].grades
                  if grade.needs_manual_grade]  # fmt: skip
    assert scores == {"ada": (18, 18), "ben": (0, 18), "cleo": (3, 18), "dan": (4, 18)}
    assert manual == []


def test_feedback_shows_each_named_check(graded):
    results, _, _, _ = graded
    page = results["dan"].feedback.read_text(encoding="utf-8")
    assert "✗ the device follows the local rank" in page and "must follow the local rank" in page
    page = results["cleo"].feedback.read_text(encoding="utf-8")
    assert "KernelDied" in page and "an endless loop" in page and "each rank has its leader" in page


def test_our_release_is_the_one_nbgrader_makes(graded):
    assert graded[3] == released("03").read_text(encoding="utf-8")


def test_unreadable_says_nothing_about_a_good_notebook():
    assert unreadable(released("03")) == ""
