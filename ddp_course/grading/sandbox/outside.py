"""Who gives the points, when the answer is a stranger's? A judge in another process than the answer.

The judge sends each round of a check into the box and gets data back. Expected values are worked out on this side, from
cases on this side; of the answer's process nothing is believed but what it returned. So a learner can lie about what a
rank did, but must bring the right results, and has not seen what they are compared with.

Read next: `protocol.py`, in which form results come; `box.py`; `../differential.py`, what is expected of them.
"""

from __future__ import annotations

import multiprocessing.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle

from ddp_course.grading.answer.isolated import NotJudged
from ddp_course.grading.answer.limits import LIMIT_S
from ddp_course.grading.checking import judged, told
from ddp_course.grading.exercise import AnswerFailed, Exercise, Fault, Verdict
from ddp_course.grading.registry import find_exercise, judges
from ddp_course.grading.sandbox import protocol

MOST_LETTERS = 4000  # of a text that a learner reads
NO_ANSWER = "what came back is nothing that ranks return"

Ask = Callable[[bytes], str]  # a request into the box -> the text that it told


class DistantAnswer:
    """A learner's function that is in a box: as `isolated.Answer`, but a run of it crosses the border twice."""

    def __init__(self, exercise: Exercise, ask: Ask, limit_s: float = LIMIT_S):
        self.exercise, self.ask, self.limit_s = exercise, ask, limit_s
        self.printed: list[str] = []
        self.lost: Exception | None = None  # why nothing came back from the box

    def run(self, driver: Callable, world_size: int, *args: Any, **settings: bool) -> list:
        """As `Answer.run`, of a driver that returns a dictionary for each of its cases."""
        known = {name: getattr(self.exercise, name) for name in ("id", "function", "hints", "refused")}
        request = {"exercise": known, "limit_s": self.limit_s, "driver": driver, "world_size": world_size}
        try:
            text = self.ask(cloudpickle.dumps({**request, "args": args, "settings": settings}))
        except Exception as error:
            self.lost = error
            raise
        reply = _form(text, world_size)
        self.printed += reply["printed"]
        if "not_judged" in reply:
            raise NotJudged(reply["not_judged"])
        if "fault" in reply:
            raise AnswerFailed(reply["fault"])
        return reply["results"]


def _form(text: str, world_size: int) -> dict[str, Any]:
    """Return a reply that has the form of one, or raise AnswerFailed."""
    try:
        reply = protocol.read(text)
        assert set(reply) in ({"results", "printed"}, {"fault", "printed"}, {"not_judged", "printed"})
        assert all(isinstance(line, str) for line in reply["printed"])
        assert isinstance(reply.get("fault", Fault()), Fault) and isinstance(reply.get("not_judged", ""), str)
        ranks = reply.get("results", [[]] * world_size)
        assert isinstance(ranks, list) and len(ranks) == world_size
        assert all(isinstance(note, dict) and isinstance(note["calls"], list) for notes in ranks for note in notes)
    except (protocol.NotPlain, AssertionError, TypeError, KeyError) as error:
        raise AnswerFailed(
            Fault("the results of the ranks", f"{type(error).__name__}: {error}", cause=NO_ANSWER)
        ) from None
    return reply


def _shortened(fault: Fault) -> Fault:
    """Return a fault as a page can show it, however much of a stranger's values or words stands in it."""
    texts = {name: text[:MOST_LETTERS] for name, text in vars(fault).items() if isinstance(text, str)}
    return replace(fault, **texts)


def verdicts_on(exercise_id: str, ask: Ask, seed: str, scratch: Path) -> tuple[list[Verdict], str]:
    """Judge an exercise; return a verdict on each check, and what a learner reads.

    Args:
        seed: chooses the cases.
        scratch: a folder that is in the box, too, for the files that a check has.
    Raises:
        NotJudged: by no fault of the answer's.
    """
    exercise = find_exercise(exercise_id)
    answer = DistantAnswer(exercise, ask)
    multiprocessing.util.get_temp_dir()  # of this process: chosen now, and not in the box
    with mock.patch.object(tempfile, "tempdir", str(scratch)), _judges_travel():
        verdicts, printed = judged(exercise, lambda: answer, seed)
    verdicts = [replace(each, fault=each.fault and _shortened(each.fault)) for each in verdicts]
    return verdicts, told(exercise, verdicts, [line[:MOST_LETTERS] for line in printed])


@contextmanager
def _judges_travel() -> Iterator[None]:
    """Within the block, a judge's functions are sent as code: the box has no judge that could be read."""
    cloudpickle.register_pickle_by_value(judges())
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(judges())
