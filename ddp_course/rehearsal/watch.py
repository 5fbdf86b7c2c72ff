"""What does a rank's program do with gradients and weights, while it runs?

Before the learner's first line, `Watch` and its two helpers put themselves between the program and torch: at the
loader, the sampler, the forward of the outermost module, each gradient, the optimizer's step, `torch.save` and `load`,
`open` and `print`. They change nothing but two things that real jobs have too: rank 0's save takes a moment, and no
wait is longer than the limit. What they see goes to a file; `compare.py` reads the files of all ranks.

Read next: `watch_sampling.py`, `watch_files.py`, then `compare.py`.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_course.rehearsal.notes import OPEN, Writer, around
from ddp_course.rehearsal.sketches import SKETCHES, sketched, weights
from ddp_course.rehearsal.source import Source
from ddp_course.rehearsal.watch_calls import CallsWatch
from ddp_course.rehearsal.watch_changes import ChangesWatch
from ddp_course.rehearsal.watch_files import FilesWatch
from ddp_course.rehearsal.watch_sampling import RowsWatch

MOST_PARAMETERS = 100  # whose gradients are noted one by one


class Watch:
    """The eyes of one rank.

    Args:
        script: the learner's file; lines are told in it.
        folder: of the notes of all ranks.
        limit_s: the longest wait that a group may have.
        die_after: end this job by SIGKILL this many steps after its first save; None for never.
        batches: a folder of the first batches of another run's ranks, which this run is to read; None for its own.
    """

    def __init__(self, script: str, folder: str, rank: int, limit_s: float, die_after: int | None = None,
                 batches: str | None = None):  # fmt: skip
        self.limit_s, self.die_after = limit_s, die_after
        path = f"{folder}/rank{rank}"
        self.writer = Writer(f"{path}.jsonl", script)
        source = Source(OPEN(script, encoding="utf-8").read())
        self.calls = CallsWatch(self.writer, source.turns | source.thaws, source.loops)
        self.data = RowsWatch(self.writer, rank, path, batches)
        self.files = FilesWatch(self.writer, rank, self.at_saved)
        self.changes = ChangesWatch(self.writer, self.calls, source)
        self.steps, self.depth, self.saved_at = 0, 0, None
        self.local: dict[int, torch.Tensor] = {}  # what this rank's rows contributed, by parameter
        self.known: set[int] = set()
        self.synced: dict[int, bool] = {}  # whether a replica's last forward was outside no_sync
        self.quiet: dict[int, int | None] = {}  # the line of a replica's last forward inside no_sync, until it is sent
        self.trained: dict[int, list[torch.Tensor]] = {}  # the parameters of each optimizer, also after its end
        self.replicas: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self.norms: set[str] = set()
        self.meeting = {
            name: value for name, value in os.environ.items() if name.startswith(("MASTER_", "TORCHELASTIC_"))
        }

    def install(self) -> None:
        """Put the eyes everywhere. Once, in a process that ends with the program."""
        around(dist, "init_process_group", self.at_group)
        around(torch.distributed.distributed_c10d, "init_process_group", self.at_group)
        around(dist, "all_reduce", self.at_all_reduce)
        around(dist, "is_initialized", self.at_asked)
        around(torch.optim.Optimizer, "add_param_group", self.at_parameters)
        around(torch.optim.Optimizer, "zero_grad", self.at_zero)
        around(nn.Module, "zero_grad", self.at_zero)
        around(nn.Module, "register_parameter", self.at_birth)
        around(DistributedDataParallel, "__init__", self.at_wrapping)
        around(DistributedDataParallel, "forward", self.at_replica)
        around(DistributedDataParallel, "no_sync", self.at_no_sync)
        around(DistributedDataParallel, "register_comm_hook", self.at_hook)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            around(nn.utils, name, self.at_clip)
        nn.modules.module.register_module_forward_pre_hook(self.before_forward)
        nn.modules.module.register_module_forward_hook(self.after_forward, always_call=True)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        self.data.install()
        self.files.install()
        self.calls.install()
        self.changes.install()

    def at_group(self, call: Callable, *args: Any, **kwargs: Any) -> None:
        kwargs["timeout"] = min(timedelta(seconds=self.limit_s), kwargs.get("timeout") or timedelta(days=1))
        if str(kwargs.get("init_method", "")).startswith(("tcp:", "file:")):
            kwargs["init_method"] = "env://"
        os.environ.update(self.meeting)  # who starts ranks himself has chosen a port, another one on each rank
        self.writer.note("group")
        call(*args, **kwargs)

    def at_asked(self, call: Callable) -> bool:
        there = call()
        if not there and self.writer.asked_by_program():
            self.writer.note("no group", lines=self.writer.lines())
        return there

    # --- modules --------------------------------------------------------------------------------------

    def at_birth(self, call: Callable, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        call(module, name, parameter)
        if parameter is not None:
            self.changes.made[id(parameter)] = self.writer.lines()

    def at_wrapping(self, call: Callable, replica: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        self.calls.note("DistributedDataParallel")
        call(replica, *args, **kwargs)
        self.replicas.add(replica)
        self.changes.at_wrapped(replica)
        self.writer.note("wrapped", unused=bool(kwargs.get("find_unused_parameters")))

    def at_replica(self, call: Callable, replica: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.synced[id(replica)] = replica.require_backward_grad_sync
            if replica.require_backward_grad_sync:
                self.quiet.pop(id(replica), None)
            else:
                self.quiet[id(replica)] = self.writer.line()
            self.changes.at_forward(replica)
        self.calls.at_forward(replica)
        return call(replica, *args, **kwargs)

    def at_hook(self, call: Callable, replica: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        hook = args[1] if len(args) > 1 else kwargs.get("hook")
        code = getattr(hook, "__code__", None)
        self.writer.note("hook", made=code.co_firstlineno if code and code.co_filename == self.writer.script else None)
        call(replica, *args, **kwargs)

    def at_no_sync(self, call: Callable, replica: DistributedDataParallel) -> Any:
        self.writer.note("no_sync")
        return call(replica)

    def before_forward(self, module: nn.Module, inputs: tuple) -> None:
        self.depth += 1
        if self.depth != 1:
            return
        given = next((each for each in inputs if isinstance(each, torch.Tensor) and each.dim() > 1), None)
        inside = any(each in self.replicas for each in module.modules())
        self.data.at_forward(module, given, inside)
        if not (module.training and torch.is_grad_enabled()):
            self.changes.at_evaluation(module)
        if module.training and torch.is_grad_enabled():
            self._look_at_norms(module, len(given) if given is not None else 0)

    def _look_at_norms(self, module: nn.Module, rows: int) -> None:
        for name, each in module.named_modules():
            local = isinstance(each, nn.modules.batchnorm._BatchNorm) and type(each).__name__ != "SyncBatchNorm"
            if local and each.training and name not in self.norms:
                self.norms.add(name)
                self.writer.note("batchnorm", name=name, rows=rows, made=self.changes.born(each.weight))

    def after_forward(self, *_: Any) -> None:
        self.depth -= 1

    # --- gradients ------------------------------------------------------------------------------------

    def at_parameters(self, call: Callable, optimizer: torch.optim.Optimizer, group: dict) -> None:
        call(optimizer, group)
        own = [each for each in optimizer.param_groups[-1]["params"] if not _sharded(each)]
        self.trained.setdefault(id(optimizer), []).extend(own)
        if not optimizer.param_groups[-1]["params"]:
            self.writer.note("empty group")
        for parameter in own:
            if id(parameter) not in self.known and parameter.requires_grad:
                self.known.add(id(parameter))
                parameter.register_hook(functools.partial(self._contributed, weakref.ref(parameter)))

    def _contributed(self, of: weakref.ref, gradient: torch.Tensor) -> None:
        parameter = of()
        if parameter.grad is None:  # what came before has been thrown away
            self.local.pop(id(parameter), None)
        sketch = sketched([gradient], seed=gradient.numel())
        self.local[id(parameter)] = self.local.get(id(parameter), 0) + sketch
        for replica in self.replicas:
            if self.synced.get(id(replica)) and not replica.require_backward_grad_sync:
                self.writer.note("late no_sync")
                self.synced[id(replica)] = False  # once is enough

    def at_all_reduce(self, call: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Whether a gradient that a replica has averaged is reduced again."""
        place = tensor.data_ptr()
        self.calls.of = self._gradient_at(place)
        self.data.at_reduce(tensor)
        for replica in self.replicas:
            if replica.require_backward_grad_sync and any(
                each.grad is not None and each.grad.data_ptr() == place for each in replica.parameters()
            ):
                self.writer.note("reduced again")
        answer = call(tensor, *args, **kwargs)
        self.data.after_reduce(tensor, kwargs.get("async_op", False))
        return answer

    def _gradient_at(self, place: int) -> str | None:
        """Which of the optimizers' parameters has its gradient there."""
        for number, own in enumerate(self.trained.values()):
            for index, each in enumerate(own):
                if each.grad is not None and each.grad.data_ptr() == place:
                    return f"the gradient of parameter {index}" + (f" of optimizer {number}" if number else "")
        return None

    def at_zero(self, call: Callable, owner: Any, *args: Any, **kwargs: Any) -> None:
        call(owner, *args, **kwargs)
        groups = (
            [list(owner.parameters())] if isinstance(owner, nn.Module) else [g["params"] for g in owner.param_groups]
        )
        for parameter in (each for group in groups for each in group):
            self.local.pop(id(parameter), None)

    def at_clip(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        """Clipping scales what is compared, so look before it."""
        parameters = args[0] if args else kwargs["parameters"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.writer.note("gradients", **self._gradients(parameters))
        held = set(map(id, parameters))
        if any(held & {id(each) for each in replica.parameters()} for replica in self.replicas
               if id(replica) in self.quiet):  # fmt: skip
            self.writer.note("clipped")
        answer = call(parameters, *args[1:], **{k: v for k, v in kwargs.items() if k != "parameters"})
        for parameter in parameters:
            if self.local.pop(id(parameter), None) is not None:  # what happens to it from here on is seen at the step
                self.local[id(parameter)] = sketched([parameter.grad], seed=parameter.numel())
        return answer

    def _gradients(self, parameters: Iterable[torch.Tensor]) -> dict:
        parameters = [each for each in parameters if not _sharded(each)]
        seen = [each for each in parameters if each.grad is not None and id(each) in self.local]
        each = [[sketched([p.grad], seed=p.numel()).tolist(), self.local[id(p)].tolist()] for p in seen]
        found, local = np.array(each or [[[0.0] * SKETCHES] * 2]).sum(axis=0)
        idle = sum(1 for each in parameters if each.requires_grad and id(each) not in self.local)
        return {"found": found.tolist(), "local": local.tolist(), "count": len(seen), "idle": idle,
                "each": each[:MOST_PARAMETERS]}  # fmt: skip

    # --- steps ----------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = _parameters(optimizer)
        for replica in self.replicas:
            if id(replica) in self.quiet and {id(each) for each in replica.parameters()} & set(map(id, parameters)):
                self.writer.note("unsent step", forward=self.quiet[id(replica)])
        gradients = self._gradients(parameters)
        if gradients["count"]:
            self.writer.note("gradients", **gradients)
            self.data.at_step()
            if self.replicas and not self.steps:
                self.changes.at_first_step([p for p in parameters if p.grad is not None])
        for parameter in parameters:
            self.local.pop(id(parameter), None)
        each = {} if self.steps else {"each": [[self.changes.born(p), *weights([p])] for p in parameters]}
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._weights(optimizer, parameters, at="before", rate=rates[0], rates=rates, **each)
        self.calls.note("step")

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps += 1
        parameters = _parameters(optimizer)
        self._weights(optimizer, parameters, at="after", clock=time.perf_counter(), still=self._still())
        if self.die_after is not None and self.saved_at is not None and self.steps >= self.saved_at + self.die_after:
            self.writer.note("dies")
            os.kill(os.getpid(), 9)

    def _weights(self, optimizer: torch.optim.Optimizer, parameters: list, **facts: Any) -> None:
        shapes = [each.numel() for each in parameters]
        self.writer.note("weights", which=id(optimizer), step=self.steps, sketch=weights(parameters), shapes=shapes,
                         **facts)  # fmt: skip

    def at_end(self, error: BaseException | None, line: int | None, talking: bool) -> None:
        """The program is over on this rank: what it came to."""
        final = [[[each.numel() for each in own], weights(own)] for own in self.trained.values()]
        raised = f"{type(error).__name__}: {error}" if error else ""
        self.calls.note_end(final=final, raised=raised, raised_at=line, talking=talking)

    def _still(self) -> list:
        """A replica's parameters that no gradient changes: DDP does not look after them."""
        named = [(name, each) for replica in self.replicas for name, each in replica.module.named_parameters()]
        return sorted([n, self.changes.born(p), *weights([p])] for n, p in named if not p.requires_grad)[:20]

    def at_saved(self) -> None:
        self.saved_at = self.steps if self.saved_at is None else self.saved_at


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"] if not _sharded(each)]


def _sharded(parameter: torch.Tensor) -> bool:
    """Whether each rank holds a part of it, which is to differ."""
    return type(parameter).__name__ == "DTensor"
