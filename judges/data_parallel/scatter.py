"""02.1 `scatter(batch, devices)`: is every tensor of a nested batch cut, and everything else kept?

Each case is a call of its own, so that an error in one does not hide the others. Read next: `threads.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from ddp_course.launcher.failure import describe

CASES = ("tensor", "uneven", "few", "nested", "kept")


def make_batch(case: str, rows: int) -> Any:
    """Return the batch of a case; each row holds its own number."""
    x = torch.arange(float(rows * 2)).view(rows, 2)
    if case == "nested":
        return {"x": x, "more": (x[:, 0] + 100, [x + 200])}
    if case == "kept":
        return (x, {"scale": 0.5, "name": "train", "none": None})
    return x


def scatter_driver(rank: int, world_size: int, function: Callable, cases: list[tuple[str, int, int]]) -> list[dict]:
    """Call the function for each case; note the chunks as plain data, or the error."""
    return [_outcome(function, make_batch(case, rows), n) for case, rows, n in cases]


def _outcome(function: Callable, batch: Any, n: int) -> dict:
    try:
        chunks = function(batch, n)
    except NotImplementedError:
        raise
    except Exception as error:
        return {"story": describe(error, 0).story}
    return {"chunks": [told(chunk) for chunk in chunks] if isinstance(chunks, list | tuple) else told(chunks)}


def told(value: Any) -> Any:
    """Return a structure with its types, so that a list in the place of a tuple shows: tensors as (shape, numbers)."""
    if isinstance(value, torch.Tensor):
        return {"tensor": [list(value.shape), value.flatten().tolist()]}
    if isinstance(value, dict):
        return {"dict": {str(key): told(item) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [told(item) for item in value]}
    return value if value is None or isinstance(value, bool | int | float | str) else f"<{type(value).__name__}>"


def scatter_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Even and uneven batches, fewer rows than devices, nested structures, and things that are no tensors."""
    n = rng.choice((3, 4))
    cases = [
        ("tensor", 2 * n, n),
        ("uneven", 2 * n + 1 + rng.randrange(n - 1), n),
        ("few", n - 1, n),
        ("nested", 3 * n, n),
        ("kept", 2 * n, n),
    ]
    for case, outcome in zip(cases, answer.run(scatter_driver, 1, cases)[0], strict=True):
        yield case[0], _fault(*case, outcome)


def _fault(case: str, rows: int, n: int, outcome: dict) -> Fault | None:
    sizes = [len(chunk) for chunk in torch.arange(rows).chunk(n)]
    batch = make_batch(case, rows)
    right = [told(_cut(batch, start, size)) for start, size in zip(_starts(sizes), sizes, strict=True)]
    expected = f"{len(sizes)} chunks with {_words(sizes)} rows, for {rows} rows and {n} devices"
    if "story" in outcome:
        cause = {"nested": "a tuple, a list or a dictionary has no rows itself; go into it, and cut what is inside"}
        cause["kept"] = "numbers, text and None are not cut; every chunk gets them as they are"
        return Fault(expected, report=outcome["story"], cause=cause.get(case, ""))
    if outcome["chunks"] == right:
        return None
    return Fault(expected, *_found(case, outcome["chunks"], sizes, n))


def _cut(batch: Any, start: int, size: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[start : start + size]
    if isinstance(batch, dict):
        return {key: _cut(item, start, size) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_cut(item, start, size) for item in batch)
    return batch


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _found(case: str, chunks: Any, sizes: list[int], n: int) -> tuple[str, None, str]:
    """Return what was found, and the likely cause."""
    if not isinstance(chunks, list):
        return "no list", None, "return a list with one chunk for each device that gets rows"
    rows = [_rows(chunk) for chunk in chunks]
    found = f"{len(chunks)} chunks with {_words(rows)} rows"
    if case in ("tensor", "uneven", "few"):
        if 0 in rows:
            return found, None, "a device without rows gets no chunk: return fewer chunks than devices"
        if sum(r or 0 for r in rows) < sum(sizes):
            return found, None, "rows are lost: the size of a chunk is rows / devices, rounded up"
        if None not in rows and sum(rows) == sum(sizes) and rows != sizes:
            return found, None, "all chunks but the last have rows / devices rows, rounded up"
        if rows == sizes:
            return found, None, "the sizes are right, the rows are not: chunk 0 has the first rows, chunk 1 the next"
        return found, None, "cut each tensor along its first dimension, one chunk after the other"
    if case == "kept" and rows == sizes:
        return found, None, "what is no tensor belongs to every chunk, unchanged"
    if len(chunks) != len(sizes):
        return found, None, "one structure for each device: the outer list is of chunks, not of the batch's parts"
    return found, None, "each chunk has the structure of the batch: dictionaries, tuples and lists stay what they are"


def _rows(chunk: Any) -> int | None:
    """Rows of the first tensor in what `told` made of a chunk."""
    if not isinstance(chunk, dict):
        return None
    if "tensor" in chunk:
        return chunk["tensor"][0][0] if chunk["tensor"][0] else None
    inner = next(iter(chunk.values()))
    items = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
    return next((rows for rows in map(_rows, items) if rows is not None), None)


def _words(sizes: list) -> str:
    return ", ".join("?" if size is None else str(size) for size in sizes)


SCATTER = Exercise(
    "02.1",
    "Scatter",
    "scatter",
    15,
    (
        Check("tensor", "one tensor, rows that divide evenly", 1),
        Check("uneven", "rows that do not divide evenly", 1),
        Check("few", "fewer rows than devices", 1),
        Check("nested", "tensors inside dictionaries, tuples and lists", 1),
        Check("kept", "what is no tensor is kept", 1),
    ),
    scatter_judge,
    refused=(
        "torch.nn.parallel.scatter_gather.scatter",
        "torch.nn.parallel.scatter_gather.scatter_kwargs",
        "ddp_course.parallel.data_parallel.scatter",
    ),
)
