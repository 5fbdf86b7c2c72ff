"""07.3 `accumulate(replica, loss_function, micro_batches)`: is it silent until the last backward pass?

The replica is torch's own DDP, which talks from C++; its collectives pass the dispatcher as all others do. At each one
is noted how many micro-batches have been through the model. Read next: `compression.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading import observe
from ddp_course.grading.compare import close, is_factor, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.gradient_bucketing.training import STUCK

WIDTH, LAYERS, ROWS = 6, 4, 3
Rows = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One call: so many micro-batches, after another call or not."""

    count: int
    seed: int

    def rows(self, rank: int) -> Rows:
        """Return one rank's micro-batches, each with inputs and targets."""
        generator = torch.Generator().manual_seed(self.seed + rank)
        xs = torch.randn(self.count, ROWS, WIDTH, generator=generator, dtype=torch.float64)
        return [(x, x.flip(1) + rank + number) for number, x in enumerate(xs)]


def make_model(seed: int) -> nn.Sequential:
    """Return the same model on every rank, in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double()


def accumulate_driver(rank: int, world_size: int, function: Callable, seed: int, cases: list[Case]) -> dict:
    """Call the function for each case on one replica, whose buckets are settled; then make one ordinary step."""
    model = make_model(seed)
    replica = DistributedDataParallel(model, bucket_cap_mb=8 * WIDTH * WIDTH / 2**20)
    forwards, backwards = [], []
    model.register_forward_pre_hook(lambda module, inputs: forwards.append(len(inputs[0])))
    next(model.parameters()).register_hook(lambda gradient: backwards.append(1))
    ordinary = [_ordinary(replica, cases[0].rows(rank)[0]) for _ in range(3)][-1]
    notes = []
    for case in cases:
        replica.zero_grad()
        forwards.clear()
        backwards.clear()
        with observe.Collectives() as seen:
            state = _noted_at_each(seen, forwards, replica)
            function(replica, nn.functional.mse_loss, case.rows(rank))
        gradients = [p.grad.tolist() if p.grad is not None else [0.0] for p in model.parameters()]
        calls = [(call.op, call.in_backward, *at) for call, at in zip(seen.calls, state, strict=True)]
        notes.append({"gradients": gradients, "calls": calls, "forwards": forwards[:], "backwards": len(backwards)})
    replica.zero_grad()
    return {"cases": notes, "ordinary": ordinary, "after": _ordinary(replica, cases[0].rows(rank)[0])}


def _noted_at_each(seen: observe.Collectives, forwards: list[int], replica: nn.Module) -> list[tuple[int, bool]]:
    """At each collective, note the number of forward passes so far and whether DDP is set to talk."""
    state: list[tuple[int, bool]] = []
    seen.on_call = lambda: state.append((len(forwards), replica.require_backward_grad_sync))
    return state


def _ordinary(replica: nn.Module, rows: tuple[torch.Tensor, torch.Tensor]) -> int:
    """Make one step of forward and backward; return the number of collectives."""
    with observe.Collectives() as seen:
        nn.functional.mse_loss(replica(rows[0]), rows[1]).backward()
    return len(seen.calls)


def whole_batch(seed: int, case: Case, ranks: range, chosen: slice = slice(None)) -> list:
    """Return the gradients of one process on these ranks' micro-batches."""
    model = make_model(seed)
    rows = [pair for rank in ranks for pair in case.rows(rank)[chosen]]
    xs, ys = zip(*rows, strict=True)
    nn.functional.mse_loss(model(torch.cat(xs)), torch.cat(ys)).backward()
    return [p.grad.tolist() for p in model.parameters()]


def accumulate_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Several micro-batches, then one, then another number of them."""
    world_size, seed = rng.choice((2, 3)), rng.randint(1, 10**6)
    cases = [Case(count, rng.randint(1, 10**6)) for count in (rng.choice((4, 5)), 1, rng.choice((2, 3)))]
    notes = answer.run(accumulate_driver, world_size, seed, cases, init=True)

    def first_fault(fault_of: Callable, *indices: int) -> Fault | None:
        faults = (
            fault_of(seed, cases[index], rank, note["cases"][index], note["ordinary"], world_size)
            for index in indices
            for rank, note in enumerate(notes)
        )
        return next(filter(None, faults), None)

    yield "mean", first_fault(_mean_fault, 0, 2)
    yield "silent", first_fault(_silent_fault, 0, 2)
    yield "last", first_fault(_last_fault, 0, 2)
    yield "one", first_fault(_mean_fault, 1) or first_fault(_last_fault, 1)
    yield "after", next(filter(None, (_after_fault(rank, note) for rank, note in enumerate(notes))), None)


def _mean_fault(seed: int, case: Case, rank: int, note: dict, ordinary: int, world_size: int) -> Fault | None:
    right, found = whole_batch(seed, case, range(world_size)), note["gradients"]
    if close(found, right, 1e-9):
        return None
    own, last = range(rank, rank + 1), slice(-1, None)
    k = case.count
    if is_factor(found, right, k):
        cause = "the micro-batches' means are added: divide each loss by the number of micro-batches"
    elif is_factor(found, right, 1 / world_size) or is_factor(found, right, k / world_size):
        cause = "it is divided by the world size twice; torch's DDP averages over the ranks already"
    elif is_factor(found, right, 1 / k):
        cause = "it is divided by the number of micro-batches twice"
    elif any(
        is_factor(found, whole_batch(seed, case, own), f) or close(found, whole_batch(seed, case, own)) for f in (k, 2)
    ):
        cause = "this is the rank's own gradient: the last micro-batch must be outside no_sync, forward and backward"
    elif any(_alike(found, whole_batch(seed, case, range(world_size), part), k) for part in (last, slice(0, 1))):
        cause = "one micro-batch only is in it; leave .grad alone between them, so that gradients add up"
    elif all(gradient == [0.0] for gradient in found):
        cause = "there is no gradient: call backward for every micro-batch, and no zero_grad at the end"
    elif k > 1 and _alike(found, whole_batch(seed, case, range(world_size), slice(0, -1)), k):
        cause = "the last micro-batch is missing"
    else:
        cause = "every micro-batch counts the same: each loss divided by their number, all added up in .grad"
    expected = f"with {k} micro-batches, the last bias's gradient {short(right[-1])}"
    return Fault(expected, short(found[-1]), rank, cause)


def _alike(found: list, right: list, k: int) -> bool:
    return close(found, right) or any(is_factor(found, right, f) for f in (1 / k, (k - 1) / k, k - 1, k))


def _silent_fault(seed: int, case: Case, rank: int, note: dict, ordinary: int, world_size: int) -> Fault | None:
    expected = f"{case.count} micro-batches, each with a forward and a backward pass; nothing sent before the last"
    early = [call for call in note["calls"] if call[2] < case.count]
    if note["forwards"] != [ROWS] * case.count:
        found = f"forward passes of {note['forwards']} rows"
        cause = "call the replica once for each micro-batch; all at once need the memory that accumulation saves"
    elif note["backwards"] != case.count:
        found = f"{note['backwards']} backward passes"
        cause = "call backward for each micro-batch, so that its graph is freed before the next forward pass"
    elif not early:
        return None
    else:
        found = f"{len(early)} collectives before the last"
        if any(not syncs for *_, syncs in early):
            cause = "no_sync encloses backward only; torch's DDP decides in the forward pass, which must be inside too"
        else:
            cause = "all micro-batches but the last belong inside replica.no_sync(), forward and backward"
    return Fault(expected, found, rank, cause)


def _last_fault(seed: int, case: Case, rank: int, note: dict, ordinary: int, world_size: int) -> Fault | None:
    calls = [call for call in note["calls"] if call[2] == case.count]
    expected = f"{ordinary} collectives in the last of {case.count} backward passes, as in an ordinary step"
    if not calls:
        cause = "the last micro-batch must have a forward and a backward pass of its own, outside no_sync"
        return Fault(expected, "no collective", rank, cause)
    in_backward = [call for call in calls if call[1]]
    if len(in_backward) != len(calls):
        cause = (
            "something is sent outside backward; DDP's own hooks do it all, if the last micro-batch is outside no_sync"
        )
        return Fault(expected, f"{len(calls) - len(in_backward)} collectives outside backward", rank, cause)
    if len(calls) == ordinary:
        return None
    cause = "each bucket is sent once in the last backward pass, by DDP itself"
    return Fault(expected, f"{len(calls)} collectives", rank, cause)


def _after_fault(rank: int, note: dict) -> Fault | None:
    expected = f"{note['ordinary']} collectives in an ordinary step afterwards"
    if not note["cases"][0]["forwards"]:
        return Fault(expected, "no step before it", rank, "call the replica for each micro-batch")
    if note["after"] == note["ordinary"]:
        return None
    cause = "no_sync was left on: use it as `with replica.no_sync():`, which switches back, also after an error"
    return Fault(expected, f"{note['after']}", rank, cause)


ACCUMULATE = Exercise(
    "07.3",
    "Accumulate without talking",
    "accumulate",
    15,
    (
        Check("mean", "the gradients are those of the whole batch", 2),
        Check("silent", "nothing is sent before the last micro-batch", 1),
        Check("last", "the last backward pass sends each bucket once", 1),
        Check("one", "a single micro-batch works, too", 1),
        Check("after", "an ordinary step afterwards averages as before", 1),
    ),
    accumulate_judge,
    refused=("ddp_course.parallel.ddp.BucketedDDP", "ddp_course.parallel.naive.NaiveDDP"),
    hints=(
        STUCK,
        (r"'Sequential' object has no attribute 'no_sync'", "no_sync belongs to the replica, not to its module"),
        (r"context manager protocol", "use it as `with replica.no_sync():`, with the brackets"),
        (r"backward through the graph a second time", "call backward once for each micro-batch's own loss"),
    ),
)
