"""06.2 `average_gradients(rank, world_size, model)`: are the gradients those of one process on the whole batch?

Each mistake leaves another number behind: W times the mean, a W-th of it, the rank's own, rank 0's. So the number tells
the mistake. A run where every rank has every gradient comes first, then one in which some ranks lack some, which is
where answers hang. The notes are "gradients", of each step by name, and "sent", the collectives of each step.
Read next: `own_ddp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import close, factor, short
from ddp_course.grading.vocabulary.expect import Expect, all_of, equals, exercise, first_fault, once
from ddp_course.grading.vocabulary.observe import Call, Collectives
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.ddp_from_scratch import nets
from judges.ddp_from_scratch.nets import TOLERANCE, one_process
from judges.ddp_from_scratch.start import READY

ROOM = 1.7  # times the bytes of the gradients; a tied weight that is sent twice needs more
WHOLE = ("all_reduce", "all_gather", "all_to_all")  # bring values together, and give them to all
FIRST_HALF = ("reduce", "reduce_scatter", "gather")  # bring them together
UNSENT = "no gradient was sent to another rank"
NO_HOOK = (
    "no gradient was sent while backward ran: average in a hook of each parameter. A hook of register_hook runs before "
    ".grad is filled, so it must change the gradient that it is given and return it"
)
ZERO = "a gradient that is missing on some ranks counts as zero there: give zeros to the sum, and set .grad to the mean"
STAYS_NONE = (
    "no rank has this gradient, so it must stay None; with zeros, momentum or weight decay would move the weight"
)


def act(function, task: nets.Task, rank: int, world_size: int) -> Note:
    """Train with the function between backward and step; note the gradients, and what was sent."""
    model, sent = task.model(), []

    def backward(step: int) -> None:
        task.loss(model, rank, step).backward()
        with Collectives() as seen:
            function(rank, world_size, model)
        sent.append(seen.calls)

    return Note(gradients=task.train(model, backward), sent=sent)


def rounds(rng: Random) -> list[Round]:
    """Two steps with all gradients; then two in which some are missing on some ranks, and some on all."""
    first, second = rng.choice(nets.WORLDS)
    whole = nets.Task(24, rng.choice((5, 6, 7)), rng.randint(1, 10**6), (((),) * first,) * 2, tied=True)
    uses, alone = uneven(second, rng)
    some = nets.Task(4, whole.rows, rng.randint(1, 10**6), uses, blank=((1, alone),))
    return [Round(first, [("whole", whole)]), Round(second, [("uneven", some)])]


def uneven(world_size: int, rng: Random) -> tuple[tuple, int]:
    """One adapter for one rank only, one for all but one rank, one for none; then others, and one for everybody.

    Returns:
        Two steps, and the rank that alone has an adapter in the second one.
    """
    one, other = rng.sample(range(world_size), 2)
    a, b, c = rng.sample(range(nets.ADAPTERS), 3)
    first = tuple((a,) * (rank == one) + (b,) * (rank != other) for rank in range(world_size))
    second = tuple((b,) * (rank == other) + (c,) for rank in range(world_size))
    return (first, second), other


# --- What is expected ------------------------------------------------------------------------------


def gradients(*steps: int, missing: bool | None = None) -> Expect:
    """Expect in these steps, counted from 0, the gradients of one process.

    Args:
        missing: True looks only at gradients that no rank has, False only at those that some rank has.
    """

    def expect(seen: Seen) -> Fault | None:
        # Rank 0 comes last: there, its own gradient and a gradient from rank 0 look alike.
        places = [(seen.of(rank), step) for rank in (*range(1, seen.world_size), 0) for step in steps]
        return first_fault(
            _gradient(step, name)(each)
            for each, step in places
            for name, right in _right(each)[step].items()
            if missing is None or missing == (not right)
        )

    return once(expect)


def _right(seen: Seen) -> list[dict]:
    return one_process(seen.case, seen.world_size)[0]


def _gradient(step: int, name: str) -> Expect:
    return equals(
        f"in step {step + 1}, the gradient of {name} is",
        lambda seen: _right(seen)[step][name],
        lambda seen: _slips(seen, step, name),
        lambda seen, found: _otherwise(seen, step, name, found),
        of=lambda seen: seen["gradients"][step][name],
        tolerance=TOLERANCE,
        shown=lambda gradient: gradient or None,
    )


def _slips(seen: Seen, step: int, name: str) -> Iterator[tuple[str, Any]]:
    right, found = _right(seen)[step], seen["gradients"][step]
    if not right[name]:
        return
    ranks, rows, mean = seen.world_size, seen.case.rows, torch.tensor(right[name], dtype=torch.float64)
    had = [torch.tensor(own[name], dtype=torch.float64) for own in one_process(seen.case, ranks)[1][step]]
    mine, have = had[seen.rank], sum(map(len, had)) // len(mean)
    if not any(found.values()):
        yield "all gradients are None; they must be in the .grad of the module's own parameters", []
    yield ZERO if have < ranks else "backward gave a gradient here, and it is gone", []
    alike = all(note.get("start") == seen.everyone[0].get("start") for note in seen.everyone)
    yield "the replicas did not start from rank 0's parameters", [] if alike else found[name]
    yield NO_HOOK if seen["start"] else UNSENT, [] if seen["sent"][step] else found[name]
    if have < ranks:
        words = "this is the mean over the ranks that have the gradient; divide by the number of all ranks"
        yield words, mean * ranks / have
    yield "gradients are summed over the ranks, not averaged: divide by the world size", mean * ranks
    yield "gradients are divided by the world size twice; once is enough, before the sum or after it", mean / ranks
    for times in (ranks / rows, 1 / rows):
        words = "this is divided by the number of rows; the loss is a mean over rows already: divide by the world size"
        yield words, mean * times
    if not len(mine):
        yield ZERO, mean * 0
    averaged = next((n for n in right if right[n] and close(found[n], right[n], TOLERANCE)), "")
    own = "this is the rank's own gradient; the mean over the ranks must come into .grad itself, not into a copy"
    left_out = f"{name} was left out of the average, and {averaged} was not: go through all parameters"
    yield left_out if averaged else own, mine
    words = "this is the rank's own gradient, divided: the sum over the ranks did not come into .grad, or was not "
    yield words + "waited for", mine / ranks
    yield "this is rank 0's gradient; a mean needs a sum over the ranks, not a broadcast", had[0]


def _otherwise(seen: Seen, step: int, name: str, found: list) -> str:
    right = _right(seen)[step][name]
    if not right:
        return STAYS_NONE
    if (times := factor(found, right)) is not None:
        return f"this is {times:.3g} times the mean; divide by the world size, once"
    if close(seen.of(0)["gradients"][step][name], right, TOLERANCE):
        return "rank 0 has the mean, the others have not: reduce leaves it on dst only"
    return "a mixture: one rank's gradient met another parameter's, or a part of the ranks is missing in the sum"


def some_sent(seen: Seen) -> Fault | None:
    """Expect that some rank gives at least half of the gradients to collectives."""
    n_bytes, most = seen.case.n_bytes, max(bytes_of(note["sent"][0]) for note in seen.everyone)
    if most >= n_bytes // 2:
        return None
    cause = "no gradient went into a collective"
    return Fault(f"gradients of {n_bytes} bytes that travel", f"{most} bytes", seen.rank, cause)


def sent_once(seen: Seen) -> Fault | None:
    """Expect that a rank gives each gradient once, in each step or backward pass; sums may be given out once more."""
    n_bytes = seen.case.n_bytes
    for number, calls in enumerate(seen["sent"], 1):
        halves = bytes_of(calls, *FIRST_HALF), bytes_of(calls, "broadcast", "scatter")
        sent = bytes_of(calls, *WHOLE) + max(halves)
        if sent > ROOM * n_bytes:
            cause = "some gradient travels twice: a tied weight has two names, and is one parameter in parameters()"
            if number > 1:
                cause = "the first time each gradient travelled once: is something registered, or sent, once more?"
            return Fault(f"about {n_bytes} bytes, which is each gradient once", f"{sent} bytes", seen.rank, cause)
    return None


def bytes_of(calls: list[Call], *ops: str) -> int:
    """Return the bytes that a rank gave to these collectives, or to all."""
    return sum(call.n_bytes for call in calls if not ops or call.op in ops)


def weights(seen: Seen) -> Fault | None:
    """Expect the weights of one process after all steps; else tell in which step they left the path."""
    right, _, weights = one_process(seen.case, seen.world_size)
    name = next((name for name in weights if not close(seen["weights"][name], weights[name], TOLERANCE)), None)
    if name is None:
        return None
    steps = [first_fault(_gradient(step, name)(seen) for name in right[step]) for step in range(len(right))]
    cause = "the gradients are right, the weights are not: leave the weights to the optimizer"
    if steps[0]:
        cause = "the gradients, or the weights, of the first step are wrong already"
    elif left := next(filter(None, steps), None):
        step = steps.index(left)
        cause = f"step 1 is right, step {step + 1} is not: nothing of the step before may be left over, and what hooks "
        cause += f"count must begin from zero again. {left.expected}, found {left.found}"
        if step == seen.case.thrice:
            cause = f"step {step + 1} has three backward passes before one update: their means add up, in each "
            cause += f"parameter that any of them used. {left.expected}, found {left.found}"
    expected = f"after {len(right)} steps, {name} is {short(weights[name])}, as in one process"
    return Fault(expected, short(seen["weights"][name]), seen.rank, cause)


once_each = all_of(some_sent, sent_once)
some, none = gradients(0, 1, missing=False), gradients(0, 1, missing=True)
AVERAGE = exercise(
    *("06.2", "Average the gradients", "average_gradients", 20),
    act=act,
    rounds=rounds,
    checks={
        "mean": ("the gradients are those of one process on the whole batch", 2, gradients(0, 1), "whole"),
        "once": ("each gradient travels once, also that of a tied weight", 1, once_each, "whole"),
        "some": ("a gradient that is missing on some ranks counts as zero there", 2, some, "uneven"),
        "none": ("a gradient that is missing on all ranks stays None", 1, none, "uneven"),
    },
    refused=READY,
    hints={
        r"'NoneType' object has no attribute|unsupported operand.*NoneType|NoneType.*not subscriptable|"
        r"got NoneType|found None|cannot be None|\(NoneType": "a parameter without a gradient has .grad None: frozen, "
        "or not used on this rank; think of both",
        "absent|cut-off|disagree; limit: waited in": "the ranks do "
        "not call the same collectives: a gradient that is None on one rank is there on another, or there is a branch "
        "on the rank; let the ranks first agree on who has what",
        "sizes; disagree: different sizes; (?i)enforce fail|Connection closed": "the ranks sent tensors of different "
        "sizes: a gradient "
        "is None on one rank and there on another; all must call the same collectives",
    },
)
