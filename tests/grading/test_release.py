"""exercises/ is what solutions/ generates, byte for byte, and a learner's answers are not overwritten."""

import shutil
import subprocess
import sys

import nbformat
import pytest

from ddp_course.grading import places
from ddp_course.grading.classroom import test_cell as name_of_test_cell
from ddp_course.grading.registry import exercises_of
from ddp_course.grading.release import main, released
from tests.grading.submissions import FOLDER, RELEASED, ROOT, SOLUTION, cell_of


@pytest.fixture
def course(tmp_path):
    for part in ("solutions", "exercises"):
        shutil.copytree(ROOT / part, tmp_path / part)
    return tmp_path


def test_the_committed_exercises_are_what_the_solutions_generate():
    assert main(["--check", "--root", str(ROOT)]) == 0
    assert released(SOLUTION) == released(SOLUTION) == RELEASED.read_text(encoding="utf-8")


def test_a_stale_exercise_is_named_and_made_anew(course, capsys):
    source = course / "solutions" / FOLDER / f"{FOLDER}.ipynb"
    source.write_text(source.read_text().replace("15 minutes", "16 minutes"))
    assert main(["--check", "--root", str(course)]) == 1
    assert f"exercises/{FOLDER}/{FOLDER}.ipynb is not what solutions/ generates" in capsys.readouterr().err
    assert main(["--root", str(course)]) == 0
    assert "16 minutes" in (course / "exercises" / FOLDER / f"{FOLDER}.ipynb").read_text()
    assert main(["--check", "--root", str(course)]) == 0


def test_an_exercise_without_a_source_is_named(course, capsys):
    shutil.copytree(course / "exercises" / FOLDER, course / "exercises" / "99_gone")
    assert main(["--check", "--root", str(course)]) == 1
    assert f"exercises/99_gone/{FOLDER}.ipynb has no source" in capsys.readouterr().err


def test_answers_are_kept_unless_forced(course, capsys):
    path = course / "exercises" / FOLDER / f"{FOLDER}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    cell_of(notebook, "ex-03-1-answer").source = "def place(environ, gpus):\n    return 'my work'\n"
    nbformat.write(notebook, path)
    assert main(["--root", str(course)]) == 1
    assert "holds answers and was kept" in capsys.readouterr().err and "my work" in path.read_text()
    assert main(["--force", "--root", str(course)]) == 0
    assert path.read_text() == RELEASED.read_text()


def test_the_release_has_neither_solutions_nor_hidden_tests():
    text = RELEASED.read_text(encoding="utf-8")
    for secret in ("BEGIN SOLUTION", "HIDDEN", "whole_number(environ", "seed=1", "all_reduce(total"):
        assert secret in SOLUTION.read_text(encoding="utf-8")
        assert secret not in text
    assert text.count("raise NotImplementedError()") == 4 + 1  # and once in the words at the top


def test_notebook_and_registry_agree_and_every_exercise_says_what_it_asks():
    notebook = nbformat.read(RELEASED, as_version=4)
    for exercise in exercises_of("03"):
        key = f"ex-{exercise.id.replace('.', '-')}"
        assert cell_of(notebook, name_of_test_cell(exercise.id)).metadata.nbgrader.points == exercise.points
        words = cell_of(notebook, f"{key}-text").source
        assert f"## {exercise.id} {exercise.title}\n" in words
        assert f"**{exercise.minutes} minutes, {exercise.points} points.**" in words
        assert words.count("**Aim:**") == words.count("**Hint:**") == 1
        assert cell_of(notebook, f"{key}-check").source == f'check("{exercise.id}", {exercise.function})'
        assert (
            f"| {exercise.id} {exercise.title} | {exercise.minutes} | {exercise.points} |" in notebook.cells[0].source
        )
        answer = cell_of(notebook, f"{key}-answer").source
        assert f"def {exercise.function}(" in answer and answer.rstrip().endswith("raise NotImplementedError()")


def test_without_nbgrader_one_sentence_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(places, "find_spec", lambda name: None)
    assert main(["--check", "--root", str(ROOT)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "make env" in said and "ddp-course[instructor]" in said


def test_importing_the_grading_loads_neither_nbgrader_nor_a_notebook_client():
    script = (
        "import sys, ddp_course.grading, ddp_course.grading.cli; print({'nbgrader', 'nbclient'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr
