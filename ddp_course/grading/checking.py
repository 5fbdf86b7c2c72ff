"""How does a learner learn whether the answer is right? `check("03.1", place)` prints it and returns the points.

The same call serves the cell in the notebook, the terminal, the autograder (with another seed) and the tests.
Read next: `exercise.py`, what a check is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from ddp_course.grading.answer.isolated import MOST_LINES, Answer, NotJudged
from ddp_course.grading.answer.limits import LIMIT_S
from ddp_course.grading.exercise import AnswerFailed, Exercise, Fault, Verdict, shown
from ddp_course.grading.learner.progress import note_points
from ddp_course.grading.registry import find_exercise

VISIBLE_SEED = 0  # that of a learner's own checks; others are a grader's


def check(exercise_id: str, function: Callable, *, seed: int = VISIBLE_SEED, limit_s: float = LIMIT_S) -> int:
    """Run `function` in processes of its own, print what is right and what is not, and return the points.

    Args:
        exercise_id: such as "03.1".
        function: the learner's.
        seed: chooses the cases and the numbers of ranks; the same seed, the same cases.
        limit_s: for each run of the function.
    Raises:
        ValueError: there is no such exercise.
    """
    exercise = find_exercise(exercise_id)
    print(f"{exercise.id} {exercise.title}", flush=True)  # before the ranks start, which may take seconds
    try:
        verdicts, printed = judged(exercise, lambda: Answer(function, exercise, limit_s), seed)
    except NotJudged as error:
        print(
            f"not checked, and no points lost: {error}\nrun the check again; `ddp-course doctor` looks for the reason"
        )
        return 0
    print(told(exercise, verdicts, printed))
    points = sum(verdict.points for verdict in verdicts)
    if seed == VISIBLE_SEED and (trouble := note_points(exercise, points)):
        print(trouble)
    return points


def told(exercise: Exercise, verdicts: list[Verdict], printed: list[str]) -> str:
    """Return what a learner reads about an answer."""
    lines = [shown(_without_repetition(v, before)) for before, v in zip([None, *verdicts], verdicts, strict=False)]
    if printed:
        lines += ["your function printed:", *(f"    {line}" for line in printed[:MOST_LINES])]
        lines += ["    ..."] * (len(printed) > MOST_LINES)
    points = sum(verdict.points for verdict in verdicts)
    return "\n".join([*lines, f"{points} of {exercise.points} points"])


def _without_repetition(verdict: Verdict, before: Verdict | None) -> Verdict:
    """Say the same traceback once."""
    if before is None or verdict.fault is None or before.fault is None or verdict.fault.report != before.fault.report:
        return verdict
    report = "the same error" if verdict.fault.report else ""
    return replace(verdict, fault=replace(verdict.fault, report=report))


def judged(exercise: Exercise, pack: Callable[[], Answer], seed: int | str) -> tuple[list[Verdict], list[str]]:
    """Return a verdict on each check of the exercise, and what the answer that `pack` makes has printed.

    Raises:
        NotJudged: by no fault of the answer's.
    """
    found: dict[str, Fault | None] = {}
    failure, printed = None, []
    try:
        answer = pack()
        printed = answer.printed
        for key, fault in _judgement(exercise, answer, seed):
            found[key] = fault
    except AnswerFailed as failed:
        failure = failed.fault
    verdicts = []
    for item in exercise.checks:
        if item.key in found:
            verdicts.append(Verdict(item, found[item.key]))
        else:
            verdicts.append(Verdict(item, failure, reached=failure is not None))
            failure = None  # said once; the checks after it were not reached
    return verdicts, printed


def _judgement(exercise: Exercise, answer: Answer, seed: int | str) -> Iterator[tuple[str, Fault | None]]:
    """Judge an answer. Results that no judge thinks of may be a mistake of ours: they cost no points."""
    try:
        yield from exercise.judge(answer, Random(f"{exercise.id}/{seed}"))
    except Exception as error:
        if isinstance(error, AnswerFailed | NotJudged) or error is answer.lost:
            raise
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise NotJudged(
            f"the check of {exercise.id} could not read the results ({said}); look at the answer"
        ) from error
