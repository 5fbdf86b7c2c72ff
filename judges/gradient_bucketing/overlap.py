"""07.2 `OverlappedDDP(module, cap_bytes)`: do buckets leave while backward still computes?

Overlap is a statement about order, so no clock is read: at each collective is noted which gradients were there. In the
first step the last rank begins its backward pass only when all others are through with theirs, and a little later than
they could have needed its gradients. A rank that talks in a blocking way never gets through; one that does not wait at
the end is done too early. Read next: `accumulation.py`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import close, factor
from ddp_course.grading.vocabulary.expect import (
    Expect,
    all_of,
    equals,
    exercise,
    first_mistake,
    follows,
    nothing,
    turned,
)
from ddp_course.grading.vocabulary.observe import Collectives, Log
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.gradient_bucketing import planning

STEPS, ROWS, RATE = 3, 4, 0.5
TOLERANCE = 1e-9
THROUGH_WAIT_S, FINISHED_WAIT_S, LATE_S = 3.0, 0.2, 0.02
BUCKETS = 3  # collectives in a step
# Of all exercises' hints: the limit of the run came before that of the collective.
STUCK = {
    "limit: waited in (all_reduce|barrier|broadcast|reduce|all_gather)": "some ranks wait in a "
    "collective that another one skips, or calls at another place; look for a branch on the rank"
}


@dataclass(frozen=True)
class Task:
    """A model, its data and a cap, all made from numbers."""

    layers: int
    width: int
    seed: int
    cap: int
    gate: str  # where ranks leave marks for each other in the first step; nothing if they do not

    def model(self) -> nn.Sequential:
        """Return the same model on every rank."""
        return Crossed(*tasks.net(self.seed, *[self.width] * (self.layers + 1)))

    @property
    def sizes(self) -> list[int]:
        """The bytes of each gradient."""
        return [parameter.nbytes for parameter in self.model().parameters()]

    @property
    def plan(self) -> list[int]:
        """The bytes of each bucket."""
        case = planning.Case(self.sizes, ["float64"] * len(self.sizes), self.cap, self.cap)
        return case.bytes_of(planning.greedy(case))

    def due(self, n_bytes: int, arrived: list[int]) -> int:
        """Return with how many gradients so many bytes are there, filled as planned or in the order of arrival."""
        sizes, place = self.sizes, {index: n for n, index in enumerate(arrived, 1)}
        found = [0]
        for order in (arrived, list(reversed(range(len(sizes))))):
            filled = accumulate(sizes[index] for index in order)
            count = next((n for n, size in enumerate(filled, 1) if size >= n_bytes), len(order))
            found += [place.get(index, len(arrived)) for index in order[:count]]  # those that never come: last
        return max(found)


class Crossed(nn.Sequential):
    """The last two layers are used in the other order: so the last gradient in a plan need not be the last to come."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *others, one, activation, two = self
        for module in (*others, two, activation, one):
            x = module(x)
        return x


class Gate:
    """Holds the last rank's backward pass back, until the other ranks' marks tell that they are through."""

    def __init__(self, path: str, rank: int, world_size: int):
        self.store, self.path, self.rank, self.last = c10d._get_default_store(), path, rank, world_size - 1
        self.met: dict[str, bool] = {}

    def mark(self, name: str) -> None:
        if self.path:
            self.store.set(f"{self.path}/{name}/{self.rank}", "yes")

    def hold(self, gradient: torch.Tensor) -> None:
        if self.rank == self.last and not self.path:
            time.sleep(LATE_S)
        elif self.rank == self.last:
            self._wait_for("through", THROUGH_WAIT_S, all)
            self._wait_for("finished", FINISHED_WAIT_S, any)

    def _wait_for(self, name: str, seconds: float, ready: Callable) -> None:
        keys, deadline = [f"{self.path}/{name}/{rank}" for rank in range(self.last)], time.monotonic() + seconds
        while not (met := ready(self.store.check([key]) for key in keys)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.met[name] = met


def act(cls, task: Task, rank: int, world_size: int) -> Note:
    """Train some steps; note gradients, weights, a log of each step, and how many gradients each collective found.

    In the logs, 0 is the moment when the first layer's weight has its gradient.
    """
    model, gate, note = task.model(), Gate(task.gate, rank, world_size), Note(gradients=[], sent=[], arrived=[])
    logs: list[Log] = []
    arrived: list[int] = []  # parameters, in the order in which their gradients come
    for index, p in enumerate(model.parameters()):  # before the answer's own hooks
        p.register_hook(lambda gradient, index=index: arrived.append(index))

    def first_layer() -> None:
        gate.mark("through")
        logs[-1].text += "0"

    next(model.parameters()).register_hook(lambda gradient: first_layer())
    replica = cls(model, task.cap)
    for step in range(STEPS):
        x, y = tasks.batch(task.seed, rank, step, ROWS, task.width)
        model.zero_grad()
        replica.train(step != 1)  # gradients are averaged in eval mode, too
        there: list[int] = []
        arrived.clear()
        with Log(model) as log, Collectives() as seen:
            logs.append(log)
            seen.on_call = lambda there=there: there.append(len(arrived))
            outputs = replica(x)
            outputs.register_hook(gate.hold)
            nn.functional.mse_loss(outputs, y).backward()
            replica.finish_gradient_sync()
            gate.mark("finished")
            found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        gate.path = ""
        note["sent"].append([pair for pair in zip(seen.calls, there, strict=True) if pair[0].op != "barrier"])
        note["arrived"].append(list(arrived))
        note["gradients"].append(torch.cat([gradient.flatten() for gradient in found]).tolist())
        tasks.descend(model, torch.tensor(note["gradients"][-1], dtype=torch.float64), RATE)
    blocked = "" if gate.met.get("through", True) else "backward stands still until the last rank has begun its own"
    early = "it returned while the last rank had not sent its gradients yet" if gate.met.get("finished") else ""
    note |= {"parameters": 2 * task.layers, "blocked": blocked, "early": early}
    return Note(note, weights=tasks.weights(model), logs=[log.text for log in logs], first=[logs[0].text])


def rounds(rng: Random) -> list[Round]:
    """Six layers in three buckets, with a gate; then seven in three, with another number of ranks.

    First a bucket has just the cap, then the gradient that fills it is too large for it.
    """
    chosen, names = [], ("gated", "free")
    for name, ranks, layers, per_bucket in zip(names, rng.sample((2, 3, 4), 2), (6, 7), (2, 2.5), strict=True):
        width, gate = rng.randint(5, 9), f"gate/{uuid.uuid4()}" if name == "gated" else ""
        cap = int(8 * per_bucket * (width * width + width))
        task = Task(layers, width, rng.randint(1, 10**6), cap, gate)
        chosen.append(Round(ranks, [(name, task)]))
    return chosen


# --- What is expected ------------------------------------------------------------------------------


def one_process(seen: Seen, ranks: slice = slice(None), times: float = 1) -> tuple[list, list[float]]:
    """Return the gradients of each step, and the last weights, of one process.

    Args:
        ranks: whose rows count. times: a factor too much.
    """
    task, model, gradients = seen.case, seen.case.model(), []
    for step in range(STEPS):
        batches = [tasks.batch(task.seed, rank, step, ROWS, task.width) for rank in range(seen.world_size)[ranks]]
        gradients.append(torch.stack([tasks.gradient(model, rows) for rows in batches]).mean(0) * times)
        tasks.descend(model, gradients[-1], RATE)
    return [gradient.tolist() for gradient in gradients], tasks.weights(model)


def mistakes(seen: Seen) -> dict[str, dict]:
    """Return the knobs that each mistake turns."""
    own, ranks = slice(seen.rank, seen.rank + 1), seen.world_size
    return {
        "gradients are summed over the ranks, not averaged: divide by the world size": {"times": ranks},
        "gradients are divided by the world size twice; once is enough, before the sum or after it":
            {"times": 1 / ranks},
        "this is the rank's own gradient; copy the averages from the bucket back into each .grad": {"ranks": own},
        "this is the rank's own gradient, divided: its sum over the ranks never came into .grad":
            {"ranks": own, "times": 1 / ranks},
        "all gradients are None or 0 when finish_gradient_sync has returned": {"times": 0},
    }  # fmt: skip


def slips(seen: Seen) -> Iterator[tuple[str, Any]]:
    early = any(note["early"] for note in seen.everyone) and any(note["sent"][0] for note in seen.everyone)
    unwaited = "the averages were used before they had arrived; wait() for every work handle, then copy back"
    yield unwaited, seen["gradients"][0] if early else None
    yield from turned(first, mistakes)(seen)


def otherwise(seen: Seen, found: list[float]) -> str:
    right, sizes = first(seen), [p.numel() for p in seen.case.model().parameters()]
    if (times := factor(found, right)) is not None:
        return f"gradients are {times:.3g} times the mean; divide by dist.get_world_size(), once"
    if close(sorted(found), sorted(right), TOLERANCE):
        return "the numbers are right, their places are not: split the bucket in the order in which it was put together"
    parts = zip(*(torch.tensor(numbers).split(sizes) for numbers in (found, right)), strict=True)
    if any(close(a, b) for a, b in parts):
        return (
            "some parameters have the average, others have not: every gradient must be in a bucket that is sent, and a "
            "bucket is left alone between all_reduce(async_op=True) and wait()"
        )
    return "a bucket was sent before all its gradients were in it, or copied back to the wrong parameters"


def left_path(seen: Seen, found: list[float]) -> str:
    steps = enumerate(zip(seen["gradients"], one_process(seen)[0], strict=True), 1)
    step = next((step for step, (ours, right) in steps if not close(ours, right, TOLERANCE)), 0)
    causes = (
        "the gradients are right, the weights are not: do not change weights, nor gradients after the sync",
        "the gradients of the first step are wrong already",
        f"step 1 is right, step {step} is not: a bucket that has been sent must wait for all its gradients again, so "
        "reset what counts them; forget the handles of the step before, and build the flat tensor again from .grad",
    )
    return causes[min(step, 2)]


def first(seen: Seen, **knobs) -> list[float]:
    """Return the gradients of the first step."""
    return one_process(seen, **knobs)[0][0]


LAST = {"tolerance": TOLERANCE, "shown": lambda found: found[-4:]}  # of all numbers, those of the last bias are shown
gradients = equals("the last bias's gradient", first, slips, otherwise, of=lambda seen: seen["gradients"][0], **LAST)
path = f"after {STEPS} steps, as in one process, the last bias"
weights = equals(path, lambda seen: one_process(seen)[1], lambda seen: (), left_path, of="weights", **LAST)


def log_is(meaning: str, causes: dict[str, str], of: str = "logs") -> Expect:
    """Expect of each log, in words, a meaning; by pattern, the cause when it is the first to fail."""
    return follows(*((pattern, meaning, cause) for pattern, cause in causes.items()), of=of)


SILENT = "nothing was sent: the hooks launch no collective, or not in each step; reset what counts the gradients"
WAITS = "a bucket that is full must not wait for gradients of another one: launch it in the hook of its last gradient"
count_is_right = log_is(
    f"in each step, {BUCKETS} collectives for %(parameters)s gradients",
    {
        r".*[sS].*": SILENT,
        r"(?!([^sS]*[sS]){%(parameters)s}).*": "one collective for each parameter: put the gradients of a bucket into "
        "one flat tensor",
        rf"([^sS]*[sS]){{{BUCKETS}}}.*": "a bucket holds more than the cap, or some are never sent: close it when it "
        "has reached cap_bytes (plan_buckets of the course wants first_cap_bytes as well), and let each hook know its "
        "own bucket",
        rf"([^sS]*[sS][^sS]*){{{BUCKETS}}}": "more collectives than buckets: close a bucket when it has reached the "
        "cap, not before, and send it once, when its last gradient is there",
    },
)
in_time = log_is(
    "each bucket but the last starts before the first layer's weight has its gradient (0)",
    {
        r".*[sS].*": SILENT,
        r".*s.*": "all collectives start after backward; launch a bucket from a hook, with its last gradient",
        r".*[sS].*[sS].*": "one bucket for everything is full only when backward is over; close buckets at the cap",
        r"[^0]*[sS].*": "the buckets wait for the first layer: either they are planned from the front, so that the "
        "first to be sent is the last to be full (go through the parameters in reverse), or all are sent at the end",
        r"[^0]*(0[^sS]*[sS]?[^sS]*)?": WAITS,
    },
)


def as_planned(seen: Seen) -> Fault | None:
    """Each step sends the buckets of the plan, of so many bytes, and nothing else."""
    steps = ([call.n_bytes for call, _ in sent] for sent in seen["sent"])
    other = next((str(sent) for sent in steps if sent != seen.case.plan), "")
    causes = {"a bucket closes when it has reached the cap, not later, and holds its own gradients only": other}
    return first_mistake(f"collectives of {seen.case.plan} bytes in each step", causes, seen.rank)


def at_once(seen: Seen) -> Fault | None:
    """A bucket starts with its last gradient, before another one comes."""
    for sent, arrived in zip(seen["sent"], seen["arrived"], strict=True):
        on_way = accumulate(call.n_bytes for call, _ in sent)
        for number, ((call, there), n_bytes) in enumerate(zip(sent, on_way, strict=True), 1):
            if call.op == "all_reduce" and there > (due := seen.case.due(n_bytes, arrived)):
                expected = f"bucket {number} starts with its last gradient, number {due} of {len(arrived)}"
                return Fault(expected, f"it started with number {there}", seen.rank, WAITS)
    return None


counted, overlapped = all_of(count_is_right, as_planned), all_of(in_time, at_once)
AT_WORK = "a rank computes on while its buckets wait for a slower rank"
asynchronous = all_of(
    log_is(AT_WORK, {r".*s.*": "nothing is launched while backward computes"}, of="first"),
    nothing(
        *("blocked", AT_WORK),
        "the hook waits for the slower rank: give the collective async_op=True, keep its handle, and call wait() in "
        "finish_gradient_sync, not in the hook",
    ),
)
THERE = "finish_gradient_sync returns when all averages are there"
waited = all_of(
    log_is(THERE, {r".*[sS].*": SILENT}, of="first"),
    nothing("early", THERE, "keep the handle of each asynchronous collective, and call wait() on every one of them"),
)

OVERLAP = exercise(
    *("07.2", "Send while backward still computes", "OverlappedDDP", 30),
    act=act,
    rounds=rounds,
    checks={
        "gradients": ("one step: the gradients are those of the whole batch", 2, gradients, "gated free"),
        "steps": ("three steps: the weights are those of one process", 1, weights, "gated free"),
        "buckets": ("there is one collective for each bucket", 1, counted, "gated free"),
        "overlap": ("buckets leave before backward is at the first layer", 2, overlapped, "gated free"),
        "async": ("backward does not wait for other ranks", 1, asynchronous, "gated free"),
        "wait": ("the averages are there when finish_gradient_sync returns", 1, waited, "gated free"),
    },
    refused=(
        *("torch.nn.parallel.DistributedDataParallel", "ddp_course.parallel.ddp.BucketedDDP"),
        *("ddp_course.parallel.grad_bucket.GradBucket", "ddp_course.parallel.naive.NaiveDDP"),
    ),
    hints={
        **STUCK,
        r"no attribute 'finish_gradient_sync'": "the class needs a method finish_gradient_sync, which may do nothing "
        "if backward itself waits",
        r"mandatory and cannot be None|'NoneType' object has no attribute '(flatten|reshape|view|ravel|numel|div)":
            "a bucket was sent before all its gradients were there: count those that are missing, start counting again "
            "in each backward pass, and use register_post_accumulate_grad_hook, which comes when .grad is set",
        r"no attribute 'register_hook'": "forward must return what the module returns",
        r"cannot assign .* before Module.__init__|has no attribute '_parameters'|before Module.__init__":
            "call super().__init__() first",
        r"forward\(\)|_forward_unimplemented|missing the required \"forward\"": "forward passes its inputs on to the "
        "module and returns what that returns",
    },
)  # fmt: skip
