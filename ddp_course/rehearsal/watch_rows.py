"""Which rows does a rank's program read, in which order, and how long does it wait for them?

Read next: `run_of_rows.py`, which reads these notes of all ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, _utils, dataloader

from ddp_course.rehearsal.notes import OPEN, Writer, around, as_line
from ddp_course.rehearsal.sketches import generators, generators_in, innermost, row_sketches

MOST_ROWS = 20_000  # of a rank, in one run


class RowsWatch:
    """The eyes of one rank for the data.

    Args:
        path: of notes by workers, without their endings.
    """

    def __init__(self, writer: Writer, rank: int, path: str):
        self.writer, self.rank, self.path, self.rows = writer, rank, path, 0
        self.made: dict[int, int | None] = {}  # the line that made a sampler

    def install(self) -> None:
        around(DistributedSampler, "__init__", self.at_sampler_made)
        around(DistributedSampler, "__iter__", self.at_sampler)
        around(DataLoader, "__init__", self.at_loader_made)
        around(DataLoader, "__iter__", self.at_pass)
        around(dataloader._BaseDataLoaderIter, "__next__", self.at_loader)
        for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):
            around(fetcher, "fetch", self.at_fetch)

    def at_sampler_made(self, call: Callable, sampler: DistributedSampler, *args: Any, **kwargs: Any) -> None:
        call(sampler, *args, **kwargs)
        self.made[id(sampler)] = self.writer.line()

    def at_sampler(self, call: Callable, sampler: DistributedSampler) -> Iterator[int]:
        padded = 0 if sampler.drop_last else sampler.total_size - len(sampler.dataset)
        made = self.made.get(id(sampler))
        self.writer.note(
            "sampler", id=id(sampler), epoch=sampler.epoch, shuffle=sampler.shuffle, padded=padded, made=made
        )
        return call(sampler)

    def at_loader_made(self, call: Callable, loader: DataLoader, *args: Any, **kwargs: Any) -> None:
        call(loader, *args, **kwargs)
        self.writer.note("loader", workers=loader.num_workers, batch=loader.batch_size)

    def at_pass(self, call: Callable, loader: DataLoader) -> Iterator:
        self.writer.note("pass")
        return call(loader)

    def at_loader(self, call: Callable, batches: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(batches)
        finally:
            self.writer.note("waited", since=began, seconds=time.perf_counter() - began)

    def at_fetch(self, call: Callable, fetcher: Any, index: Any) -> Any:
        """Whether reading rows draws random numbers, and from which state; in a worker, this is the worker."""
        before = generators() | generators_in(fetcher.dataset)
        try:
            return call(fetcher, index)
        finally:
            after = generators() | generators_in(fetcher.dataset)
            drawn = {name: state for name, state in before.items() if state != after.get(name)}
            if drawn:
                worker = torch.utils.data.get_worker_info()
                fact = {"worker": worker.id if worker else None, "drawn": drawn, "line": _reads(fetcher.dataset)}
                with OPEN(f"{self.path}.{os.getpid()}.draws", "a") as notes:
                    notes.write(as_line({"what": "drew", "rank": self.rank, **fact}))

    def at_forward(self, module: nn.Module, given: torch.Tensor | None, replica: bool) -> None:
        """The rows that go into the outermost module."""
        if given is None or self.rows >= MOST_ROWS:
            return
        rows = row_sketches(given)
        self.rows += len(rows)
        trains = module.training and torch.is_grad_enabled()
        learns = any(parameter.requires_grad for parameter in module.parameters())
        self.writer.note("forward", training=trains and learns, rows=rows, replica=replica)


def _reads(rows: Any) -> int | None:
    """The line at which a data set reads a row."""
    rows = innermost(rows)
    code = getattr(type(rows), "__getitem__", None) or getattr(type(rows), "__iter__", None)
    return code.__code__.co_firstlineno if hasattr(code, "__code__") else None
