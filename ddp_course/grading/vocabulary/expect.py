"""What can be expected of an answer? The words of the judges of 11.1 to 11.3, 11.5, 15.1 and 15.2.

All others are judged by their own solutions, as `differential.py` says; these are still to follow.

An exercise is made by `exercise`, of

    act      how a rank calls what the learner wrote: (function, case, rank, world_size) -> its result, or a `Note`
    rounds   which cases there are, chosen by a random generator; a `Round` is one run on some ranks
    checks   a table: key -> (what the learner reads, points, an expectation, the names of the cases it looks at)

A round runs when a check first needs it. An expectation looks at
what one rank did with one case, a `Seen`: it gives nothing, or a `Fault` that names the mistake. The first fault over
the cases and ranks is told, so no judge loops over ranks. These make expectations:

    equals   the reference's value, or else the slip whose value was found
    nothing  that a note is empty, where it would tell what is wrong
    follows  the order of events, as a pattern over a `Log`
    all_of   several, the first fault counts
    once     not on each rank; for files, and for what is told of all ranks together

and any function of a `Seen` is one, too (`first_mistake` is their table of causes). A round that may fail is an
`Ending`. A slip is a mistake and the value that it leads to. Where the reference can run with one knob turned
(`turned`), it does, so that the table of mistakes cannot drift from what is right:

    weights = equals("the last weights", one_process, turned(one_process, {"divide by the ranks": {"times": 2}}), "...")

Traps. A list of slips is read from the top: put the special ones first, and test that no slip has the right value by
chance (`equals` asks for the right value first). An `act` runs on the ranks: it must not print nor keep anything, and
what it patches it gives back, else the ranks are thrown away after each run and the check is slow. Text of a pattern
rule is filled in by `%(name)s` from the fields of the case and the notes, so a literal `%` is `%%`.
Read next: `play.py`, what is noted; `tasks.py`, small models and rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

from ddp_course.grading.answer.isolated import Answer
from ddp_course.grading.exercise import AnswerFailed, Check, Exercise, Fault
from ddp_course.grading.vocabulary.compare import close, told_apart
from ddp_course.grading.vocabulary.observe import LETTERS
from ddp_course.grading.vocabulary.play import Act, Note, Round, Seen, played

Expect = Callable[[Seen], Fault | None]
Slips = Callable[[Seen], Iterable[tuple[str, Any]]]  # (cause, the value that it leads to)
Form = Callable[[Any], str]  # why a value is not of the right kind, or nothing
SINGLE = 1e-6  # what float32 leaves of a number, with a few roundings
NEARLY = "right to six digits or more: is something computed in float32 here, where float64 is expected?"
NEVER_TALKED = "the ranks never talked, so no rank can know what the others hold"


def exercise(
    id: str,
    title: str,
    function: str,
    minutes: int,
    *,
    act: Act,
    rounds: Callable[..., list[Round]],
    checks: Mapping[str, tuple[str, int, Expect, str]],
    within: Callable[[], AbstractContextManager] | None = None,
    refused: tuple[str, ...] = (),
    hints: Mapping[str, str] | None = None,
) -> Exercise:
    """Return the exercise that its tables describe.

    Args:
        checks: by key: what a learner reads, the points, what is expected, and of which cases: "unequal empty".
        within: a context around all runs, such as a folder of files; `rounds` gets what it gives as a second argument.
        refused: what does the task already.
        hints: by code of a failure or pattern in its report (see `codes.fits`), the likely cause; the first that fits
            is told.
    """

    def judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
        with (within or nullcontext)() as place:
            chosen = rounds(rng, place) if within else rounds(rng)
            seen: dict[str, list[Seen] | Fault] = {}
            changed = None  # what was given; told once, of a check that is passed otherwise
            for key, (_, _, expect, names) in checks.items():
                for name in names.split():
                    if name not in seen:
                        seen |= _outcomes(answer, act, next(r for r in chosen if name in dict(r.cases)), seen)
                fault = first_fault(seen[name] for name in names.split() if isinstance(seen[name], Fault))
                looked_at = [each for name in names.split() if not fault for each in seen[name]]
                fault = fault or first_fault(map(expect, looked_at))
                if not fault and not changed:
                    fault = changed = first_fault(map(leaves_as_given, looked_at))
                yield key, fault

    told = tuple(Check(key, words, points) for key, (words, points, _, _) in checks.items())
    return Exercise(id, title, function, minutes, told, judge, tuple((hints or {}).items()), refused)


def leaves_as_given(seen: Seen) -> Fault | None:
    """Expect that a call leaves its arguments alone. Where it should not, `act` hands out copies."""
    if not seen["given_changed"]:
        return None
    cause = "the function changes what it is given; work on a copy, such as x.clone() or list(values)"
    return Fault("arguments that are afterwards what they were", "changed ones", seen.rank, cause)


def called(function: Callable, case: Any, rank: int, world_size: int) -> Any:
    """An `act` for a function of plain arguments, which know nothing of ranks: the case has them in order."""
    return function(*case)


def first_fault(faults: Iterable[Fault | None]) -> Fault | None:
    """Return the first that is one."""
    return next(filter(None, faults), None)


def first_mistake(expected: str, mistakes: Mapping[str, Any], rank: int | None = None) -> Fault | None:
    """Return a fault of the first mistake that was made; `mistakes` has by cause what was found, or nothing."""
    return next((Fault(expected, str(found), rank, cause) for cause, found in mistakes.items() if found), None)


@dataclass(frozen=True)
class Ending(Round):
    """A round that may fail: then all that is noted of each rank is "ended", the fault.

    Args:
        how: a pattern of what is said of such an end; any other one ends the check.
    """

    how: str = ""


def _outcomes(answer: Answer, act: Act, chosen: Round, seen: Mapping[str, Any]) -> dict[str, list[Seen] | Fault]:
    """Run a round; return by the cases' names what each rank did, or why that is not known.

    An answer that raised where it should not earns nothing where it should: it may do nothing else.
    """
    before = first_fault(fault for fault in seen.values() if isinstance(fault, Fault))
    if before and (chosen.raises or isinstance(chosen, Ending)):
        return dict.fromkeys(dict(chosen.cases), before)
    try:
        return played(answer, act, chosen)
    except AnswerFailed as failed:
        fault = failed.fault
        if isinstance(chosen, Ending) and re.search(chosen.how, fault.report or fault.expected):
            ended = [Note(ended=fault)] * chosen.world_size
            return {name: [Seen(case, rank, ended) for rank in range(chosen.world_size)] for name, case in chosen.cases}
        if not fault.goes_on:
            raise
        return dict.fromkeys(dict(chosen.cases), fault)


# --- Expectations ------------------------------------------------------------------------------------


def equals(
    what: str | Callable[[Seen, Any], str],
    right: Callable[[Seen], Any],
    slips: Slips,
    otherwise: str | Callable[[Seen, Any], str],
    *,
    of: str | Callable[[Seen], Any] = "value",
    tolerance: float = 1e-6,
    form: Form = lambda found: "",
    shown: Callable[[Any], Any] = lambda found: found,
) -> Expect:
    """Expect the reference's value; else name the slip whose value was found.

    Args:
        what: is expected, in words; a plain text is followed by the right value.
        otherwise: the cause when no slip leads to what was found; of text, or of (seen, found).
        of: what is looked at: the name of a note, or a function of what was seen.
        form: says what is wrong with a value of the wrong kind.
        shown: the part of a value that the learner reads.
    """

    def expect(seen: Seen) -> Fault | None:
        found, wanted = seen[of] if isinstance(of, str) else of(seen), right(seen)
        cause = form(found)
        if not cause and close(found, wanted, tolerance):
            return None
        cause = cause or next((slip for slip, value in slips(seen) if close(found, value, tolerance)), "")
        cause = cause or (NEARLY if close(found, wanted, SINGLE) else "")
        cause = cause or (otherwise if isinstance(otherwise, str) else otherwise(seen, found))
        text, right_text = told_apart(shown(found), shown(wanted))
        words = f"{what} {right_text}" if isinstance(what, str) else what(seen, wanted)
        return Fault(words, text, seen.rank if seen.world_size > 1 else None, cause)

    return expect


def turned(reference: Callable[..., Any], mistakes: Mapping[str, dict] | Callable[[Seen], Mapping[str, dict]]) -> Slips:
    """Return the slips of a reference `(seen, **knobs)`: by cause, the knobs that the mistake turns."""

    def slips(seen: Seen) -> Iterator[tuple[str, Any]]:
        for cause, knobs in (mistakes(seen) if callable(mistakes) else mistakes).items():
            yield cause, reference(seen, **knobs)

    return slips


def nothing(of: str, what: str, cause: str) -> Expect:
    """Expect that this note is empty; else its text is what was found."""
    return lambda seen: Fault(what, seen[of], seen.rank, cause) if seen[of] else None


def follows(*rules: tuple[str, str, str], of: str = "logs") -> Expect:
    """Expect each log to match all rules; a rule is (pattern, its meaning, the cause when it is the first to fail).

    Args:
        of: the name of the note that has the logs, a list of texts: one for each step.
    """

    def expect(seen: Seen) -> Fault | None:
        marks = {**getattr(seen.case, "__dict__", {}), **seen.everyone[seen.rank]}
        for log in seen[of]:
            for pattern, meaning, cause in rules:
                if not re.fullmatch(pattern % marks, log):
                    return Fault(meaning % marks, f"{log or 'nothing'} ({LETTERS})", seen.rank, cause % marks)
        return None

    return expect


def all_of(*expects: Expect) -> Expect:
    """The first fault of several expectations."""
    return lambda seen: first_fault(expect(seen) for expect in expects)


def once(expect: Expect) -> Expect:
    """An expectation of all ranks together: it is asked on rank 0, and may look at the others by `seen.of(rank)`."""
    return lambda seen: expect(seen) if seen.rank == 0 else None
