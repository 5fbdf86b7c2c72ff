"""A class is graded through nbgrader: gradebook, feedback, and bad submissions that stop nothing.

Everything is in one run, two at a time: starting a kernel for each submission is what costs.
"""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import psutil
import pytest

from ddp_course.commands.grade import print_grades
from ddp_course.grading.instructor.classroom import NAME, Classroom, plain, unreadable
from ddp_course.grading.instructor.whole_class import WholeClass
from ddp_course.grading.registry import LESSONS
from ddp_course.grading.sandbox.box import way_here
from ddp_course.grading.source import solution_of
from tests.grading import tricks
from tests.grading.submissions import ROOT, cell_of, filled, released, solutions, submit

FOLDER = LESSONS["03"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]

WAY = way_here()[0]
LIMITS = {"BoxedExecute": {"answer_timeout": 5}}
LEAVES_A_PROCESS = """
import subprocess, sys

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)", "left_by_hal"], start_new_session=True)
"""
KILLS_ITS_GRADER = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"
WRONG_DEVICE = solution_of("03.1").replace("cuda:{local_rank}", "cuda:{rank}")


def tampered() -> nbformat.NotebookNode:
    """A submission that helps itself: every test cell changed or gone; one answer is nearly right."""
    notebook = filled("03", {"03.1": WRONG_DEVICE})
    notebook.cells.append(nbformat.v4.new_code_cell(tricks.FORGE["a script for who looks at it"]))
    cell_of(notebook, "ex-03-1-text").source = "<script>alert('pwned')</script>"
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
        {"03.1": "import os\nos._exit(1)", "03.2": "while True:\n    pass", "03.3": hanging, "03.5": answers["03.5"]},
    )


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The whole class, graded once: the submissions' results by student, the folder, and what was printed."""
    base = tmp_path_factory.mktemp("class")
    explained = filled("03", solutions("03"))
    cell_of(explained, "ex-03-question").source = "new_group is a collective <img src=x onerror=alert(1)>"
    submit(base / "in", "ada", explained)
    beside = submit(base / "in", "ben", filled("03", {})).parent
    (beside / "index.html").write_text("<script>alert('pwned')</script>")
    submit(base / "in", "=cmd|'x", filled("03", {}))  # a table's program would run it
    submit(base / "in", "cleo", broken())
    submit(base / "in", "dan", tampered())
    submit(base / "in", "eve", "Dear teacher, my dog ate it.")
    (base / "in" / "fred" / FOLDER).mkdir(parents=True)
    submit(base / "in", "gus", '{"cells": 3, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    submit(base / "in", "hal", filled("03", {"03.1": LEAVES_A_PROCESS, "03.5": solutions("03")["03.5"]}))
    submit(base / "in", "ida", filled("03", {"03.1": KILLS_ITS_GRADER, "03.5": solutions("03")["03.5"]}))
    printed = io.StringIO()
    with WholeClass(ROOT, base / "in", base / "class", 2, WAY, settings=LIMITS) as whole_class:
        with contextlib.redirect_stdout(printed):
            print_grades(whole_class)
        release = release_of(whole_class.classroom)
        results = {student: graded for (student, _), graded in whole_class.done.items()}
    correct_by_hand(base / "class", "ben", "ex-03-2-test", 2)
    correct_by_hand(base / "class", "ben", "ex-03-question", 1.5)
    return results, base, printed.getvalue(), release


def release_of(classroom: Classroom) -> str:
    """What nbgrader itself, with its database, makes of the solutions."""
    return (Path(classroom.coursedir.release_directory) / FOLDER / f"{FOLDER}.ipynb").read_text(encoding="utf-8")


def test_points(graded):
    results, _, _, _ = graded
    assert results["ada"].points == {"03.1": 5, "03.2": 5, "03.3": 5, "03.5": 3, "03.4": 5} and not results["ada"].notes
    assert results["ben"].points == {"03.1": 0, "03.2": 0, "03.3": 0, "03.5": 0, "03.4": 0}


def test_what_breaks_costs_only_itself_and_is_named(graded):
    cleo = graded[0]["cleo"]
    assert cleo.points == {"03.1": 0, "03.2": 0, "03.3": 0, "03.5": 3, "03.4": 0}
    assert cleo.notes == [
        "ex-03-1-answer: the kernel died while this cell ran",
        "ex-03-2-answer: the cell ran past its time limit and was interrupted",
    ]


def test_tampered_and_missing_tests_are_put_back(graded):
    results, base, _, _ = graded
    assert results["dan"].points == {"03.1": 4, "03.2": 0, "03.3": 0, "03.5": 0, "03.4": 0}
    notebook = nbformat.read(base / "class" / "autograded" / "dan" / FOLDER / f"{FOLDER}.ipynb", as_version=4)
    for name in ("ex-03-1-test", "ex-03-2-test", "ex-03-3-test"):
        assert f'check("{name[3:5]}.{name[6]}", ' in cell_of(notebook, name).source
    assert cell_of(notebook, "ex-03-2-test").metadata.nbgrader.points == 5


def test_bad_submissions_are_named_with_the_reason(graded):
    results, _, printed, _ = graded
    assert results["eve"].reason == "the file is not JSON, so not a notebook"
    assert results["fred"].reason == f"no {FOLDER}.ipynb in {FOLDER}/"
    assert results["gus"].reason.startswith("the file is not a notebook: ")
    named = [line.split()[0] for line in printed.splitlines() if "not graded" in line]
    assert sorted(named) == ["eve", "fred", "gus"]
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if "total" in line}
    assert " ".join(rows["ada"]) == "03 03.1 5/5 03.2 5/5 03.3 5/5 03.4 5/5 03.5 3/3 total 23/23"
    assert " ".join(rows["cleo"]) == "03 03.1 0/5 03.2 0/5 03.3 0/5 03.4 0/5 03.5 3/3 total 3/23"


def test_the_gradebook_has_a_row_for_each_and_the_reason_where_there_are_no_points(graded):
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{graded[1] / 'class' / 'gradebook.db'}", "ddp_course") as gradebook:
        submissions = gradebook.assignment_submissions(FOLDER)
        scores = {s.student.id: (s.score, s.max_score) for s in submissions}
        manual = [grade.name for s in submissions for grade in s.notebooks[0].grades if grade.needs_manual_grade]
        comments = {s.student.id: {comment.comment for comment in s.notebooks[0].comments} for s in submissions}
    points = {"ada": 23, "ben": 3.5, "cleo": 3, "dan": 4, "eve": 0, "fred": 0, "gus": 0, "hal": 3, "ida": 3 * bool(WAY)}
    assert scores == {student: (earned, 26) for student, earned in points.items()}
    assert manual == ["ex-03-question"]  # ada's: the others left it as it was released
    assert comments["eve"] == {"not graded: the file is not JSON, so not a notebook"}
    assert comments["fred"] == {f"not graded: no {FOLDER}.ipynb in {FOLDER}/"}
    assert comments["ada"] == {None}


def test_the_table_has_a_row_for_each(graded):
    with (graded[1] / "class" / "grades.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["ada", "ben", "cleo", "dan", "eve", "fred", "gus", "hal", "ida"]
    columns = ("points", "of", "exercise 1", "exercise 4", "question", "remark")
    assert [rows["dan"][name] for name in columns] == ["4", "26", "4", "0", "0", ""]
    assert [rows["ada"][name] for name in columns[-2:]] == ["", "nobody has read the question's answer yet"]
    assert rows["eve"]["remark"] == "not graded: the file is not JSON, so not a notebook"
    assert rows["cleo"]["remark"].startswith("ex-03-1-answer: the kernel died")


def test_no_process_of_a_submission_is_left(graded):
    assert graded[0]["hal"].points["03.5"] == 3
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if "left_by_hal" in (p.info["cmdline"] or [])] == []


def test_feedback_shows_each_named_check_or_why_there_is_none(graded):
    page = feedback(graded, "dan")
    assert "✗ the device follows the local rank" in page and "must follow the local rank" in page
    assert "pwned" in page  # as text
    page += feedback(graded, "ada")
    assert "new_group is a collective &lt;img" in page
    runs = RunsInABrowser()
    runs.feed(page)
    assert runs.found == []
    page = feedback(graded, "cleo")
    assert "KernelDied" in page and "an endless loop" in page and "each rank has its leader" in page
    assert "This submission was not graded:" in feedback(graded, "eve") and "not JSON" in feedback(graded, "eve")


class RunsInABrowser(HTMLParser):
    """Collects what of a page would run a stranger's `alert`."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.tag = [], ""

    def handle_starttag(self, tag, attrs):
        self.tag = tag
        self.found += [f"{tag} {name}={value}" for name, value in attrs if "alert" in (value or "")]

    def handle_data(self, data):
        if self.tag in ("script", "style", "svg") and "alert(" in data:
            self.found.append(f"{self.tag}: {data[:80]}")


def feedback(graded, student: str) -> str:
    return (graded[1] / "class" / "feedback" / student / FOLDER / f"{FOLDER}.html").read_text(encoding="utf-8")


def test_the_same_command_again_grades_only_what_changed(graded):
    """Also what an interrupted run does; its journal is cut in the middle of a line."""
    results, base, _, _ = graded
    journal = base / "class" / "grading.jsonl"
    whole, printed = journal.read_bytes(), io.StringIO()
    lines = whole.splitlines(keepends=True)
    last = json.loads(lines[-1])["student"]
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    damaged = '{"cells": 4, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'
    (base / "in" / "gus" / FOLDER / f"{FOLDER}.ipynb").write_text(damaged)
    with WholeClass(ROOT, base / "in", base / "class", 1, WAY, settings=LIMITS) as whole_class:
        assert set(whole_class.digests) - set(whole_class.done) == {("gus", "03"), (last, "03")}
        whole_class.done.setdefault((last, "03"), results[last])  # it may be one that takes long
        with contextlib.redirect_stdout(printed):
            print_grades(whole_class)
        assert whole_class.done["ada", "03"] == results["ada"]
    assert "8 of 9 were graded before" in printed.getvalue()
    with (base / "class" / "grades.csv").open(newline="", encoding="utf-8") as file:
        ben = next(row for row in csv.DictReader(file) if row["student"] == "ben")
    assert (ben["exercise 2"], ben["question"], ben["points"]) == ("2", "1.5", "3.5")
    assert "6 graded, 3 not graded" in (base / "class" / "class_report.html").read_text()
    assert [line.split()[0] for line in printed.getvalue().splitlines() if "not graded" in line] == ["gus"]


def correct_by_hand(out: Path, student: str, cell: str, points: float) -> None:
    """What formgrader does when a person enters points."""
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{out / 'gradebook.db'}", "ddp_course") as gradebook:
        gradebook.find_grade(cell, FOLDER, FOLDER, student).manual_score = points
        gradebook.db.commit()


def test_what_lies_beside_a_notebook_is_no_feedback_and_no_name_is_a_formula(graded):
    results, base, *_ = graded
    assert [path.name for path in (base / "class" / "feedback" / "ben" / FOLDER).iterdir()] == [f"{FOLDER}.html"]
    assert not any("=" in student for student in results)


@pytest.mark.parametrize("name", ["ada", "Zoë Ü. O-1", "b@c.org", "名前"])
def test_names_of_people_are_names(name):
    assert NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["=1+1", "*", "a\nb", "-x", "a/b", "x" * 101, "a;b", "@sum"])
def test_what_a_table_or_a_terminal_would_read_as_more_is_no_name(name):
    assert not NAME.fullmatch(name)


def test_an_error_that_repeats_a_students_words_says_them_plainly():
    assert plain("bad <script>x</script> \x1b[1A✓\n" + "y" * 9000) == "bad ‹script›x‹/script› �[1A✓\n" + "y" * 1971


def test_our_release_is_the_one_nbgrader_makes(graded):
    assert graded[3] == released("03").read_text(encoding="utf-8")


def test_unreadable_says_nothing_about_a_good_notebook():
    assert unreadable(released("03")) == ""


def test_formgrader_shows_the_class(graded):
    """In a server of its own; nbgrader's settings name the gradebook in class/."""
    out = graded[1]
    shutil.copy(ROOT / "nbgrader_config.py", out)
    environment = {**os.environ, "JUPYTER_TOKEN": "told", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jupyter_server", "--ip=127.0.0.1", "--port=0", "--no-browser", "--allow-root"]
    with (out / "server.log").open("w+") as log:
        server = subprocess.Popen(command, cwd=out, env=environment, stderr=log, start_new_session=True)
        try:
            address = wait_for_address(out / "server.log", server)
            students = json.loads(page_of(f"{address}/formgrader/api/submissions/{FOLDER}"))
            shown = page_of(f"{address}/formgrader/gradebook/{FOLDER}/{FOLDER}")
            first = json.loads(page_of(f"{address}/formgrader/api/submitted_notebooks/{FOLDER}/{FOLDER}"))[0]["id"]
            answers = page_of(f"{address}/formgrader/submissions/{first}")
        finally:
            server.terminate()
            server.wait(20)
    assert {s["student"]: s["score"] for s in students if s["autograded"]} == {
        "ada": 23, "ben": 3.5, "cleo": 3, "dan": 4, "eve": 0, "fred": 0, "gus": 0, "hal": 3, "ida": 3 * bool(WAY)
    }  # fmt: skip
    assert "Manual Grading" in shown and "Meet at a file" in answers


def wait_for_address(log: Path, server: subprocess.Popen) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", log.read_text())
        with contextlib.suppress(ConnectionRefusedError):  # it names its address before it listens
            if found:
                socket.create_connection(("127.0.0.1", int(found[1]))).close()
                return found[0].rstrip("/")
        time.sleep(0.1)
    raise AssertionError(f"no server: {log.read_text()}")


def page_of(address: str) -> str:
    with urllib.request.urlopen(f"{address}?token=told", timeout=30) as answer:
        return answer.read().decode()
