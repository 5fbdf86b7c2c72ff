"""What is wrong with the arguments, said before any process starts.

Read next: `pool.py`, which calls these first.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle


class _OneSentence(Exception):
    """IPython shows the sentence alone: the mistake is in the call, not in the frames below it."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__bases__[1].__name__}: {self}"]


class WrongValue(_OneSentence, ValueError):
    """An argument has a value that cannot be."""


class WrongType(_OneSentence, TypeError):
    """An argument is of a kind that cannot be."""


def check_settings(world_size: int, start_method: str, rendezvous: str, timeout_s: float) -> None:
    """Raise ValueError or TypeError for a setting that no set of ranks can have."""
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise WrongType(f"world_size must be a whole number of ranks, not {world_size!r}")
    if world_size < 1:
        raise WrongValue(f"world_size={world_size}: a job has at least one rank")
    if start_method not in ("spawn", "forkserver"):
        raise WrongValue(
            f"start_method={start_method!r}: use 'spawn' or 'forkserver'; CUDA and threads do not survive a fork"
        )
    if rendezvous not in ("file", "env"):
        raise WrongValue(
            f"rendezvous={rendezvous!r}: use 'file' or 'env'; for 'tcp' call groups.join_group with init=False"
        )
    if not timeout_s > 0:
        raise WrongValue(f"timeout_s={timeout_s}: the time a rank may wait in a collective must be positive")


def pack(fn: Callable, world_size: int, args: tuple) -> bytes:
    """Return the call `fn(rank, world_size, *args)` as bytes, by value where a rank could not import it.

    Raises:
        TypeError: it cannot be called so, or something in it cannot leave this process; names it.
    """
    _check_call(fn, world_size, args)
    try:
        return _dumps((fn, tuple(args)))
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
        name = getattr(fn, "__name__", repr(fn))
        raise WrongType(
            f"{name} cannot travel to other processes: {error}{_culprit(fn, args)}; open files, locks, sockets and "
            "generators inside the function, on each rank"
        ) from None


def _check_call(fn: Callable, world_size: int, args: tuple) -> None:
    if not callable(fn):
        raise WrongType(f"the first argument must be a function to run on every rank, not {fn!r}")
    if not isinstance(args, tuple | list):
        raise WrongType(f"args must be a tuple, not {type(args).__name__}; for one argument write args=(value,)")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(0, world_size, *args)
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        extra = "".join(f", {type(a).__name__}" for a in args)
        raise WrongType(f"{name}{signature} is called as {name}(rank, world_size{extra}): {error}") from None


class _Pickler(cloudpickle.CloudPickler):
    """Refuses open files, of which cloudpickle would send a copy of the content without a word."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, io.IOBase) and obj not in (sys.stdout, sys.stderr, sys.stdin):
            raise pickle.PicklingError(f"it uses the open file {getattr(obj, 'name', obj)!r}")
        return super().reducer_override(obj)


def _dumps(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _culprit(fn: Callable, args: tuple) -> str:
    try:
        used = inspect.getclosurevars(fn)
        named = {**used.nonlocals, **used.globals}
    except (TypeError, ValueError):
        named = {}
    named |= {f"args[{i}]": value for i, value in enumerate(args)}
    for name, value in named.items():
        try:
            _dumps(value)
        except Exception:  # anything that cannot be pickled, for whatever reason
            return f" (in {name})"
    return ""
