"""How do a learner's results come to the judge, when nothing of the learner's may run there?

As JSON, with a tag where JSON has no word of its own: tuples, sets, bytes, numbers that are not finite, tensors, and
the notes of a rank. Reading it makes plain data and never calls anything that the text names; a text that is not of
this form is refused. Functions travel the other way only, from the judge to the ranks.

Read next: `boxed.py`, where the border is.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.observe import Call

MOST_LETTERS = 2**26  # of one message
MOST_LEVELS = 60  # of lists in lists
TAG = "!"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class NotPlain(ValueError):
    """A value that is no plain data, or a text that is none of this form."""


def written(value: Any) -> str:
    """Return a value of plain data as text.

    Raises:
        NotPlain: there is something else in it; says what.
    """
    return json.dumps(_tagged(value), allow_nan=False)


def read(text: str) -> Any:
    """Return the value that `written` made this text of.

    Raises:
        NotPlain: the text is none of its texts, is too long, or is nested too deep.
    """
    if len(text) > MOST_LETTERS:
        raise NotPlain(f"{len(text)} letters, where {MOST_LETTERS} may come")
    try:
        return _untagged(json.loads(text, parse_constant=_no_such_number), MOST_LEVELS)
    except NotPlain:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError) as error:
        raise NotPlain(f"{type(error).__name__}: {str(error)[:200]}") from None


def _tagged(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind.__index__(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TAG: ["float", repr(float(value))]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    for kind, (name, parts) in _WRITTEN.items():
        if isinstance(value, kind):
            return {TAG: [name, *parts(value)]}
    raise NotPlain(f"a {type(value).__name__} cannot travel; give numbers, text, lists, dictionaries or tensors")


def _pairs(value: dict) -> list:
    return [[_tagged(key), _tagged(item)] for key, item in value.items()]


def _tensor(value: torch.Tensor) -> list:
    if value.is_sparse or value.is_quantized:
        raise NotPlain("a sparse or quantised tensor cannot travel")
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    dtype = str(value.dtype).removeprefix("torch.")
    return [dtype, list(value.shape), base64.b64encode(flat.numpy().tobytes()).decode()]


_WRITTEN: dict[type, tuple[str, Callable[[Any], list]]] = {
    dict: ("dict", lambda value: _pairs(value)),
    tuple: ("tuple", lambda value: [_tagged(item) for item in value]),
    set: ("set", lambda value: [_tagged(item) for item in value]),
    bytes: ("bytes", lambda value: [base64.b64encode(value).decode()]),
    torch.Tensor: ("tensor", _tensor),
    Call: ("call", lambda value: [_tagged(item) for item in astuple(value)]),
    Fault: ("fault", lambda value: [_tagged(item) for item in astuple(value)]),
}


def _untagged(value: Any, levels: int) -> Any:
    if levels == 0:
        raise NotPlain(f"nested more than {MOST_LEVELS} deep")
    if isinstance(value, list):
        return [_untagged(item, levels - 1) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, (name, *parts)),) = value.items()
    if tag != TAG or name not in _READ:
        raise NotPlain(f"no such kind of value: {str(name)[:60]}")
    return _READ[name]([_untagged(part, levels - 1) for part in parts])


def _read_tensor(parts: list) -> torch.Tensor:
    dtype, shape, data = parts
    given = torch.frombuffer(bytearray(base64.b64decode(data, validate=True)) or bytearray(1), dtype=torch.uint8)
    if not data:
        given = given[:0]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise NotPlain(f"no such shape: {str(shape)[:60]}")
    return given.view(DTYPES[dtype]).reshape(shape)


def _read_call(parts: list) -> Call:
    return _typed(Call(*parts), (str, tuple, float | int, int, bool, int | None))


def _read_fault(parts: list) -> Fault:
    return _typed(Fault(*parts), (str, str, int | None, str, str, bool))


def _typed(made: Any, kinds: tuple) -> Any:
    if all(isinstance(part, kind) for part, kind in zip(vars(made).values(), kinds, strict=True)):
        return made
    raise NotPlain(f"a {type(made).__name__} of other parts than it has")


_READ: dict[str, Callable[[list], Any]] = {
    "float": lambda parts: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[parts[0]],
    "dict": lambda parts: dict(parts),
    "tuple": tuple,
    "set": set,
    "bytes": lambda parts: base64.b64decode(parts[0], validate=True),
    "tensor": _read_tensor,
    "call": _read_call,
    "fault": _read_fault,
}


def _no_such_number(name: str) -> None:
    raise NotPlain(f"no such number: {name}")
