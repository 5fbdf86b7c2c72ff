"""What is wrong with the arguments, said before any process starts.

Read next: `pool.py`, which calls these first.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch


class _OneSentence(Exception):
    """IPython shows the sentence alone: the mistake is in the call, not in the frames below it."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__bases__[1].__name__}: {self}"]


class WrongValue(_OneSentence, ValueError):
    """An argument has a value that cannot be."""


class WrongType(_OneSentence, TypeError):
    """An argument is of a kind that cannot be."""


RANK_BYTES = 100_000_000  # a rank that has imported torch, without what it shares with the others


def check_settings(
    world_size: int, start_method: str, rendezvous: str, timeout_s: float, limit_s: float | None = None
) -> None:
    """Raise ValueError or TypeError for a setting that no set of ranks can have."""
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise WrongType(f"world_size must be a whole number of ranks, not {world_size!r}")
    if world_size < 1:
        raise WrongValue(f"world_size={world_size}: a job has at least one rank")
    if world_size > (most := _most_ranks()):
        raise WrongValue(
            f"world_size={world_size}: a rank is a process of about {RANK_BYTES / 1e6:.0f} MB, so this machine holds "
            f"{most} at most; for more ranks, use more machines and torchrun"
        )
    if start_method not in ("spawn", "forkserver"):
        raise WrongValue(
            f"start_method={start_method!r}: use 'spawn' or 'forkserver'; CUDA and threads do not survive a fork"
        )
    if rendezvous not in ("file", "env"):
        raise WrongValue(
            f"rendezvous={rendezvous!r}: use 'file' or 'env'; for 'tcp' call groups.join_group with init=False"
        )
    check_seconds("timeout_s", timeout_s, "the time that a rank may wait in a collective")
    check_limit(limit_s)


def check_limit(limit_s: float | None) -> None:
    """Raise TypeError or ValueError for a limit that no call can have."""
    if limit_s is not None:
        check_seconds("limit_s", limit_s, "the time that a call may take, or None")


def check_seconds(name: str, value: float, what: str) -> None:
    """Raise TypeError or ValueError unless `value` is a positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongType(f"{name} must be a number of seconds, not {value!r}: {what}")
    if not value > 0:
        raise WrongValue(f"{name}={value}: {what} must be more than 0 s")


def _most_ranks() -> int:
    return max(64, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // RANK_BYTES)


def pack(fn: Callable, world_size: int, args: tuple) -> bytes:
    """Return the call `fn(rank, world_size, *args)` as bytes, by value where a rank could not import it.

    Raises:
        TypeError: it cannot be called so, or something in it cannot leave this process; names it.
    """
    _check_call(fn, world_size, args)
    try:
        return dumps((fn, tuple(args)))
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
    """Refuses open files, of which cloudpickle would send a copy of the content without a word.

    A tensor that is a small part of a large memory is sent alone: pickle would take the memory with it.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, io.IOBase) and obj not in (sys.stdout, sys.stderr, sys.stdin):
            raise pickle.PicklingError(f"it uses the open file {getattr(obj, 'name', obj)!r}")
        if type(obj) is torch.Tensor and _is_small_part(obj):
            return obj.clone().__reduce_ex__(self.proto)
        return super().reducer_override(obj)


def _is_small_part(tensor: torch.Tensor) -> bool:
    if tensor.requires_grad or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return 2 * tensor.nbytes < tensor.untyped_storage().nbytes()


def dumps(value: Any) -> bytes:
    """Return a value as bytes, by value where another process could not import it."""
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
            dumps(value)
        except Exception:  # anything that cannot be pickled, for whatever reason
            return f" (in {name})"
    return ""
