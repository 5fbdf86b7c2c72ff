"""An untouched exercise gets nothing and is told so; that the solutions get full marks is tested in test_judges.py."""

import pytest

from ddp_course.grading import check
from ddp_course.grading.registry import LESSONS, exercises_of
from ddp_course.grading.source import function_of
from tests.grading.submissions import answer_cells, released, solutions

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("lesson", LESSONS)
def test_an_untouched_exercise_gets_nothing_and_is_told_so(lesson, capsys):
    answers = answer_cells(released(lesson))
    assert sorted(answers) == sorted(solutions(lesson)) == [exercise.id for exercise in exercises_of(lesson)]
    for exercise in exercises_of(lesson):
        assert check(exercise.id, function_of(exercise.id, exercise.function, answers[exercise.id])) == 0
        said = capsys.readouterr().out
        assert "this is not written yet" in said and "rank 0 of" not in said
