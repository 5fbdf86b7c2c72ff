"""How do answers fare that somebody wrote who had not seen the judges? Their answers are in strangers.jsonl.

    .venv/bin/python -m tests.grading.strangers          all; told are those that got what they should not
    .venv/bin/python -m tests.grading.strangers 07 12.1  some

A right answer has to get full marks with a learner's seed and with a grader's, a wrong one with neither or one. What
got past a judge belongs among that exercise's mistakes, with a view that tells it apart.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from ddp_course.grading import check, differential
from ddp_course.grading.learner import progress
from ddp_course.grading.registry import find_exercise
from ddp_course.grading.source import function_of

ANSWERS = Path(__file__).with_name("strangers.jsonl")


def main(wanted: list[str]) -> int:
    """Check the answers; return how many got what they should not."""
    os.environ[progress.VARIABLE] = ""
    differential.EXPLAIN_S = 0.0  # points alone are asked for
    answers = [json.loads(line) for line in ANSWERS.read_text(encoding="utf-8").splitlines()]
    odd = judged = 0
    for answer in answers:
        if wanted and not answer["exercise"].startswith(tuple(wanted)):
            continue
        judged += 1
        if full_marks(answer) != (answer["kind"] == "right"):
            odd += 1
            print(f"{answer['exercise']} {answer['kind']}: {answer['what']}", flush=True)
    print(f"{judged} answers, {odd} of them judged otherwise than their writer says")
    return odd


def full_marks(answer: dict) -> bool:
    """Return whether an answer gets all points with both seeds."""
    exercise = find_exercise(answer["exercise"])
    with contextlib.redirect_stdout(io.StringIO()):
        function = function_of(exercise.id, exercise.function, answer["source"])
        return all(check(exercise.id, function, seed=seed) == exercise.points for seed in (0, 1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
