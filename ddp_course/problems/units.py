"""How much is "1.5 GB", and which units does an answer have?

An answer is a number and a unit. Sizes are understood in bytes and bits, with decimal and binary prefixes, rates as a
size per second, times, shares in percent, and counts of something, such as tokens. GB is 10^9 bytes and GiB 2^30.

Left out on purpose: a comma as the decimal point, which would make 1,500 mean two things.
Read next: `problem.py`, which judges.
"""

from __future__ import annotations

import math
import re

PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
BYTES = {"B": 1.0, "byte": 1.0, "bytes": 1.0, "bit": 1 / 8, "bits": 1 / 8, "b": 1 / 8}
SIZES = {
    prefix + name: scale * size
    for prefix, scale in ({**PREFIXES, "K": 1e3} | BINARY).items()
    for name, size in BYTES.items()
    if prefix or name != "b"
}
TIMES = {
    "ns": 1e-9,
    **dict.fromkeys(("us", "µs", "μs"), 1e-6),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
RATES = {f"{name}{per}": size for name, size in SIZES.items() for per in ("/s", "ps")}
SHARES = {"%": 1.0, "percent": 1.0, "per cent": 1.0}
KINDS = {"a size": SIZES, "a time": TIMES, "a rate": RATES, "a share": SHARES}
COUNTS = PREFIXES | {"K": 1e3, "thousand": 1e3, "million": 1e6, "billion": 1e9, "B": 1e9}
FACTORS = {  # of times that are off
    "That is 60 times too long: seconds were taken for minutes, or minutes for hours.": 60,
    "That is a sixtieth: minutes were taken for seconds, or hours for minutes.": 1 / 60,
    "That is 3600 times too long: seconds were taken for hours.": 3600,
    "That is 24 times too long: hours were taken for days.": 24,
    "That is a 24th: days were taken for hours.": 1 / 24,
    "That is 8 times too long: bytes were taken for bits.": 8,
    "That is an eighth: bits were taken for bytes.": 1 / 8,
}

# 1.5, .5, 1e9, 1,500,000 and then the unit
ANSWER = re.compile(r"[~≈]?\s*(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)((?:[eE][+-]?\d+)?)\s*(\D.*|)")


def kind_of(unit: str) -> str:
    """Return what a unit measures: "a size", "a time", "a rate", "a share", or "a number" of something."""
    return next((kind for kind, units in KINDS.items() if unit in units), "a number")


def scale_of(unit: str) -> float:
    """Return how many bytes, seconds, bytes per second or percent a unit is; 1 for what is counted."""
    return KINDS.get(kind_of(unit), {}).get(unit, 1.0)


def parsed(text: str, unit: str) -> float:
    """Return an answer in bytes, seconds, bytes per second, percent, or as a plain number.

    Args:
        text: such as "1.5 GB", "0.012 s", "1,200 tokens".
        unit: one of the kind that is asked for, such as "GB"; or what is counted, such as "tokens".
    Raises:
        ValueError: no number, or a unit that is missing, unknown or of another kind; says what is expected.
    """
    found, kind = ANSWER.fullmatch(text.strip()), kind_of(unit)
    example = f"{kind} such as 12 {unit}" if kind != "a number" else f"a number of {unit}, such as 12"
    if not found or found[3].startswith(","):
        raise ValueError(f"{text.strip()!r} has no number that is understood: expected {example}, or 1.5 or 1.5e9")
    number, given = float(found[1].replace(",", "") + found[2]), found[3].strip()
    if number == math.inf:
        raise ValueError(f"{text.strip()!r} is more than a float holds: expected {example}")
    if kind == "a number":
        given = given.replace("GPU h", "GPU-h")  # the one unit that has two spellings
        given = re.sub(rf"\s*\b(?:{re.escape(unit)}|{re.escape(unit.removesuffix('s'))})$", "", given)
        if given in COUNTS:
            return number * COUNTS[given]
    elif given in KINDS[kind]:
        return number * KINDS[kind][given]
    if not given:
        raise ValueError(f"the unit is missing: expected {example}")
    other = kind_of(given)
    what = f"{given} is {other}" if other != "a number" else f"the unit {given!r} is not known"
    raise ValueError(f"{what}: expected {example}")


def said(value: float, unit: str, exact: bool = False) -> str:
    """Return a value of `parsed` in `unit`: three significant digits, or exact."""
    scaled = value / scale_of(unit)
    number = f"{round(scaled):,}" if exact else f"{float(f'{scaled:.3g}'):,.12g}"
    return f"{number} {unit}".replace(" %", "%")


def confusions(unit: str, true: float, exact: bool = False) -> dict[str, float]:
    """Return what anybody may do wrong with a unit: a sentence, and what comes out in place of the right value."""
    kind = kind_of(unit)
    if exact:
        return {"That is one too many.": true + 1, "That is one too few.": true - 1}
    if kind == "a share":
        return {
            "That is the other part: what is asked for and this make 100%.": 100 - true,
            "That is a fraction: in percent it is a hundred times as much.": true / 100,
        }
    found = {name: factor * true for name, factor in (FACTORS if kind == "a time" else {}).items()}
    if kind in ("a size", "a rate"):
        power = 1 + "kMGTP".index(unit[0])
        binary, prefix = 1.024**power, unit[0]
        found = {
            "That is the number of bits: 8 bits are a byte.": 8 * true,
            "That is an eighth: bytes were taken for bits, and divided by 8.": true / 8,
            f"That is in {prefix}iB: 1 {prefix}B is 1000^{power} bytes, not 1024^{power}.": true / binary,
            f"A prefix was taken for 1024^{power}: here {prefix} is 1000^{power}.": true * binary,
        }
    found["That is 1000 times too much: look at the prefixes."] = 1000 * true
    found["That is a thousandth: look at the prefixes."] = true / 1000
    return found
