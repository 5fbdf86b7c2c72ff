"""How long would a step take with other buckets, another network, a thousand ranks?

A step is a few events: each gradient is ready at some moment of backward, a bucket is launched with its last gradient,
and the link carries one bucket after the other. `profile_model` measures those moments, once and without any
communication; `predict` plays the events through on paper, with no process group, for any plan, link and number of
ranks.

Left out on purpose: ranks that are slow by turns, other traffic on the link, and buckets of several dtypes.
Read next: `published.py`, predictions beside published measurements; `measure.py`, the other side of the comparison.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.parallel.bucketing import MIB, Bucket, plan_buckets
from ddp_course.scaling.link import Link
from ddp_course.spans import Span


class Gradient(NamedTuple):
    """When a parameter's gradient is there."""

    name: str
    nbytes: int
    ready_s: float  # after the start of backward


@dataclass(frozen=True)
class Profile:
    """What a step is made of, without communication; the last three say what communication adds beside the link."""

    forward_s: float
    gradients: tuple[Gradient, ...]  # last parameter first, as buckets are filled
    backward_s: float  # at least the last gradient's `ready_s`
    optimizer_s: float
    launch_s: float = 0.0  # by which a bucket's launch delays the rest of backward
    busy_s_per_byte: float = 0.0  # and each byte of it: copies, and the collective's own work on the same cores
    finish_s: float = 0.0  # from the arrival of the last bucket until backward returns

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)

    def with_batch(self, factor: float) -> Profile:
        """The same step with `factor` times the rows: forward and backward take that much longer."""
        gradients = tuple(g._replace(ready_s=g.ready_s * factor) for g in self.gradients)
        return replace(
            self, forward_s=self.forward_s * factor, gradients=gradients, backward_s=self.backward_s * factor
        )


@dataclass(frozen=True)
class Prediction:
    """One simulated step."""

    step_s: float
    exposed_s: float  # from the end of backward until the last bucket has arrived
    hidden_s: float  # the link's busy time beside backward
    spans: tuple[Span, ...]  # of one rank, from 0 s on
    bound: str  # a sentence: what bounds the step

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
    sizes = [sum(gradient.nbytes for gradient in bucket) for bucket in plan]
    costs = [link.all_reduce_seconds(nbytes, world_size, algorithm) for nbytes in sizes]
    start_s = accumulation * profile.forward_s + (accumulation - 1) * profile.backward_s  # of the last backward
    launches, backward_end_s = _launches(profile, plan, sizes, world_size)
    talk, free_s = [], 0.0
    for nbytes, cost_s, launched_s in zip(sizes, costs, launches, strict=True):
        begin_s = max(launched_s, free_s)
        free_s = begin_s + cost_s
        if world_size > 1:
            name = f"all_reduce, simulated {link.name}"
            talk.append(Span(name, start_s + begin_s, start_s + free_s, "all-reduce", nbytes))
    exposed_s = max(0.0, free_s - backward_end_s) if world_size > 1 else 0.0
    waits_s = exposed_s + profile.finish_s if world_size > 1 else 0.0
    end_s = start_s + backward_end_s + waits_s
    spans = _computing(profile, accumulation, start_s, backward_end_s, waits_s)
    last_queued = len(talk) > 1 and talk[-1].start_s > start_s + launches[-1]
    latency_s = sum(link.all_reduce_seconds(0, world_size, algorithm) for _ in plan)
    return Prediction(
        end_s + profile.optimizer_s,
        exposed_s,
        sum(costs) - exposed_s if exposed_s < sum(costs) else 0.0,
        tuple(sorted([*spans, *talk], key=lambda span: span.start_s)),
        _bound(
            len(plan),
            exposed_s,
            end_s + profile.optimizer_s,
            sum(costs),
            latency_s,
            profile.backward_s,
            last_queued,
        ),
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


def _launches(
    profile: Profile, plan: list[list[Gradient]], sizes: list[int], world_size: int
) -> tuple[list[float], float]:
    """When each bucket is launched and when backward ends, after its start.

    Buckets are launched in the order of the plan, so a full one may have to wait for the one before. What a bucket
    takes from the processor, all that comes later in backward is late by; after the last one nothing comes.
    """
    if world_size == 1:
        return [max(g.ready_s for g in bucket) for bucket in plan], profile.backward_s
    launches, ready_s, late_s = [], 0.0, 0.0
    for bucket, nbytes in zip(plan, sizes, strict=True):
        ready_s = max(ready_s, max(gradient.ready_s for gradient in bucket))
        launches.append(ready_s + late_s)
        taken_s = profile.launch_s + nbytes * profile.busy_s_per_byte
        late_s += min(taken_s, profile.backward_s - ready_s)
    return launches, profile.backward_s + late_s


def _computing(
    profile: Profile, accumulation: int, start_s: float, backward_end_s: float, waits_s: float
) -> list[Span]:
    spans, at_s = [], 0.0
    for number in range(accumulation):
        last = number == accumulation - 1
        forward_end_s = start_s if last else at_s + profile.forward_s
        end_s = start_s + backward_end_s if last else forward_end_s + profile.backward_s
        spans += [
            Span("forward", at_s, forward_end_s, "forward"),
            Span("backward", forward_end_s, end_s, "backward"),
        ]
        at_s = end_s
    if waits_s:
        spans.append(Span("waiting", at_s, at_s + waits_s, "waiting"))
    return [*spans, Span("optimizer", at_s + waits_s, at_s + waits_s + profile.optimizer_s, "optimizer")]


def _bound(
    buckets: int,
    exposed_s: float,
    step_s: float,
    talking_s: float,
    latency_s: float,
    backward_s: float,
    last_queued: bool,
) -> str:
    if not talking_s:
        return "Computing bounds the step: one rank has nobody to talk to."
    if exposed_s < 0.02 * step_s:
        return f"Computing bounds the step: {1 - exposed_s / talking_s:.0%} of the communication is hidden behind it."
    if latency_s > talking_s / 2:
        if buckets == 1:
            return "Latency bounds the step, though one bucket pays it only once: send it in fewer rounds."
        return f"Latency bounds the step: {buckets} buckets pay it one by one; larger buckets pay it less often."
    if last_queued:
        return "The link's bandwidth bounds the step: buckets queue for it, and no bucket size sends fewer bytes."
    if buckets == 1 and talking_s > backward_s:
        return "The link's bandwidth bounds the step: it takes longer than backward, which could hide only a part."
    return "The last bucket bounds the step: nothing is left to compute behind which it could hide; make it smaller."


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


# --- Measuring a profile ---------------------------------------------------------------------------


def profile_model(
    model: nn.Module,
    batch: Sequence[Any],
    loss_fn: Callable[[Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    repeats: int = 10,
    warm_up: int = 2,
    all_ranks: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Profile:
    """Time the parts of a training step without communication: medians over `repeats` steps.

    Args:
        model: a module, or a replica; that computes inside its `no_sync`.
        batch: what the model is called with.
        loss_fn: from the model's outputs to the loss.
        optimizer: takes its steps, so the model is trained; None counts 0 s for it.
        all_ranks: let all ranks compute at once, as they do in training, and note the slowest one's times.
    Raises:
        ValueError: a parameter got no gradient.
    Collective: with `all_ranks` one barrier and one all_gather_object per step; every rank of the group.
    """
    steps = [
        profile_step(model, batch, loss_fn, optimizer, all_ranks=all_ranks, process_group=process_group)
        for _ in range(warm_up + repeats)
    ]
    return median_profile(steps[warm_up:])


def profile_step(
    model: nn.Module,
    batch: Sequence[Any],
    loss_fn: Callable[[Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    all_ranks: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Profile:
    """Time one step; arguments, errors and collectives as `profile_model`'s."""
    params = {name.removeprefix("module."): p for name, p in model.named_parameters() if p.requires_grad}
    ready_s: dict[str, float] = {}  # moments on the clock

    def note(name: str, param: torch.Tensor) -> None:
        ready_s[name] = time.perf_counter()

    hooks = [param.register_post_accumulate_grad_hook(partial(note, name)) for name, param in params.items()]
    if all_ranks:
        dist.barrier(process_group)
    try:
        begin_s, start_s, end_s, optimizer_s = _timed_step(model, batch, loss_fn, optimizer)
    finally:
        for hook in hooks:
            hook.remove()
    if silent := [name for name in params if name not in ready_s]:
        raise ValueError(f"no gradient for {', '.join(silent)}; profile a step that uses every parameter")
    gradients = tuple(
        Gradient(name, param.numel() * param.element_size(), ready_s[name] - start_s)
        for name, param in reversed(params.items())
    )
    profile = Profile(start_s - begin_s, gradients, end_s - start_s, optimizer_s)
    return _slowest(profile, process_group) if all_ranks else profile


def _timed_step(model, batch, loss_fn, optimizer) -> tuple[float, float, float, float]:
    """When the step, and in it backward, began and ended on the clock; and the seconds of the optimizer."""
    begin_s = time.perf_counter()
    model.zero_grad(set_to_none=True)
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        loss = loss_fn(model(*batch))
        start_s = time.perf_counter()
        loss.backward()
    end_s = time.perf_counter()
    if optimizer is not None:
        optimizer.step()
    return begin_s, start_s, end_s, time.perf_counter() - end_s


def _slowest(profile: Profile, process_group: dist.ProcessGroup | None) -> Profile:
    """The moments of a step, counted from its begin, at which the last rank got there: a collective waits for it.

    Collective: one all_gather_object.
    """
    found: list[Profile] = [profile] * dist.get_world_size(process_group)
    dist.all_gather_object(found, profile, group=process_group)
    forward_s = max(other.forward_s for other in found)
    gradients = tuple(
        own._replace(ready_s=max(other.forward_s + other.gradients[place].ready_s for other in found) - forward_s)
        for place, own in enumerate(profile.gradients)
    )
    backward_s = max(other.forward_s + other.backward_s for other in found) - forward_s
    return Profile(forward_s, gradients, backward_s, max(other.optimizer_s for other in found))


def median_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the median of every moment, over several steps of the same model."""
    gradients = tuple(
        Gradient(same[0].name, same[0].nbytes, statistics.median(gradient.ready_s for gradient in same))
        for same in zip(*(profile.gradients for profile in profiles), strict=True)
    )
    backward_s = statistics.median(profile.backward_s for profile in profiles)
    return Profile(
        statistics.median(profile.forward_s for profile in profiles),
        gradients,
        max(backward_s, *(gradient.ready_s for gradient in gradients)),
        statistics.median(profile.optimizer_s for profile in profiles),
        profiles[0].launch_s,
        profiles[0].busy_s_per_byte,
        profiles[0].finish_s,
    )


def with_overheads(profile: Profile, late_s: Mapping[int, float], finish_s: float = 0.0) -> Profile:
    """Add what communication takes from computing, found with a link that is no obstacle.

    Args:
        late_s: for two or more numbers of buckets, by how much the last gradient is later than without communication.
            A straight line through them has `launch_s` as its slope; its height, shared among the bytes, is
            `busy_s_per_byte`.
        finish_s: as in `Profile`.
    Raises:
        ValueError: fewer than two numbers of buckets.
    """
    if len(late_s) < 2:
        raise ValueError(f"expected the seconds of two numbers of buckets or more, found {len(late_s)}")
    slope, height = statistics.linear_regression(list(late_s), list(late_s.values()))
    busy_s_per_byte = max(0.0, height) / profile.nbytes
    return replace(profile, launch_s=max(0.0, slope), busy_s_per_byte=busy_s_per_byte, finish_s=finish_s)
