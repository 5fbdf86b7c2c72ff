"""What does a program change in a replica after it was wrapped, and what does it feed its schedules?

DistributedDataParallel looks after the parameters that were trainable when it was made. One that is thawed, replaced or
converted later is no longer among them, and nothing says so: here it is noted, with the line.

Read next: `run_of_weights.py`, which asks why weights differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_course.rehearsal.notes import Writer, around
from ddp_course.rehearsal.source import Source
from ddp_course.rehearsal.watch_calls import CallsWatch


class ChangesWatch:
    """The eyes of one rank for what is changed after wrapping."""

    def __init__(self, writer: Writer, calls: CallsWatch, source: Source):
        self.writer, self.calls, self.source = writer, calls, source
        self.trainable: dict[int, dict[int, torch.Tensor]] = {}  # of each replica, when it was made
        self.present: dict[int, dict[int, torch.Tensor]] = {}
        self.told: set[tuple[int, str]] = set()
        self.thawed: dict[int, list[int]] = {}  # parameter -> the lines at work when it was thawed
        self.applying = 0

    def install(self) -> None:
        around(nn.Module, "_apply", self.at_apply)
        around(torch.Tensor, "requires_grad_", self.at_requires_grad)
        around(ReduceLROnPlateau, "step", self.at_metric)

    def at_wrapped(self, replica: DistributedDataParallel) -> None:
        parameters = list(replica.module.parameters())
        self.present[id(replica)] = {id(each): each for each in parameters}
        self.trainable[id(replica)] = {id(each): each for each in parameters if each.requires_grad}

    def at_requires_grad(self, call: Callable, tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        if requires_grad and not tensor.requires_grad and isinstance(tensor, nn.Parameter):
            self.thawed[id(tensor)] = self.writer.lines()
        return call(tensor, requires_grad)

    def at_forward(self, replica: DistributedDataParallel) -> None:
        """Before a training forward: which parameters does the replica not know?"""
        known, present = self.trainable.get(id(replica), {}), self.present.get(id(replica), {})
        for name, each in replica.module.named_parameters():
            if each.requires_grad and id(each) not in known and (id(replica), name) not in self.told:
                self.told.add((id(replica), name))
                if id(each) in present:
                    at = self.thawed.get(id(each)) or self.calls.last_of(self.source.thaws)
                    self.writer.note("thawed", name=name, at=at)
                else:
                    self.writer.note("replaced", name=name)

    def at_apply(self, call: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """`.to`, `.double`, `.half`, `.cuda` and the like."""
        self.applying += 1
        before = [(id(each), each.dtype, each.device) for each in module.parameters()] if self.applying == 1 else []
        try:
            return call(module, *args, **kwargs)
        finally:
            self.applying -= 1
            after = [(id(each), each.dtype, each.device) for each in module.parameters()] if not self.applying else []
            held = set().union(*self.trainable.values())
            if before != after and held & {one for one, *_ in before}:
                kinds = sorted({str(each[1]).removeprefix("torch.") for each in after})
                self.writer.note("converted", to=", ".join(kinds), at=self.writer.lines())

    def at_metric(self, call: Callable, schedule: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        self.writer.note("metric", value=float(metrics))
        call(schedule, metrics, *args, **kwargs)
