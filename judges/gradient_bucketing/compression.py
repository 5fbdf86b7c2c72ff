"""07.4 `half_hook(state, bucket)`: half of the bytes, and nothing lost for good?

The model is made so that each rank chooses its own gradients: its loss is their product with the parameters. The same
gradients come in every step, so that what an answer returns over all steps can be compared with what came in.
Read next: `grading/checking.py`, which prints what is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import flat
from ddp_course.grading.vocabulary.expect import Expect, Slips, all_of, equals, exercise, turned
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.gradient_bucketing.overlap import STUCK

STEPS = 24
QUANTUM = 2.0**-24  # the smallest float16
TOLERANCE = 2e-3  # of float16: 11 bits, rounded three times at most
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
    cap_bytes: int = 10**6
    steps: int = STEPS

    @property
    def buckets(self) -> int:
        """How many a step has, when DDP has planned them again; the cap is less than any gradient, or more than all."""
        return len(self.by_rank[0]) if self.cap_bytes < 100 else 1


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Train with the hook; note the sum of the gradients over all steps, and what was sent in the last."""
    gradients = [torch.tensor(values) for values in case.by_rank[rank]]
    model = Chosen([len(values) for values in gradients])
    replica = DistributedDataParallel(model, bucket_cap_mb=case.cap_bytes / 2**20)
    replica.register_comm_hook({}, function)
    total = 0.0
    for _ in range(case.steps):
        replica.zero_grad()
        with Collectives() as seen:
            replica(*gradients).backward()
        total = total + torch.cat([part.grad.double() for part in model.parts])
    return Note(total=total.tolist(), sent=seen.talks)


def rounds(rng: Random) -> list[Round]:
    """Ordinary and large gradients in one bucket; then those too small for float16, in one bucket and in several."""
    ranks = rng.choice((2, 3))

    def usual() -> Values:
        return [[rng.choice((-1, 1)) * rng.uniform(0.1, 9.0) for _ in range(size)] for size in sizes]

    def tiny(size: int, least: float, most: float) -> list[float]:
        return [rng.uniform(least, most) * QUANTUM * ranks for _ in range(size)]

    sizes = [rng.randint(20, 30), rng.randint(5, 9)]
    one = [
        ("usual", Case([usual() for _ in range(ranks)], steps=1)),
        ("large", Case([[[rng.uniform(4e4, 5e4) for _ in range(6)]]] * ranks, steps=1)),
        # What is kept must stay small, also where a rank's gradient is never like the average. And it belongs to this
        # replica: the next one has as many gradients, which are tiny.
        (
            "apart",
            Case(
                [
                    [[(10_000.0, -8_000.0, 1_000.0)[rank] + rng.choice((0, 8)) for _ in range(8)]]
                    for rank in range(ranks)
                ]
            ),
        ),
        ("tiny", Case([[tiny(8, 0.1 + 0.1 * rank, 0.2 + 0.1 * rank)] for rank in range(ranks)])),
        # If a tenth of what was lost is forgotten each time, these never add up to half a quantum.
        ("tiny", Case([[tiny(8, 0.03, 0.045)] for _ in range(ranks)], steps=5 * STEPS)),
    ]
    # Buckets of equal size, of which one loses more, then of unequal ones; each rank has rests of its own. Where one
    # rank has all the larger ones, their sum is not rounded.
    larger = [tiny(8, 2100, 4000), *[[0.0] * 8] * (ranks - 1)]
    several = [
        ("several", Case([[tiny(8, 0.3, 0.45), values] for values in larger], 16)),
        ("several", Case([[tiny(size, 0.1, 0.4) for size in (7, 12, 5)] for _ in range(ranks)], 16)),
    ]
    return [Round(ranks, one), Round(ranks, several)]


# --- What is expected ------------------------------------------------------------------------------


def half(seen: Seen) -> Fault | None:
    """The last step sends two bytes for each gradient, and each bucket at once."""
    count, sent = len(seen["total"]), sum(call.n_bytes for call in seen["sent"])
    if 0 < sent <= 2 * count and len(seen["sent"]) <= seen.case.buckets:
        return None
    cause = "send the bucket once, as one tensor in float16"
    if sent in (0, 4 * count):
        cause = "this is float32 still: the tensor given to all_reduce must be float16"
        cause = cause if sent else "nothing is sent; call all_reduce in the hook"
    expected = f"{2 * count} bytes for {count} gradients, two each"
    return Fault(expected, f"{sent} bytes in {len(seen['sent'])} collectives", seen.rank, cause)


def came_in(seen: Seen, times: float = 1, own: bool = False) -> list[float]:
    """Return the averages over the ranks, added up over all steps; or the rank's own gradients."""
    by_rank = torch.tensor([flat(values) for values in seen.case.by_rank], dtype=torch.float64)
    return (times * seen.case.steps * (by_rank[seen.rank] if own else by_rank.mean(0))).tolist()


def mistakes(seen: Seen) -> dict[str, dict]:
    """Return the knobs that each mistake turns."""
    ranks = seen.world_size
    own = "this is the rank's own gradient: the future must hold the sum over the ranks, as it is after all_reduce"
    return {
        "they are too small for float16 and became 0, step after step; keep what was lost, and add all of it next time":
            {"times": 0},
        "gradients are summed over the ranks, not averaged: divide by the world size": {"times": ranks},
        "gradients are divided by the world size twice": {"times": 1 / ranks},
        own: {"own": True},
        f"{own}, undivided": {"own": True, "times": 1 / ranks},
    }  # fmt: skip


def inexact(seen: Seen, found: list[float]) -> str:
    if not torch.tensor(found).isfinite().all():
        if seen.case.steps > 1:
            return "what is kept grows without end; keep what you wanted to send minus what this rank sends, alone"
        return "the sum passes 65504, the largest float16: divide by the world size before the sum, not after it"
    return "the result is further off than float16's rounding; bfloat16, for one, has three bits less"


roughly = equals("averages", came_in, turned(came_in, mistakes), inexact, of="total", tolerance=10 * TOLERANCE)
near = equals("averages", came_in, turned(came_in, mistakes), inexact, of="total", tolerance=TOLERANCE)


def made_up(slips: Slips, otherwise: str) -> Expect:
    """Expect that what was returned over all steps differs from what came in by a few quanta, not by more."""

    def expect(seen: Seen) -> Fault | None:
        slack = 1.5 * QUANTUM * seen.world_size / max(came_in(seen))
        what = f"over {seen.case.steps} steps, gradients that add up to"
        return equals(what, came_in, slips, otherwise, of="total", tolerance=slack)(seen)

    return all_of(half, expect)


lost = made_up(
    turned(came_in, mistakes),
    "what was lost comes back in part, or too often: keep what you wanted to send, with the old loss in it, minus what "
    "this rank sends, and take that difference before all_reduce changes the tensor",
)


def kept(seen: Seen) -> Fault | None:
    """Tiny gradients are made up for; with large ones what is kept stays small."""
    return (lost if max(came_in(seen)) < 1 else roughly)(seen)


buckets = made_up(
    lambda seen: (),
    "if the check of a single bucket passes, what was lost in one bucket is added to another, or forgotten: keep one "
    "tensor for each bucket.index(), and begin with zeros again only when the bucket has another size than before",
)

COMPRESS = exercise(
    *("07.4", "Half the bytes, and nothing lost for good (stretch)", "half_hook", 20),
    act=act,
    rounds=rounds,
    checks={
        "bytes": ("a bucket takes two bytes for each gradient", 1, half, "usual"),
        "close": ("the averages are right up to float16's rounding", 1, near, "usual large"),
        "lost": ("what rounding has lost is sent in later steps", 2, kept, "tiny apart"),
        "buckets": ("each bucket keeps its own losses", 1, buckets, "several"),
    },
    refused=(
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook",
        "ddp_course.parallel.comm_hooks.fp16_compress_hook",
    ),
    hints={
        **STUCK,
        r"must match the size|size of tensor": "DDP plans its buckets again after the first step, so bucket 0 has "
        "another size then; begin with zeros",
        r"SIGSEGV": "the hook returns None, which ends the process; it must return a future",
        "limit": "the future is never complete, or there is an endless loop; see work.get_future()",
        r"Communication hook|comm hook|callback|[Ff]uture|return": "the hook returns a future of one tensor: "
        "work.get_future().then(function of the future)",
    },
)
