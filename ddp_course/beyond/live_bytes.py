"""How much memory does a training step really need?

`LiveBytes` watches every operation that goes through torch's dispatcher, and keeps a weak reference to each
tensor's storage. After each operation it adds up the storages that still live. What it sees is what the CPU's
allocator records too: in one process both give the same peak, byte for byte (a test compares them). The
profiler's records cannot be used on ranks, since gloo's threads free tensors that the profiler does not watch there.

Counted: the bytes of all tensors of this process on the CPU that were made or touched inside the `with` block:
weights, gradients, state, activations, buckets, gathered layers, input rows. Not counted: what one operation
allocates and frees inside itself, buffers inside gloo, Python, and torch's own libraries.

Left out on purpose: GPUs, where `torch.cuda.max_memory_allocated` gives the figure.
Read next: `plan.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["LiveBytes", "train_step"]


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
        for tensor in tree_iter((result, args)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self._alive.setdefault(storage._cdata, StorageWeakRef(storage))
        self.look(func.__name__)
        return result

    def look(self, name: str = "") -> int:
        """Add up what lives now, and return it."""
        total = 0
        for key in list(self._alive):
            # A weak reference keeps the address from being used again, and gives the storage if it still lives.
            # Its size is read anew each time: FSDP frees a layer by making its storage empty.
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

    @contextmanager
    def during(self, phase: str) -> Any:
        """Name what runs inside."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def train_step(
    live: LiveBytes, model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, loss_of: Callable
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
