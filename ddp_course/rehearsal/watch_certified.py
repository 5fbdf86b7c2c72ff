"""What does a certificate need to see besides? All weights after each step, the numbers of rows, and chance in a step.

Weights go to a file beside a rank's notes, in double precision, which holds those of single precision exactly.
Read next: `certify.py`, which reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddp_course.rehearsal.notes import OPEN, around
from ddp_course.rehearsal.sketches import generators, row_sketches
from ddp_course.rehearsal.watch import Watch
from ddp_course.rehearsal.watch_sampling import _tensors

MOST_BYTES = 100e6  # of a rank's weights; steps that come later are not compared, but the first always is,
MOST_OF_A_STATE = 400e6  # unless the weights are larger than this: one process and each rank keep two
MOST_ROWS = 40_000  # of an epoch


class CertifiedWatch:
    """The eyes of one rank for what is certified; to be installed before `watch`, which changes the first batches."""

    def __init__(self, watch: Watch, path: str):
        self.watch, self.left, self.size = watch, 0.0, 0
        self.file = OPEN(path, "wb")  # noqa: SIM115  (as long as the rank)
        self.state: dict[str, str] | None = None  # of the generators, when the latest batch was given out
        self.latest: Any = None  # the pass that it is from

    def install(self) -> None:
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(lambda *_: self.keep())
        around(_BaseDataLoaderIter, "_reset", self.at_reset)
        around(_BaseDataLoaderIter, "_next_index", self.at_numbers)
        around(_BaseDataLoaderIter, "__next__", self.at_batch)

    def before_step(self, *_: Any) -> None:
        if self.state not in (None, generators()):
            self.watch.writer.note("chance")
        self.state = None
        if self.latest is not None:
            self.latest._trains = True
        if not self.size:
            self.keep()

    def keep(self) -> None:
        """Write the weights of all optimizers, as long as they are as many as before the first step."""
        weights = [p.detach().reshape(-1) for each in self.watch.trained.values() for p in each]
        size = sum(map(len, weights))
        if not self.size and size:
            self.size = size
            self.file.write(torch.tensor([size], dtype=torch.float64).numpy().tobytes())
            self.left = max(MOST_BYTES, 2 * 8 * size) if 8 * size <= MOST_OF_A_STATE else 0
        self.left = self.left - 8 * size if size == self.size else -1
        if size and self.left >= 0:
            self.file.write(torch.cat([each.to("cpu", torch.float64) for each in weights]).numpy().tobytes())
        self.file.flush()

    def at_reset(self, call: Callable, batches: Any, *args: Any, **kwargs: Any) -> None:
        batches._drawn, batches._seen = [], []  # persistent workers keep their iterator
        call(batches, *args, **kwargs)

    def at_numbers(self, call: Callable, batches: Any) -> Any:
        numbers = call(batches)
        vars(batches).setdefault("_drawn", []).extend(numbers if isinstance(numbers, list) else [numbers])
        return numbers

    def at_batch(self, call: Callable, batches: Any) -> Any:
        try:
            batch = call(batches)
        except StopIteration:
            if getattr(batches, "_trains", False):
                self.watch.writer.note("epoch", **_numbered(batches._dataset, batches._drawn, batches._seen))
            raise
        rows = next(_tensors(batch), torch.tensor(0))
        seen = vars(batches).setdefault("_seen", [])
        seen += row_sketches(rows) if rows.dim() and len(seen) < MOST_ROWS else []
        self.state, self.latest = generators(), batches
        return batch


def _numbered(rows: Any, drawn: list, seen: list[float]) -> dict:
    """The numbers of a pass's rows and all that there are, in the data set inside Subset; {} if they cannot be told."""
    if not hasattr(rows, "__len__") or len(rows) > MOST_ROWS or len(drawn) != len(seen):
        return {}
    try:
        return {"drawn": _inside(rows, drawn), "of": _inside(rows, range(len(rows))), "contents": seen}
    except (TypeError, ValueError, LookupError):  # None, of an iterable data set; texts, tuples
        return {}


def _inside(rows: Any, numbers: Iterable) -> list[int]:
    while isinstance(rows, Subset):
        numbers, rows = [rows.indices[number] for number in numbers], rows.dataset
    return [int(number) for number in numbers]
