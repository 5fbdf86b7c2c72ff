"""Whose answers are alike, also after renaming?

copydetect replaces every name of a program and compares what is left (the winnowing of Schleimer, Wilkerson and Aiken
2003); what the release gave to all does not count. Short right answers are alike without copying, so two figures stand
beside each other: alike after renaming, and alike letter by letter. A person looks at both answers and decides.

Needs copydetect and rapidfuzz.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import combinations

from copydetect import CodeFingerprint, compare_files
from rapidfuzz.fuzz import ratio

GRAM, WINDOW = 20, 4  # letters of the renamed program: the shortest that counts, and how many begin together
TOO_SHORT = 90  # letters of a renamed program; below, all answers are alike
ALIKE = 0.8


@dataclass(frozen=True)
class Pair:
    """Two students whose answers to an exercise are alike; both shares are of 1."""

    exercise: str
    students: tuple[str, str]
    renamed: float
    as_written: float


def pairs_alike(exercise: str, answers: dict[str, str], given: str = "", least: float = ALIKE) -> list[Pair]:
    """Return the pairs of answers to one exercise that are alike after renaming, most alike first.

    Args:
        answers: the source of each student's answer cell.
        given: what the release has in that cell.
        least: how much of the shorter answer must be in the other one.
    """
    boilerplate = list(_fingerprint(given).hashes) if given.strip() else []
    prints = {student: _fingerprint(source, boilerplate) for student, source in answers.items() if source.strip()}
    prints = {student: found for student, found in prints.items() if len(found.filtered_code) >= TOO_SHORT}
    pairs = []
    for one, two in combinations(sorted(prints), 2):
        _, shares, _ = compare_files(prints[one], prints[two])
        if (renamed := min(1.0, max(map(float, shares)))) >= least:
            pairs.append(Pair(exercise, (one, two), renamed, ratio(answers[one], answers[two]) / 100))
    return sorted(pairs, key=lambda pair: (-pair.renamed, -pair.as_written))


def _fingerprint(source: str, boilerplate: list[int] | None = None) -> CodeFingerprint:
    return CodeFingerprint("answer.py", GRAM, WINDOW, boilerplate, language="python", fp=io.StringIO(source))
