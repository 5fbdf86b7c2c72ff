"""14.2 `tokens_per_gpu(...)`: how many tokens keep a GPU busy, and so how many GPUs can share a batch?

A pure function. The numbers are those of made-up clusters, in which no two slips come to the same.

Read next: `event_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from ddp_course.grading.vocabulary.expect import Expect, called, equals, exercise, turned
from ddp_course.grading.vocabulary.play import Round, Seen
from judges.scaling.slips import numbers

NAMES = "equal, hidden, gpus"


class Case(NamedTuple):
    """The arguments of the learner's function."""

    flops: float
    bytes_per_s: float
    gradient_bytes: int
    global_batch: int


def rounds(rng: Random) -> list[Round]:
    """Gradients in float32, in other dtypes, and batches that do not divide evenly."""
    cases = [(name, _case(rng, size)) for name, size in (("float32", 4), ("float32", 4), ("others", 2), ("others", 8))]
    return [Round(1, cases, init=False)]


def _case(rng: Random, gradient_bytes: int) -> Case:
    flops, bytes_per_s = rng.randrange(100, 1000) * 1e12, rng.randrange(10, 500) * 1e9
    hidden = gradient_bytes * flops / 2 / bytes_per_s
    return Case(flops, bytes_per_s, gradient_bytes, int(hidden * (rng.randrange(5, 900) + rng.uniform(0.6, 0.9))))


def worked(seen: Seen, equal: float = 1, hidden: float = 1, size: int = 0, rounding: Callable = int) -> list[float]:
    """Return the three numbers, each so many times; gpus by the tokens that hide everything."""
    flops, bytes_per_s, gradient_bytes, global_batch = seen.case
    ratio = (size or gradient_bytes) * flops / bytes_per_s
    return [equal * ratio / 3, hidden * ratio / 2, rounding(global_batch / (hidden * ratio / 2))]


def _mistakes(seen: Seen) -> dict[str, dict]:
    return {
        "float32 gradients have 4 bytes, others do not: use gradient_bytes": {"size": 4},
        "an all_reduce sends each byte twice: 2 * bytes / bandwidth": {"equal": 1 / 2, "hidden": 1 / 2},
        "only backward hides communication: 4 of the 6 operations": {"hidden": 2 / 3},
        "forward is over when the first gradient is ready: backward has 4 of the 6 operations": {"hidden": 2},
        "6 operations for each parameter and token, 4 of them in backward": {"equal": 3, "hidden": 2},
        "part of a GPU trains nothing, and one more leaves each too few tokens: round down":
            {"rounding": lambda gpus: int(gpus) + 1},
        "GPUs are counted in whole numbers: round down": {"rounding": float},
    }  # fmt: skip


def number(index: int, otherwise: str) -> Expect:
    """Return what is expected of one of the three numbers."""

    def said(seen: Seen, right: float) -> str:
        c = seen.case
        sizes = f"{c.gradient_bytes} bytes a gradient, a global batch of {c.global_batch} tokens"
        cluster = f"{c.flops:.3g} operations and {c.bytes_per_s:.3g} bytes a second"
        return f"{cluster}, {sizes}: {NAMES.split(', ')[index]} {right:.6g}"

    def reference(seen: Seen, **knobs: Any) -> float:
        return worked(seen, **knobs)[index]

    return equals(said, reference, turned(reference, _mistakes), otherwise, of=lambda seen: seen["value"][index])


equal = number(0, "6 * P * tokens / flops is to equal 2 * gradient_bytes * P / bytes_per_s; P cancels")
hidden = number(1, "4 * P * tokens / flops, backward, is to equal 2 * gradient_bytes * P / bytes_per_s")
gpus = number(2, "the global batch divided by the tokens of `hidden`, rounded down")

TOKENS = exercise(
    "14.2",
    "Tokens per GPU",
    "tokens_per_gpu",
    10,
    act=called,
    rounds=rounds,
    checks={
        "equal": ("communication as long as computing", 1, numbers(NAMES, equal), "float32 others"),
        "hidden": ("communication as long as backward", 1, numbers(NAMES, hidden), "float32 others"),
        "gpus": ("the most GPUs for a global batch", 1, numbers(NAMES, gpus), "float32 others"),
    },
    hints={
        r"missing \d required|takes \d+ positional": "the four arguments come in the order of the text",
        r"name '(P|parameters)' is not defined": "the number of parameters is on both sides, and cancels",
        "limit": "no search is needed: each number is one formula",
    },
)
