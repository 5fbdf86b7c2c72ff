"""Are two results the same, and if not, what is between them?

Results travel as plain data: numbers, text, lists, dictionaries. Numbers are compared with a tolerance, and a constant
factor between two results is told, since a factor is what most mistakes of data parallel training leave behind: the
number of ranks (a sum in place of a mean), a half, a quarter.

Read next: `judges/`, which turn a factor into a sentence.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Numbers = list[float]


def flat(value: Any) -> Numbers | None:
    """Return all numbers in a nested list, in order; None when something in it is no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return [float(value)]
    if isinstance(value, torch.Tensor):
        return value.detach().double().flatten().tolist()
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if not isinstance(value, list | tuple):
        return None
    parts = [flat(item) for item in value]
    return None if any(part is None for part in parts) else [number for part in parts for number in part]


def close(found: Any, expected: Any, tolerance: float = 1e-6) -> bool:
    """Whether two results hold the same numbers, up to `tolerance` of the largest one; nan equals nothing."""
    ours, theirs = flat(found), flat(expected)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return False
    scale = max([1e-30, *map(abs, theirs)])
    return all(abs(a - b) <= tolerance * scale for a, b in zip(ours, theirs, strict=True))


def factor(found: Any, expected: Any, tolerance: float = 1e-4) -> float | None:
    """Return k when `found` is k times `expected`, number for number; None when there is no such k, or it is 0."""
    ours, theirs = flat(found), flat(expected)
    if not ours or theirs is None or len(ours) != len(theirs):
        return None
    k = sum(a * b for a, b in zip(ours, theirs, strict=True)) / (sum(b * b for b in theirs) or math.nan)
    if not math.isfinite(k) or abs(k) <= tolerance:
        return None
    return k if close(ours, [k * b for b in theirs], tolerance) else None


def short(value: Any, most: int = 4, digits: int = 4) -> str:
    """Return a result as text for one line: numbers with so many digits, lists with so many items."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, list | tuple):
        items = [short(item, most, digits) for item in value[:most]] + ["..."] * (len(value) > most)
        return f"[{', '.join(items)}]"
    return repr(value)


def told_apart(found: Any, expected: Any) -> tuple[str, str]:
    """Return two results that differ as texts that do: with more digits, then with more items, than `short` gives."""
    texts = ((short(found, most, digits), short(expected, most, digits)) for most in (4, 64) for digits in (4, 9, 17))
    return next(((a, b) for a, b in texts if a != b), (f"{short(found)}, a {type(found).__name__}", short(expected)))
