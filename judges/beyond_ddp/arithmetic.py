"""17.1 `bytes_on_a_rank(parameters, world_size, strategy, mixed)`: what does a rank hold, and what is divided?

Arithmetic alone. Each slip of thought, such as master weights that are forgotten, lands on numbers of its own.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1 and figure 1.
Read next: `sharded_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from random import Random
from typing import Any

from ddp_course.grading.compare import short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

Case = tuple[int, int, str, bool]  # parameters, world_size, strategy, mixed
FLOATS_EXACT = 2**53  # up to here a float counts in ones
PARTS = ("parameters", "gradients", "state")
BYTES = {False: (4, 4, 8), True: (2, 2, 12)}  # of each part, for one parameter
DIVIDED = {"ddp": (), "zero1": ("state",), "zero2": ("gradients", "state"), "zero3": PARTS}


def arithmetic_driver(rank: int, world_size: int, function: Callable, cases: list[Case]) -> list[Any]:
    """Return the learner's numbers for each case."""
    return [_in_parts(function(*case)) for case in cases]


def _in_parts(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == set(PARTS):
        return [plain(value[name]) for name in PARTS]
    return f"a dictionary with {sorted(map(str, value))}" if isinstance(value, dict) else short(plain(value))


def arithmetic_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Every strategy with numbers that divide evenly, then some that do not, and a single rank."""
    groups = {name: [_even(rng, name, mixed) for mixed in (False, True)] for name in DIVIDED}
    # The last has more than 2**53: a division of floats would be some parameters off, as the share is odd.
    groups["uneven"] = [_uneven(rng, f"zero{stage}", stage == 2, 10**7 if stage < 3 else 10**18) for stage in (1, 2, 3)]
    groups["uneven"].append((rng.randint(10, 10**6), 1, "zero3", True))
    cases = [case for group in groups.values() for case in group]
    found = iter(answer.run(arithmetic_driver, 1, cases)[0])
    for key, group in groups.items():
        faults = [_fault(case, next(found)) for case in group]
        yield key, next(filter(None, faults), None)


def _even(rng: Random, strategy: str, mixed: bool) -> Case:
    world_size = rng.choice((4, 8, 16, 64))
    return rng.randint(10**6, 10**9) * world_size, world_size, strategy, mixed


def _uneven(rng: Random, strategy: str, mixed: bool, most: int) -> Case:
    world_size = rng.choice((3, 7, 24))
    return (
        # At most half a parameter over: rounding the bytes up instead is then another number.
        2 * rng.randint(most // 4, most // 2) * world_size + rng.randint(1, world_size // 2),
        world_size,
        strategy,
        mixed,
    )


def held(case: Case, each: tuple[int, ...] | None = None, divided: tuple[str, ...] | None = None, up: Callable = ceil):
    """Return the bytes of each part on the fullest rank; with other arguments than the case, what a slip gives."""
    parameters, world_size, strategy, mixed = case
    each, divided = each or BYTES[mixed], DIVIDED[strategy] if divided is None else divided
    # In whole numbers: ceil(a / b) is exact only while a fits in a float.
    share = -(-parameters // world_size) if up is ceil else parameters // world_size
    return [(share if name in divided else parameters) * size for name, size in zip(PARTS, each, strict=True)]


def _fault(case: Case, found: Any) -> Fault | None:
    right = held(case)
    if found == right and all(isinstance(number, int) for number in found):
        return None
    parameters, world_size, strategy, mixed = case
    kind = "mixed precision" if mixed else "float32"
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    expected = f"{strategy}, {kind}, {parameters:,} parameters on {ranks}: {_said(right)}"
    if not (isinstance(found, list) and all(isinstance(n, int | float) and not isinstance(n, bool) for n in found)):
        return Fault(expected, str(found), cause='return a dictionary with "parameters", "gradients" and "state"')
    return Fault(expected, _said(found), cause=_cause(case, found, right))


def _said(numbers: list) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in zip(PARTS, numbers, strict=True))


def _cause(case: Case, found: list, right: list) -> str:
    parameters, world_size, strategy, mixed = case
    if found != right and found == _bytes_rounded(case):
        return "the bytes are rounded up: round up the parameters, which are not cut, then multiply by their bytes"
    if parameters > FLOATS_EXACT and all(
        abs(ours - theirs) <= 1e-6 * theirs for ours, theirs in zip(found, right, strict=True)
    ):
        return "nearly: math.ceil(a / b) goes through a float, which is inexact here; -(-a // b) is exact"
    if all(isinstance(number, int) for number in found):
        named = next((said for guess, said in _slips(case) if found == guess), "")
        if named:
            return named
    if any(isinstance(number, float) for number in found):
        return "bytes are whole numbers, and these are floats: for large models they are inexact. Divide with //"
    wrong = [name for name, ours, theirs in zip(PARTS, found, right, strict=True) if ours != theirs]
    if world_size > 1:
        for name in wrong:
            ours, whole, share = found[PARTS.index(name)], held(case, divided=()), held(case, divided=PARTS)
            if name in DIVIDED[strategy] and ours == whole[PARTS.index(name)]:
                return f"{strategy} divides the {name} among the ranks"
            if name not in DIVIDED[strategy] and ours == share[PARTS.index(name)]:
                return f"{strategy} does not divide the {name}: every rank holds all of them"
    return f"look at the {' and the '.join(wrong)}: bytes for one parameter, times the parameters that a rank holds"


def _bytes_rounded(case: Case) -> list[int]:
    parameters, world_size, strategy, mixed = case
    parts = zip(PARTS, BYTES[mixed], strict=True)
    return [-(-size * parameters // (world_size if name in DIVIDED[strategy] else 1)) for name, size in parts]


def _slips(case: Case) -> Iterator[tuple[list, str]]:
    mixed = case[3]
    size, grad, state = BYTES[mixed]
    if mixed:
        yield held(case, (2, 2, 8)), "the float32 copy of the weights is missing in the state: 4 + 4 + 4 bytes"
        yield held(case, (6, 2, 8)), "the float32 copy of the weights belongs to the state: only the optimizer reads it"
        yield held(case, (2, 4, 12)), "in mixed precision the gradients are in bfloat16 too, 2 bytes each"
        yield held(case, (2, 2, 10)), "the master copy is float32: 4 bytes"
        yield held(case, (2, 2, 6)), "both moments and the copy of the weights are float32: 4 bytes each, not 2"
        yield (
            held(case, (2, 2, 4)),
            "Adam's two moments are float32 also in mixed precision, and there is a master copy",
        )
        yield held(case, BYTES[False]), "this is float32 throughout; mixed is True here"
    else:
        yield held(case, (4, 4, 12)), "a master copy is needed in mixed precision only: in float32 it is the weight"
        yield held(case, BYTES[True]), "this is mixed precision; mixed is False here"
        yield held(case, (4, 4, 4)), "Adam keeps two numbers for each parameter"
    yield held(case, up=int), "the fullest rank decides: where it does not divide evenly, round the share up"
    yield held(case, (1, 1, state // size)), "these are numbers, not bytes"
    for other, divided in DIVIDED.items():
        yield held(case, divided=divided), f"this is what {other} holds; {case[2]} {_divides(case[2])}"


def _divides(strategy: str) -> str:
    return f"divides the {' and the '.join(DIVIDED[strategy])}" if DIVIDED[strategy] else "divides nothing"


ARITHMETIC = Exercise(
    "17.1",
    "What a rank holds",
    "bytes_on_a_rank",
    15,
    (
        Check("ddp", "DDP: all of it on every rank", 1),
        Check("zero1", "ZeRO-1: the state is divided", 1),
        Check("zero2", "ZeRO-2: the gradients too", 1),
        Check("zero3", "ZeRO-3: the parameters too", 1),
        Check("uneven", "the fullest rank, where it does not divide evenly", 1),
    ),
    arithmetic_judge,
    hints=(
        (r"KeyError", 'the strategies are "ddp", "zero1", "zero2" and "zero3"'),
        (r"missing \d required|takes \d+ positional", "the four arguments come in the order of the text"),
    ),
)
