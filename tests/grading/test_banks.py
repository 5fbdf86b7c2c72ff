"""Every answer of every bank gets what it deserves: full marks, or less and the right hint."""

import os
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from ddp_course.grading import check
from ddp_course.grading.answer.kept import KEPT
from ddp_course.grading.registry import exercises_of, find_exercise
from tests.grading.bank import ALL, BANKS, Right, Wrong, all_right, answers, written

SEEDS = (0, 1)  # a learner's, and that of the notebook's test cells


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_these_tests() -> Iterator[None]:
    """What checks keep is gone before the next file's tests."""
    yield
    KEPT.end()


def checked(answer: Right | Wrong, function: Callable, **options) -> int:
    """Return the points of an answer."""
    with mock.patch.dict(os.environ):
        os.environ.pop("PYTEST_CURRENT_TEST")  # else every test has other surroundings, and gets other ranks
        return check(answer.exercise, function, **options)


def rights() -> list:
    """Return all right answers, each with both seeds; those that are not the solution are slow together."""
    return [
        pytest.param(a, seed, id=f"{a.exercise} {a.way}, seed {seed}", marks=marks_of(a, seed))
        for a in all_right()
        for seed in SEEDS
    ]


def marks_of(answer: Right, seed: int) -> list[pytest.MarkDecorator]:
    return [] if answer.way == "the solution" else [pytest.mark.slow] if seed else [pytest.mark.nightly]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("answer", "seed"), rights())
def test_a_right_answer_gets_full_marks_however_it_is_written(answer: Right, seed: int, capsys):
    points = checked(answer, written(answer.exercise, answer.source, answer.setup), seed=seed)
    assert points == find_exercise(answer.exercise).points, capsys.readouterr().out


def wrongs() -> list:
    """Return all wrong answers; of those that are waited for until a limit, one a lesson runs by day."""
    found, waited_for = [], set()
    for answer in answers("WRONG"):
        lesson, waits = answer.exercise[:2], answer.limit_s < Wrong.limit_s
        by_day = not waits or lesson not in waited_for
        waited_for |= {lesson} if waits else set()
        name, mark = f"{answer.exercise} {answer.mistake}", pytest.mark.slow if by_day else pytest.mark.nightly
        found.append(pytest.param(answer, id=name, marks=mark))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("answer", wrongs())
def test_a_wrong_answer_loses_its_points_and_is_told_why(answer: Wrong, capsys):
    exercise = find_exercise(answer.exercise)
    points = checked(answer, written(answer.exercise, answer.source), limit_s=answer.limit_s)
    said = capsys.readouterr().out
    fails = [c.key for c in exercise.checks] if answer.fails == ALL else list(answer.fails)
    assert [c.key for c in exercise.checks if f"✗ {c.name} " in said] == fails, said
    assert points == sum(c.points for c in exercise.checks if c.key not in fails)
    assert answer.hint in said, said
    assert "Traceback" not in said and "ddp_course/grading" not in said, said


@pytest.mark.parametrize("lesson", BANKS)
def test_every_exercise_has_at_least_five_wrong_answers_and_two_right_ones(lesson):
    for exercise in (each for each in exercises_of(lesson) if not each.mistakes):
        assert len([a for a in answers("WRONG") if a.exercise == exercise.id]) >= 5, exercise.id
        assert len([a for a in all_right() if a.exercise == exercise.id]) >= 2, exercise.id
