"""The solution of every exercise gets full marks, on the visible and on the hidden values; an untouched one gets 0."""

import nbformat
import pytest

from ddp_course.grading import check
from ddp_course.grading.registry import LESSONS, exercises_of
from tests.grading.bank import run_as_cell
from tests.grading.submissions import answer_cells, cell_of, released, solutions, source_of

pytestmark = pytest.mark.timeout(300)


def setup_of(lesson: str) -> str:
    return cell_of(nbformat.read(source_of(lesson), as_version=4), "setup").source + "\n"


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_solutions_get_full_marks(lesson, capsys):
    setup, answers = setup_of(lesson), solutions(lesson)
    assert sorted(answers) == [exercise.id for exercise in exercises_of(lesson)]
    for exercise in exercises_of(lesson):
        for seed in (0, 1):
            points = check(exercise.id, run_as_cell(exercise.id, setup + answers[exercise.id]), seed=seed)
            assert points == exercise.points, capsys.readouterr().out


@pytest.mark.parametrize("lesson", LESSONS)
def test_an_untouched_exercise_gets_nothing_and_is_told_so(lesson, capsys):
    setup, answers = setup_of(lesson), answer_cells(released(lesson))
    for exercise in exercises_of(lesson):
        assert check(exercise.id, run_as_cell(exercise.id, setup + answers[exercise.id])) == 0
        assert "this is not written yet" in capsys.readouterr().out
