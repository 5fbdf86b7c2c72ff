"""A learner's copy of the course: nothing of theirs is overwritten, and nothing new is kept from them."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from ddp_course.commands import lab
from ddp_course.grading import paths
from ddp_course.grading.learner.workspace import bring

LESSON, EXERCISE = "notebooks/00_start_here.ipynb", "exercises/00_start_here/00_start_here.ipynb"


@pytest.fixture
def course(tmp_path) -> Path:
    for name in (LESSON, EXERCISE):
        publish(tmp_path / "course" / name, "print(1)")
    return tmp_path / "course"


def publish(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cell = new_code_cell(code, execution_count=3, outputs=[new_output("stream", text="1\n")])
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Start"), cell]), path)


def code_of(path: Path) -> str:
    return nbformat.read(path, as_version=4).cells[1].source


def edit(path: Path, code: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].source = code
    nbformat.write(notebook, path)


def test_the_copy_has_no_outputs_and_the_course_keeps_its_own(course, tmp_path):
    told = bring(course, tmp_path / "work")
    assert len(told) == 1 and "the checkout stays as it is" in told[0]
    cell = nbformat.read(tmp_path / "work" / LESSON, as_version=4).cells[1]
    assert (cell.outputs, cell.execution_count, cell.source) == ([], None, "print(1)")
    assert nbformat.read(course / LESSON, as_version=4).cells[1].outputs
    assert bring(course, tmp_path / "work") == []


def test_a_lesson_that_was_only_run_is_renewed_and_one_that_was_edited_gets_the_newer_beside_it(course, tmp_path):
    work = tmp_path / "work"
    bring(course, work)
    publish(work / LESSON, "print(1)")  # run: it has outputs now
    edit(work / EXERCISE, "mine")
    assert bring(course, work) == []
    for name in (LESSON, EXERCISE):
        publish(course / name, "print(2)")
    told = sorted(bring(course, work))
    assert told == [
        "00_start_here.ipynb is the newer version now",
        "00_start_here.ipynb is yours and stays; the newer version is 00_start_here (newer).ipynb beside it",
    ]
    assert code_of(work / LESSON) == "print(2)" and code_of(work / EXERCISE) == "mine"
    assert code_of((work / EXERCISE).with_name("00_start_here (newer).ipynb")) == "print(2)"
    assert bring(course, work) == [], "said once"


def test_what_was_deleted_or_came_later_is_there_again(course, tmp_path):
    work = tmp_path / "work"
    bring(course, work)
    (work / LESSON).unlink()
    publish(course / "notebooks" / "01_next.ipynb", "print(3)")
    assert sorted(bring(course, work)) == ["00_start_here.ipynb is new", "01_next.ipynb is new"]
    assert code_of(work / LESSON) == "print(1)"


def test_an_answer_in_the_copy_is_what_check_and_progress_look_at(course, tmp_path, monkeypatch):
    monkeypatch.chdir(course)
    assert paths.learners_root() == course
    bring(course, course / "work")
    assert paths.learners_root() == course / "work"
    monkeypatch.chdir(course / "work" / "exercises")
    assert paths.learners_root() == course / "work"


def test_lab_serves_the_copy_and_says_when_it_cannot_be_written(course, monkeypatch, capsys):
    served = []
    monkeypatch.chdir(course)
    monkeypatch.setattr(lab.os, "execv", lambda program, command: served.append((Path.cwd(), command)))
    lab.main(["--no-browser", "--port", "9123"])
    lab.main(["--no-browser"])  # now from inside the copy
    assert [where for where, _ in served] == [course / "work"] * 2
    assert "--port=9123" in served[0][1] and not any("--port" in word for word in served[1][1])
    (course / "file").write_text("")
    assert lab.main(["--folder", str(course / "file")]) == 1
    assert "give another folder" in capsys.readouterr().err
