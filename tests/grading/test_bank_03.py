"""Every answer of the bank gets what it deserves: full marks, or less and the right hint."""

import linecache

import pytest

from ddp_course.grading import check
from ddp_course.grading.registry import find_exercise
from tests.grading.bank_03 import ALL, IMPORTS, RIGHT, WRONG, Right, Wrong

OTHER_SEED = 1  # that of the notebook's test cells


def written(exercise_id: str, source: str):
    """Return the answer's function as if its text had been run in a notebook's cell."""
    source, cell = IMPORTS + source, f"<ipython-input-{abs(hash(source))}>"
    linecache.cache[cell] = (len(source), None, source.splitlines(True), cell)
    namespace = {"__name__": "__main__"}  # so that it travels by value
    exec(compile(source, cell, "exec"), namespace)
    return namespace[find_exercise(exercise_id).function]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("answer", RIGHT, ids=lambda a: f"{a.exercise} {a.way}")
def test_a_right_answer_gets_full_marks_however_it_is_written(answer: Right, capsys):
    for seed in (0, OTHER_SEED):
        points = check(answer.exercise, written(answer.exercise, answer.source), seed=seed)
        assert points == find_exercise(answer.exercise).points, capsys.readouterr().out


@pytest.mark.timeout(120)
@pytest.mark.parametrize("answer", WRONG, ids=lambda a: f"{a.exercise} {a.mistake}")
def test_a_wrong_answer_loses_its_points_and_is_told_why(answer: Wrong, capsys):
    exercise = find_exercise(answer.exercise)
    points = check(answer.exercise, written(answer.exercise, answer.source), limit_s=answer.limit_s)
    said = capsys.readouterr().out
    fails = [c.key for c in exercise.checks] if answer.fails == ALL else list(answer.fails)
    assert [c.key for c in exercise.checks if f"✗ {c.name} " in said] == fails, said
    assert points == sum(c.points for c in exercise.checks if c.key not in fails)
    assert answer.hint in said, said
    assert "Traceback" not in said and "ddp_course/grading" not in said, said


def test_every_exercise_has_at_least_five_wrong_answers_and_two_right_ones():
    for exercise in ("03.1", "03.2", "03.3", "03.4"):
        assert len([a for a in WRONG if a.exercise == exercise]) >= 5
        assert len([a for a in RIGHT if a.exercise == exercise]) >= 2
