"""An exercise judged against its own solution: the same cases, on the same ranks, looked at in the same way.

    cases     rounds of named cases, from a random generator; plain data
    act       how a rank calls an answer and what it notes: (function, case, rank, world_size) -> a result, or a `Note`
    checks    key -> (what the learner reads, points, the names of the cases, a view, the cause where no mistake fits)
    mistakes  edits of the solution: `name | checks that fail | cause`, and below it `old => new`

A check is passed where the view of the answer is that of the solution, on every rank and in every case. Where it is
not, the mistakes run on the same cases until one has the view of the answer, and its cause is told. So a mistake is
written once, as a program: the tests expect it to fail the checks that it names, and no judge works out what it leads
to. `also` has references whose outcome differs from the solution's and is as right; `right` has answers that the tests
expect to pass.

What this form cannot do by itself, and the way out: an answer that is right in many ways (a plan, a schedule) needs a
view that leaves the freedom out, a reference in `also`, or a view that gives a `Fault`, which is a check by property.
Timing is not looked at: note the order of events instead. Files are noted by `act`, or looked at by a view, while the
folder of `within` is there; each reference and each mistake has a folder of its own.

Read next: `judges/scaling/least_tokens.py`, a function; `judges/collectives/gather_rows.py`, ranks; `source.py`, how
a table of mistakes is read; `vocabulary/rounds.py`, what is noted on a rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from random import Random
from typing import Any

from ddp_course.grading.answer.isolated import Answer, NotJudged
from ddp_course.grading.answer.limits import LIMIT_S, patience
from ddp_course.grading.exercise import AnswerFailed, Check, Exercise, Fault
from ddp_course.grading.source import function_of, mistakes_of, solution_of, variants_of
from ddp_course.grading.vocabulary.compare import close, differing, factor, same, told_apart
from ddp_course.grading.vocabulary.rounds import Round, Seen, played

View = Callable[[Seen], Any]
TRY_S = 5.0  # for one run of a mistake; what an answer is compared with has as long as the answer
EXPLAIN_S = 2.0  # for all mistakes that are tried for one answer
MOST_KEPT = 64  # exercises and seeds whose references and mistakes are remembered: a second check runs the answer alone
SINGLE = 1e-5  # what float32 leaves of a number, with a few roundings
NEARLY = "right to five digits or more: is something computed in float32 here, where float64 is expected?"


class _Holds:
    """What a view returns where a property holds; nothing that an answer returns is the same."""


HOLDS = _Holds()

_kept: dict[tuple, dict[tuple[str, str], list]] = {}


def value(seen: Seen) -> Any:
    """The plain result, as a view."""
    return seen["value"]


def called(function: Callable, case: Any, rank: int, world_size: int) -> Any:
    """An `act` for a function of plain arguments, which know nothing of ranks: the case has them in order."""
    return function(*case)


def exercise(
    id: str,
    title: str,
    function: str,
    minutes: int,
    *,
    cases: Callable[..., list[Round]],
    checks: Mapping[str, tuple[str, int, str, View, str]],
    mistakes: str,
    act: Callable = called,
    also: str = "",
    right: str = "",
    tolerance: float = 1e-6,
    said: Callable[[Seen], str] = lambda seen: "",
    within: Callable[[], AbstractContextManager] | None = None,
    hints: Mapping[str, str] | None = None,
    refused: tuple[str, ...] = (),
) -> Exercise:
    """Return the exercise that its tables describe.

    Args:
        checks: see above; a view may give a `Fault` itself, and `HOLDS` where a property holds. The cause may be a
            function of what was seen.
        mistakes: as `source.mistakes_of` reads them.
        also, right: as `source.variants_of` reads them.
        tolerance: of floats, relative to the largest beside them.
        said: introduces what is expected of a case: "ranks bring 3, 0 rows:".
        within: a context around the runs, such as a folder of files; `cases` gets what it gives as a second argument.
        hints: by code of a failure or pattern in its report (see `codes.fits`), the likely cause.
        refused: what does the task already.
    """
    told = tuple(Check(key, words, points) for key, (words, points, *_) in checks.items())
    tried = mistakes_of(id, mistakes, tuple(checks))
    references = ["", *(source for _, source in variants_of(id, also))]

    def judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
        with ExitStack() as places:
            outcomes = _Outcomes(answer, spec, act, cases, within or nullcontext, references, places, rng)
            failed: dict[str, Any] = {}
            for key, (_, _, names, view, _) in checks.items():
                try:
                    failed[key] = outcomes.compared(key, names, view, tolerance)
                except AnswerFailed as hung:  # told after the checks before it, whose mistakes know what has failed
                    failed[key] = hung
                    break
            wrong, changed = {key for key, how in failed.items() if how}, None
            for key, (_, _, names, view, otherwise) in checks.items():
                how = failed.get(key)
                if isinstance(how, AnswerFailed):
                    raise how
                if isinstance(how, tuple):
                    seen, found, right_view = how
                    cause = outcomes.explained(key, names, view, wrong, tried, tolerance)
                    how = _told(seen, found, right_view, cause, otherwise, said, tolerance)
                elif not how and not changed:
                    how = changed = outcomes.changed(names)
                yield key, how

    spec = Exercise(
        *(id, title, function, minutes, told, judge, tuple((hints or {}).items()), refused),
        mistakes=tried,
        rights=(*variants_of(id, also), *variants_of(id, right)),
    )
    return spec


def _told(seen: Seen, found: Any, right: Any, cause: str, otherwise: Any, said: Callable, tolerance: float) -> Fault:
    """Return the fault of a view that is not the solution's: the place where they first part, and why."""
    where, one, other = differing(found, right, tolerance)
    cause = cause or _scaled(found, right, seen.world_size)
    rounded = isinstance(other, int) and abs(other) > 2**24 and close(one, other, SINGLE)  # no float32 holds it
    cause = cause or (NEARLY if tolerance < SINGLE and (rounded or same(found, right, SINGLE)) else "")
    cause = cause or (otherwise(seen) if callable(otherwise) else otherwise)
    if where.endswith(":") and isinstance(one, bool) and isinstance(other, bool):  # a view's own question
        one, other = ("yes" if each else "no" for each in (one, other))
    else:
        one, other = told_apart(one, other)
    rank = seen.rank if seen.world_size > 1 else None
    return Fault(" ".join(filter(None, [said(seen), where, other])), one, rank, cause)


def _scaled(found: Any, right: Any, world_size: int) -> str:
    """The mistake of all lessons: a number of ranks too much or too little."""
    times = factor(found, right) if world_size > 1 else None
    if times and math.isclose(times, world_size, rel_tol=1e-4):
        return "a sum over the ranks, where a mean is asked for: divide by the world size"
    if times and math.isclose(times, 1 / world_size, rel_tol=1e-4):
        return "divided by the number of ranks once too often"
    return ""


class _Outcomes:
    """What the answer, the references and the mistakes did; each plays a round when it is needed.

    The answer is called None; the solution is "", and each other reference or mistake is its text.
    """

    def __init__(
        self,
        answer: Answer,
        spec: Exercise,
        act: Callable,
        cases: Callable,
        within: Callable[[], AbstractContextManager],
        references: list[str],
        places: ExitStack,
        rng: Random,
    ):
        self.answer, self.spec, self.act = answer, spec, act
        self.cases, self.within, self.references, self.places = cases, within, references, places
        self.state = rng.getstate()
        self.views = _kept.setdefault((spec.id, self.state), {})
        while len(_kept) > MOST_KEPT:
            del _kept[next(iter(_kept))]
        self.rounds: dict[str | None, list[Round]] = {}
        self.known: dict[str | None, dict[str, list[Seen] | Fault]] = {}
        self.explain_until = 0.0

    def seen(self, name: str, who: str | None) -> list[Seen] | Fault:
        """What each rank did in the cases of this name, or why that is not known.

        Raises:
            AnswerFailed: it hung, so that no more is run.
        """
        if who not in self.rounds:
            rng = Random()
            rng.setstate(self.state)
            place = self.places.enter_context(self.within())
            self.rounds[who] = self.cases(rng) if place is None else self.cases(rng, place)
            self.known[who] = {}
        known = self.known[who]
        if name not in known:
            chosen = next(each for each in self.rounds[who] if name in dict(each.cases))
            before = next((fault for fault in known.values() if isinstance(fault, Fault)), None)
            if before and (chosen.raises or chosen.ends):  # it raised where it should not: its raising earns nothing
                known |= dict.fromkeys(dict(chosen.cases), before)
            else:
                known |= self._played(chosen, who)
        return known[name]

    def _played(self, chosen: Round, who: str | None) -> Mapping[str, list[Seen] | Fault]:
        try:
            return played(self.answer if who is None else self._runner(who), self.act, chosen)
        except AnswerFailed as failed:
            if who in self.references:
                raise NotJudged(f"what this is compared with failed: {failed}") from None
            if who is None and not failed.fault.goes_on:
                raise
            return dict.fromkeys(dict(chosen.cases), failed.fault)

    def _runner(self, who: str) -> Answer:
        source = who or solution_of(self.spec.id)
        own = replace(self.spec, refused=(), hints=())
        limit_s = LIMIT_S if who in self.references else TRY_S
        return Answer(function_of(self.spec.id, self.spec.function, source), own, limit_s)

    def viewed(self, key: str, names: str, view: View, who: str) -> list[Any]:
        """The views of a reference or mistake, one for each case and rank; they are remembered."""
        if (who, key) not in self.views:
            self.views[who, key] = self._views(names, view, who)
        return self.views[who, key]

    def _views(self, names: str, view: View, who: str | None) -> list[Any]:
        found = []
        for seen in (self.seen(name, who) for name in names.split()):
            found += [seen] if isinstance(seen, Fault) else [_viewed(view, each) for each in seen]
        return found

    def compared(self, key: str, names: str, view: View, tolerance: float) -> Any:
        """Return nothing where the answer has a reference's view; else a fault, or where and how the views part."""
        found = self._views(names, view, None)
        if fault := next((each for each in found if isinstance(each, Fault)), None):
            return fault
        if all(each is HOLDS for each in found):  # there is nothing to compare, so the solution need not run
            return None
        rights = (self.viewed(key, names, view, text) for text in self.references)
        if any(same(found, right, tolerance) for right in rights):
            return None
        right = self.viewed(key, names, view, "")
        at = next(n for n, (a, b) in enumerate(zip(found, right, strict=True)) if not same(a, b, tolerance))
        places = [each for name in names.split() for each in self.seen(name, None)]
        return places[at], found[at], right[at]

    def explained(self, key: str, names: str, view: View, failed: set[str], tried: tuple, tolerance: float) -> str:
        """The cause of a mistake that has the view of the answer; of those that fail the same checks first."""
        found = self._views(names, view, None)
        likely = [mistake for mistake in tried if key in mistake.fails and mistake.tried]
        self.explain_until = self.explain_until or time.monotonic() + EXPLAIN_S * patience()
        for mistake in sorted(likely, key=lambda mistake: set(mistake.fails) != failed):
            if (mistake.source, key) not in self.views and time.monotonic() > self.explain_until:
                break
            if same(found, self.viewed(key, names, view, mistake.source), tolerance):
                return mistake.cause
        return ""

    def changed(self, names: str) -> Fault | None:
        """A fault where a call has changed its arguments. Where it should, `act` hands out copies."""
        seen = (each for name in names.split() for each in self.seen(name, None))
        rank = next((each.rank for each in seen if each["given_changed"]), None)
        if rank is None:
            return None
        cause = "the function changes what it is given; work on a copy, such as x.clone() or list(values)"
        return Fault("arguments that are afterwards what they were", "changed ones", rank, cause)


def _viewed(view: View, seen: Seen) -> Any:
    """A view of what was seen; an answer's result may be of any form."""
    try:
        return view(seen)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
        return f"a result of another form: {str(dict(seen.everyone[seen.rank]).get('value'))[:80]}"
