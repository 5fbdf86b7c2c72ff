"""How long would a step take with other buckets, another network, a thousand ranks?

A step is a few events: each gradient is ready at some moment of backward, a bucket is launched with its last gradient,
and the link carries one bucket after the other. `step_profile.py` measures those moments, once and without any
communication; `predict` plays the events through on paper, with no process group, for any plan, link and number of
ranks. On this machine a simulated link cannot be quicker than the all_reduce that really runs, so each bucket takes the
longer of the two times.

Left out on purpose: ranks that are slow by turns, other traffic on the link, and buckets of several dtypes.
Read next: `link.py`, what a message costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ddp_course.parallel.bucketing import MIB, Bucket, plan_buckets
from ddp_course.scaling.link import Link
from ddp_course.scaling.spans import Span
from ddp_course.scaling.step_profile import Gradient, Profile, profile_model

__all__ = [
    "Gradient",
    "Prediction",
    "Profile",
    "best_bucket",
    "plan_of",
    "predict",
    "profile_model",
    "sweep_buckets",
    "sweep_ranks",
]

HIDDEN_SHARE = 0.02  # of a step: less of it exposed is none


@dataclass(frozen=True)
class Prediction:
    """One simulated step."""

    step_s: float
    exposed_s: float  # from the end of backward until the last bucket has arrived
    hidden_s: float  # the link's busy time beside backward
    spans: tuple[Span, ...]  # of one rank, from 0 s on
    bound: str  # a sentence: what bounds the step
    own: tuple[bool, ...] = ()  # for each bucket, whether the machine's own all_reduce outlasts the link

    @property
    def talking_s(self) -> float:
        return self.exposed_s + self.hidden_s


# --- The events of a step --------------------------------------------------------------------------


def predict(
    profile: Profile,
    buckets: float | Sequence[Bucket | Sequence[str]],
    world_size: int,
    link: Link,
    algorithm: str = "ring",
    accumulation: int = 1,
    *,
    first_cap_bytes: float = MIB,
) -> Prediction:
    """Simulate one step of DDP.

    Args:
        buckets: a cap in bytes, or a plan: the buckets of a `BucketedDDP`, or names of parameters for each bucket.
        algorithm: of the all_reduce, "ring" or "tree".
        accumulation: backward passes per step; only the last one communicates.
        first_cap_bytes: the first bucket's cap; a smaller cap holds for it as well.
    Raises:
        ValueError: a plan with other parameters than the profile's, or no rank, or no pass.
    """
    if world_size < 1 or accumulation < 1:
        raise ValueError(f"expected at least 1 rank and 1 pass, found {world_size} and {accumulation}")
    plan = plan_of(profile, buckets, first_cap_bytes)
    start_s = accumulation * profile.forward_s + (accumulation - 1) * profile.backward_s  # of the last backward
    on_link = partial(link.all_reduce_seconds, world_size=world_size, algorithm=algorithm)
    messages, backward_s, exposed_s, waits_s = [], profile.backward_s, 0.0, 0.0
    if world_size > 1:
        messages, backward_s = _send(profile, plan, on_link)
        exposed_s = max([0.0, *(message.end_s - backward_s for message in messages)])  # a frozen model sends none
        waits_s = exposed_s + profile.finish_s
    step_s = start_s + backward_s + waits_s + profile.optimizer_s
    spans = _computing(profile, accumulation, start_s, backward_s, waits_s)
    spans += [message.span(start_s, link) for message in messages]
    return Prediction(
        step_s,
        exposed_s,
        max(0.0, sum(message.cost_s for message in messages) - exposed_s),
        tuple(sorted(spans, key=lambda span: span.start_s)),
        _bound(messages, exposed_s, step_s, len(plan) * on_link(0), profile.backward_s),
        tuple(message.own for message in messages) or (False,) * len(plan),
    )


def plan_of(
    profile: Profile, buckets: float | Sequence[Bucket | Sequence[str]], first_cap_bytes: float = MIB
) -> list[list[Gradient]]:
    """Return the gradients of each bucket, in the order of the launches."""
    by_name = {gradient.name: gradient for gradient in profile.gradients}
    if isinstance(buckets, int | float):
        # One byte an element, and no memory: only names and sizes count. In the order of registration.
        named = [(g.name, torch.empty(g.nbytes, dtype=torch.uint8, device="meta")) for g in profile.gradients[::-1]]
        buckets = plan_buckets(named, buckets, min(buckets, first_cap_bytes))
    names = [list(bucket.names if isinstance(bucket, Bucket) else bucket) for bucket in buckets]
    found = [name for bucket in names for name in bucket]
    if sorted(found) != sorted(by_name):
        odd = sorted(set(found) ^ set(by_name)) or sorted({name for name in found if found.count(name) > 1})
        raise ValueError(f"plan and profile differ in {', '.join(odd)}; take both from the same model")
    return [[by_name[name] for name in bucket] for bucket in names]


@dataclass(frozen=True)
class _Message:
    """One bucket's all_reduce; its moments count from the start of the last backward."""

    nbytes: int
    launched_s: float
    begin_s: float  # later than it was launched if the link is busy
    cost_s: float
    own: bool  # whether the machine's own all_reduce outlasts the link

    @property
    def end_s(self) -> float:
        return self.begin_s + self.cost_s

    def span(self, start_s: float, link: Link) -> Span:
        name = "all_reduce, this machine's own" if self.own else f"all_reduce, simulated {link.name}"
        return Span(name, start_s + self.begin_s, start_s + self.end_s, "all-reduce", self.nbytes)


def _send(
    profile: Profile, plan: list[list[Gradient]], on_link: Callable[[int], float]
) -> tuple[list[_Message], float]:
    """Each bucket's message, and when backward ends, after its start.

    Buckets are launched in the order of the plan, so a full one may have to wait for the one before. What a bucket
    takes from the processor, all that comes later in backward is late by; after the last one nothing comes.
    """
    messages, ready_s, late_s, free_s = [], 0.0, 0.0, 0.0
    for bucket in plan:
        nbytes = sum(gradient.nbytes for gradient in bucket)
        ready_s = max(ready_s, max(gradient.ready_s for gradient in bucket))
        launched_s = ready_s + late_s
        link_s, own_s = on_link(nbytes), profile.own_seconds(nbytes)
        messages.append(_Message(nbytes, launched_s, max(launched_s, free_s), max(link_s, own_s), own_s > link_s))
        free_s = messages[-1].end_s
        late_s += min(profile.launch_s + nbytes * profile.busy_s_per_byte, profile.backward_s - ready_s)
    return messages, profile.backward_s + late_s


def _computing(profile: Profile, accumulation: int, start_s: float, backward_s: float, waits_s: float) -> list[Span]:
    spans, at_s = [], 0.0
    for number in range(accumulation):
        last = number == accumulation - 1
        forward_end_s = start_s if last else at_s + profile.forward_s
        end_s = start_s + backward_s if last else forward_end_s + profile.backward_s
        spans += [
            Span("forward", at_s, forward_end_s, "forward"),
            Span("backward", forward_end_s, end_s, "backward"),
        ]
        at_s = end_s
    if waits_s:
        spans.append(Span("waiting", at_s, at_s + waits_s, "waiting"))
    return [*spans, Span("optimizer", at_s + waits_s, at_s + waits_s + profile.optimizer_s, "optimizer")]


def _bound(messages: list[_Message], exposed_s: float, step_s: float, latency_s: float, backward_s: float) -> str:
    buckets, talking_s = len(messages), sum(message.cost_s for message in messages)
    if not talking_s:
        return "Computing bounds the step: one rank has nobody to talk to."
    if exposed_s < HIDDEN_SHARE * step_s:
        return f"Computing bounds the step: {1 - exposed_s / talking_s:.0%} of the communication is hidden behind it."
    if sum(message.own for message in messages) > buckets / 2:
        return "This machine's own all_reduce bounds the step: it takes longer than the simulated link."
    if latency_s > talking_s / 2:
        if buckets == 1:
            return "Latency bounds the step, though one bucket pays it only once: send it in fewer rounds."
        return f"Latency bounds the step: {buckets} buckets pay it one by one; larger buckets pay it less often."
    if buckets > 1 and messages[-1].begin_s > messages[-1].launched_s:
        return "The link's bandwidth bounds the step: buckets queue for it, and no bucket size sends fewer bytes."
    if buckets == 1 and talking_s > backward_s:
        return "The link's bandwidth bounds the step: it takes longer than backward, which could hide only a part."
    return "The last bucket bounds the step: no computing is left that could hide it; make it smaller."


# --- Sweeps ----------------------------------------------------------------------------------------


def sweep_buckets(
    profile: Profile, world_size: int, link: Link, caps: Iterable[float], **options: Any
) -> dict[float, Prediction]:
    """Predict a step for each cap in bytes; `options` are `predict`'s."""
    return {cap: predict(profile, cap, world_size, link, **options) for cap in caps}


def best_bucket(profile: Profile, world_size: int, link: Link, caps: Iterable[float], **options: Any) -> float:
    """Return the cap, in bytes, with the shortest predicted step; of equals the largest."""
    found = sweep_buckets(profile, world_size, link, caps, **options)
    return min(found, key=lambda cap: (round(found[cap].step_s, 9), -cap))


def sweep_ranks(
    profile: Profile, cap_bytes: float, link: Link, world_sizes: Iterable[int] = (1, 2, 4, 8, 64, 1024), **options: Any
) -> dict[int, Prediction]:
    """Predict a step for each number of ranks, each rank with the same rows as before (weak scaling)."""
    return {world_size: predict(profile, cap_bytes, world_size, link, **options) for world_size in world_sizes}
