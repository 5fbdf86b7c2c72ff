"""11.5 `train_steps(...)`: SyncBatchNorm, accumulation and autocast in one loop, equal to one process.

The judge trains in one process, on the rows of all ranks, piece by piece. A model that notes the format of what passes
through it tells whether autocast was on. Read `training.py` first.

Read next: `grading/answer/isolated.py`, how a learner's function is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import close, flat
from ddp_course.grading.vocabulary.expect import (
    Expect,
    Form,
    Slips,
    all_of,
    equals,
    exercise,
    first_mistake,
    follows,
    turned,
)
from ddp_course.grading.vocabulary.play import Round, Seen
from judges.your_own_program.training import HIDDEN, STEPS, Case, act, one_process, statistics

# Exactly and roughly. In 60 cases bfloat16 changed the weights by 0.0041 at most, where most mistakes change them by
# more than 0.014, and the losses by 0.0004. A loss is a report, and may be added up in float32.
TOLERANCES = {"losses": (1e-6, 0.0025)}
OTHERS = (1e-8, 0.01)


def rounds(rng: Random) -> list[Round]:
    """Exactly, in float64, on two or three ranks, also undivided; then in bfloat16, and not."""
    world_size = rng.choice((2, 3))
    pieces = 5 - world_size  # another number, so that a factor between two losses has one meaning
    seeds = tuple(rng.sample(range(1000), world_size + 1))
    short = [Case(seeds[:3], pieces, 8 * pieces, amp=amp, number=torch.float32) for amp in (True, False)]
    return [
        Round(world_size, [("exact", Case(seeds, pieces, 8 * pieces)), ("whole", Case(seeds, 1, 8))]),
        Round(2, [("amp", case) for case in short]),
    ]


def _wrong_size(seen: Seen) -> str:
    case, sizes, wrong = seen.case, set(seen["rows"]), "the pieces have the wrong size: "
    if sizes <= {case.rows // case.pieces}:
        return ""
    if sizes == {case.pieces}:
        return f"{wrong}split(pieces) cuts parts of `pieces` rows, chunk(pieces) `pieces` parts"
    if sizes == {case.rows}:
        return "the batch is not split: `pieces` parts, each with statistics of its own"
    return f"{wrong}`pieces` equal parts, in order, one forward pass for each"


def part(what: str, of: str, slips: Slips, otherwise: Callable[[Seen, Any], str], form: Form = lambda _: "") -> Expect:
    """Expect what one process finds; `otherwise` says more than the wrong size of the pieces."""
    exactly, roughly = (
        equals(
            f"{how}{what} of one process that has piece k of all ranks as its piece k:",
            lambda seen: one_process(seen.case)[of],
            slips,
            lambda seen, found: _wrong_size(seen) or otherwise(seen, found),
            of=of,
            tolerance=tolerance,
            form=form,
            shown=lambda found: (flat(found) or [found])[:4],
        )
        for tolerance, how in zip(TOLERANCES.get(of, OTHERS), ("", "in float32, or with amp, roughly "), strict=True)
    )
    return lambda seen: (exactly if seen.case.number == torch.float64 else roughly)(seen)


one_by_one = follows(
    (
        r"[^F]*(F[^F]*B[^F]*)*",
        "a backward pass after each forward pass",
        "call backward() for each piece before the next forward pass; then only one piece needs memory",
    )
)
pieces = equals(
    lambda seen, rows: f"{seen.case.pieces} forward passes of {rows[0]} rows for each of {STEPS} batches",
    lambda seen: [seen.case.rows // seen.case.pieces] * seen.case.pieces * STEPS,
    lambda seen: (),
    lambda seen, found: _wrong_size(seen) or f"{len(found)} forward passes",
    of="rows",
)


def _statistics_slips(seen: Seen) -> Iterator[tuple[str, list]]:
    untouched = "BatchNorm's statistics are as they were: each piece goes through the model, in train mode"
    yield untouched, statistics(seen.case.model())
    yield untouched, []
    own = one_process(seen.case, ranks=(seen.rank,))["first"]
    yield "each rank normalises by its own rows: model = SyncBatchNorm.convert(model)", own


def _why_other_weights(seen: Seen, found: list) -> str:
    if not all(close(seen.of(rank)["weights"], seen.of(0)["weights"], 1e-9) for rank in range(seen.world_size)):
        return "the gradients are not averaged over the ranks: wrap the model in DistributedDataParallel"
    causes = (cause for cause, value in _statistics_slips(seen) if close(seen["first"], value, 1e-8))
    return next(causes, "zero the gradients once a batch, and step once a batch")


WEIGHT_SLIPS = {
    "the weights are as they were: call optimizer.step() after each batch": {"lr": 0.0},
    "a batch's gradient is the mean over its pieces: divide each loss by `pieces`": {"slip": "undivided"},
    "old gradients are still there: zero them before each batch": {"slip": "kept"},
    "the gradients are zeroed between the pieces: zero them once a batch": {"slip": "zeroed"},
    "the pieces are parts in order: with 2 pieces, the first half of the rows, then the rest": {"slip": "dealt"},
    "only the first batch is trained": {"steps": 1},
}
weights = part(
    *("the weights", "weights"),
    turned(lambda seen, **knobs: one_process(seen.case, **knobs)["weights"], WEIGHT_SLIPS),
    _why_other_weights,
)
first = part(
    *("after the first batch, the running mean and variance", "first", _statistics_slips),
    lambda seen, found: "each piece k with the k-th pieces of all ranks, in order",
)
last = part(
    *("the running mean and variance", "last", lambda seen: ()),
    lambda seen, found: "those of the first batch are right; is every piece seen once, with the model in train mode?",
)


def norm(seen: Seen) -> Fault | None:
    """Those after the first batch; the last ones only if the weights are right, which they follow."""
    follow = any(weights(seen.of(rank)) for rank in range(seen.world_size))
    return first(seen) or (None if follow else last(seen))


def messages(seen: Seen) -> Fault | None:
    """Gradients travel once a batch, and statistics for each piece."""
    of_each = seen.case.number.itemsize
    each, n_weights = seen["bytes"] / STEPS, of_each * len(flat(seen["weights"]))
    n_statistics = of_each * seen.case.pieces * (4 * HIDDEN + 1)
    many, found = each > 1.4 * n_weights + n_statistics, f"{each:,.0f} bytes in each step"
    return first_mistake(f"gradients once a batch, {n_weights:,} bytes, and statistics, {n_statistics:,}", {
        _wrong_size(seen): many and _wrong_size(seen) and found,
        "the gradients are sent after every piece: run forward and backward of all but the last one within "
        "replica.no_sync()": many and found,
        "the gradients do not travel: DistributedDataParallel sends them in backward, outside of no_sync":
            each < n_weights and found,
    }, seen.rank)  # fmt: skip


def _loss_slips(seen: Seen) -> Iterator[tuple[str, list[float]]]:
    right, rest = one_process(seen.case)["losses"][0], seen["losses"][1:]
    yield "that is the sum over the ranks; divide by the world size", [seen.world_size * right, *rest]
    yield "that is the sum over the pieces; divide by `pieces`", [seen.case.pieces * right, *rest]
    yield "it is divided by `pieces` twice", [right / seen.case.pieces, *rest]
    if not close(seen["losses"], seen.of(seen.rank - 1)["losses"], 1e-9):
        yield "this rank's own loss; average it over the ranks with an all_reduce", seen["losses"]
    yield "the first is right; the others follow the weights, which are not", [right, *rest]


losses = part(
    *("the losses", "losses", _loss_slips),
    lambda seen, found: (
        "they follow BatchNorm's statistics, which are not right"
        if norm(seen)
        else "the mean over all pieces, and over all ranks"
    ),
    lambda found: "" if len(flat(found) or []) == STEPS else "return a list with one loss for each batch",
)


def as_rows(seen: Seen) -> Fault | None:
    """Without amp, the loss has the format of the rows."""
    found = seen["loss_formats"] and set(seen["loss_formats"]) != {str(seen.case.number)} and not seen.case.amp
    cause = "convert the scores to the dtype of x, then take the loss"
    return first_mistake(f"a loss in {seen.case.number}", {cause: found and ", ".join(seen["loss_formats"])}, seen.rank)


loss = all_of(losses, as_rows)


def formats(seen: Seen) -> Fault | None:
    """Weights and loss are in float32; the layers compute in bfloat16 where it is asked for."""
    found, numbers = ", ".join(seen["formats"]), ", ".join(seen["numbers"])
    losses = flat(seen["losses"]) or []
    rounded = torch.tensor(losses).bfloat16().tolist()
    if not seen.case.amp:
        cause = "autocast is on although amp is False: enabled=amp"
        other = found != "torch.float32" and found
        return first_mistake("without amp, linear layers compute in float32", {cause: other})
    return first_mistake("with amp, weights and loss in float32, and linear layers that compute in bfloat16", {
        "small updates vanish in 16 bits; keep the weights, and put autocast around the forward pass":
            numbers != "torch.float32" and f"weights in {numbers}",
        'torch.autocast("cpu", torch.bfloat16, enabled=amp) around the forward pass of every piece':
            found != "torch.bfloat16" and found,
        "exponentials and logarithms need more bits: scores.float(), then the loss":
            ("torch.bfloat16" in seen["loss_formats"] or rounded == losses) and "a loss in bfloat16",
    })  # fmt: skip


STEP = exercise(
    "11.5",
    "A whole step (stretch)",
    "train_steps",
    35,
    act=act,
    rounds=rounds,
    checks={
        "pieces": ("one piece at a time", 1, all_of(pieces, one_by_one), "exact"),
        "weights": ("the weights of one process", 2, weights, "exact whole amp"),
        "norm": ("BatchNorm's statistics are those of all ranks", 1, norm, "exact"),
        "messages": ("gradients travel once a batch", 1, messages, "exact amp"),
        "loss": ("the losses, over pieces and ranks", 1, loss, "exact whole amp"),
        "amp": ("bfloat16 where it is asked for, and only there", 1, formats, "amp"),
    },
    hints={
        r"SyncBatchNorm expected input tensor to be on|SyncBatchNorm.*GPU": "torch's SyncBatchNorm refuses CPUs; "
        "take the course's",
        r"expected scalar type|must have the same dtype|same dtype": "do not cast the rows or the model yourself; "
        "autocast does it",
        "absent|disagree|cut-off": "a collective that not every rank calls: "
        "every rank must run each piece, and reduce each loss",
        "limit": "a collective that not every rank calls, or a loop that never ends",
    },
)
