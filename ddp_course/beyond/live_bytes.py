"""How much memory does a training step really need?

`LiveBytes` watches every operation that goes through torch's dispatcher, and keeps a weak reference to each
tensor's storage. After each operation it adds up the storages that still live. What it sees is what the CPU's
allocator records too: in one process both give the same peak, to 1 % (a test compares them). On ranks the
allocator's records do not add up, since gloo's threads free tensors, and the profiler does not watch those threads.

Counted: the bytes of all tensors of this process on the CPU that were made or touched inside the `with` block:
weights, gradients, state, activations, buckets, gathered layers, input rows. Not counted: what one operation
allocates and frees inside itself, buffers inside gloo, Python, and torch's own libraries.

Left out on purpose: GPUs, where `torch.cuda.max_memory_allocated` gives the figure.
Read next: `plan.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ddp_course.beyond.sharded_optimizer import ShardedOptimizer

__all__ = ["LiveBytes", "Peak", "measured_peak", "train_step"]


class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of all living tensor storages after each operation.

    Attributes:
        now: bytes alive after the last operation.
        peak: the most since the start, or since `reset`.
        at: phase and name of the operation after which the peak was reached.
        phase: a word of yours for what runs; put into `at`.
        history: bytes after each operation, with its phase, since `reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, StorageWeakRef] = {}
        self.phase = ""
        self.now = 0
        self.reset()

    def reset(self) -> None:
        """Forget the peak so far; what lives still counts."""
        self.peak, self.at = 0, ""
        self.history: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor unpacks it, and the operations on its local tensors come here again
        result = func(*args, **(kwargs or {}))
        self.seen(tensor for tensor in tree_iter((result, args)) if _is_plain(tensor))
        self.look(func.__name__)
        return result

    def look(self, name: str = "") -> int:
        """Add up what lives now, and return it."""
        total = 0
        for key in list(self._alive):
            # A weak reference keeps the address from being used again, and gives the storage if it still lives.
            # Its size is read again each time: FSDP frees a layer by making its storage empty.
            storage = torch.UntypedStorage._new_with_weak_ptr(self._alive[key].cdata)
            if storage is None:
                del self._alive[key]
            else:
                total += storage.nbytes()
            del storage
        self.now = total
        self.history.append((self.phase, total))
        if total > self.peak:
            self.peak, self.at = total, f"{self.phase}: {name}"
        return total

    def seen(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these from now on, before an operation touches them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._alive.setdefault(storage._cdata, StorageWeakRef(storage))

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name what runs inside."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def _is_plain(value: object) -> bool:
    # A DTensor says the size of the whole; its part on this rank is a tensor of its own.
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and not isinstance(value, DTensor)


class Peak(NamedTuple):
    """The most bytes alive in a step, when that was, and all that was alive when."""

    bytes: int
    at: str  # phase and operation
    history: tuple[tuple[str, int], ...]


def measured_peak(
    rank: int, world_size: int, build: Callable, divided: int = 0, steps: int = 2, loop: str = "foreach"
) -> Peak:
    """Train `build()` for some steps and return the most bytes that were alive in the last one.

    Args:
        build: returns a model with the same weights on every rank, the name and module of each unit, one rank's input
            rows, and a function from the model's output to the loss.
        divided: what is divided among the ranks, as in `Strategy`: 0 nothing (torch's DDP), 1 the state
            (`ShardedOptimizer` beside DDP), 2 and 3 gradients and parameters too (`fully_shard`, one unit after the
            other). One rank trains the plain model.
        loop: how Adam goes over the parameters, as in `memory_of`.
    Collective: those of the strategy.
    """
    model, parts, inputs, loss_of = build()
    live = LiveBytes()
    with live:
        live.seen([*model.parameters(), *model.buffers(), inputs])
        replica, optimizer = _set_up(model, parts, divided if world_size > 1 else None, loop)
        for _ in range(steps):
            live.reset()  # the first step has no state yet
            train_step(live, replica, optimizer, inputs, loss_of)
    return Peak(live.peak, live.at, tuple(live.history))


def _set_up(
    model: nn.Module, parts: Sequence[tuple[str, nn.Module]], divided: int | None, loop: str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    ways = {"foreach": loop == "foreach", "fused": loop == "fused"}
    if divided in (0, 1):
        model = nn.parallel.DistributedDataParallel(model)
    if divided in (2, 3):
        from torch.distributed.fsdp import fully_shard  # slow to import

        for _, module in parts:
            if any(True for _ in module.parameters()):
                fully_shard(module, reshard_after_forward=divided == 3)
        fully_shard(model, reshard_after_forward=divided == 3)
    if divided == 1:
        return model, ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3, **ways)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, **ways)


def train_step(
    live: LiveBytes, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, loss_of: Callable
) -> None:
    """Make one step, with each of its parts named for `live`.

    Collective: those of the model and the optimizer.
    """
    optimizer.zero_grad()
    with live.during("forward"):
        loss = loss_of(model(inputs))
    with live.during("backward"):
        loss.backward()
    with live.during("optimizer"):
        optimizer.step()
