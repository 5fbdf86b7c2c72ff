"""Which rows does a rank's program read, in which order, and how long does it wait for them?

Read next: `rehearse_sampling.py`, which reads these notes of all ranks.
"""

from __future__ import annotations

import contextlib
import glob
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, _utils, dataloader

from ddp_course.rehearsal.notes import OPEN, Writer, around, as_line
from ddp_course.rehearsal.sketches import generators, generators_in, innermost, row_sketches

MOST_ROWS = 40_000  # of a rank, in one run
MOST_COUNTS = 100  # numbers in a sum that is looked at
MOST_BATCHES, MOST_BYTES = 64, 20_000_000  # that are left for another run; bytes of each
SAVE, LOAD = torch.save, torch.load  # the program's own are watched


class RowsWatch:
    """The eyes of one rank for the data.

    Args:
        path: of notes by workers, without their endings.
        batches: a folder with the batches that other ranks read before their first step, which are joined and given to
            the program in the place of its own; None: it reads its own, and leaves them there for another run.
    """

    def __init__(self, writer: Writer, rank: int, path: str, batches: str | None = None):
        self.writer, self.rank, self.path, self.rows = writer, rank, path, 0
        self.made: dict[int, int | None] = {}  # the line that made a sampler
        self.set: dict[int, int | None] = {}  # the line that gave it its epoch
        self.loaders: dict[int, int] = {}  # a loader's number
        self.first = FirstBatches(batches) if batches else None
        self.kept: list | None = None if batches else []
        self.alive: list[torch.Tensor] = []
        self.sums: dict[int, torch.Tensor] = {}  # small sums, as they were after they were reduced

    def install(self) -> None:
        around(DistributedSampler, "__init__", self.at_sampler_made)
        around(DistributedSampler, "__iter__", self.at_sampler)
        around(DistributedSampler, "set_epoch", self.at_epoch)
        around(DataLoader, "__init__", self.at_loader_made)
        around(DataLoader, "__iter__", self.at_pass)
        around(dataloader._BaseDataLoaderIter, "__next__", self.at_loader)
        for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):
            around(fetcher, "fetch", self.at_fetch)

    def at_sampler_made(self, call: Callable, sampler: DistributedSampler, *args: Any, **kwargs: Any) -> None:
        call(sampler, *args, **kwargs)
        self.made[id(sampler)] = self.writer.line()

    def at_epoch(self, call: Callable, sampler: DistributedSampler, epoch: int) -> None:
        self.set[id(sampler)] = self.writer.line()
        call(sampler, epoch)

    def at_sampler(self, call: Callable, sampler: DistributedSampler) -> Iterator[int]:
        padded = 0 if sampler.drop_last else sampler.total_size - len(sampler.dataset)
        self.writer.note(
            "sampler",
            **{name: getattr(sampler, name) for name in ("epoch", "shuffle", "seed", "rank", "num_replicas")},
            id=id(sampler),
            padded=padded,
            made=self.made.get(id(sampler)),
            set=self.set.get(id(sampler)),
        )
        return call(sampler)

    def at_loader_made(self, call: Callable, loader: DataLoader, *args: Any, **kwargs: Any) -> None:
        call(loader, *args, **kwargs)
        self.loaders[id(loader)] = len(self.loaders)
        draws = getattr(type(loader.sampler).__iter__, "__code__", None)
        own = draws.co_firstlineno if draws and draws.co_filename == self.writer.script else None
        self.writer.note("loader", loader=self.loaders[id(loader)], workers=loader.num_workers, batch=loader.batch_size,
                         sampler=type(loader.sampler).__name__, draws=own)  # fmt: skip

    def at_pass(self, call: Callable, loader: DataLoader) -> Iterator:
        owners = [innermost(loader.dataset), loader.sampler, loader.batch_sampler]
        sets_epoch = any(  # torch's own has a question of its own, and what does not shuffle needs no epoch
            callable(getattr(owner, "set_epoch", None)) and getattr(owner, "shuffle", True) is not False
            for owner in owners
            if type(owner) is not DistributedSampler
        )
        counts = {f"{type(owner).__name__}.{name}": value for owner in owners if hasattr(owner, "__dict__")
                  for name, value in vars(owner).items() if type(value) is int}  # fmt: skip
        number = self.loaders.get(id(loader), -1)
        self.writer.note("pass", loader=number, stay=loader.persistent_workers and loader.num_workers > 0,
                         counts=counts, sets_epoch=sets_epoch)  # fmt: skip
        batches = call(loader)
        batches._number = number
        return batches

    def at_loader(self, call: Callable, batches: Any) -> Any:
        began = time.perf_counter()
        batch = call(batches)
        seconds, number = time.perf_counter() - began, getattr(batches, "_number", -1)
        tensor = next(_tensors(batch), None)
        rows = []
        if tensor is not None and tensor.dim() and self.rows < MOST_ROWS:
            rows = row_sketches(tensor)
            self.rows += len(rows)
        self.writer.note("batch", loader=number, since=began, seconds=seconds, rows=rows)
        if self.kept is not None:
            self.kept.append([number, batch])
        return self.first.next(number, batch) if self.first else batch

    def at_step(self) -> None:
        """The first step is taken: what was read for it is left for the run on one rank."""
        if self.kept:
            # A batch of objects that cannot be saved is compared with nothing.
            with contextlib.suppress(Exception), OPEN(f"{self.path}.batches", "wb") as file:
                SAVE([part for part in self.kept if _bytes(part[1]) < MOST_BYTES][:MOST_BATCHES], file)
        if self.first and not self.first.over:
            self.first.over = True
            self.writer.note("replayed", whole=self.first.whole and not self.first.left)
        self.kept = None

    def at_reduce(self, tensor: torch.Tensor) -> None:
        """Whether something small is added to since it was reduced last, and reduced again."""
        if tensor.numel() > MOST_COUNTS or tensor.is_complex():
            return
        before = self.sums.get(tensor.data_ptr())
        if before is not None and before.shape == tensor.shape:
            now = tensor.detach()
            grows = bool((now > before).any() and (before > 0).any())
            self.writer.note("again", grows=grows, shrinks=bool((now < before).any()))
        if tensor.dtype in (torch.bfloat16, torch.float16):
            self.writer.note("half", dtype=str(tensor.dtype).removeprefix("torch."), size=tensor.numel())

    def after_reduce(self, tensor: torch.Tensor, later: bool) -> None:
        if tensor.numel() <= MOST_COUNTS and not later and not tensor.is_complex():
            self.sums[tensor.data_ptr()] = tensor.detach().clone()
            self.alive.append(tensor)  # its memory is not given to another

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
        """The samples that go into the outermost module."""
        if given is None or self.rows >= MOST_ROWS:
            return
        rows = row_sketches(given)
        self.rows += len(rows)
        trains = module.training and torch.is_grad_enabled()
        learns = any(parameter.requires_grad for parameter in module.parameters())
        random = any(isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0 for each in module.modules())
        self.writer.note("forward", training=trains and learns, rows=rows, replica=replica, random=random)


class FirstBatches:
    """The batches that the ranks of another run read before their first step, joined.

    Attributes:
        whole: whether all that the program has read so far came from there.
    """

    def __init__(self, folder: str):
        paths = sorted(glob.glob(f"{folder}/rank*.batches"))
        of_ranks = [LOAD(path, weights_only=True) for path in paths]
        of_steps = [tuple(zip(*together, strict=True)) for together in zip(*of_ranks, strict=False)]
        self.left = [(numbers[0], batches) for numbers, batches in of_steps if len(set(numbers)) == 1]
        self.whole = bool(self.left) and len({len(each) for each in of_ranks}) == 1
        self.over = False

    def next(self, number: int, own: Any) -> Any:
        """Return what takes the place of a batch."""
        if self.over:
            return own
        if not self.left or self.left[0][0] != number:
            self.whole = False
            return own
        try:
            return joined(self.left.pop(0)[1])
        except (TypeError, ValueError, RuntimeError):
            self.whole = False
            return own


def joined(batches: Sequence[Any]) -> Any:
    """Join the ranks' batches along their first dimension; texts of unequal length are padded.

    Raises:
        TypeError, ValueError, RuntimeError: they cannot be joined.
    """
    one = batches[0]
    if isinstance(one, torch.Tensor):
        if one.dim() == 2 and len({each.shape[1] for each in batches}) > 1:
            longest, pad = (
                max(each.shape[1] for each in batches),
                -100 if any((each == -100).any() for each in batches) else 0,
            )
            batches = [nn.functional.pad(each, (0, longest - each.shape[1]), value=pad) for each in batches]
        return torch.cat(list(batches))
    if isinstance(one, dict):
        return {name: joined([each[name] for each in batches]) for name in one}
    if isinstance(one, list | tuple):
        if one and not isinstance(one[0], torch.Tensor | dict | list | tuple):
            return type(one)(part for each in batches for part in each)
        return type(one)(joined(parts) for parts in zip(*batches, strict=True))
    raise TypeError(f"batches of {type(one).__name__} cannot be joined")


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict | list | tuple):
        for each in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(each)


def _bytes(batch: Any) -> int:
    return sum(each.numel() * each.element_size() for each in _tensors(batch))


def _reads(rows: Any) -> int | None:
    """The line at which a data set reads a row."""
    rows = innermost(rows)
    code = getattr(type(rows), "__getitem__", None) or getattr(type(rows), "__iter__", None)
    return code.__code__.co_firstlineno if hasattr(code, "__code__") else None
