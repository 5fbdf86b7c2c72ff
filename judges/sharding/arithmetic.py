"""17.1 `bytes_on_a_rank(parameters, world_size, strategy, mixed)`: what does a rank hold, and what is divided?

Read next: `sharded_step.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

Case = tuple[int, int, str, bool]  # the arguments


def cases(rng: Random) -> list[Round]:
    """Every strategy with numbers that divide evenly, then some that do not, and a single rank."""
    named: list[tuple[str, Case]] = []
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        world_size = rng.choice((4, 8, 16, 64))
        parameters = rng.randint(10**6, 10**9) * world_size
        named += [(strategy, (parameters, world_size, strategy, mixed)) for mixed in (False, True)]
    # The last has more than 2**53: a division of floats would be some parameters off, as the share is odd.
    for strategy, mixed, most in (("zero1", False, 10**7), ("zero2", True, 10**7), ("zero3", False, 10**18)):
        world_size = rng.choice((7, 11, 24))
        # At most half a parameter over: rounding the bytes up instead is then another number.
        parameters = 2 * rng.randint(most // 4, most // 2) * world_size + rng.randint(2, world_size // 2)
        named.append(("uneven", (parameters, world_size, strategy, mixed)))
    named.append(("uneven", (rng.randint(10, 10**6), 1, "zero3", True)))
    return [Round(1, named, init=False)]


def act(function, case: Case, rank: int, world_size: int) -> Any:
    found = function(*case)
    return Note(value={name: plain(n) for name, n in found.items()}) if isinstance(found, dict) else found


def said(seen: Seen) -> str:
    parameters, world_size, strategy, mixed = seen.case
    kind, ranks = "mixed precision" if mixed else "float32", f"{world_size} rank{'s' * (world_size > 1)}"
    return f"{strategy}, {kind}, {parameters:,} parameters on {ranks}:"


def whole(seen: Seen) -> dict[str, Any]:
    """The bytes; what is no whole number is said to be another thing, for a float equals the whole number."""
    return {name: n if type(n) is int else f"{n}, a {type(n).__name__}" for name, n in seen["value"].items()}


def otherwise(seen: Seen) -> str:
    if not isinstance(seen["value"], dict) or len(seen["value"]) != 3:
        return 'return a dictionary with "parameters", "gradients" and "state"'
    parts = ("state", "gradients", "parameters")[: ("ddp", "zero1", "zero2", "zero3").index(seen.case[2])]
    divides = f"divides the {' and the '.join(parts)}" if parts else "divides nothing"
    return f"bytes for one parameter, times the parameters that a rank holds; {seen.case[2]} {divides}"


MISTAKES = """
no master copy | all | the float32 copy of the weights is missing in the state: 4 + 4 + 4 bytes
    12 if mixed => 8 if mixed
master copy among the parameters | all | the float32 copy of the weights belongs to the state; only Adam reads it
    12 if mixed => 8 if mixed
    "parameters": 2 => "parameters": 6
float32 gradients | all | in mixed precision the gradients are in bfloat16 too, 2 bytes each
    "gradients": 2 => "gradients": 4
half a master copy | all | the master copy is float32: 4 bytes
    12 if mixed => 10 if mixed
moments and master copy in 16 bits | all | both moments and the copy of the weights are float32: 4 bytes each, not 2
    12 if mixed => 6 if mixed
a master copy in float32 | all | a master copy is needed in mixed precision only: in float32 it is the weight
    else 8 => else 12
one moment | all | Adam keeps two numbers for each parameter
    else 8 => else 4
`mixed` is not read | all | this is float32 throughout; where mixed is True, each part has other bytes
    if mixed => if False
the share rounded down | uneven | the fullest rank decides: where it does not divide evenly, round the share up
    -(-parameters // world_size) => parameters // world_size
the bytes rounded up | uneven
| the bytes are rounded up: round up the parameters, which are not cut, then multiply by their bytes
    size * (share if place < divided else parameters) => -(-size * parameters // (world_size if place < divided else 1))
ceiling of a float | uneven | nearly: math.ceil(a / b) goes through a float, which is inexact here; -(-a // b) is exact
    share = -(-parameters // world_size) => share = __import__("math").ceil(parameters / world_size)
floats | zero1 zero2 zero3 uneven
| bytes are whole numbers, and these are floats: for large models they are inexact. Divide with //
    -(-parameters // world_size) => parameters / world_size
the master copy stays whole | zero1 zero2 zero3 uneven | the state is divided with all its 12 bytes, the master copy too
    else parameters) => else parameters) + 4 * (parameters - share) * (part == "state" and mixed and divided > 0)
ZeRO-1 divides the gradients too | zero1 uneven | this is what zero2 holds; zero1 divides the state alone
    "zero1": 1 => "zero1": 2
ZeRO-3 leaves the parameters whole | zero3 uneven | this is what zero2 holds; zero3 divides the parameters, too
    "zero3": 3 => "zero3": 2
all that is over on one rank | uneven | several ranks have one parameter more, none has two more: round the share up
    -(-parameters // world_size) => parameters // world_size + parameters % world_size
a table of factors, the parts in the wrong order | zero1 zero2 uneven | zero1 divides the state | tests
    def bytes_on_a_rank(parameters, world_size, strategy, mixed):
        found = dict(zip(("parameters", "gradients", "state"), (2, 2, 12) if mixed else (4, 4, 8)))
        whole = {"ddp": 3, "zero1": 2, "zero2": 1, "zero3": 0}[strategy]
        for number, (name, each) in enumerate(reversed(found.items())):
            found[name] = each * (parameters if number < whole else -(-parameters // world_size))
        return found
three numbers in a row | all | return a dictionary with "parameters", "gradients" and "state" | tests
    def bytes_on_a_rank(parameters, world_size, strategy, mixed):
        two, stage = 2 if mixed else 4, 0 if strategy == "ddp" else int(strategy[-1])
        share = [parameters if stage < n else -(-parameters // world_size) for n in (3, 2, 1)]
        return two * share[0], two * share[1], (12 if mixed else 8) * share[2]
an endless loop | all | endless loop | hangs
    share = => while True:
        pass
    share =
"""

ARITHMETIC = exercise(
    *("17.1", "What a rank holds", "bytes_on_a_rank", 15),
    cases=cases,
    act=act,
    said=said,
    mistakes=MISTAKES,
    checks={
        key: (words, 1, key, whole, otherwise)
        for key, words in (
            ("ddp", "DDP: all of it on every rank"),
            ("zero1", "ZeRO-1: the state is divided"),
            ("zero2", "ZeRO-2: the gradients too"),
            ("zero3", "ZeRO-3: the parameters too"),
            ("uneven", "the fullest rank, where it does not divide evenly"),
        )
    },
    hints={
        r"KeyError": 'the strategies are "ddp", "zero1", "zero2" and "zero3"',
        r"missing \d required|takes \d+ positional": "the four arguments come in the order of the text",
    },
)
