"""The judge is outside: what he asks for is understood without him, and what he is told is looked at."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch

from ddp_course.grading.answer.isolated import NotJudged
from ddp_course.grading.exercise import AnswerFailed, Fault
from ddp_course.grading.registry import LESSONS, exercises_of, find_exercise
from ddp_course.grading.sandbox import outside, protocol
from ddp_course.grading.sandbox.boxed import CASES, cases_of
from ddp_course.grading.sandbox.outside import NO_ANSWER, verdicts_on

# In a process that has no judges, as in a box.
UNDERSTAND = """
import sys
sys.modules["judges"] = None
import cloudpickle
from pathlib import Path
for path in map(Path, sys.argv[1:]):
    try:
        cloudpickle.loads(path.read_bytes())
    except Exception as error:
        print(path.name, type(error).__name__, error)
"""


class Enough(Exception):
    """All that a test wants to see."""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_the_judge_asks_for_is_understood_where_no_judge_is(tmp_path):
    asked = []
    for exercise in (exercise for lesson in LESSONS for exercise in exercises_of(lesson)):
        path = tmp_path / exercise.id

        def ask(request: bytes, path: Path = path) -> str:
            path.write_bytes(request)
            raise Enough

        with pytest.raises(Enough):
            verdicts_on(exercise.id, ask, "seed", tmp_path)
        asked.append(str(path))
    done = subprocess.run([sys.executable, "-c", UNDERSTAND, *asked], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def told(reply: object, tmp_path) -> tuple[int, str]:
    text = reply if isinstance(reply, str) else protocol.written(reply)
    verdicts, said = verdicts_on("03.1", lambda request: text, "seed", tmp_path)
    return sum(verdict.points for verdict in verdicts), said


@pytest.mark.parametrize(
    "reply",
    [
        "no JSON",
        {"results": [[]]},
        {"results": [[]], "printed": [], "points": 5},
        {"results": [[], []], "printed": []},
        {"results": [[{"value": 1}]], "printed": []},
        {"results": "five", "printed": []},
        {"results": [[3]], "printed": []},
        {"fault": "none", "printed": []},
        {"results": [[]], "printed": [1]},
        {"points": 5, "printed": []},
        [5],
        5,
    ],
    ids=str,
)
def test_a_reply_of_another_form_earns_nothing_and_says_so(reply, tmp_path):
    points, text = told(reply, tmp_path)
    assert points == 0 and NO_ANSWER in text


def test_results_that_no_judge_thinks_of_cost_what_they_concern_and_raise_nothing(tmp_path):
    odd = {"value": [[[{}]], None, -1.5, "x" * 10], "calls": [None, "all_reduce"], "error": 3}
    points, text = told({"results": [[odd] * 9], "printed": ["rank 0 | hello"]}, tmp_path)
    assert points == 0 and text.endswith("0 of 5 points")


def test_results_that_a_judge_stumbles_over_are_not_graded(tmp_path, monkeypatch):
    def stumbles(*_):
        return bool(torch.zeros(2))  # as a judge does over a tensor where a number should be

    monkeypatch.setattr(outside, "find_exercise", lambda name: replace(find_exercise(name), judge=stumbles))
    with pytest.raises(NotJudged, match=r"the check of 03\.1 could not read the results \(RuntimeError: Boolean"):
        told({"results": [], "printed": []}, tmp_path)


def test_a_fault_is_told_in_its_words_and_what_was_printed(tmp_path):
    points, text = told({"fault": Fault(report="it raised", cause="a typo"), "printed": ["rank 0 | hello"]}, tmp_path)
    assert points == 0 and "it raised" in text and "likely cause: a typo" in text and "rank 0 | hello" in text


@pytest.mark.parametrize("where", ["printed", "report", "value"])
def test_of_a_text_without_end_so_much_is_told_as_can_be_read(where, tmp_path):
    flood = "x" * 2**22
    reply = {
        "printed": {"results": [[{"calls": []}] * 9], "printed": [flood] * 9},
        "report": {"fault": Fault(report=flood, cause=flood), "printed": []},
        "value": {"results": [[{"value": flood, "calls": []}] * 9], "printed": []},
    }[where]
    assert len(told(reply, tmp_path)[1]) < 100_000


def test_what_could_not_be_judged_is_no_fault(tmp_path):
    with pytest.raises(NotJudged, match="too slow"):
        told({"not_judged": "too slow", "printed": []}, tmp_path)


def test_cases_are_those_of_the_classs_secret(tmp_path):
    asked = {}
    for seed in ("one", "another", "one"):

        def ask(request: bytes, seed: str = seed) -> str:
            asked.setdefault(seed, []).append(request)
            raise AnswerFailed(Fault())

        verdicts_on("09.1", ask, seed, tmp_path)
    assert find_exercise("09.1").points == 5
    assert asked["one"][0] != asked["another"][0]


def test_a_hand_in_has_one_of_the_classs_sets_of_cases():
    notebooks = [nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"x = {n}")]) for n in range(200)]
    ours = [cases_of("a secret", each) for each in notebooks]
    assert ours == [cases_of("a secret", each) for each in notebooks]
    assert len(set(ours)) == CASES and not set(ours) & {cases_of("another", each) for each in notebooks}
