"""What is right gets full marks, a mistake fails its checks and is told: of all exercises."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from ddp_course.grading import differential
from ddp_course.grading.answer.isolated import Answer
from ddp_course.grading.answer.worker_pool import KEPT
from ddp_course.grading.checking import judged, told
from ddp_course.grading.exercise import Exercise, Fault
from ddp_course.grading.registry import LESSONS, exercises_of
from ddp_course.grading.source import Mistake, function_of, solution_of

SEEDS = (0, 1)  # a learner's, and that of the notebook's test cells
EXERCISES = [each for lesson in LESSONS for each in exercises_of(lesson)]
HANGS_S = 2.0
BY_DAY = 6


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_these_tests() -> Iterator[None]:
    """What checks keep is gone before the next file's tests; a busy machine has time to explain."""
    with mock.patch.object(differential, "EXPLAIN_S", 60.0):
        yield
    KEPT.end()


def verdicts(exercise: Exercise, source: str, seed: int = 0, limit_s: float = 10.0) -> tuple[list[str], int, str]:
    """Return the checks that an answer fails, its points, and what is told."""
    with mock.patch.dict(os.environ):
        os.environ.pop("PYTEST_CURRENT_TEST")  # else every test has other surroundings, and gets other ranks
        function = function_of(exercise.id, exercise.function, source)
        found, printed = judged(exercise, lambda: Answer(function, exercise, limit_s), seed)
    failed = [verdict.check.key for verdict in found if verdict.points < verdict.check.points]
    return failed, sum(verdict.points for verdict in found), told(exercise, found, printed)


def rights() -> list:
    """The solutions and the other right answers with both seeds: with one by day."""
    found = []
    for exercise in EXERCISES:
        for way, source in (("the solution", solution_of(exercise.id)), *exercise.rights):
            for seed in SEEDS:
                mark = pytest.mark.slow if seed else pytest.mark.nightly
                name = f"{exercise.id} {way}, seed {seed}"
                found.append(pytest.param(exercise, source, seed, id=name, marks=mark))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("exercise", "source", "seed"), rights())
def test_a_right_answer_gets_full_marks_however_it_is_written(exercise, source, seed):
    failed, points, said = verdicts(exercise, source, seed)
    assert (failed, points) == ([], exercise.points), said


def mistakes() -> list:
    """All mistakes: by day some of each exercise, which fail all its checks, and of those that hang one a lesson."""
    found, waited_for = [], set()
    for exercise in EXERCISES:
        shown: set[str] = set()
        for number, mistake in enumerate(exercise.mistakes):
            lesson, hangs = exercise.id[:2], mistake.how == "hangs"
            by_day = lesson not in waited_for if hangs else number < BY_DAY or not shown.issuperset(mistake.fails)
            if by_day:
                shown |= set(mistake.fails)
                waited_for |= {lesson} if hangs else set()
            mark = pytest.mark.slow if by_day else pytest.mark.nightly
            found.append(pytest.param(exercise, mistake, id=f"{exercise.id} {mistake.name}", marks=mark))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("exercise", "mistake"), mistakes())
def test_a_mistake_fails_its_checks_and_is_told(exercise: Exercise, mistake: Mistake):
    failed, _, said = told_once(exercise, mistake)
    assert failed == [check.key for check in exercise.checks if check.key in mistake.fails], said
    assert mistake.cause in said, said
    assert "Traceback" not in said and "ddp_course/grading" not in said, said


def told_once(exercise: Exercise, mistake: Mistake) -> tuple[list[str], int, str]:
    """As `verdicts`, and what is compared with the mistake as an answer is the same run of it."""
    seen = differential._Outcomes.seen

    def once(outcomes: differential._Outcomes, name: str, who: str | None) -> list | Fault:
        return seen(outcomes, name, None if who == mistake.source else who)

    with mock.patch.object(differential._Outcomes, "seen", once):
        return verdicts(exercise, mistake.source, limit_s=HANGS_S if mistake.how == "hangs" else 10.0)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("exercise", "mistake"), mistakes())
def test_a_mistake_that_runs_again_does_the_same(exercise: Exercise, mistake: Mistake):
    with mock.patch.dict(differential._kept, clear=True):
        failed, points, said = verdicts(exercise, mistake.source, limit_s=HANGS_S if mistake.how == "hangs" else 10.0)
    assert (failed, points) == told_once(exercise, mistake)[:2] and mistake.cause in said, said


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_an_exercise_has_its_share_of_mistakes(exercise):
    assert len(exercise.mistakes) >= 5
    keys = {check.key for check in exercise.checks}
    assert {key for mistake in exercise.mistakes for key in mistake.fails} == keys
    assert len({mistake.name for mistake in exercise.mistakes}) == len(exercise.mistakes)
