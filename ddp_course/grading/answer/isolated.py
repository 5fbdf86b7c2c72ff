"""How is a learner's function run, when it may hang, crash or end its process?

Always in other processes, with a time limit. What comes back is plain data, or an `AnswerFailed` that says in the
learner's terms what happened: their own traceback, the rank that died, the line where the ranks wait. After a hang
nothing more is run, so a check ends in bounded time.

Read next: `worker_pool.py`, the processes; `forbidden.py`, what is refused; `vocabulary/observe.py`, what is noted.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import cloudpickle
import torch

from ddp_course.grading.answer.forbidden import nobody_leaves_early, refused
from ddp_course.grading.answer.limits import LIMIT_S, patience
from ddp_course.grading.answer.worker_pool import run_on_ranks
from ddp_course.grading.exercise import AnswerFailed, Exercise, Fault
from ddp_course.launcher import RankError, codes
from ddp_course.launcher.packing import dumps

MOST_LINES, MOST_LETTERS = 20, 160  # of what the answer printed

# What C++ prints when it aborts, which the report says better.
_NOT_THE_ANSWERS = ("terminate called", "what():", "gloo::")

_ENDED = ("raised", "died", "cut-off", "outside-group")  # and not waited: more may be run

# Told by any exercise's check, after the exercise's own hints.
_COMMON_HINTS = (
    (r"raised NotImplementedError", "this is not written yet; replace the line `raise NotImplementedError()`"),
    (r"raised SystemExit|exit status", "the function ends its process; remove exit(), sys.exit() or os._exit()"),
    (r"killed by SIGKILL", "the process was killed, most often because memory ran out"),
    (
        "absent|cut-off",
        "one rank skips a collective that the others wait in, or ends its group first; look for a branch on the rank",
    ),
    ("disagree", "every rank must call the same collectives in the same order"),
    ("limit", "an endless loop, or ranks that wait for each other"),
)


class NotJudged(Exception):
    """Ranks could not start, or this machine was too slow: nothing is known of the answer."""


class Answer:
    """A learner's function, packed so that other processes can run it.

    Raises:
        AnswerFailed: what was given is no function, or cannot travel.
    """

    lost: Exception | None = None  # why no run brought anything back, where the function is far away

    def __init__(self, function: Callable, exercise: Exercise, limit_s: float = LIMIT_S):
        self.exercise, self.limit_s = exercise, limit_s
        self.printed: list[str] = []
        if not callable(function):
            given = f"{type(function).__name__} {str(function)[:60]}"
            cause = f'give {exercise.function} itself: check("{exercise.id}", {exercise.function})'
            raise AnswerFailed(Fault(expected=f"what you wrote as {exercise.function}", found=given, cause=cause))
        try:
            self.packed = dumps(function)
        except Exception as error:  # whatever the function refers to says so in its own way
            found = f"{type(error).__name__}: {error}"
            cause = "the function uses something that cannot leave the notebook, such as an open file; make it inside"
            raise AnswerFailed(Fault("a function that can run in other processes", found, cause=cause)) from None

    def run(self, driver: Callable, world_size: int, *args: Any, init: bool = False, fresh: bool = False) -> list:
        """Call `driver(rank, world_size, function, *args)` on every rank and return what each returned.

        Args:
            driver: a function of the grader's that calls the learner's and returns plain data.
            init: whether the ranks have a process group already.
            fresh: for processes that nothing else has run in, or runs in afterwards.
        Raises:
            AnswerFailed: the function raised, died or ran past its limit.
            NotJudged: the ranks could not start.
        """
        printed = StringIO()
        try:
            with redirect_stdout(printed), warnings.catch_warnings(action="ignore"):
                call = (driver, self.packed, self.exercise.refused, args)
                return run_on_ranks(_call, world_size, call, init=init, limit_s=self.limit_s * patience(), fresh=fresh)
        except RankError as error:
            if error.code == "start":
                raise NotJudged(f"the ranks could not start: {error}") from None
            raise AnswerFailed(self._fault(error)) from None
        finally:
            lines = printed.getvalue().splitlines()
            printed = [line[:MOST_LETTERS] for line in lines if line.startswith("rank ") and " | " in line]
            self.printed += [line for line in printed if not any(words in line for words in _NOT_THE_ANSWERS)]

    def _fault(self, error: RankError) -> Fault:
        if error.error_type == "FaultFound":
            return Fault(**json.loads(error.message))
        # The time limit is no setting of the learner's.
        report = re.sub(r"; if a\s+rank was only slow, raise timeout_s", "", str(error))
        hints = (*self.exercise.hints, *_COMMON_HINTS)
        cause = next((hint for pattern, hint in hints if codes.fits(pattern, error.code, report)), "")
        if error.error_type == "NotImplementedError":
            return Fault(cause=cause)
        ended = error.code in _ENDED or any(where.status == "died" for where in error.ranks)
        return Fault(report=report, cause=cause, goes_on=ended)


def _call(rank: int, world_size: int, driver: Callable, packed: bytes, names: tuple, args: tuple) -> Any:
    # Warnings: what matters is said by the check. The others before unpacking, which looks the function's globals up.
    with warnings.catch_warnings(action="ignore"), refused(names), nobody_leaves_early():
        function = cloudpickle.loads(packed)
        for names_of in _globals_of(function):
            names_of.setdefault("hash", functools.partial(_salted_hash, secrets.token_bytes(8)))
        return driver(rank, world_size, function, *args)


def _globals_of(function: Any) -> list[dict]:
    """Return the names that a learner's function, or class with its methods, looks up."""
    parts = [function, *vars(function).values()] if isinstance(function, type) else [function]
    return [part.__globals__ for part in parts if hasattr(part, "__globals__")]


def _salted_hash(salt: bytes, value: Any) -> int:
    """Python's `hash`, as in a process that was started by itself: kept ranks are forked, and share one salt."""
    return hash((salt, value)) if isinstance(value, str | bytes) else hash(_with_salt(salt, value))


def _with_salt(salt: bytes, value: Any) -> Any:
    if isinstance(value, tuple | frozenset):
        return type(value)(_with_salt(salt, part) for part in value)
    return (salt, value) if isinstance(value, str | bytes) else value


def plain(value: Any) -> Any:
    """Return a learner's value as something that can travel and be compared: numbers, text, lists."""
    if isinstance(value, int) and value.bit_length() > 1023:
        return f"<int of {value.bit_length()} bits>"  # more than a float can hold, so nothing to compare
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, torch.device) else f"<{type(value).__name__}>"  # no addresses
