"""14.2 `tokens_per_gpu(...)`: how many tokens keep a GPU busy, and so how many GPUs can share a batch? A pure function.

The numbers are those of made-up clusters, in which no two mistakes come to the same.
"""

from __future__ import annotations

from random import Random

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round, Seen


def cases(rng: Random) -> list[Round]:
    """Gradients in float32, in other dtypes, and batches that do not divide evenly."""

    def made(gradient_bytes: int) -> tuple:
        flops, bytes_per_s = rng.randrange(100, 1000) * 1e12, rng.randrange(10, 500) * 1e9
        hidden = gradient_bytes * flops / 2 / bytes_per_s
        return flops, bytes_per_s, gradient_bytes, int(hidden * (rng.randrange(5, 900) + rng.uniform(0.6, 0.9)))

    named = [(name, made(size)) for name, size in (("float32", 4), ("float32", 4), ("others", 2), ("others", 8))]
    return [Round(1, named, init=False)]


def said(seen: Seen) -> str:
    flops, bytes_per_s, gradient_bytes, global_batch = seen.case
    cluster = f"{flops:.3g} operations and {bytes_per_s:.3g} bytes a second"
    return f"{cluster}, {gradient_bytes} bytes a gradient, a global batch of {global_batch} tokens:"


def numbers(seen: Seen) -> dict[str, float]:
    return dict(zip(("equal", "hidden", "gpus"), seen["value"], strict=True))


MISTAKES = """
each byte once | all | an all_reduce sends each byte twice: 2 * bytes / bandwidth
    2 * gradient_bytes => gradient_bytes
four bytes, always | all | float32 gradients have 4 bytes, others do not: use gradient_bytes
    gradient_bytes / => 4 /
6 operations in backward | hidden gpus | only backward hides communication: 4 of the 6 operations
    flops / 4 => flops / 6
2 operations in backward | hidden gpus | forward is over when the first gradient is ready: backward has 4 of the 6
    flops / 4 => flops / 2
one operation | all | 6 operations for each parameter and token, 4 of them in backward
    flops / 6 => flops / 2
    flops / 4 => flops / 2
rounded up | gpus | part of a GPU trains nothing, and one more leaves each too few tokens: round down
    math.floor => math.ceil
not rounded | gpus | GPUs are counted in whole numbers: round down
    math.floor(global_batch / hidden) => global_batch / hidden
by the tokens that equal | gpus | the batch is divided by the tokens that hide everything, `hidden`
    / hidden => / equal
"""

TOKENS = exercise(
    *("14.2", "Tokens per GPU", "tokens_per_gpu", 10),
    cases=cases,
    said=said,
    mistakes=MISTAKES,
    checks={
        "equal": ("communication as long as computing", 1, "float32 others", lambda seen: numbers(seen)["equal"],
                  "6 * P * tokens / flops is to equal 2 * gradient_bytes * P / bytes_per_s; P cancels"),
        "hidden": ("communication as long as backward", 1, "float32 others", lambda seen: numbers(seen)["hidden"],
                   "4 * P * tokens / flops, backward, is to equal 2 * gradient_bytes * P / bytes_per_s"),
        "gpus": ("the most GPUs for a global batch", 1, "float32 others", lambda seen: numbers(seen)["gpus"],
                 "the global batch divided by the tokens of `hidden`, rounded down"),
    },
    hints={
        r"missing \d required|takes \d+ positional": "the four arguments come in the order of the text",
        r"name '(P|parameters)' is not defined": "the number of parameters is on both sides, and cancels",
        "limit": "no search is needed: each number is one formula",
    },
)  # fmt: skip
