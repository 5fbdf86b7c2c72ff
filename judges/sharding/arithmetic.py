"""17.1 `bytes_on_a_rank(parameters, world_size, strategy, mixed)`: what does a rank hold, and what is divided?

Arithmetic alone. Each slip of thought, such as master weights that are forgotten, lands on numbers of its own.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1 and figure 1.
Read next: `sharded_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from random import Random
from typing import Any, NamedTuple

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import short
from ddp_course.grading.vocabulary.expect import exercise
from ddp_course.grading.vocabulary.play import Round, Seen

FLOATS_EXACT = 2**53  # up to here a float counts in ones
PARTS = ("parameters", "gradients", "state")
BYTES = {False: (4, 4, 8), True: (2, 2, 12)}  # of each part, for one parameter
DIVIDED = {"ddp": (), "zero1": ("state",), "zero2": ("gradients", "state"), "zero3": PARTS}


class Case(NamedTuple):
    """The arguments of the learner's function."""

    parameters: int
    world_size: int
    strategy: str
    mixed: bool


def act(function, case: Case, rank: int, world_size: int) -> Any:
    """Return the learner's three numbers, or in words what came instead."""
    value = function(*case)
    if isinstance(value, dict) and set(value) == set(PARTS):
        return [plain(value[name]) for name in PARTS]
    return f"a dictionary with {sorted(map(str, value))}" if isinstance(value, dict) else short(plain(value))


def rounds(rng: Random) -> list[Round]:
    """Every strategy with numbers that divide evenly, then some that do not, and a single rank."""
    even = [(name, _even(rng, name)) for name in DIVIDED]
    cases = [(name, case._replace(mixed=mixed)) for name, case in even for mixed in (False, True)]
    # The last has more than 2**53: a division of floats would be some parameters off, as the share is odd.
    uneven = [_uneven(rng, f"zero{stage}", stage == 2, 10**7 if stage < 3 else 10**18) for stage in (1, 2, 3)]
    uneven.append(Case(rng.randint(10, 10**6), 1, "zero3", True))
    return [Round(1, cases + [("uneven", case) for case in uneven], init=False)]


def _even(rng: Random, strategy: str) -> Case:
    world_size = rng.choice((4, 8, 16, 64))
    return Case(rng.randint(10**6, 10**9) * world_size, world_size, strategy, mixed=False)


def _uneven(rng: Random, strategy: str, mixed: bool, most: int) -> Case:
    world_size = rng.choice((3, 7, 24))
    # At most half a parameter over: rounding the bytes up instead is then another number.
    parameters = 2 * rng.randint(most // 4, most // 2) * world_size + rng.randint(1, world_size // 2)
    return Case(parameters, world_size, strategy, mixed)


def held(case: Case, each: tuple[int, ...] | None = None, divided: tuple[str, ...] | None = None, up: Callable = ceil):
    """Return the bytes of each part on the fullest rank; with other arguments than the case, what a slip gives."""
    parameters, world_size, strategy, mixed = case
    each, divided = each or BYTES[mixed], DIVIDED[strategy] if divided is None else divided
    # In whole numbers: ceil(a / b) is exact only while a fits in a float.
    share = -(-parameters // world_size) if up is ceil else parameters // world_size
    return [(share if name in divided else parameters) * size for name, size in zip(PARTS, each, strict=True)]


def right(seen: Seen) -> Fault | None:
    """The bytes of each part, as whole numbers."""
    case, found, wanted = seen.case, seen["value"], held(seen.case)
    if found == wanted and all(isinstance(number, int) for number in found):
        return None
    ranks = f"{case.world_size} rank{'s' * (case.world_size > 1)}"
    kind = "mixed precision" if case.mixed else "float32"
    expected = f"{case.strategy}, {kind}, {case.parameters:,} parameters on {ranks}: {_said(wanted)}"
    if not (isinstance(found, list) and all(isinstance(n, int | float) and not isinstance(n, bool) for n in found)):
        return Fault(expected, str(found), cause='return a dictionary with "parameters", "gradients" and "state"')
    return Fault(expected, _said(found), cause=_cause(case, found, wanted))


def _said(numbers: list) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in zip(PARTS, numbers, strict=True))


def _cause(case: Case, found: list, right: list) -> str:
    parameters, world_size, strategy, mixed = case
    if found != right and found == _bytes_rounded(case):
        return "the bytes are rounded up: round up the parameters, which are not cut, then multiply by their bytes"
    nearly = all(abs(ours - theirs) <= 1e-6 * theirs for ours, theirs in zip(found, right, strict=True))
    if parameters > FLOATS_EXACT and nearly:
        return "nearly: math.ceil(a / b) goes through a float, which is inexact here; -(-a // b) is exact"
    floats = any(isinstance(number, float) for number in found)
    if not floats and (named := next((cause for cause, guess in _slips(case) if found == guess), "")):
        return named
    if floats:
        return "bytes are whole numbers, and these are floats: for large models they are inexact. Divide with //"
    wrong = [number for number, name in enumerate(PARTS) if found[number] != right[number]]
    for number in wrong if world_size > 1 else ():
        name = PARTS[number]
        if name in DIVIDED[strategy] and found[number] == held(case, divided=())[number]:
            return f"{strategy} divides the {name} among the ranks"
        if name not in DIVIDED[strategy] and found[number] == held(case, divided=PARTS)[number]:
            return f"{strategy} does not divide the {name}: every rank holds all of them"
    names = " and the ".join(PARTS[number] for number in wrong)
    return f"look at the {names}: bytes for one parameter, times the parameters that a rank holds"


def _bytes_rounded(case: Case) -> list[int]:
    parts = zip(PARTS, BYTES[case.mixed], strict=True)
    over = (case.world_size if name in DIVIDED[case.strategy] else 1 for name in PARTS)
    return [-(-size * case.parameters // by) for (_, size), by in zip(parts, over, strict=True)]


def _slips(case: Case) -> Iterator[tuple[str, list]]:
    state = BYTES[case.mixed][2] // BYTES[case.mixed][0]
    if case.mixed:
        wrong = {
            (2, 2, 8): "the float32 copy of the weights is missing in the state: 4 + 4 + 4 bytes",
            (6, 2, 8): "the float32 copy of the weights belongs to the state: only the optimizer reads it",
            (2, 4, 12): "in mixed precision the gradients are in bfloat16 too, 2 bytes each",
            (2, 2, 10): "the master copy is float32: 4 bytes",
            (2, 2, 6): "both moments and the copy of the weights are float32: 4 bytes each, not 2",
            (2, 2, 4): "Adam's two moments are float32 also in mixed precision, and there is a master copy",
            BYTES[False]: "this is float32 throughout; mixed is True here",
        }
    else:
        wrong = {
            (4, 4, 12): "a master copy is needed in mixed precision only: in float32 it is the weight",
            BYTES[True]: "this is mixed precision; mixed is False here",
            (4, 4, 4): "Adam keeps two numbers for each parameter",
        }
    yield from ((cause, held(case, each)) for each, cause in wrong.items())
    yield "the fullest rank decides: where it does not divide evenly, round the share up", held(case, up=int)
    yield "these are numbers, not bytes", held(case, (1, 1, state))
    mine = " and the ".join(DIVIDED[case.strategy])
    for other, divided in DIVIDED.items():
        does = f"divides the {mine}" if mine else "divides nothing"
        yield f"this is what {other} holds; {case.strategy} {does}", held(case, divided=divided)


ARITHMETIC = exercise(
    "17.1",
    "What a rank holds",
    "bytes_on_a_rank",
    15,
    act=act,
    rounds=rounds,
    checks={
        "ddp": ("DDP: all of it on every rank", 1, right, "ddp"),
        "zero1": ("ZeRO-1: the state is divided", 1, right, "zero1"),
        "zero2": ("ZeRO-2: the gradients too", 1, right, "zero2"),
        "zero3": ("ZeRO-3: the parameters too", 1, right, "zero3"),
        "uneven": ("the fullest rank, where it does not divide evenly", 1, right, "uneven"),
    },
    hints={
        r"KeyError": 'the strategies are "ddp", "zero1", "zero2" and "zero3"',
        r"missing \d required|takes \d+ positional": "the four arguments come in the order of the text",
    },
)
