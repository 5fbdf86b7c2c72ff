"""Large things as a few numbers: tensors, rows, and the states of generators.

A tensor is noted as its inner products with fixed random vectors. Sketches are linear, so the mean of the ranks'
sketches is the sketch of the mean, and nothing has to be sent while the program runs.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

SKETCHES = 3  # numbers for each tensor; one may be blind by chance


def alike(one: list[float], other: list[float], tolerance: float) -> bool:
    """Whether two sketches agree, relative to the larger."""
    size = max(map(abs, [*one, *other, 1e-30]))
    return all(abs(a - b) <= tolerance * size for a, b in zip(one, other, strict=True))


@functools.lru_cache(maxsize=256)
def _vectors(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SKETCHES, size, generator=generator, dtype=torch.float64)


def sketched(tensors: Iterable[torch.Tensor], seed: int) -> torch.Tensor:
    """Return inner products with fixed random vectors, in double precision."""
    total = torch.zeros(SKETCHES, dtype=torch.float64)
    with torch.no_grad():
        for each in tensors:
            dense = each.detach().to_dense() if each.is_sparse else each.detach()
            total += _vectors(each.numel(), seed) @ dense.reshape(-1).to("cpu", torch.float64)
    return total


def weights(parameters: list[torch.Tensor]) -> list[float]:
    return sum((sketched([each], seed=each.numel() + index) for index, each in enumerate(parameters)),
               torch.zeros(SKETCHES)).tolist()  # fmt: skip


def row_sketches(tensor: torch.Tensor) -> list[float]:
    """One number a row: equal rows have equal numbers."""
    flat = tensor.detach().reshape(len(tensor), -1).to("cpu", torch.float64)
    return [float(f"{number:.9g}") for number in (flat * _vectors(flat.shape[1], 1)[0]).sum(dim=1).tolist()]


def generators() -> dict[str, str]:
    """The state of each generator that programs draw from, as a short word."""
    kind, keys, position, *rest = np.random.get_state()
    return {
        "torch": _word(torch.get_rng_state().numpy().tobytes()),
        "numpy": _word(keys.tobytes() + repr((position, rest)).encode()),
        "random": str(hash(random.getstate()[1])),  # of whole numbers: the same in each process
    }


def innermost(rows: Any) -> Any:
    """The data set inside Subset and its like."""
    while hasattr(rows, "dataset"):
        rows = rows.dataset
    return rows


def generators_in(rows: Any) -> dict[str, str]:
    """The same of the generators that a data set keeps for itself, or that its transforms keep."""
    found = {}
    for owner in [innermost(rows), *vars(innermost(rows)).values()]:
        for name, each in vars(owner).items() if hasattr(owner, "__dict__") else ():
            if isinstance(each, torch.Generator):
                found[name] = _word(each.get_state().numpy().tobytes())
            elif isinstance(each, np.random.Generator):
                found[name] = _word(repr(each.bit_generator.state).encode())
            elif isinstance(each, random.Random):
                found[name] = _word(repr(each.getstate()).encode())
    return found


def _word(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
