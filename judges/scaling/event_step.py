"""13.3 `step_seconds(...)`: how long does a step take, and how much of its communication shows?

A pure function, judged by playing the same events in the simplest way. The cases are made so that each rule counts in
one of them: the last gradient of a bucket, one message at a time, the order of the plan, what backward still has to do.

Source: Li et al. 2020 (arXiv 2006.15704), section 3.2.3, for the rules; Thakur et al. 2005 for the ring's time.
Read next: `judges/beyond_ddp/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from judges.scaling.slips import first_fault, form_fault, number_fault, same

NAMES = "step_s, exposed_s"


class Case(NamedTuple):
    """The arguments of the learner's function."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    gradients: list[tuple[int, float]]  # bytes, ready
    buckets: list[list[int]]
    world_size: int
    latency_s: float
    bytes_per_s: float


def driver(rank: int, world_size: int, function: Callable, cases: list[Case]) -> list[Any]:
    """Return the learner's answer for each case, given copies."""
    return [
        plain(function(*case[:3], list(case.gradients), [list(b) for b in case.buckets], *case[5:])) for case in cases
    ]


def step_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """One bucket; a fast link; a slow one; a bucket that is full too early; and the edges.

    Latencies, and gradients that are listed out of order, count in two of them, so that one slip does not cost all.
    """
    one = [_simple(_case(rng, 1, 0.8)) for _ in range(2)]
    fast = [_case(rng, 3, 0.3) for _ in range(2)]
    slow = [_case(rng, 4, 1.6) for _ in range(3)]
    early = [_simple(_early(_case(rng, 3, 2.4))) for _ in range(2)]
    edges = [_case(rng, 2, 0.7)._replace(world_size=1), _nothing(_case(rng, 2, 0.5))]
    edges += [_rest(_simple(_case(rng, 2, 0.2))), _rest(_alone(_case(rng, 1, 1.2)))]
    found = iter(answer.run(driver, 1, one + fast + slow + early + edges, init=False)[0])
    for key, cases in (("one", one), ("overlap", fast), ("queue", slow), ("order", early), ("edges", edges)):
        yield key, first_fault(cases, [next(found) for _ in cases], _fault)


# --- The cases -------------------------------------------------------------------------------------


def _case(rng: Random, buckets: int, load: float) -> Case:
    """Gradients that are ready one after the other; all messages together take `load` of backward."""
    world_size, per_bucket = rng.choice((2, 3, 4, 8)), 3
    count = buckets * per_bucket
    ready = sorted(rng.uniform(0.05, 0.98) for _ in range(count - 1)) + [1.0]
    backward = rng.uniform(0.05, 0.2)
    gradients = [(rng.randrange(200, 900) * 1024, round(backward * r, 6)) for r in ready]
    # As registered: the first layer's gradient is ready last. Within a bucket the order is not that of the moments.
    gradients.reverse()
    plan = [[count - 1 - (b * per_bucket + i) for i in range(per_bucket)] for b in range(buckets)]
    for bucket in plan:
        _mixed(bucket, gradients)
    nbytes = sum(size for size, _ in gradients)
    latency = load * backward * 0.2 / (2 * (world_size - 1) * buckets)
    speed = 2 * (world_size - 1) / world_size * nbytes / (0.8 * load * backward)
    last = max(ready_s for _, ready_s in gradients)
    return Case(round(backward / 2.2, 6), last, round(backward / 9, 6), gradients, plan, world_size, latency, speed)


def _mixed(bucket: list[int], gradients: list[tuple[int, float]]) -> None:
    """Let the latest gradient stand between the others, so that it matters who is looked at."""
    earliest, middle, latest = sorted(bucket, key=lambda index: gradients[index][1])
    bucket[:] = [earliest, latest, middle]


def _early(case: Case) -> Case:
    """The same with a second bucket that is full before the first."""
    moments = {index: case.gradients[index][1] for bucket in case.buckets[:2] for index in bucket}
    order = sorted(moments.values())
    gradients = list(case.gradients)
    for index, ready in zip([*case.buckets[1], *case.buckets[0]], order, strict=True):
        gradients[index] = (gradients[index][0], ready)
    for bucket in case.buckets:
        _mixed(bucket, gradients)
    return case._replace(gradients=gradients)


def _rest(case: Case) -> Case:
    """The same, with layers before the first trained one: backward goes on when all gradients are there."""
    return case._replace(backward_s=1.4 * case.backward_s)


def _simple(case: Case) -> Case:
    """The same without latency, and the gradients of each bucket in the order in which they are ready."""
    plan = [sorted(bucket, key=lambda index: case.gradients[index][1]) for bucket in case.buckets]
    return case._replace(buckets=plan, latency_s=0.0)


def _alone(case: Case) -> Case:
    """The same with one gradient in all, ready last, and no latency."""
    nbytes = sum(size for size, _ in case.gradients)
    return case._replace(gradients=[(nbytes, case.backward_s)], buckets=[[0]], latency_s=0.0)


def _nothing(case: Case) -> Case:
    """No bucket, as within no_sync."""
    return case._replace(buckets=[])


# --- The events ------------------------------------------------------------------------------------


def ring_s(case: Case, nbytes: int) -> float:
    return 2 * (case.world_size - 1) * (case.latency_s + nbytes / case.world_size / case.bytes_per_s)


def full_s(case: Case, choose: Callable = max) -> list[float]:
    """When each bucket has its last gradient."""
    return [choose(case.gradients[i][1] for i in bucket) for bucket in case.buckets]


def end_s(case: Case, starts: list[float], lasts: list[float], *, queue: bool = True, in_order: bool = True) -> float:
    """When the last message has arrived, after backward's start."""
    launched, free, ends = 0.0, 0.0, [0.0]
    order = range(len(starts)) if in_order else sorted(range(len(starts)), key=starts.__getitem__)
    for bucket in order:
        launched = max(launched, starts[bucket]) if in_order else starts[bucket]
        begin = max(launched, free) if queue else launched
        free = begin + lasts[bucket]
        ends.append(free)
    return max(ends)


def worked(case: Case) -> tuple[float, float]:
    """The step and its exposed part."""
    lasts = [ring_s(case, _bytes(case, bucket)) for bucket in case.buckets] if case.world_size > 1 else []
    end = end_s(case, full_s(case), lasts) if lasts else 0.0
    exposed = max(0.0, end - case.backward_s)
    return case.forward_s + case.backward_s + exposed + case.optimizer_s, exposed


def _bytes(case: Case, bucket: list[int]) -> int:
    return sum(case.gradients[i][0] for i in bucket)


def _said(case: Case) -> str:
    counts = (len(case.buckets), "bucket"), (len(case.gradients), "gradient"), (case.world_size, "rank")
    buckets, gradients, ranks = (f"{count} {what}{'s' * (count != 1)}" for count, what in counts)
    return f"{buckets} of {gradients}, {ranks}, exposed seconds"


def _slips(case: Case) -> dict[str, float]:
    """The exposed part that each mistake gives."""
    w, full = case.world_size, full_s(case)
    nbytes = [_bytes(case, bucket) for bucket in case.buckets]
    lasts = [ring_s(case, size) for size in nbytes]

    def shown(end: float) -> float:
        return max(0.0, end - case.backward_s)

    def with_times(times: list[float]) -> float:
        return shown(end_s(case, full, times))

    return {
        "the link carries one message at a time: a bucket waits until the one before has arrived": shown(
            end_s(case, full, lasts, queue=False)
        ),
        "the link carries one message at a time, and each waits for the one before": shown(
            end_s(case, full, lasts, queue=False, in_order=False)
        ),
        "buckets are launched in the order of the plan, on every rank: one that is full early waits": shown(
            end_s(case, full, lasts, in_order=False)
        ),
        "each bucket may start when it is full; here all messages wait for the end of backward": sum(lasts),
        "a bucket waits for the latest of its gradients, not for an earlier one": shown(
            end_s(case, full_s(case, min), lasts)
        ),
        "a bucket waits for the latest of its gradients, wherever that one stands in the list": shown(
            end_s(case, [case.gradients[bucket[-1]][1] for bucket in case.buckets], lasts)
        ),
        "exposed is what lies after backward, not what lies after the last bucket was full": max(
            0.0, end_s(case, full, lasts) - max([*full, 0.0])
        ),
        "a ring takes 2 (W - 1) messages: as many to hand round as to add up": with_times([t / 2 for t in lasts]),
        "each of the 2 (W - 1) messages has a latency": with_times(
            [t - (2 * (w - 1) - 1) * case.latency_s for t in lasts]
        ),
        "the latency is forgotten": with_times([t - 2 * (w - 1) * case.latency_s for t in lasts]),
        "each message of a ring carries a W-th of the bytes": with_times(
            [2 * (w - 1) * (case.latency_s + size / case.bytes_per_s) for size in nbytes]
        ),
        "each bucket is a message of its own: its latencies, its turn": with_times(
            [0.0] * (len(full) - 1) + [ring_s(case, sum(nbytes))] if full else []
        ),
    }


def _fault(case: Case, answer: Any) -> Fault | None:
    if fault := form_fault(answer, NAMES):
        return fault
    step, exposed = worked(case)
    if same(answer[0], exposed) and same(answer[1], step):
        found = f"({answer[0]:.6g}, {answer[1]:.6g})"
        return Fault(f"(step_s, exposed_s): ({step:.6g}, {exposed:.6g})", found, cause="the step comes first")
    if answer[1] < -1e-9:
        cause = "when all has arrived before backward ends, nothing is exposed: not less than 0"
        return Fault(f"{_said(case)}: {exposed:.6g}", f"{answer[1]:.6g}", cause=cause)
    otherwise = "a message starts when its bucket is launched and the link is free; exposed is what lies after backward"
    if case.world_size == 1:
        otherwise = "one rank sends nothing, so nothing is exposed"
    if fault := number_fault(_said(case), answer[1], exposed, _slips(case), otherwise):
        return fault
    parts = (case.forward_s, case.backward_s, case.optimizer_s)
    slips = {
        "forward is part of the step": step - parts[0],
        "the optimizer is part of the step": step - parts[2],
        "the step is longer by what is exposed": sum(parts),
        "the messages that backward hides take no time of the step": sum(parts)
        + sum(ring_s(case, _bytes(case, bucket)) for bucket in case.buckets),
        "backward and optimizer are part of the step too": case.forward_s + exposed,
    }
    what = _said(case).replace("exposed seconds", "seconds of the step")
    return number_fault(what, answer[0], step, slips, "forward + backward + exposed + optimizer")


STEP = Exercise(
    "13.3",
    "A step on paper (stretch)",
    "step_seconds",
    30,
    (
        Check("one", "one bucket", 1),
        Check("overlap", "several buckets and a fast link", 1),
        Check("queue", "a slow link: one message at a time", 2),
        Check("order", "a bucket that is full too early", 1),
        Check("edges", "one rank, no bucket, a backward that goes on", 1),
    ),
    step_judge,
    refused=("ddp_course.scaling.simulate.predict", "ddp_course.collectives.ring_seconds"),
    hints=(
        (r"iterable argument is empty|max\(\) arg is an empty|IndexError", "there may be no bucket at all"),
        (r"ZeroDivisionError", "one rank sends nothing: no ring, no division"),
        (r"missing \d required|takes \d+ positional", "the eight arguments come in the order of the text"),
        (r"no result after", "walk from event to event, not in small steps of time"),
    ),
)
