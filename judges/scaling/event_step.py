"""14.3 `step_seconds(...)`: how long does a step take, and how much of its communication shows?

A pure function. The cases are made so that each rule counts in one of them: the last gradient of a bucket, one
message at a time, the order of the plan, what backward still has to do.

Source: Li et al. 2020 (arXiv 2006.15704), section 3.2.3, for the rules; Thakur et al. 2005 for the ring's time.
Read next: `judges/sharding/`.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from ddp_course.grading.differential import exercise, value
from ddp_course.grading.vocabulary.rounds import Round, Seen


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


def cases(rng: Random) -> list[Round]:
    """One bucket; a fast link; a slow one; a bucket that is full too early; and the edges.

    Latencies, and gradients that are listed out of order, count in two of them, so that one slip does not cost all.
    """
    named = {
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
    return [Round(1, [(name, case) for name, some in named.items() for case in some], init=False)]


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


def said(seen: Seen) -> str:
    buckets, gradients, ranks = len(seen.case.buckets), len(seen.case.gradients), seen.case.world_size
    return f"{buckets} buckets, {gradients} gradients, {ranks} ranks: [step_s, exposed_s] ="


MISTAKES = """
all at once | queue order | the link carries one message at a time: a bucket waits until the one before has arrived
    max(full_s, free_s) + ring_s => max(free_s, full_s + ring_s)
a link that never stands still | queue | the link carries one message at a time, and is free in between
    for bucket => begun_s, sent_s = None, 0.0
    for bucket
    free_s = max(full_s, free_s) + ring_s => begun_s, sent_s = full_s if begun_s is None else begun_s, sent_s + ring_s
    free_s = max(begun_s + sent_s, full_s + ring_s)
no overlap | overlap queue order edges
| each bucket may start when it is full; here all messages wait for the end of backward
    max(full_s, => max(backward_s,
at the first gradient | one overlap queue order | a bucket waits for the latest of its gradients, not for an earlier one
    full_s = max( => full_s = min(
at the gradient listed last | overlap queue
| a bucket waits for the latest of its gradients, wherever that one stands in the list
    max(gradients[index][1] for index in bucket) => gradients[bucket[-1]][1]
whoever is full first | order
| buckets are launched in the order of the plan, on every rank: one that is full early waits
    in buckets if => in sorted(buckets, key=lambda b: max(gradients[i][1] for i in b)) if
all as one bucket | overlap queue order | each bucket is a message of its own: its latencies, its turn
    in buckets if => in [sum(buckets, [])] * bool(buckets) if
half a ring | all | a ring takes 2 (W - 1) messages: as many to hand round as to add up
    2 * (world_size - 1) => (world_size - 1)
one latency | overlap queue | each of the 2 (W - 1) messages has a latency
    (latency_s + => (latency_s / 2 / (world_size - 1) +
no latency | overlap queue | the latency is forgotten
    (latency_s + => (0 +
all bytes in each message | all | each message of a ring carries a W-th of the bytes
    nbytes / world_size => nbytes
whole bytes | one | a W-th of the bytes need not be a whole number of them
    nbytes / world_size => nbytes // world_size
one rank sends | edges | one rank sends nothing, so nothing is exposed
    if world_size > 1 else [] => 
    2 * (world_size - 1) => max(1, 2 * (world_size - 1))
behind the last bucket | edges | exposed is what lies after backward, not what lies after the last bucket was full
    free_s - backward_s => free_s - max((gradients[i][1] for b in buckets for i in b), default=0)
less than nothing | edges | when all has arrived before backward ends, nothing is exposed: not less than 0
    max(0.0, free_s - backward_s) => free_s - backward_s
forward left out | all | forward is part of the step
    return forward_s + => return
no optimizer | all | the optimizer is part of the step
    + exposed_s + optimizer_s => + exposed_s
the exposed part is not in the step | all | the step is longer by what is exposed
    + exposed_s + optimizer_s => + optimizer_s
the other way round | all | the step comes first
    return => step_s =
    , exposed_s => 
    return exposed_s, step_s
no bucket, no maximum | all | there may be no bucket at all
    free_s = 0.0 => free_s = 0.0 * max(buckets)[0]
all at once, from a list | queue order | the link carries one message at a time | tests
    def step_seconds(forward_s, backward_s, optimizer_s, gradients, buckets, world_size, latency_s, bytes_per_s):
        launched, ends = 0.0, [backward_s]
        for bucket in buckets:
            sizes, moments = zip(*(gradients[i] for i in bucket))
            launched = max(launched, *moments)
            message_s = latency_s + sum(sizes) / world_size / bytes_per_s
            ends.append(launched + 2 * (world_size - 1) * message_s if world_size > 1 else 0)
        return forward_s + max(ends) + optimizer_s, max(ends) - backward_s
no overlap, in one sum | overlap queue order edges | here all messages wait for the end of backward | tests
    def step_seconds(forward_s, backward_s, optimizer_s, gradients, buckets, world_size, latency_s, bytes_per_s):
        nbytes = sum(gradients[i][0] for bucket in buckets for i in bucket)
        exposed_s = 2 * (world_size - 1) * (latency_s * len(buckets) + nbytes / world_size / bytes_per_s)
        return forward_s + backward_s + exposed_s + optimizer_s, exposed_s
small steps of time, and none is left | all | walk from event to event | hangs
    free_s = max(full_s, free_s) + ring_s => while free_s != full_s: free_s += 1e-9
"""

RULES = "a message starts when its bucket is launched and the link is free; exposed is what lies after backward"
STEP = exercise(
    *("14.3", "A step on paper (stretch)", "step_seconds", 30),
    cases=cases,
    said=said,
    mistakes=MISTAKES,
    checks={
        "one": ("one bucket", 1, "one", value, RULES),
        "overlap": ("several buckets and a fast link", 1, "overlap", value, RULES),
        "queue": ("a slow link: one message at a time", 2, "queue", value, RULES),
        "order": ("a bucket that is full too early", 1, "order", value, RULES),
        "edges": ("one rank, no bucket, a backward that goes on", 1, "edges", value, RULES),
    },
    refused=("ddp_course.scaling.simulate.predict", "ddp_course.collectives.ring_seconds"),
    hints={
        r"iterable argument is empty|max\(\) arg is an empty|IndexError": "there may be no bucket at all",
        r"ZeroDivisionError": "one rank sends nothing: no ring, no division",
        r"missing \d required|takes \d+ positional": "the eight arguments come in the order of the text",
        "limit": "walk from event to event, not in small steps of time",
    },
)
