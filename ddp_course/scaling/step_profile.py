"""What is a training step made of, before anybody communicates?

Forward, backward with a moment for each gradient, optimizer. `profile_model` measures them with hooks on the
parameters, inside a replica's `no_sync`; over all ranks it notes when the last one got there, for a collective waits
for it. What communication adds beside the link's time is measured apart, by `with_overheads`.

Left out on purpose: the operators inside a layer, which torch.profiler shows.
Read next: `simulate.py`, which predicts a step from its profile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn


class Gradient(NamedTuple):
    """When a parameter's gradient is there."""

    name: str
    nbytes: int
    ready_s: float  # after the start of backward


@dataclass(frozen=True)
class Profile:
    """What a step is made of, without communication; the last five say what communication adds beside the link."""

    forward_s: float
    gradients: tuple[Gradient, ...]  # last parameter first, as buckets are filled
    backward_s: float  # at least the last gradient's `ready_s`
    optimizer_s: float
    launch_s: float = 0.0  # by which a bucket's launch delays the rest of backward
    busy_s_per_byte: float = 0.0  # and each byte of it: copies, and the collective's own work on the same cores
    finish_s: float = 0.0  # from the arrival of the last bucket until backward returns
    own_s: float = 0.0  # what an all_reduce takes on this machine, whatever link is simulated, for each bucket
    own_s_per_byte: float = 0.0  # and for each byte of it

    def own_seconds(self, nbytes: float) -> float:
        """Return what an all_reduce of `nbytes` takes on this machine; 0 where that has not been measured."""
        return max(0.0, self.own_s + nbytes * self.own_s_per_byte)

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)

    def with_batch(self, factor: float) -> Profile:
        """The same step with `factor` times the rows: forward and backward take that much longer."""
        gradients = tuple(g._replace(ready_s=g.ready_s * factor) for g in self.gradients)
        return replace(
            self, forward_s=self.forward_s * factor, gradients=gradients, backward_s=self.backward_s * factor
        )


# --- Measuring ---------------------------------------------------------------------------------------


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
        all_ranks: let all ranks compute at once, as they do in training, and note when the last one is so far, counted
            from the first one's begin. They must share a clock, so be on one machine.
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
    return _slowest(profile, begin_s, process_group) if all_ranks else profile


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


def _slowest(profile: Profile, begin_s: float, process_group: dist.ProcessGroup | None) -> Profile:
    """The moments at which the last rank got there, for a collective waits for it, after the first one began.

    Ranks leave a barrier at different moments, most of all where they are more than the cores.

    Collective: one all_gather_object.
    """
    told: list[tuple[Profile, float]] = [(profile, begin_s)] * dist.get_world_size(process_group)
    dist.all_gather_object(told, (profile, begin_s), group=process_group)
    first_s = min(begin_s for _, begin_s in told)
    found = [(other, other.forward_s + begin_s - first_s) for other, begin_s in told]
    forward_s = max(ended_s for _, ended_s in found)
    gradients = tuple(
        own._replace(ready_s=max(ended_s + other.gradients[place].ready_s for other, ended_s in found) - forward_s)
        for place, own in enumerate(profile.gradients)
    )
    backward_s = max(ended_s + other.backward_s for other, ended_s in found) - forward_s
    return Profile(forward_s, gradients, backward_s, max(other.optimizer_s for other, _ in found))


def median_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the median of every moment, over several steps of the same model."""
    gradients = tuple(
        Gradient(same[0].name, same[0].nbytes, statistics.median(gradient.ready_s for gradient in same))
        for same in zip(*(profile.gradients for profile in profiles), strict=True)
    )
    backward_s = statistics.median(profile.backward_s for profile in profiles)
    return replace(
        profiles[0],
        forward_s=statistics.median(profile.forward_s for profile in profiles),
        gradients=gradients,
        backward_s=max(backward_s, *(gradient.ready_s for gradient in gradients)),
        optimizer_s=statistics.median(profile.optimizer_s for profile in profiles),
    )


def with_overheads(
    profile: Profile, late_s: Mapping[int, float], finish_s: float = 0.0, own_s: Mapping[float, float] | None = None
) -> Profile:
    """Add what communication takes from computing, found with a link that is no obstacle.

    Args:
        late_s: for two or more numbers of buckets, by how much the last gradient is later than without communication.
            A straight line through them has `launch_s` as its slope; its height, shared among the bytes, is
            `busy_s_per_byte`.
        finish_s: as in `Profile`.
        own_s: for two or more sizes in bytes, what an all_reduce takes on this machine; None is no time at all.
    Raises:
        ValueError: fewer than two numbers of buckets, or sizes.
    """
    if len(late_s) < 2:
        raise ValueError(f"expected the seconds of two numbers of buckets or more, found {len(late_s)}")
    slope, height = statistics.linear_regression(list(late_s), list(late_s.values()))
    found = replace(
        profile, launch_s=max(0.0, slope), busy_s_per_byte=max(0.0, height) / profile.nbytes, finish_s=finish_s
    )
    if own_s is None:
        return found
    if len(own_s) < 2:
        raise ValueError(f"expected the seconds of two sizes or more, found {len(own_s)}")
    per_byte, start = statistics.linear_regression(list(own_s), list(own_s.values()))
    return replace(found, own_s=start, own_s_per_byte=per_byte)
