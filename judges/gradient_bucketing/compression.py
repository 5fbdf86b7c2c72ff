"""07.4 `half_hook(state, bucket)`: half of the bytes, and nothing lost for good?

The model is made so that each rank chooses its own gradients: its loss is their product with the parameters. The same
gradients come in every step, so that what an answer hands out over all steps can be compared with what came in.
Read next: `grading/checking.py`, which prints what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading import observe
from ddp_course.grading.compare import close, flat, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.gradient_bucketing.training import STUCK

STEPS = 24
QUANTUM = 2.0**-24  # the smallest float16
TOLERANCE = 2e-3  # of float16: 11 bits, rounded three times at most
MIXED = (
    "what was lost in one bucket is added to another, or forgotten: keep one tensor for each bucket.index(), and begin "
    "anew with zeros only when the bucket has another size than before"
)
WRONG_ALREADY = "the averages are wrong already, see above"
UNROUNDED = Fault(
    "losses that are made up for", "no half of the bytes", cause="send float16 first: see the first check"
)
Values = list[list[float]]  # of each parameter


class Chosen(nn.Module):
    """Parameters whose gradients are the inputs."""

    def __init__(self, sizes: list[int]):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def forward(self, *gradients: torch.Tensor) -> torch.Tensor:
        return sum((part * gradient).sum() for part, gradient in zip(self.parts, gradients, strict=True))


@dataclass(frozen=True)
class Case:
    """The gradients of each rank, the same in every step, and a cap for DDP's buckets."""

    by_rank: list[Values]
    cap_bytes: int
    steps: int

    @property
    def mean(self) -> list[float]:
        """The right averages, one list for all parameters."""
        return torch.tensor([flat(values) for values in self.by_rank], dtype=torch.float64).mean(0).tolist()


def hook_driver(rank: int, world_size: int, function: Callable, cases: list[Case]) -> list[dict]:
    """Train with the hook; note the gradients of every step, and what was sent in the last."""
    notes = []
    for case in cases:
        gradients = [torch.tensor(values) for values in case.by_rank[rank]]
        model = Chosen([len(values) for values in gradients])
        replica = DistributedDataParallel(model, bucket_cap_mb=case.cap_bytes / 2**20)
        replica.register_comm_hook({}, function)
        steps = []
        for _ in range(case.steps):
            replica.zero_grad()
            with observe.Collectives() as seen:
                replica(*gradients).backward()
            steps.append(torch.cat([part.grad.double() for part in model.parts]).tolist())
        calls = [(call.op, call.n_bytes) for call in seen.calls if call.op not in ("barrier",)]
        notes.append({"steps": steps, "calls": calls})
    return notes


def hook_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Ordinary and large gradients in one bucket; then those too small for float16, in one bucket and in several."""
    world_size = rng.choice((2, 3))

    def values(size: int, low: float, high: float) -> list[float]:
        return [rng.choice((-1, 1)) * rng.uniform(low, high) for _ in range(size)]

    def same(size: int, least: float, most: float) -> Values:
        return [[rng.uniform(least, most) * QUANTUM * world_size for _ in range(size)]]

    sizes = [rng.randint(20, 30), rng.randint(5, 9)]
    usual = Case([[values(n, 0.1, 9.0) for n in sizes] for _ in range(world_size)], 10**6, 1)
    large = Case([[[rng.uniform(4e4, 5e4) for _ in range(6)]]] * world_size, 10**6, 1)
    tiny = Case([same(8, 0.1 + 0.1 * rank, 0.2 + 0.1 * rank) for rank in range(world_size)], 10**6, STEPS)
    # Buckets of equal size, then of unequal ones; each rank has rests of its own.
    equal = Case([[*same(8, 0.3, 0.45), [0.0] * 8] for _ in range(world_size)], 16, STEPS)
    unequal = Case(
        [[*same(7, 0.1, 0.4), *same(12, 0.1, 0.4), *same(5, 0.1, 0.4)] for _ in range(world_size)], 16, STEPS
    )
    notes = answer.run(hook_driver, world_size, [usual, large, tiny], init=True)
    unrounded = _first(_bytes_fault, usual, notes, 0)
    yield "bytes", unrounded
    wrong = _first(_close_fault, usual, notes, 0) or _first(_large_fault, large, notes, 1)
    yield "close", wrong
    lost = UNROUNDED if unrounded else _first(_lost_fault, tiny, notes, 2)
    yield "lost", replace(lost, cause=WRONG_ALREADY) if lost and wrong and not unrounded else lost
    if unrounded:
        yield "buckets", UNROUNDED
        return
    notes = answer.run(hook_driver, world_size, [equal, unequal], init=True)
    mixed = _first(_lost_fault, equal, notes, 0) or _first(_lost_fault, unequal, notes, 1)
    yield "buckets", replace(mixed, cause=MIXED) if mixed and not lost else mixed


def _first(fault_of: Callable, case: Case, notes: list[list[dict]], index: int) -> Fault | None:
    return next(filter(None, (fault_of(case, rank, cases[index]) for rank, cases in enumerate(notes))), None)


def _bytes_fault(case: Case, rank: int, note: dict) -> Fault | None:
    count, sent = len(case.mean), sum(n_bytes for _, n_bytes in note["calls"])
    if sent and sent <= 2 * count:
        return None
    expected = f"{2 * count} bytes for {count} gradients, two each"
    if not sent:
        cause = "nothing is sent; call all_reduce in the hook"
    elif sent == 4 * count:
        cause = "this is float32 still: the tensor given to all_reduce must be float16"
    else:
        cause = "send the bucket once, as one tensor in float16"
    return Fault(expected, f"{sent} bytes in {len(note['calls'])} collectives", rank, cause)


def _close_fault(case: Case, rank: int, note: dict) -> Fault | None:
    right, found = case.mean, note["steps"][0]
    if close(found, right, TOLERANCE):
        return None
    ranks, own = len(case.by_rank), flat(case.by_rank[rank])
    if close(found, [ranks * value for value in right], TOLERANCE):
        cause = "gradients are summed over the ranks, not averaged: divide by the world size"
    elif close(found, [value / ranks for value in right], TOLERANCE):
        cause = "gradients are divided by the world size twice"
    elif close(found, own, TOLERANCE) or close(found, [value / ranks for value in own], TOLERANCE):
        cause = (
            "this is the rank's own gradient: the future must hold the sum over the ranks, as it is after all_reduce"
        )
    else:
        cause = "the result is further off than float16's rounding; bfloat16, for one, has three bits less"
    return Fault(short(right), short(found), rank, cause)


def _large_fault(case: Case, rank: int, note: dict) -> Fault | None:
    right, found = case.mean, note["steps"][0]
    if close(found, right, TOLERANCE):
        return None
    cause = "the sum passes 65504, the largest float16: divide by the world size before the sum, not after it"
    if not any(value == float("inf") for value in found):
        cause = "large gradients are not averaged as others are"
    return Fault(short(right), short(found), rank, cause)


def _lost_fault(case: Case, rank: int, note: dict) -> Fault | None:
    """After many steps, what was handed out may differ from what came in by a few quanta, not by more."""
    right = [case.steps * value for value in case.mean]
    found = torch.tensor(note["steps"], dtype=torch.float64).sum(0).tolist()
    slack = 1.5 * QUANTUM * len(case.by_rank)
    if all(abs(a - b) <= slack for a, b in zip(found, right, strict=True)):
        return None
    expected = f"over {case.steps} steps, gradients that add up to {short(right)}"
    if not any(found):
        cause = "they are too small for float16 and became 0, step after step; keep what was lost, and add it next time"
    else:
        cause = (
            "what was lost comes back in part, or too often: keep what you wanted to send, with the old loss in it, "
            "minus what this rank sends, and take that difference before all_reduce changes the tensor"
        )
    return Fault(expected, short(found), rank, cause)


COMPRESS = Exercise(
    "07.4",
    "Half the bytes, and nothing lost for good (stretch)",
    "half_hook",
    20,
    (
        Check("bytes", "a bucket takes two bytes for each gradient", 1),
        Check("close", "the averages are right up to float16's rounding", 1),
        Check("lost", "what rounding has lost is sent in later steps", 2),
        Check("buckets", "each bucket keeps its own losses", 1),
    ),
    hook_judge,
    refused=(
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook",
        "ddp_course.parallel.comm_hooks.fp16_compress_hook",
    ),
    hints=(
        STUCK,
        (
            r"must match the size|size of tensor",
            "DDP plans its buckets anew after the first step, so bucket 0 has another size then; begin with zeros",
        ),
        (r"SIGSEGV", "the hook returns None, which ends the process; it must return a future"),
        (r"no result after", "the future is never complete, or there is an endless loop; see work.get_future()"),
        (
            r"Communication hook|comm hook|callback|[Ff]uture|return",
            "the hook returns a future of one tensor: work.get_future().then(function of the future)",
        ),
    ),
)
