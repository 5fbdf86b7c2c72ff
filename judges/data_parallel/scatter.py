"""02.1 `scatter(batch, devices)`: is every tensor of a nested batch cut, and everything else kept?

Each case is a call of its own, so that an error in one does not hide the others. Read next: `threads.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pprint import pformat
from random import Random
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import exercise, first_mistake
from ddp_course.grading.vocabulary.play import Note, Round, Seen


class Tag:
    """What is no tensor, number or text, and is one thing however often it is named."""

    def __repr__(self) -> str:
        return "the tag"


TAG = Tag()


@dataclass(frozen=True)
class Case:
    """A batch of so many rows, each of which holds its own number, for n devices."""

    kind: str
    rows: int
    n: int

    def batch(self) -> Any:
        """Return the batch."""
        x = torch.arange(float(self.rows * 2)).view(self.rows, 2)
        if self.kind == "nested":
            return {"x": x, "more": (x[:, 0].long() + 100, [x + 200])}
        if self.kind == "kept":
            # As long as there are rows, but no tensors.
            plain = {"names": [f"row {n}" for n in range(self.rows)], "array": np.arange(self.rows), "tag": TAG}
            return (x, {"scale": 0.5, "name": "train", "none": None, **plain})
        if self.kind == "first":
            return {"name": "train", "x": x}
        return x

    def chunks(self) -> list:
        """Return what each device gets."""
        parts = torch.arange(self.rows).chunk(self.n)
        return [pytree.tree_map_only(torch.Tensor, lambda x, part=part: x[part], self.batch()) for part in parts]


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the chunks."""
    chunks = function(case.batch(), case.n)
    if not isinstance(chunks, list):
        return Note()
    tags = [leaf for leaf in pytree.tree_leaves(chunks) if isinstance(leaf, Tag)]
    return Note(as_text(chunks), copied=any(tag is not TAG for tag in tags))


def as_text(chunks: list) -> dict[str, list]:
    """Return chunks as text, so that a list in the place of a tuple shows; and the rows of each one's first tensor."""
    firsts = [next(filter(torch.is_tensor, pytree.tree_leaves(chunk)), torch.tensor(0)) for chunk in chunks]
    return {"chunks": [*map(pformat, chunks)], "rows": [x.shape[0] if x.dim() else None for x in firsts]}


def rounds(rng: Random) -> list[Round]:
    """Even and uneven batches, fewer rows than devices, nested structures, and things that are no tensors."""
    n = rng.choice((3, 4))
    rows = {
        "tensor": 2 * n,
        "uneven": 2 * n + 1 + rng.randrange(n - 2),
        "few": n - 1,
        "nested": 3 * n,
        "kept": 2 * n,
        "first": n - 1,
    }
    cases = [(kind, Case(kind, count, n)) for kind, count in rows.items()] + [("few", Case("tensor", 2, 1))]
    return [Round(1, cases, (Exception,), init=False)]


def chunked(seen: Seen) -> Fault | None:
    """Each chunk has the batch's structure and its own rows."""
    case, rows, right = seen.case, seen["rows"], as_text(seen.case.chunks())
    sizes = right["rows"]
    expected = f"{len(sizes)} chunks with {_words(sizes)} rows, for {case.rows} rows and {case.n} devices"
    if seen["story"]:
        cause = {
            "nested": "a tuple, a list or a dictionary has no rows itself; go into it, and cut what is inside",
            "kept": "numbers, text and None are not cut; every chunk gets them as they are",
            "first": "there are as many chunks as the tensors have pieces, which may be fewer than devices",
        }
        return Fault(expected, report=seen["story"], cause=cause.get(case.kind, ""))
    if seen["chunks"] == right["chunks"]:
        cause = "what is no tensor belongs to every chunk as it is, and not a copy of it"
        return first_mistake("the batch's own objects in every chunk", {cause: seen["copied"] and "a copy of one"})
    if rows is None:
        return Fault(expected, "no list", cause="return a list with one chunk for each device that gets rows")
    plain, total = case.kind not in ("nested", "kept", "first"), sum(count or 0 for count in rows)
    causes = {
        "a device without rows gets no chunk: return fewer chunks than devices": plain and 0 in rows,
        "rows are lost: the size of a chunk is rows / devices, rounded up": plain and total < case.rows,
        "the sizes are right, the rows are not: chunk 0 has the first rows, chunk 1 the next": plain and rows == sizes,
        "all chunks but the last have rows / devices rows, rounded up": plain and total == case.rows,
        "cut each tensor along its first dimension, one chunk after the other": plain,
        "what is no tensor belongs to every chunk, unchanged": case.kind == "kept" and rows == sizes,
        "there are as many chunks as the tensors have pieces, fewer than devices here": case.kind == "first",
        "one structure for each device: the outer list is of chunks, not of the batch's parts": len(rows) != len(sizes),
        "each chunk has the structure of the batch: dictionaries, tuples and lists stay what they are": True,
    }
    found = f"{len(rows)} chunks with {_words(rows)} rows"
    return first_mistake(expected, {cause: applies and found for cause, applies in causes.items()})


def _words(sizes: list) -> str:
    return ", ".join("?" if size is None else str(size) for size in sizes)


SCATTER = exercise(
    "02.1",
    "Scatter",
    "scatter",
    15,
    act=act,
    rounds=rounds,
    checks={
        "tensor": ("one tensor, rows that divide evenly", 1, chunked, "tensor"),
        "uneven": ("rows that do not divide evenly", 1, chunked, "uneven"),
        "few": ("fewer rows than devices", 1, chunked, "few first"),
        "nested": ("tensors inside dictionaries, tuples and lists", 1, chunked, "nested"),
        "kept": ("what is no tensor is kept", 1, chunked, "kept"),
    },
    refused=(
        *("torch.nn.parallel.scatter_gather.scatter", "torch.nn.parallel.scatter_gather.scatter_kwargs"),
        "ddp_course.parallel.data_parallel.scatter",
    ),
)
