"""Are two results the same, and if not, what is between them?

Results travel as plain data: numbers, text, lists, dictionaries. Numbers are compared with a tolerance, and a constant
factor between two results is told, since a factor is what most mistakes of data parallel training leave behind: the
number of ranks (a sum in place of a mean), a half, a quarter.

Read next: `judges/`, which turn a factor into a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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


def same(found: Any, right: Any, tolerance: float = 1e-6) -> bool:
    """Whether two views are one: floats up to `tolerance` of the largest beside them, all else exactly; nan is nan."""
    if isinstance(right, bool) or isinstance(found, bool):
        return found is right
    if isinstance(right, int | float):
        if not isinstance(found, int | float):
            return False
        return found == right or (found != found and right != right) or _near(found, right, tolerance * abs(right))
    if isinstance(right, dict) and isinstance(found, dict):
        return found.keys() == right.keys() and all(same(found[key], right[key], tolerance) for key in right)
    if not isinstance(right, list | tuple) or not isinstance(found, list | tuple):
        return type(found) is type(right) and found == right
    return len(found) == len(right) and all(_same_items(found, right, tolerance))


def _same_items(found: Sequence, right: Sequence, tolerance: float) -> Iterator[bool]:
    scale = tolerance * max((abs(x) for x in right if isinstance(x, float) and math.isfinite(x)), default=0.0)
    for a, b in zip(found, right, strict=True):
        yield (isinstance(a, float) and isinstance(b, float) and _near(a, b, scale)) or same(a, b, tolerance)


def _near(found: float, right: float, distance: float) -> bool:
    return (isinstance(found, float) or isinstance(right, float)) and abs(found - right) <= distance < math.inf


def differing(found: Any, right: Any, tolerance: float = 1e-6) -> tuple[str, Any, Any]:
    """Return the place where two views first part, in words, and what each has there; a short list stays whole."""
    where = []
    while True:
        if isinstance(right, dict) and isinstance(found, dict) and found.keys() == right.keys():
            key = next((key for key in right if not same(found[key], right[key], tolerance)), None)
        elif isinstance(right, list | tuple) and isinstance(found, list | tuple) and len(found) == len(right):
            if len(right) <= 6 and not any(isinstance(item, list | tuple | dict) for item in right):
                break
            key = next((n for n, ok in enumerate(_same_items(found, right, tolerance)) if not ok), None)
        else:
            break
        if key is None:
            break
        where.append(str(key) if isinstance(right, dict) else f"[{key}]")
        found, right = found[key], right[key]
    return " ".join(where).replace(" [", "["), found, right


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
