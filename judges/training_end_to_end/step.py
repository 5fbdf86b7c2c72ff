"""11.3 `train_steps(...)`: SyncBatchNorm, accumulation and autocast in one loop, equal to one process.

The judge trains in one process, on the rows of all ranks, piece by piece. A model that notes the format of what passes
through it tells whether autocast was on.

Read next: `grading/isolated.py`, how a learner's function is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from ddp_course.grading.compare import close, factor, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from judges.training_end_to_end.training import (
    HIDDEN,
    driver,
    first_statistics,
    network,
    one_process,
    running,
)


def step_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Exactly, in float64, on two or three ranks; then in bfloat16."""
    world_size = rng.choice((2, 3))
    pieces = 5 - world_size  # another number, so that a factor between two losses has one meaning
    seeds, plan = rng.sample(range(1000), world_size + 1), (3, 8 * pieces, pieces)
    notes = answer.run(driver, world_size, seeds, plan, False, True, init=True)
    right = one_process(seeds, plan)
    yield "pieces", _pieces_fault(notes, plan)
    weights = _weights_fault(notes, right, seeds, plan)
    yield "weights", weights
    norm = _norm_fault(notes, right, seeds, plan, follow=weights is not None)
    yield "norm", norm
    yield "messages", _messages_fault(notes, plan)
    yield "loss", _loss_fault(notes, right, plan, follow=norm is not None)
    pairs = [answer.run(driver, 2, seeds[:3], plan, amp, False, init=True)[0] for amp in (True, False)]
    yield "amp", _amp_fault(*pairs)


def _split(state: dict) -> tuple[list, list]:
    """Return weights, and running statistics."""
    running = {name: value for name, value in state.items() if "running" in name}
    return [value for name, value in sorted(state.items()) if name not in running], list(running.values())


def _pieces_fault(notes: list[dict], plan: tuple) -> Fault | None:
    steps, rows, pieces = plan
    for rank, note in enumerate(notes):
        if note["rows"] != [rows // pieces] * pieces * steps:
            said = f"{pieces} forward passes of {rows // pieces} rows for each of {steps} batches"
            found = f"{len(note['rows'])} forward passes, rows: {short(note['rows'])}"
            return Fault(said, found, rank, _wrong_size(note, plan))
        if note["most_waiting"] > 1:
            cause = "call backward() for each piece before the next forward pass; then only one piece needs memory"
            return Fault("one piece at a time", f"{note['most_waiting']} forward passes wait for backward", rank, cause)
    return None


def _wrong_size(note: dict, plan: tuple) -> str:
    """Return why the pieces have another size than they should, or "" when they have theirs."""
    _, rows, pieces = plan
    sizes = set(note["rows"])
    if sizes <= {rows // pieces}:
        return ""
    if sizes == {pieces}:
        return "the pieces have the wrong size: split(pieces) cuts parts of `pieces` rows, chunk(pieces) `pieces` parts"
    if sizes == {rows}:
        return "the batch is not split: `pieces` parts, each with statistics of its own"
    return "the pieces have the wrong size: `pieces` equal parts, in order, one forward pass for each"


def _weights_fault(notes: list[dict], right: dict, seeds: list[int], plan: tuple) -> Fault | None:
    expected = _split(right["state"])[0]
    first = _split(notes[0]["state"])[0]
    for rank, note in enumerate(notes):
        found = _split(note["state"])[0]
        if not close(found, first, 1e-9):
            cause = "the gradients are not averaged over the ranks: wrap the model in DistributedDataParallel"
            return Fault("the same weights on every rank", "others than on rank 0", rank, cause)
    if close(first, expected, 1e-8):
        return None
    start = _split({k: plain(v) for k, v in network(seeds[0], torch.float64).state_dict().items() if "num_" not in k})
    if close(first, start[0], 1e-9):
        return Fault("trained weights", "the weights are as they were", cause="call optimizer.step() after each batch")
    slips = [
        (one_process(seeds, plan, "undivided"), "a batch's gradient is the mean over its pieces: divide each loss by "
         "`pieces`"),
        (one_process(seeds, plan, "kept"), "old gradients are still there: zero them before each batch"),
        (one_process(seeds, plan, "zeroed"), "the gradients are zeroed between the pieces: zero them once a batch"),
        (one_process(seeds, plan, "dealt"), "the pieces are parts in order: with 2 pieces, the first half of the rows, "
         "then the second"),
        (one_process(seeds, (1, *plan[1:])), "only the first batch is trained"),
    ]  # fmt: skip
    cause = _wrong_size(notes[0], plan)
    cause = cause or next((said for other, said in slips if close(first, _split(other["state"])[0], 1e-8)), "")
    cause = cause or _why_other_statistics(notes[0], 0, seeds, plan)
    said = "the weights of one process that has piece k of all ranks as its piece k"
    return Fault(said, "other weights", cause=cause or "zero the gradients once a batch, and step once a batch")


def _why_other_statistics(note: dict, rank: int, seeds: list[int], plan: tuple) -> str:
    """Return what is wrong with BatchNorm after the first batch, or "" when that is not known."""
    found, fresh = note["first_statistics"], running(network(seeds[0], torch.float64))
    if not found or close(found, fresh, 1e-9):
        return "BatchNorm's statistics are as they were: each piece goes through the model, in train mode"
    if close(found, first_statistics([seeds[0], seeds[1 + rank]], plan), 1e-8):
        return "each rank normalises by its own rows: model = SyncBatchNorm.convert(model)"
    return ""


def _norm_fault(notes: list[dict], right: dict, seeds: list[int], plan: tuple, *, follow: bool) -> Fault | None:
    """Those after the first batch; the last ones only if the weights are right, which they `follow`."""
    first, last = first_statistics(seeds, plan), _split(right["state"])[1]
    for rank, note in enumerate(notes):
        found = note["first_statistics"]
        if not close(found, first, 1e-8):
            cause = _wrong_size(note, plan) or _why_other_statistics(note, rank, seeds, plan)
            cause = cause or "each piece k with the k-th pieces of all ranks, in order"
            return Fault(
                "after the first batch, the running mean and variance of all ranks' rows", "others", rank, cause
            )
        if not follow and not close(_split(note["state"])[1], last, 1e-8):
            cause = "those of the first batch are right; is every piece seen once, with the model in train mode?"
            return Fault("the running mean and variance of all ranks' rows", "others", rank, cause)
    return None


def _messages_fault(notes: list[dict], plan: tuple) -> Fault | None:
    steps, _, pieces = plan
    weights = 8 * sum(p.numel() for p in network(0, torch.float64).parameters())
    statistics = 8 * pieces * (4 * HIDDEN + 1)
    most = steps * (1.4 * weights + statistics)
    for rank, note in enumerate(notes):
        if note["bytes"] > most:
            cause = "the gradients are sent after every piece: run forward and backward of all but the last one "
            cause = _wrong_size(note, plan) or cause + "within replica.no_sync()"
            found = f"{note['bytes'] / steps:,.0f} bytes in each step"
            said = f"gradients once a batch, {weights:,} bytes, and statistics, {statistics:,}"
            return Fault(said, found, rank, cause)
        if note["bytes"] < steps * weights:
            found = f"{note['bytes'] / steps:,.0f} bytes in each step"
            cause = "the gradients do not travel: DistributedDataParallel sends them in backward, outside of no_sync"
            return Fault(f"gradients once a batch, {weights:,} bytes", found, rank, cause)
    return None


def _loss_fault(notes: list[dict], right: dict, plan: tuple, *, follow: bool) -> Fault | None:
    """`follow`: BatchNorm's statistics are wrong, and with them any loss."""
    expected, world_size = right["losses"], len(notes)
    for rank, note in enumerate(notes):
        found = note["losses"]
        if close(found, expected, 1e-7):
            continue
        if not isinstance(found, list) or len(found) != plan[0]:
            cause = "return a list with one loss for each batch"
            return Fault(f"{plan[0]} losses", short(found), rank, cause)
        # Wrong weights change the later losses, so the first one has to tell.
        ratio = factor(found, expected) or factor(found[:1], expected[:1]) or 0
        told = {
            world_size: "that is the sum over the ranks; divide by the world size",
            plan[2]: "that is the sum over the pieces; divide by `pieces`",
            1 / plan[2]: "it is divided by `pieces` twice",
        }
        cause = next((said for k, said in told.items() if abs(ratio - k) < 1e-4 * k), "")
        if not cause and not close(found, notes[rank - 1]["losses"], 1e-9):
            cause = "this rank's own loss; average it over the ranks with an all_reduce"
        if not cause and close(found[:1], expected[:1], 1e-7):
            cause = "the first is right; the others follow the weights, which are not"
        cause = cause or _wrong_size(note, plan)
        cause = cause or ("they follow BatchNorm's statistics, which are not right" if follow else "")
        cause = cause or "the mean over all pieces, and over all ranks"
        return Fault(f"losses {short(expected)}", short(found), rank, cause)
    return None


def _amp_fault(on: dict, off: dict) -> Fault | None:
    if on["numbers"] != ["torch.float32"]:
        cause = "small updates vanish in 16 bits; keep the weights, and put autocast around the forward pass"
        return Fault("weights in float32", ", ".join(on["numbers"]), cause=cause)
    if on["formats"] != ["torch.bfloat16"]:
        cause = 'torch.autocast("cpu", torch.bfloat16, enabled=amp) around the forward pass of every piece'
        return Fault("with amp, linear layers compute in bfloat16", ", ".join(on["formats"]), cause=cause)
    if off["formats"] != ["torch.float32"]:
        cause = "autocast is on although amp is False: enabled=amp"
        return Fault("without amp, linear layers compute in float32", ", ".join(off["formats"]), cause=cause)
    return None


STEP = Exercise(
    "11.3",
    "A whole step (stretch)",
    "train_steps",
    35,
    (
        Check("pieces", "one piece at a time", 1),
        Check("weights", "the weights of one process", 2),
        Check("norm", "BatchNorm's statistics are those of all ranks", 1),
        Check("messages", "gradients travel once a batch", 1),
        Check("loss", "the losses, over pieces and ranks", 1),
        Check("amp", "bfloat16 where it is asked for, and only there", 1),
    ),
    step_judge,
    hints=(
        (r"SyncBatchNorm expected input tensor to be on|SyncBatchNorm.*GPU", "torch's SyncBatchNorm refuses CPUs; "
         "take the course's"),
        (r"expected scalar type|must have the same dtype|same dtype", "do not cast the rows or the model yourself; "
         "autocast does it"),
        (r"never entered|disagree about|lost the connection", "a collective that not every rank calls: "
         "every rank must run each piece, and reduce each loss"),
        (r"no result after", "a collective that not every rank calls, or a loop that never ends"),
    ),
)  # fmt: skip
