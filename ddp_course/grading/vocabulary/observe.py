"""What did the answer do, while it ran? Noted inside a rank, without asking the learner to call anything of ours.

Every collective and every message of torch passes its dispatcher, whichever Python function called it; a dispatch mode
sees it there. A `Call` means the same whichever of torch's overloads it was: the name that people say, and the bytes
that this rank gives. A `Log` also has the forward and backward passes and the updates, all in one row of letters.

Source: torch/utils/_python_dispatch.py.
Read next: `judges/process_groups/`, which judges by these notes.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_course.launcher.interception import GIVEN, OPERATORS

MESSAGES = ("send", "recv")
LETTERS = "F forward, B backward, s sent in backward, S sent outside it, U update"


@dataclass(frozen=True)
class Call:
    """One collective or message, as a rank entered it."""

    op: str  # "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv", "barrier", ...
    ranks: tuple[int, ...]  # of the group, as numbered in the default group
    timeout_s: float  # of the group
    n_bytes: int  # that this rank gives: of a gather its own part, of a broadcast the tensor, on every rank
    in_backward: bool = False  # entered from a hook, while autograd was at work
    peer: int | None = None  # of a message: the other side, as numbered in the default group


class Collectives(TorchDispatchMode):
    """Within the `with` block, note every collective and message of this thread in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.on_call: Callable[[], object] = lambda: None  # a look at the moment of each

    @property
    def talks(self) -> list[Call]:
        """The calls that carry something: all but barriers."""
        return [call for call in self.calls if call.op != "barrier"]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            group = next((found for found in map(_as_group, args) if found is not None), None)
            if group is not None:
                self.calls.append(_call(func, args, group))
                self.on_call()
        return func(*args, **(kwargs or {}))


def _as_group(arg: object) -> dist.ProcessGroup | None:
    """Return the process group that an operator's argument stands for: an object, or in newer operators a name."""
    if isinstance(arg, torch.ScriptObject) and arg._type().name() == "ProcessGroup":
        return dist.ProcessGroup.unbox(arg)
    if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min", "product"):
        return c10d._resolve_process_group(arg)
    return None


def _call(func: torch._ops.OpOverload, args: tuple, group: dist.ProcessGroup) -> Call:
    given = {argument.name: arg for argument, arg in zip(func._schema.arguments, args, strict=False)}
    name = func._schema.name.partition("::")[2]
    op, ranks = plain_name(OPERATORS.get(name, name)), tuple(dist.get_process_group_ranks(group))
    timeout = group._get_backend(group._device_types[0]).options._timeout
    brings = None if op in ("barrier", "recv") else next((given[key] for key in GIVEN if key in given), None)
    peer = given.get("dst", given.get("src")) if op in MESSAGES else None
    return Call(
        op,
        ranks,
        timeout.total_seconds(),
        _n_bytes(brings),
        in_backward=torch._C._current_graph_task_id() != -1,
        peer=None if peer is None else ranks[peer],
    )


def plain_name(op: str) -> str:
    """Return what people say for an operator: "all_gather" for "all_gather_into_tensor_coalesced"."""
    return re.sub(r"^monitored_|(_into_tensor|_tensor|_single)?(_coalesced)?(_out)?_*$", "", op)


def _n_bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_n_bytes, value))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


class Log(Collectives):
    """Within the block, write a letter into `text` for each event of a module, an optimizer and this thread's talk.

    `FBFBFBssU` is a step of three micro-batches whose last backward pass sends two buckets.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None):
        super().__init__()
        self.text = ""
        self.on_call = self._called
        self._hooks = [module.register_forward_hook(self._forward)]
        if optimizer:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._write("U")))

    def _called(self) -> None:
        if self.calls[-1].op != "barrier":
            self._write("s" if self.calls[-1].in_backward else "S")

    def _forward(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self._write("F")
        if output.requires_grad:
            output.register_hook(lambda gradient: self._write("B"))

    def _write(self, letter: str) -> None:
        self.text += letter

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()


_watchers: list[Callable[[str, tuple], None]] = []


@contextmanager
def audited(watch: Callable[[str, tuple], None]) -> Iterator[None]:
    """Within the block, tell `watch` of Python's audit events, such as each file that is opened, in whatever way."""
    _hook_for_good()
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


@functools.cache
def _hook_for_good() -> None:
    """Python lets nobody take an audit hook back, so a process that stays has one."""
    sys.addaudithook(lambda event, args: [watch(event, args) for watch in _watchers] and None)
