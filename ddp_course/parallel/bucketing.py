"""Which gradients travel together, and in which order?

One all_reduce per parameter pays the latency once per parameter; one for all of them cannot start before the last
gradient is there. Buckets lie between: neighbouring gradients share one flat tensor until it holds `cap_bytes`.
The plan is made before any gradient exists, from names, shapes, dtypes and devices, so every rank makes the same one.

Left out on purpose: a second plan in the order in which gradients really arrived, which torch's DDP makes after its
first step. Where layers run in the order in which they were registered, the two are nearly the same.
Read next: `grad_bucket.py`, a bucket at work; `ddp.py`, which fills buckets while backward goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

MIB = 1024 * 1024


@dataclass(frozen=True)
class Bucket:
    """Gradients that share one flat tensor and one all_reduce."""

    index: int  # the first to be launched is 0
    dtype: torch.dtype
    device: torch.device
    names: tuple[str, ...]  # of the parameters, in the order of the flat tensor
    shapes: tuple[torch.Size, ...]
    numels: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class _Open:
    """A bucket that still takes gradients."""

    cap_bytes: float
    params: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    nbytes: int = 0


def plan_buckets(
    named_params: Iterable[tuple[str, torch.Tensor]], cap_bytes: float = 25 * MIB, first_cap_bytes: float = MIB
) -> list[Bucket]:
    """Pack gradients into buckets, last parameter first, each bucket of one dtype and device.

    A bucket closes with the gradient that fills it, so it may be larger than its cap by that gradient. The first
    bucket of each kind is small: its all_reduce can begin soon after backward has begun.

    Args:
        named_params: in the order in which the model registered them.
    Returns:
        The buckets in the order in which they are launched, which is by the place of their first gradient.
    Source: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size; Li et al. 2020, section 3.2.3.
    """
    # Reverse order: backward finishes the last layer first.
    backward_order = list(reversed(list(named_params)))
    place = {name: number for number, (name, _) in enumerate(backward_order)}
    closed: list[list[tuple[str, torch.Tensor]]] = []
    # One open bucket for each kind: kinds may alternate, as float32 norms between bfloat16 layers do, and a bucket that
    # closed at every change would hold one gradient.
    opened: dict[tuple[torch.dtype, torch.device], _Open] = {}
    for name, param in backward_order:
        kind = (param.dtype, param.device)
        bucket = opened.setdefault(kind, _Open(first_cap_bytes))
        bucket.params.append((name, param))
        bucket.nbytes += param.numel() * param.element_size()
        if bucket.nbytes >= bucket.cap_bytes:
            closed.append(bucket.params)
            opened[kind] = _Open(cap_bytes)
    closed += [bucket.params for bucket in opened.values() if bucket.params]
    # All ranks send in one order, so a full bucket waits for those before it. torch sorts by the last gradient. With
    # one dtype and device that is the same order. With several it is torch's that launches earlier: here a bucket that
    # begins early and fills late holds up those behind it, and the plan is simpler to tell.
    closed.sort(key=lambda params: place[params[0][0]])
    return [_described(index, params) for index, params in enumerate(closed)]


def _described(index: int, params: list[tuple[str, torch.Tensor]]) -> Bucket:
    names, tensors = zip(*params, strict=True)
    return Bucket(
        index,
        tensors[0].dtype,
        tensors[0].device,
        names,
        tuple(tensor.shape for tensor in tensors),
        tuple(tensor.numel() for tensor in tensors),
    )
