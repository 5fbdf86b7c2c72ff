"""07.4 `half_hook(state, bucket)`: half of the bytes, and nothing lost for good?

The model is made so that each rank chooses its own gradients: its loss is their product with the parameters. The same
gradients come in every step, so that what an answer returns over all steps can be compared with what came in.
"""

from __future__ import annotations

import math
from random import Random

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.compare import close, flat
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.gradient_bucketing.overlap import STUCK

STEPS = 24
QUANTUM = 2.0**-24  # the smallest float16
TOLERANCE = 2e-3  # of float16: 11 bits, rounded three times at most


class Chosen(nn.Module):
    """Parameters whose gradients are the inputs."""

    def __init__(self, sizes: list[int]):
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def forward(self, *gradients: torch.Tensor) -> torch.Tensor:
        return sum((part * gradient).sum() for part, gradient in zip(self.parts, gradients, strict=True))


def cases(rng: Random) -> list[Round]:
    """Ordinary and large gradients in one bucket; then those too small for float16, in one bucket and in several.

    A case has the gradients of each rank, the same in every step; how many steps; and a cap for DDP's buckets.
    """
    ranks = rng.choice((2, 3))

    def usual() -> list[list[float]]:
        return [[rng.choice((-1, 1)) * rng.uniform(0.1, 9.0) for _ in range(size)] for size in sizes]

    def tiny(size: int, least: float, most: float) -> list[float]:
        return [rng.uniform(least, most) * QUANTUM * ranks for _ in range(size)]

    def apart(far: float) -> list[list[float]]:
        return [[far + rng.choice((0, 8)) for _ in range(8)]]

    sizes = [rng.randint(20, 30), rng.randint(5, 9)]
    one = [
        ("usual", ([usual() for _ in range(ranks)], 1, 10**6)),
        ("large", ([[[rng.uniform(4e4, 5e4) for _ in range(6)]]] * ranks, 1, 10**6)),
        # What is kept must stay small, also where a rank's gradient is never like the average. And it belongs to this
        # replica: the next one has as many gradients, which are tiny.
        ("apart", (list(map(apart, (10_000.0, -8_000.0, 1_000.0)[:ranks])), STEPS, 10**6)),
        ("tiny", ([[tiny(8, 0.1 + 0.1 * rank, 0.2 + 0.1 * rank)] for rank in range(ranks)], STEPS, 10**6)),
        # If a tenth of what was lost is forgotten each time, these never add up to half a quantum.
        ("tiny", ([[tiny(8, 0.03, 0.045)] for _ in range(ranks)], 5 * STEPS, 10**6)),
    ]
    # Buckets of equal size, of which one loses more, then of unequal ones; each rank has rests of its own. Where one
    # rank has all the larger ones, their sum is not rounded.
    larger = [tiny(8, 2100, 4000), *[[0.0] * 8] * (ranks - 1)]
    several = [
        ("several", ([[tiny(8, 0.3, 0.45), values] for values in larger], 16, 8)),
        ("several", ([[tiny(size, 0.1, 0.4) for size in (7, 12, 5)] for _ in range(ranks)], 16, 8)),
    ]
    return [Round(ranks, one), Round(ranks, several)]


def act(function, case: tuple, rank: int, world_size: int) -> Note:
    """Train with the hook; note the sum of the gradients over all steps, and what was sent in the last."""
    by_rank, steps, cap_bytes = case
    gradients = [torch.tensor(values) for values in by_rank[rank]]
    model = Chosen([len(values) for values in gradients])
    replica = DistributedDataParallel(model, bucket_cap_mb=cap_bytes / 2**20)
    replica.register_comm_hook({}, function)
    total = 0.0
    for _ in range(steps):
        replica.zero_grad()
        with Collectives() as seen:
            replica(*gradients).backward()
        total = total + torch.cat([part.grad.double() for part in model.parts])
    return Note(total=total.tolist(), sent=seen.talks)


def sent(seen: Seen) -> str:
    """What the last step sends."""
    n_bytes, count = sum(call.n_bytes for call in seen["sent"]), len(seen["total"])
    return f"{n_bytes} bytes in {len(seen['sent'])} collectives, for {count} gradients"


def came_back(seen: Seen) -> dict:
    """What came in, averaged and added up over all steps, if what came back is this or nearly; else what came back."""
    by_rank, steps, _ = seen.case
    right = (steps * torch.tensor([flat(values) for values in by_rank], dtype=torch.float64).mean(0)).tolist()
    slack = 1.5 * QUANTUM * seen.world_size / max(right) if max(right) < 1 else TOLERANCE * (10 if steps > 1 else 1)
    near = close(seen["total"], right, slack)
    return {f"averages, added up over {steps} steps,": right if near else seen["total"]}


def halves(seen: Seen) -> dict:
    return {"sent:": sent(seen), **came_back(seen)}


def inexact(seen: Seen) -> str:
    if all(map(math.isfinite, seen["total"])):
        return "the result is further off than float16's rounding; bfloat16, for one, has three bits less"
    return "the sum passes 65504, the largest float16: divide by the world size before the sum, not after it"


MISTAKES = """
rounds and forgets | lost buckets
| they are too small for float16 and became 0, step after step; keep what was lost, and add all of it next time
    wanted += lost => pass
float32 still | bytes lost buckets | this is float32 still: the tensor given to all_reduce must be float16
    wanted.to(torch.float16) => wanted.clone()
sum in place of the mean | close lost buckets
| gradients are summed over the ranks, not averaged: divide by the world size
    bucket.buffer() / dist.get_world_size() => bucket.buffer().clone()
divided after the sum | close
| the sum passes 65504, the largest float16: divide by the world size before the sum, not after it
    bucket.buffer() / dist.get_world_size() => bucket.buffer().clone()
    sent.float()) => sent.float() / dist.get_world_size())
bfloat16 | close buckets | further off than float16's rounding; bfloat16, for one, has three bits less
    torch.float16 => torch.bfloat16
the loss is taken after all_reduce | lost buckets
| what is kept is not what this rank has lost: take the difference before all_reduce changes the tensor
    state[bucket.index()] = wanted - sent.float() => pass
    return work => work.wait()
    state[bucket.index()] = wanted - sent.float()
    return work
the distance to the average is kept | lost buckets
| what is kept grows without end; keep what you wanted to send minus what this rank sends, alone
    state[bucket.index()] = wanted - sent.float() => pass
    return work => work.wait()
    state[bucket.index()] = wanted - sent.float() / dist.get_world_size()
    return work
a loss for each size | buckets
| what was lost in one bucket is added to another of its size: keep one tensor for each bucket.index()
    bucket.index() => bucket.buffer().numel()
one loss for all buckets | buckets
| what was lost in one bucket is added to another, or forgotten: keep one tensor for each bucket.index()
    bucket.index() => 0
kept outside of the state | lost | what another replica lost is added: keep it in `state`, which is this one's
    def half_hook(state, bucket): => LOST = {}

    def half_hook(_, bucket, state=LOST):
in two messages | bytes lost buckets | send the bucket once, as one tensor in float16
    work = dist => dist.all_reduce(sent[:1])
    work = dist
    sent, async_op => sent[1:], async_op
nine tenths of the loss come back | lost | what was lost comes back in part: add all of it next time
    wanted += lost => wanted += 0.9 * lost
the old loss is left out of the new one | lost buckets
| keep what you wanted to send, with the old loss in it, minus what this rank sends
    wanted += lost => wanted = wanted + lost
    wanted - sent.float() => bucket.buffer() / dist.get_world_size() - sent.float()
no look at the size | buckets | DDP plans its buckets again after the first step
     and lost.shape == wanted.shape =>
the rank's own gradient comes back | close lost buckets
| this is the rank's own gradient: the future must hold the sum over the ranks, as it is after all_reduce
    lambda future: sent.float() => lambda future: bucket.buffer().clone()
a tensor in place of a future | all | the hook returns a future
    return work.get_future().then(lambda future: sent.float()) => work.wait()
    return sent.float()
a future without an end | all | the future is never complete | hangs
    return work.get_future().then(lambda future: sent.float()) => return torch.futures.Future()
rounds and forgets, in one line | lost buckets | keep what was lost, and add all of it next time | tests
    def half_hook(state, bucket):
        halves = (bucket.buffer() / dist.get_world_size()).half()
        return dist.all_reduce(halves, async_op=True).get_future().then(lambda future: future.value()[0].float())
torch's own | all | this exercise is to write | tests
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def half_hook(state, bucket):
        return fp16_compress_hook(None, bucket)
"""

RIGHT = """
waits in the hook, keeps the loss undivided, by index and size
    def half_hook(state, bucket):
        gradients, key = bucket.buffer(), (bucket.index(), bucket.buffer().numel())
        gradients.add_(state.setdefault(key, torch.zeros_like(gradients)))
        sent = gradients.div(dist.get_world_size()).half()
        state[key] = gradients - dist.get_world_size() * sent.float()
        dist.all_reduce(sent)
        done = torch.futures.Future()
        done.set_result(gradients.copy_(sent))
        return done
"""

COMPRESS = exercise(
    *("07.4", "Half the bytes, and nothing lost for good (stretch)", "half_hook", 20),
    cases=cases,
    act=act,
    mistakes=MISTAKES,
    right=RIGHT,
    tolerance=1e-5,
    checks={
        "bytes": ("a bucket takes two bytes for each gradient", 1, "usual", sent,
                  "send the bucket once, as one tensor in float16"),
        "close": ("the averages are right up to float16's rounding", 1, "usual large", came_back, inexact),
        "lost": ("what rounding has lost is sent in later steps", 2, "tiny apart", halves,
                 "what was lost comes back in part, or too often: keep what you wanted to send, with the old loss in "
                 "it, minus what this rank sends, and take that difference before all_reduce changes the tensor"),
        "buckets": ("each bucket keeps its own losses", 1, "several", halves,
                    "if the check of a single bucket passes, what was lost in one bucket is added to another, or "
                    "forgotten: keep one tensor for each bucket.index(), and begin with zeros again only when the "
                    "bucket has another size than before"),
    },
    refused=(
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook",
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
)  # fmt: skip
