"""11.3 `train_steps(...)`: SyncBatchNorm, accumulation and autocast in one loop, equal to one process.

The judge trains in one process, on the rows of all ranks, piece by piece. A model that notes the format of what passes
through it tells whether autocast was on.

Read next: `../../isolated.py`, how a learner's function is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddp_course.grading import observe
from ddp_course.grading.compare import close, factor, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

FEATURES, HIDDEN, CLASSES = 12, 40, 5
LR = 0.1

Batches = list[tuple[torch.Tensor, torch.Tensor]]  # rows and labels, by step


class Noting(nn.Module):
    """A linear layer that notes the format of its results."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, narrow)
        self.formats: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.formats.add(str(y.dtype))
        return y


def network(seed: int, number: torch.dtype) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [Noting(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), Noting(HIDDEN, CLASSES)]
    return nn.Sequential(*layers).to(number)


def batches_of(seed: int, rows: int, steps: int, number: torch.dtype) -> Batches:
    """The rows of one rank; each seed has a mean of its own, so that the ranks' statistics differ."""
    generator = torch.Generator().manual_seed(seed)
    spread, mean = 1 + seed % 3, torch.randn(FEATURES, generator=generator)
    return [
        (
            (mean + spread * torch.randn(rows, FEATURES, generator=generator)).to(number),
            torch.randint(0, CLASSES, (rows,), generator=generator),
        )
        for _ in range(steps)
    ]


def driver(rank: int, world_size: int, function: Callable, seeds: list[int], plan: tuple, amp: bool, wide: bool) -> Any:
    """Let the learner's function train; return losses, weights, statistics, formats and bytes sent."""
    number = torch.float64 if wide else torch.float32
    steps, rows, pieces = plan
    model = network(seeds[0], number)
    layers = [model[0], model[3]]  # the learner may replace modules, not these
    batches = batches_of(seeds[1 + rank], rows, steps, number)
    with observe.Collectives() as seen:
        losses = function(rank, world_size, model, batches, LR, pieces, amp)
    state = {name: plain(value.double()) for name, value in model.state_dict().items() if "num_" not in name}
    return {
        "losses": plain(losses),
        "state": state,
        "numbers": sorted({str(p.dtype) for p in model.parameters()}),
        "formats": sorted(set.union(*(layer.formats for layer in layers))),
        "bytes": sum(call.n_bytes for call in seen.calls if call.op != "broadcast"),
    }


def one_process(seeds: list[int], plan: tuple, *, whole: bool = True, count: int | None = None) -> dict:
    """Train in this process, in float64. `whole`: piece k of all ranks together; otherwise those of rank 0 alone."""
    steps, rows, pieces = plan
    model = network(seeds[0], torch.float64)
    by_rank = [batches_of(seed, rows, steps, torch.float64) for seed in (seeds[1:] if whole else seeds[1:2])]
    losses = []
    for step in range(steps):
        model.zero_grad()
        parts = [[t.chunk(pieces) for t in batches[step]] for batches in by_rank]
        total = 0.0
        for k in range(pieces):
            x, labels = (torch.cat([part[which][k] for part in parts]) for which in (0, 1))
            loss = F.cross_entropy(model(x), labels) / (count or pieces)
            loss.backward()
            total += loss.item()
        losses.append(total)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
    state = {name: value.tolist() for name, value in model.state_dict().items() if "num_" not in name}
    return {"losses": losses, "state": state}


def step_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Exactly, in float64, on two or three ranks; then in bfloat16."""
    world_size, pieces = rng.choice((2, 3)), rng.choice((2, 3))
    seeds, plan = rng.sample(range(1000), world_size + 1), (3, 8 * pieces, pieces)
    notes = answer.run(driver, world_size, seeds, plan, False, True, init=True)
    right = one_process(seeds, plan)
    yield "weights", _weights_fault(notes, right, seeds, plan)
    yield "norm", _norm_fault(notes, right)
    yield "messages", _messages_fault(notes, plan)
    yield "loss", _loss_fault(notes, right, plan)
    pairs = [answer.run(driver, 2, seeds[:3], plan, amp, False, init=True)[0] for amp in (True, False)]
    yield "amp", _amp_fault(*pairs)


def _split(state: dict) -> tuple[list, list]:
    """Return weights, and running statistics."""
    running = {name: value for name, value in state.items() if "running" in name}
    return [value for name, value in sorted(state.items()) if name not in running], list(running.values())


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
        (one_process(seeds, plan, count=1), "a batch's gradient is the mean over its pieces: divide each loss by "
         "`pieces`"),
        (one_process(seeds, (1, *plan[1:])), "only the first batch is trained"),
        (one_process(seeds, (*plan[:2], 1)), "the batch is not split: `pieces` parts, each with statistics of its own"),
    ]  # fmt: skip
    cause = next((said for other, said in slips if close(first, _split(other["state"])[0], 1e-8)), "")
    if not cause and not close(_split(notes[0]["state"])[1], _split(right["state"])[1], 1e-8):
        cause = "the statistics differ, too: convert BatchNorm to SyncBatchNorm before the model is wrapped"
    said = "the weights of one process that has piece k of all ranks as its piece k"
    return Fault(said, "other weights", cause=cause or "zero the gradients once a batch, and step once a batch")


def _norm_fault(notes: list[dict], right: dict) -> Fault | None:
    expected = _split(right["state"])[1]
    for rank, note in enumerate(notes):
        found = _split(note["state"])[1]
        if not close(found, expected, 1e-8):
            cause = (
                "each rank follows its own rows: SyncBatchNorm.convert(model), before the model is wrapped"
                if not close(found[0], expected[0], 1e-3)
                else "the statistics are nearly right; is every piece seen once, with the model in train mode?"
            )
            return Fault("the running mean and variance of all ranks' rows", "others", rank, cause)
    return None


def _messages_fault(notes: list[dict], plan: tuple) -> Fault | None:
    steps, _, pieces = plan
    weights = 8 * sum(p.numel() for p in network(0, torch.float64).parameters())
    statistics = 8 * pieces * (4 * HIDDEN + 1)
    most = steps * (1.4 * weights + statistics)
    for rank, note in enumerate(notes):
        if note["bytes"] > most:
            cause = (
                "the gradients are sent after every piece: run forward and backward of all but the last one "
                "within replica.no_sync()"
            )
            found = f"{note['bytes'] / steps:,.0f} bytes in each step"
            said = f"gradients once a batch, {weights:,} bytes, and statistics, {statistics:,}"
            return Fault(said, found, rank, cause)
        if note["bytes"] < steps * weights:
            found = f"{note['bytes'] / steps:,.0f} bytes in each step"
            cause = "the gradients do not travel: DistributedDataParallel sends them in backward, outside of no_sync"
            return Fault(f"gradients once a batch, {weights:,} bytes", found, rank, cause)
    return None


def _loss_fault(notes: list[dict], right: dict, plan: tuple) -> Fault | None:
    expected, world_size = right["losses"], len(notes)
    for rank, note in enumerate(notes):
        found = note["losses"]
        if close(found, expected, 1e-7):
            continue
        if not isinstance(found, list) or len(found) != plan[0]:
            cause = "return a list with one loss for each batch"
            return Fault(f"{plan[0]} losses", short(found), rank, cause)
        ratio = factor(found, expected) or 0
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
        Check("weights", "the weights of one process", 2),
        Check("norm", "BatchNorm's statistics are those of all ranks", 1),
        Check("messages", "gradients travel once a batch", 1),
        Check("loss", "the losses, over pieces and ranks", 1),
        Check("amp", "bfloat16 where it is asked for, and only there", 2),
    ),
    step_judge,
    hints=(
        (r"SyncBatchNorm expected input tensor to be on|SyncBatchNorm.*GPU", "torch's SyncBatchNorm refuses CPUs; "
         "take the course's"),
        (r"expected scalar type|must have the same dtype|same dtype", "do not cast the rows or the model yourself; "
         "autocast does it"),
        (r"never entered|disagree about|lost the connection", "every rank must run each piece, and reduce each loss"),
        (r"no result after", "a collective that not every rank calls, or a loop that never ends"),
    ),
)  # fmt: skip
