"""Every answer of every bank gets what it deserves: full marks, or less and the right hint.

A check mostly waits: for processes to start, for a hang to reach its limit. So some answers are checked at a time, in
processes of their own, and each test looks at one of them.
"""

import contextlib
import io
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from ddp_course.grading import check
from ddp_course.grading.registry import LESSONS, exercises_of, find_exercise
from tests.grading.bank import ALL, BANKS, Right, Wrong, all_right, answers, written

OTHER_SEED = 1  # that of the notebook's test cells
AT_A_TIME = 3


def checked(answer: Right | Wrong, seed: int) -> tuple[int, str]:
    """Return the points of an answer, and what the learner reads."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        limit = {"limit_s": answer.limit_s} if isinstance(answer, Wrong) else {}
        points = check(
            answer.exercise, written(answer.exercise, answer.source, getattr(answer, "setup", None)), seed=seed, **limit
        )
    return points, said.getvalue()


@pytest.fixture(scope="module")  # its processes are gone before the next file's tests
def verdict(request):
    """What the check of an answer says; all that this session asks for are under way."""
    chosen = [
        item.callspec.params["answer"]
        for item in request.session.items
        if "verdict" in getattr(item, "fixturenames", ())
    ]
    with ProcessPoolExecutor(AT_A_TIME, multiprocessing.get_context("spawn")) as workers:
        under_way = {
            (answer, seed): workers.submit(checked, answer, seed)
            for answer in chosen
            for seed in ((0, OTHER_SEED) if isinstance(answer, Right) else (0,))
        }
        yield lambda answer, seed=0: under_way[answer, seed].result()
        workers.shutdown(cancel_futures=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("answer", all_right(), ids=lambda a: f"{a.exercise} {a.way}")
def test_a_right_answer_gets_full_marks_however_it_is_written(answer: Right, verdict: Callable):
    for seed in (0, OTHER_SEED):
        points, said = verdict(answer, seed)
        assert points == find_exercise(answer.exercise).points, said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("answer", answers("WRONG"), ids=lambda a: f"{a.exercise} {a.mistake}")
def test_a_wrong_answer_loses_its_points_and_is_told_why(answer: Wrong, verdict: Callable):
    exercise = find_exercise(answer.exercise)
    points, said = verdict(answer)
    fails = [c.key for c in exercise.checks] if answer.fails == ALL else list(answer.fails)
    assert [c.key for c in exercise.checks if f"✗ {c.name} " in said] == fails, said
    assert points == sum(c.points for c in exercise.checks if c.key not in fails)
    assert answer.hint in said, said
    assert "Traceback" not in said and "ddp_course/grading" not in said, said


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_exercise_has_at_least_five_wrong_answers_and_two_right_ones(lesson):
    assert lesson in BANKS
    for exercise in exercises_of(lesson):
        assert len([a for a in answers("WRONG") if a.exercise == exercise.id]) >= 5, exercise.id
        assert len([a for a in all_right() if a.exercise == exercise.id]) >= 2, exercise.id
