"""`ddp-course check 03`: the saved notebook, checked in the terminal."""

import nbformat
import pytest

from ddp_course.cli import main
from ddp_course.grading.learner.terminal import check_notebook
from ddp_course.grading.registry import exercises_of
from tests.grading.submissions import cell_of, filled, solutions, source_of


def checked(*arguments: object) -> int:
    return main(["check", *map(str, arguments)])


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_solution_scores_full_marks_with_an_exit_code_of_zero(capsys):
    assert checked("03", "--notebook", source_of("03"), "--seed", "2") == 0
    out, err = capsys.readouterr()
    assert "03_process_groups.ipynb: 23 of 23 points" in out and out.count("✓") == 20 and "✗" not in out
    assert err == ""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_each_broken_answer_costs_only_itself(tmp_path):
    answers = solutions("03")
    broken = filled(
        "03",
        {
            "03.1": "import os\nos._exit(1)",
            "03.2": "while True:\n    pass",
            "03.3": "def node_sum(rank, world_size, ranks_per_node, value):\n    while True:\n        pass",
            "03.5": answers["03.5"],
        },
    )
    cell_of(broken, "ex-03-1-check").source = "def check(*args):\n    return 5"  # what a notebook's own check says
    cell_of(broken, "ex-03-1-test").source = "5"  # and its test, does not matter
    path, said = tmp_path / "mine.ipynb", []
    nbformat.write(broken, path)
    points = check_notebook(path, exercises_of("03"), say=said.append, answer_timeout=3)
    words = "\n".join(said)
    assert points == {"03.1": 0, "03.2": 0, "03.3": 0, "03.5": 3, "03.4": 0}, words
    assert "KernelDied: the kernel died while this cell ran" in words
    assert "CellTimeoutError: the cell ran past its time limit" in words
    assert "✗ there is no function place; its cell did not run" in words
    assert "an endless loop, or ranks that wait for each other" in words


def test_what_cannot_be_checked_gets_one_sentence_and_exit_code_two(tmp_path, capsys):
    assert checked("03.9") == checked("77") == checked("03", "--notebook", tmp_path / "none.ipynb") == 2
    (tmp_path / "words.ipynb").write_text("not a notebook")
    assert checked("03", "--notebook", tmp_path / "words.ipynb") == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 4
    assert "no exercise '03.9'" in err and "is not a notebook" in err
    assert "none.ipynb: there is no such file or folder" in err
