"""How is a problem made, and who says whether an answer is right?

A problem has a text with numbers that are drawn, and a function that counts or simulates the right value and computes
slips: what comes out for somebody who forgets a factor, or counts all ranks for one. Numbers are drawn again until
the slips can be told from the right value and from each other.

The functions of a lesson are in a file such as `collectives.py`, the words in one of the same name, `collectives.toml`:
for each problem its title, text and unit, what each number is drawn from, and a sentence for each slip.
Read next: `counting.py`, which answers are counted with, and `collectives.py`, the first twelve problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from ddp_course.problems import units

ROUNDED = 0.006  # relative: an answer of three significant digits is off by 0.005 at most
TRIES = 2000

Numbers = SimpleNamespace
# The right value, and what each slip gives: bytes, seconds, bytes/s, percent or a count. None: draw other numbers.
Counted = tuple[float, dict[str, float]] | None


@dataclass(frozen=True)
class Problem:
    """One problem without its numbers."""

    name: str
    title: str
    text: str  # with the numbers in braces
    unit: str  # of the answer
    draws: Mapping[str, Sequence[Any]]  # what each number is chosen from
    slips: Mapping[str, str]  # name -> a sentence for the learner
    count: Callable[[Numbers], Counted]  # may add numbers to those that are drawn
    tolerance: float = ROUNDED  # relative; 0: an exact number

    @classmethod
    def made(cls, name: str, words: Mapping[str, Any], count: Callable[[Numbers], Counted]) -> Problem:
        """Return a problem from its words: `draws` has lists, or ranges such as "10:100:5", which ends with 100."""
        draws = {key: values if isinstance(values, list) else _range(values) for key, values in words["draws"].items()}
        return cls(
            name,
            words["title"],
            words["text"].strip(),
            words["unit"],
            draws,
            words["slips"],
            count,
            words.get("within", ROUNDED),
        )

    def drawn(self, random: Random) -> Instance:
        """Return the problem with numbers.

        Raises:
            RuntimeError: no numbers were found for which all slips differ.
        """
        for _ in range(TRIES):
            numbers = Numbers(**{name: random.choice(values) for name, values in self.draws.items()})
            if (counted := self.count(numbers)) and (wrong := self._apart(*counted)):
                return Instance(self, numbers, counted[0], wrong)
        raise RuntimeError(f"{self.name}: in {TRIES} tries no numbers were found that tell its slips apart")

    def _apart(self, true: float, slips: Mapping[str, float]) -> dict[str, float] | None:
        """Sentence -> value of each slip, or None if two values are too near to each other to be told apart.

        Where whole numbers are asked for, several slips may give the same one: the first is told.
        """
        if not self.tolerance:
            slips = {name: value for value, name in {v: n for n, v in reversed(slips.items()) if v != true}.items()}
        values = [true, *slips.values()]
        if true <= 0 or any(self._near(a, b) for at, a in enumerate(values) for b in values[:at]):
            return None
        wrong = {self.slips[name]: value for name, value in slips.items()}
        confused = units.confusions(self.unit, true, exact=not self.tolerance).items()
        apart = {said: value for said, value in confused if not any(self._near(value, other) for other in values)}
        return wrong | apart

    def _near(self, one: float, other: float) -> bool:
        return abs(one - other) <= 2 * self.tolerance * abs(one)


@dataclass(frozen=True)
class Instance:
    """A problem with its numbers."""

    problem: Problem
    numbers: Numbers
    true: float
    wrong: Mapping[str, float]  # a sentence -> what somebody gets who makes that slip

    @property
    def text(self) -> str:
        """The question; if three significant digits are not what is asked for, it says so."""
        tolerance = self.problem.tolerance
        how = "" if tolerance == ROUNDED else f" To within {tolerance:.0%}." if tolerance else " The exact number."
        return self.problem.text.format(**vars(self.numbers)) + how

    @property
    def answer(self) -> str:
        """The right answer, with its unit."""
        return units.said(self.true, self.problem.unit, exact=not self.problem.tolerance)

    def judged(self, text: str) -> tuple[bool, str]:
        """Return whether an answer is right, and a sentence that says so or names the slip.

        Raises:
            ValueError: the number or the unit is not understood.
        """
        value, tolerance = units.parsed(text, self.problem.unit), self.problem.tolerance
        if abs(value - self.true) <= tolerance * self.true:
            return True, f"Right: {self.answer}."
        if not tolerance and value != round(value):
            return False, "Not right: a whole number is asked for."
        named = [said for said, wrong in self.wrong.items() if abs(value - wrong) <= tolerance * abs(wrong)]
        return False, named[0] if named else f"Not right: that is too {'much' if value > self.true else 'little'}."


def _range(values: str) -> range:
    first, last, *step = map(int, values.split(":"))
    return range(first, last + 1, *step)
