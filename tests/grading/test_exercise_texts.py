"""A hint at any time; the solution after a try, or when asked for it all the same."""

from pathlib import Path

import nbformat
import pytest

from ddp_course import cli
from ddp_course.grading.learner.workspace import bring
from ddp_course.grading.paths import CHECKOUT
from ddp_course.grading.registry import LESSONS, exercises_of


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    bring(CHECKOUT, tmp_path)
    monkeypatch.chdir(tmp_path / "notebooks")
    return tmp_path


def said(capsys, *command: str) -> tuple[int, str]:
    status = cli.main(list(command))
    return status, "".join(capsys.readouterr())


def test_each_exercise_has_a_hint_and_a_solution_that_fills_its_answer_in(copy, capsys):
    for exercise in (exercise for lesson in LESSONS for exercise in exercises_of(lesson)):
        status, hint = said(capsys, "hint", exercise.id)
        assert status == 0 and len(hint) > 20 and hint[0] in hint[0].upper()
        status, solution = said(capsys, "solution", exercise.id, "--anyway")
        assert status == 0 and exercise.function in solution
        assert "NotImplementedError()" not in solution and " SOLUTION" not in solution


def test_a_solution_is_shown_after_a_try_or_to_who_insists(copy, capsys):
    status, told = said(capsys, "solution", "3.1")
    assert status == 1 and "ddp-course hint 03.1" in told and "--anyway" in told and "def place" not in told
    path = copy / "exercises/03_process_groups/03_process_groups.ipynb"
    notebook = nbformat.read(path, as_version=4)
    answer = next(cell for cell in notebook.cells if cell.metadata.nbgrader.grade_id == "ex-03-1-answer")
    answer.source = "def place(environ):\n    return 0, 1"
    nbformat.write(notebook, path)
    status, told = said(capsys, "solution", "3.1")
    assert status == 0 and "def place" in told and "return 0, 1" not in told


def test_an_exercise_that_is_none_is_said_to_be_none(copy, capsys):
    for word in ("hint", "solution"):
        status, told = said(capsys, word, "03.9")
        assert status == 2 and "03.9" in told and "Traceback" not in told


def test_new_makes_a_copy_with_the_programs_and_keeps_what_was_edited(tmp_path, capsys):
    folder = tmp_path / "mine"
    assert said(capsys, "new", str(folder))[0] == 0
    mine = folder / "programs" / "ddp.py"
    assert mine.read_text() == (CHECKOUT / "programs" / "ddp.py").read_text()
    mine.write_text("# mine\n")
    status, told = said(capsys, "new", str(folder))
    assert status == 0 and mine.read_text() == "# mine\n" and str(folder) in told
    assert not list(folder.rglob("*(newer)*")), "nothing is newer"
    (folder / "a file").write_text("")
    assert said(capsys, "new", str(folder / "a file"))[0] == 1
