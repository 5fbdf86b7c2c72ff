"""Which samples does each rank train on?

Every rank knows the same order of all samples, and takes from it every W-th one, beginning with its own number. Nobody
has to be asked. `ShardSampler` does so in two modes: exactly as torch's `DistributedSampler`, with a list of all
indices; or streaming, with an order that is a formula (`permutation.py`), so that a billion samples cost no more
memory than ten. Both can go on in the middle of an epoch, with another number of ranks too.

Left out on purpose: samples drawn by weights, and datasets without a length.
Read next: `parallel/replicas.py`, what is trained on these samples; or torch/utils/data/distributed.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ddp_course.data.permutation import Permutation

MODES = ("compatible", "streaming")
CHUNK = 16384  # samples whose order is computed at once: their arrays stay in the processor's cache


class ShardSampler(Sampler[int]):
    """This rank's indices of a shuffled epoch.

        sampler = ShardSampler(dataset, mode="streaming")
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(dataset, batch_size, sampler=sampler):
                ...                                # train on these samples
                sampler.advance(len(x))            # only if the position is to be saved

    In mode "compatible" the ranks have the same number of indices: some are repeated, or with `drop_last` left out.
    In mode "streaming" no index is repeated: without `drop_last`, ranks may differ by one index. Give `drop_last=True`
    to train: in each step the ranks average their gradients, and one that has a step more would wait in vain.

    Args:
        dataset: the samples, or their number.
        num_replicas, rank: W and this rank; by default those of the default group.
        shuffle: False keeps the dataset's order.
        seed: the same on every rank; with it and the epoch, every rank finds the same order.
        drop_last: leave out the last samples that don't fill a row, which is W samples, one for each rank.
        mode: "compatible" or "streaming".
    Raises:
        ValueError: an argument is wrong; says which.
    Source: torch/utils/data/distributed.py, DistributedSampler, for the compatible mode.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mode: str = "compatible",
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is not known; choose from {', '.join(MODES)}")
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.world_size = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        _check_place(self.length, self.world_size, self.rank)
        self.shuffle, self.seed, self.drop_last, self.mode = shuffle, seed, drop_last, mode
        self.epoch = 0
        self.consumed = 0  # samples of this epoch that all ranks together have trained on

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch`. A new epoch begins at its start, the present one stays where it is."""
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def __len__(self) -> int:
        """How many indices this rank has left in this epoch."""
        left = max(0, self.length - self.consumed)
        if self.drop_last:
            return left // self.world_size
        if self.mode == "compatible":
            return -(-left // self.world_size)  # rounded up
        return len(range(self.rank, left, self.world_size))

    def __iter__(self) -> Iterator[int]:
        left = self.length - self.consumed
        if self.consumed and left < (self.world_size if self.drop_last else 1):
            warnings.warn(f"epoch {self.epoch} is used up; call set_epoch for the next one", stacklevel=2)
        if self.mode == "streaming":
            # Cut for drop_last: of an incomplete last row the lower ranks would have an index more than the others.
            return islice(self._streamed(self.consumed), len(self))
        return iter(self._listed(self.consumed))

    # --- Where the training loop is ------------------------------------------------------------------

    def advance(self, rows: int) -> None:
        """Note that this rank has trained on `rows` more samples, and the others on as many.

        The loop says so, not the iterator: a DataLoader with workers asks for indices long before they are used.
        """
        if rows < 0:
            raise ValueError(f"rows={rows}: the position can only go forward")
        self.consumed = min(self.length, self.consumed + rows * self.world_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch as plain values, the same on every rank after the same number of rows.

        Where the ranks' last rows are uneven (streaming without `drop_last`), rank 0's is the one to save: it is never
        behind the others.
        """
        names = ("epoch", "consumed", "length", "seed", "shuffle", "mode")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, be it with another number of ranks.

        Raises:
            ValueError: the state belongs to another order of samples; names the difference.
        """
        for name in ("length", "seed", "shuffle", "mode"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved position has {name}={state[name]!r}, this sampler {getattr(self, name)!r}: "
                    "the order of the samples would be another one"
                )
        self.epoch, self.consumed = state["epoch"], state["consumed"]

    # --- The order -----------------------------------------------------------------------------------

    def _streamed(self, start: int) -> Iterator[int]:
        """Compute the order piece by piece. Positions `start + rank`, then every W-th one."""
        order = Permutation(self.length, self.seed, self.epoch) if self.shuffle else None
        step = CHUNK * self.world_size
        for first in range(start + self.rank, self.length, step):
            positions = np.arange(first, min(first + step, self.length), self.world_size, dtype=np.uint64)
            yield from (positions if order is None else order(positions)).tolist()

    def _listed(self, start: int) -> list[int]:
        """Do as torch's sampler does: the whole order, made even by repeating its beginning, then every W-th."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        else:
            order = list(range(self.length))
        left = order[start:] if start else order  # a copy only where it must be
        total = len(self) * self.world_size
        while 0 < len(left) < total:  # more than once for a dataset that is smaller than W
            # The epoch's beginning, as without a resume.
            left += order[: total - len(left)]
        return left[self.rank : total : self.world_size]


def _check_place(length: int, world_size: int, rank: int) -> None:
    if length < 1:
        raise ValueError("the dataset is empty: there is nothing to divide")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} does not exist among {world_size} ranks, which count from 0 to {world_size - 1}")
