"""Which problems does a lesson have, and with which numbers?

Each problem's numbers follow from its name and a seed, so that the same sheet can be had again.
Read next: `commands/problems.py`, where answers are asked for.
"""

from __future__ import annotations

import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from random import Random

from ddp_course.problems.problem import Instance, Problem

LESSONS = {4: "collectives", 14: "scaling", 15: "recovery", 17: "sharding", 18: "model_parallel"}
SEEDS = 9999


@cache
def words(lesson: int) -> dict[str, dict]:
    """Return the words of a lesson's problems by name, in order. What they are counted with is not imported."""
    if lesson not in LESSONS:
        raise ValueError(f"lesson {lesson} has no problems; these have: {', '.join(map(str, LESSONS))}")
    return tomllib.loads((Path(__file__).parent / f"{LESSONS[lesson]}.toml").read_text(encoding="utf-8"))


def problems_of(lesson: int) -> list[Problem]:
    """Return a lesson's problems, without numbers."""
    counting = import_module(f"ddp_course.problems.{LESSONS.get(lesson)}") if words(lesson) else None
    return [Problem.made(name, said, getattr(counting, name)) for name, said in words(lesson).items()]


@dataclass(frozen=True)
class Sheet:
    """A lesson's problems with the numbers of a seed; a notebook shows its text."""

    lesson: int
    seed: int

    @property
    def head(self) -> str:
        """Which sheet this is, and how its answers are written."""
        return f"Lesson {self.lesson:02}, seed {self.seed}. Answers have a unit and three significant digits: 1.50 GB."

    @cached_property
    def instances(self) -> list[Instance]:
        """Its problems, from number 1 on."""
        return [each.drawn(Random(f"{self.seed} {each.name}")) for each in problems_of(self.lesson)]

    def instance(self, number: int) -> Instance:
        """Return a problem by its number.

        Raises:
            ValueError: there is none of this number.
        """
        if not 1 <= number <= len(self.instances):
            raise ValueError(f"lesson {self.lesson} has problems 1 to {len(self.instances)}, not {number}")
        return self.instances[number - 1]

    def question(self, number: int) -> str:
        """Return a problem's number, title and text in lines of a terminal's width."""
        instance = self.instance(number)
        text = textwrap.fill(instance.text, 88, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        return f"{number:2}. {instance.problem.title}\n{text}"

    def answer(self, number: int, text: str) -> None:
        """Print whether an answer such as "1.5 GB" is right, or which slip it shows."""
        print(self.instance(number).judged(text)[1])

    def __repr__(self) -> str:
        questions = "\n\n".join(self.question(number) for number in range(1, len(self.instances) + 1))
        return f"{self.head}\n\n{questions}"


def problems(lesson: int, seed: int | None = None) -> Sheet:
    """Return a lesson's problems; without a seed, with numbers that nobody has seen.

    Raises:
        ValueError: the lesson has no problems.
    """
    words(lesson)
    return Sheet(lesson, Random().randint(1, SEEDS) if seed is None else seed)
