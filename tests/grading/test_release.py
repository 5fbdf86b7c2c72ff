"""exercises/ is what solutions/ generates, byte for byte, and a learner's answers are not overwritten."""

import json
import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from ddp_course.commands import release
from ddp_course.commands.release import main
from ddp_course.grading import paths
from ddp_course.grading.instructor.classroom import test_cell as name_of_test_cell
from ddp_course.grading.instructor.release import released as generated
from ddp_course.grading.registry import LESSONS, exercises_of
from tests.grading.submissions import ROOT, cell_of, released, solutions, source_of

FOLDER, RELEASED = LESSONS["03"], released("03")


@pytest.fixture
def course(tmp_path):
    for part in ("solutions", "exercises"):
        shutil.copytree(ROOT / part, tmp_path / part)
    return tmp_path


@pytest.mark.slow
def test_the_committed_exercises_are_what_the_solutions_generate():
    assert main(["--check", "--root", str(ROOT)]) == 0
    assert generated(source_of("03")) == generated(source_of("03")) == RELEASED.read_text(encoding="utf-8")
    assert {path.parent.name for path in ROOT.glob("exercises/*/*.ipynb")} == set(LESSONS.values())


@pytest.mark.slow
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


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_release_has_neither_solutions_nor_hidden_tests(lesson):
    text, source = released(lesson).read_text(encoding="utf-8"), source_of(lesson).read_text(encoding="utf-8")
    for secret in ("BEGIN SOLUTION", "HIDDEN", "seed=1"):
        assert secret in source and secret not in text
    for exercise, answer in solutions(lesson).items():
        inside = [part.partition("### END SOLUTION")[0] for part in answer.split("### BEGIN SOLUTION")[1:]]
        assert inside, exercise
        longest = max((line.strip() for part in inside for line in part.splitlines()), key=len)
        written = json.dumps(longest, ensure_ascii=False)[1:-1]
        assert written in source and written not in text, exercise


@pytest.mark.parametrize("lesson", LESSONS)
def test_notebook_and_registry_agree_and_every_exercise_says_what_it_asks(lesson):
    notebook = nbformat.read(released(lesson), as_version=4)
    stretch = [exercise.title.endswith("(stretch)") for exercise in exercises_of(lesson)]
    assert len(stretch) >= (1 if lesson == "18" else 2) and stretch == sorted(stretch) and not all(stretch)
    for exercise in exercises_of(lesson):
        key = f"ex-{exercise.id.replace('.', '-')}"
        assert cell_of(notebook, name_of_test_cell(exercise.id)).metadata.nbgrader.points == exercise.points
        words = cell_of(notebook, f"{key}-text").source
        assert f"## {exercise.id} {exercise.title}\n" in words
        assert f"**{exercise.minutes} minutes, {exercise.points} points.**" in words
        assert words.count("**Aim:**") == words.count("<summary>Hint</summary>") == 1
        assert cell_of(notebook, f"{key}-check").source == f'check("{exercise.id}", {exercise.function})'
        row = f"| {exercise.id} {exercise.title} | {exercise.minutes} | {exercise.points} |"
        assert row in notebook.cells[0].source
        answer = cell_of(notebook, f"{key}-answer").source
        assert f"def {exercise.function}(" in answer or f"class {exercise.function}" in answer
        assert "raise NotImplementedError()" in answer
    lesson_text = next(ROOT.glob(f"notebooks/{lesson}_*.ipynb")).read_text(encoding="utf-8")
    assert f"../exercises/{LESSONS[lesson]}/{LESSONS[lesson]}.ipynb" in lesson_text


def test_outside_of_the_course_one_sentence_says_where_to_go(monkeypatch, capsys):
    def nowhere():
        raise RuntimeError("go to the course's folder")

    monkeypatch.setattr(release, "course_root", nowhere)
    assert main([]) == 1
    assert capsys.readouterr().err == "go to the course's folder\n"


def test_without_nbgrader_one_sentence_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(paths, "find_spec", lambda name: None)
    assert main(["--check", "--root", str(ROOT)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "make env" in said and "ddp-course[instructor]" in said


@pytest.mark.slow
def test_importing_the_grading_loads_neither_nbgrader_nor_a_notebook_client():
    script = (
        "import sys, ddp_course.grading, ddp_course.commands.grade; print({'nbgrader', 'nbclient'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr


def test_no_exercise_uses_what_a_box_hides():
    hidden = re.compile(r"^\s*(from|import) (judges|solutions|tests|benchmarks)\b", re.MULTILINE)
    for lesson in LESSONS:
        cells = nbformat.read(released(lesson), as_version=4).cells
        assert not [found[0] for cell in cells if (found := hidden.search(cell.source))], LESSONS[lesson]
