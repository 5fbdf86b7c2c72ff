"""14.3 `step_seconds(...)`: how long does a step take, and how much of its communication shows?

A pure function, judged by playing the same events in the simplest way. The cases are made so that each rule counts in
one of them: the last gradient of a bucket, one message at a time, the order of the plan, what backward still has to do.

Source: Li et al. 2020 (arXiv 2006.15704), section 3.2.3, for the rules; Thakur et al. 2005 for the ring's time.
Read next: `judges/sharding/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any, NamedTuple

from ddp_course.grading.vocabulary.compare import close, flat
from ddp_course.grading.vocabulary.expect import called, equals, exercise, turned
from ddp_course.grading.vocabulary.play import Round, Seen
from judges.scaling.slips import numbers

FLOOR = 1e-3  # of seconds, so that 0 equals what is below a billionth


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


def rounds(rng: Random) -> list[Round]:
    """One bucket; a fast link; a slow one; a bucket that is full too early; and the edges.

    Latencies, and gradients that are listed out of order, count in two of them, so that one slip does not cost all.
    """
    cases = {
        "one": [_simple(_case(rng, 1, 0.8, unit=1)) for _ in range(2)],  # so few bytes that no W-th is whole
        "overlap": [_case(rng, 3, 0.3) for _ in range(2)],
        "queue": [*(_case(rng, 4, 1.6) for _ in range(3)), _stalled(_case(rng, 3, 1.2))],
        "order": [_simple(_early(_case(rng, 3, 2.4))) for _ in range(2)],
        "edges": [
            _case(rng, 2, 0.7)._replace(world_size=1),
            _case(rng, 2, 0.5)._replace(buckets=[]),  # as within no_sync
            *(_rest(case) for case in (_simple(_case(rng, 2, 0.2)), _alone(_case(rng, 1, 1.2)))),
        ],
    }
    return [Round(1, [(name, case) for name, some in cases.items() for case in some], init=False)]


def _case(rng: Random, buckets: int, load: float, unit: int = 1024) -> Case:
    """Gradients that are ready one after the other; all messages together take `load` of backward."""
    world_size, per_bucket = rng.choice((2, 3, 4, 8)), 3
    count = buckets * per_bucket
    ready = sorted(rng.uniform(0.05, 0.98) for _ in range(count - 1)) + [1.0]
    backward = rng.uniform(0.05, 0.2)
    gradients = [(rng.randrange(201, 900, 2) * unit, round(backward * r, 6)) for r in ready]
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
    late, early, *_ = case.buckets
    order = sorted(case.gradients[index][1] for index in late + early)
    for index, ready in zip([*early, *late], order, strict=True):
        case.gradients[index] = (case.gradients[index][0], ready)
    for bucket in case.buckets:
        _mixed(bucket, case.gradients)
    return case


def _stalled(case: Case) -> Case:
    """The same with a first bucket that has arrived long before the second is full: the link waits in between."""
    first, late_s = case.buckets[0], 0.85 * case.backward_s
    moments = [0.1 * ready if i in first else late_s + 0.15 * ready for i, (_, ready) in enumerate(case.gradients)]
    return case._replace(gradients=[(size, s) for (size, _), s in zip(case.gradients, moments, strict=True)])


def _rest(case: Case) -> Case:
    """The same, with layers before the first trained one: backward goes on when all gradients are there."""
    return case._replace(backward_s=1.4 * case.backward_s)


def _simple(case: Case) -> Case:
    """The same without latency, and the gradients of each bucket in the order in which they are ready."""
    plan = [sorted(bucket, key=lambda index: case.gradients[index][1]) for bucket in case.buckets]
    return case._replace(buckets=plan, latency_s=0.0)


def _alone(case: Case) -> Case:
    """The same with one gradient in all, ready last, and no latency."""
    gradients = [(sum(size for size, _ in case.gradients), case.backward_s)]
    return case._replace(gradients=gradients, buckets=[[0]], latency_s=0.0)


# --- The events, with knobs for what is wrong ------------------------------------------------------


def _full(case: Case, bucket: list[int], choose: Callable = max) -> float:
    return choose(case.gradients[i][1] for i in bucket)


def _ring(case: Case, nbytes: int, latencies: int | None = None) -> float:
    messages = 2 * (case.world_size - 1)
    latency_s = case.latency_s * (messages if latencies is None else latencies)
    return latency_s + messages * nbytes / case.world_size / case.bytes_per_s


def exposed(seen: Seen, full=_full, ring=_ring, queue=True, order=True, one=False, end_s=None) -> list[float]:
    """Return how long communication goes on after backward, and what is next to nothing.

    Args:
        full, ring: when a bucket is full, how long its message takes. queue, order: whether messages wait for each
            other, and buckets. one: whether all gradients are one bucket. end_s: in place of backward's end.
    """
    case, launched, free, end = seen.case, 0.0, 0.0, 0.0
    plan = case.buckets if case.world_size > 1 else []
    plan = [sum(plan, [])] if one and plan else plan
    for bucket in plan if order else sorted(plan, key=lambda bucket: full(case, bucket)):
        launched = max(launched if order else 0.0, full(case, bucket))
        free = max(launched, free if queue else 0.0) + ring(case, sum(case.gradients[i][0] for i in bucket))
        end = max(end, free)
    return [max(0.0, end - (case.backward_s if end_s is None else end_s)), FLOOR]


def step(seen: Seen) -> float:
    """Return the seconds of the step."""
    return sum(seen.case[:3]) + exposed(seen)[0]


def _mistakes(seen: Seen) -> dict[str, dict]:
    last = max((_full(seen.case, bucket) for bucket in seen.case.buckets), default=0.0)
    return {
        "the link carries one message at a time: a bucket waits until the one before has arrived": {"queue": False},
        "the link carries one message at a time, and each waits for the one before": {"queue": False, "order": False},
        "buckets are launched in the order of the plan, on every rank: one that is full early waits": {"order": False},
        "each bucket may start when it is full; here all messages wait for the end of backward":
            {"full": lambda case, bucket: case.backward_s},
        "a bucket waits for the latest of its gradients, not for an earlier one": {"full": partial(_full, choose=min)},
        "a bucket waits for the latest of its gradients, wherever that one stands in the list":
            {"full": lambda case, bucket: case.gradients[bucket[-1]][1]},
        "exposed is what lies after backward, not what lies after the last bucket was full": {"end_s": last},
        "a ring takes 2 (W - 1) messages: as many to hand round as to add up": {"ring": lambda *a: _ring(*a) / 2},
        "each of the 2 (W - 1) messages has a latency": {"ring": partial(_ring, latencies=1)},
        "the latency is forgotten": {"ring": partial(_ring, latencies=0)},
        "each message of a ring carries a W-th of the bytes":
            {"ring": lambda case, nbytes: _ring(case, case.world_size * nbytes)},
        "a W-th of the bytes need not be a whole number of them":
            {"ring": lambda case, nbytes: _ring(case, nbytes // case.world_size * case.world_size)},
        "each bucket is a message of its own: its latencies, its turn": {"one": True},
    }  # fmt: skip


def _step_slips(seen: Seen) -> Iterator[tuple[str, float]]:
    forward, backward, optimizer, gradients, buckets, *_ = seen.case
    hidden = sum(_ring(seen.case, sum(gradients[i][0] for i in bucket)) for bucket in buckets)
    yield "forward is part of the step", step(seen) - forward
    yield "the optimizer is part of the step", step(seen) - optimizer
    yield "the step is longer by what is exposed", forward + backward + optimizer
    yield "the messages that backward hides take no time of the step", forward + backward + optimizer + hidden
    yield "backward and optimizer are part of the step too", forward + exposed(seen)[0]


# --- What is expected ------------------------------------------------------------------------------


def _said(what: str) -> Callable[[Seen, Any], str]:
    return lambda seen, right: (
        f"buckets: {len(seen.case.buckets)}, gradients: {len(seen.case.gradients)}, ranks: {seen.case.world_size}, "
        f"{what}: {flat(right)[0]:.6g}"
    )


def _otherwise(seen: Seen, found: list[float]) -> str:
    if close(found[0], step(seen)):
        return "the step comes first"
    if found[0] < 0:
        return "when all has arrived before backward ends, nothing is exposed: not less than 0"
    if seen.case.world_size == 1:
        return "one rank sends nothing, so nothing is exposed"
    return "a message starts when its bucket is launched and the link is free; exposed is what lies after backward"


both = numbers(
    "step_s, exposed_s",
    equals(
        _said("exposed seconds"),
        exposed,
        turned(exposed, _mistakes),
        _otherwise,
        of=lambda seen: [seen["value"][1], FLOOR],
        shown=lambda pair: pair[0],
    ),
    equals(
        _said("seconds of the step"),
        step,
        _step_slips,
        "forward + backward + exposed + optimizer",
        of=lambda seen: seen["value"][0],
    ),
)

STEP = exercise(
    "14.3",
    "A step on paper (stretch)",
    "step_seconds",
    30,
    act=called,
    rounds=rounds,
    checks={
        "one": ("one bucket", 1, both, "one"),
        "overlap": ("several buckets and a fast link", 1, both, "overlap"),
        "queue": ("a slow link: one message at a time", 2, both, "queue"),
        "order": ("a bucket that is full too early", 1, both, "order"),
        "edges": ("one rank, no bucket, a backward that goes on", 1, both, "edges"),
    },
    refused=("ddp_course.scaling.simulate.predict", "ddp_course.collectives.ring_seconds"),
    hints={
        r"iterable argument is empty|max\(\) arg is an empty|IndexError": "there may be no bucket at all",
        r"ZeroDivisionError": "one rank sends nothing: no ring, no division",
        r"missing \d required|takes \d+ positional": "the eight arguments come in the order of the text",
        "limit": "walk from event to event, not in small steps of time",
    },
)
