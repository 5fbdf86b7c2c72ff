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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


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
