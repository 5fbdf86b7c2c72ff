"""What does a program change in a replica after it was wrapped, and what does it feed its schedules?

DistributedDataParallel looks after the parameters that were trainable when it was made. One that is thawed, replaced or
converted later is no longer among them, and nothing says so: here it is noted, with the line.

Read next: `rehearse_weights.py`, which asks why weights differ.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_course.rehearsal.notes import Writer, around
from ddp_course.rehearsal.sketches import weights
from ddp_course.rehearsal.source import Source
from ddp_course.rehearsal.watch_calls import CallsWatch

MOST_EVALUATIONS = 50  # that are noted, from one place
MOST_COPIES = 200  # of parameters


class ChangesWatch:
    """The eyes of one rank for what is changed after wrapping."""

    def __init__(self, writer: Writer, calls: CallsWatch, source: Source):
        self.writer, self.calls, self.source = writer, calls, source
        self.trainable: dict[int, dict[int, torch.Tensor]] = {}  # of each replica, when it was made
        self.present: dict[int, dict[int, torch.Tensor]] = {}
        self.told: set[tuple[int, str]] = set()
        self.made: dict[int, list[int]] = {}  # parameter -> the lines at work when it was made
        self.thawed: dict[int, list[int]] = {}  # parameter -> the lines at work when it was thawed
        self.applying = self.losses = self.buffers = self.copies = 0
        self.evaluations: Counter[tuple] = Counter()

    def install(self) -> None:
        around(torch, "manual_seed", self.at_seed)
        for name in ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"):
            around(nn.functional, name, self.at_loss)
        around(nn.Module, "_apply", self.at_apply)
        around(nn.Parameter, "__deepcopy__", self.at_copy)
        around(nn.Module, "named_parameters", self.at_names)
        around(torch.Tensor, "requires_grad_", self.at_requires_grad)
        around(ReduceLROnPlateau, "step", self.at_metric)

    def at_wrapped(self, replica: DistributedDataParallel) -> None:
        parameters = list(replica.module.parameters())
        if not self.present:  # the first replica's, when all ranks have rank 0's weights
            self.writer.note(
                "wrapped as",
                each=[[name, next(iter(self.source.writes(name.rpartition(".")[2])), None), *weights([p])]
                      for name, p in replica.module.named_parameters()],
            )  # fmt: skip
        self.present[id(replica)] = {id(each): each for each in parameters}
        self.trainable[id(replica)] = {id(each): each for each in parameters if each.requires_grad}

    def at_requires_grad(self, call: Callable, tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        if requires_grad and not tensor.requires_grad and isinstance(tensor, nn.Parameter):
            self.thawed[id(tensor)] = self.writer.lines()
        return call(tensor, requires_grad)

    def at_first_step(self, trained: list[torch.Tensor]) -> None:
        """Which parameters are trained outside of every replica, and which were changed since they were wrapped?"""
        held = set().union(*self.present.values())
        for each in (p for p in trained if id(p) not in held):
            self.writer.note("outside", made=self._maker(each))
        for parameters in self.present.values():
            self.writer.note("begins as", each=[weights([p]) for p in parameters.values()])
            break

    def born(self, parameter: torch.Tensor) -> int | None:
        """The line that made a parameter."""
        return next(iter(self.made.get(id(parameter), ())), None)

    def _maker(self, parameter: torch.Tensor) -> int | None:
        """The line that made it: out of the constructors, to where the module is made."""
        return next((line for line in self.made.get(id(parameter), []) if not self.source.constructs(line)), None)

    def at_copy(self, call: Callable, parameter: nn.Parameter, memo: dict) -> nn.Parameter:
        """A teacher, an average: do the ranks copy the same?"""
        self.copies += 1
        if self.copies <= MOST_COPIES:
            self.writer.note("copied", sketch=weights([parameter]))
        return call(parameter, memo)

    def at_names(self, call: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Iterator:
        """Parameters chosen by a beginning that no name in a wrapped model has."""
        if isinstance(module, DistributedDataParallel) and self.writer.asked_by_program():
            loop = self.source.statements.get(self.writer.line())
            for test in self.source.named("startswith"):
                first = test.args[0] if test.args else None
                if isinstance(first, ast.Constant) and loop in self.source.above(test) and not any(
                    name.startswith(first.value) for name, _ in call(module)
                ):  # fmt: skip
                    self.writer.note("empty group", at=test.lineno, seen=f"no name begins with {first.value!r}")
        return call(module, *args, **kwargs)

    def at_evaluation(self, module: nn.Module) -> None:
        """Which weights are used where nothing is learned?"""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        parameters = [each for each in inner.parameters() if type(each).__name__ != "DTensor"]
        lines = self.writer.lines()
        if parameters and self.evaluations[tuple(lines)] < MOST_EVALUATIONS:
            self.evaluations[tuple(lines)] += 1
            self.writer.note("evaluates", shapes=[p.numel() for p in parameters], sketch=weights(parameters))

    def at_loss(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        """Which weights does a loss give to classes?"""
        given = [kwargs[name] for name in ("weight", "pos_weight") if isinstance(kwargs.get(name), torch.Tensor)]
        given += [each for each in args[2:3] if isinstance(each, torch.Tensor)]
        if given and torch.is_grad_enabled() and self.losses < MOST_EVALUATIONS:
            self.losses += 1
            self.writer.note("loss weights", sizes=[each.numel() for each in given], sketch=weights(given))
        return call(*args, **kwargs)

    def at_seed(self, call: Callable, seed: int) -> Any:
        if self.writer.asked_by_program():
            self.writer.note("seeded", seed=int(seed))
        return call(seed)

    def at_forward(self, replica: DistributedDataParallel) -> None:
        """Before a training forward: which parameters are unknown to the replica, and which buffers will it send?"""
        norms = {id(each) for part in replica.module.modules() if isinstance(part, nn.modules.batchnorm._NormBase)
                 for each in part.buffers()}  # fmt: skip
        own = [(name, each) for name, each in replica.module.named_buffers()
               if id(each) not in norms and each.is_floating_point()]  # fmt: skip
        if own and self.buffers < MOST_EVALUATIONS:
            self.buffers += 1
            self.writer.note("buffers", each=[[name, *weights([each])] for name, each in own])
        known, present = self.trainable.get(id(replica), {}), self.present.get(id(replica), {})
        for name, each in replica.module.named_parameters():
            if each.requires_grad and id(each) not in known and (id(replica), name) not in self.told:
                self.told.add((id(replica), name))
                if id(each) in present:
                    at = self.thawed.get(id(each)) or self.calls.last_of(self.source.thaws)
                    self.writer.note("thawed", name=name, at=at)
                else:
                    self.writer.note("replaced", name=name, at=self._maker(each))

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

    def at_metric(self, call: Callable, schedule: ReduceLROnPlateau, *args: Any, **kwargs: Any) -> None:
        self.writer.note("metric", value=float(args[0] if args else kwargs["metrics"]))
        call(schedule, *args, **kwargs)
