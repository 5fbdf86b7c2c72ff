"""How does a call travel to the ranks, and how does what it returns come back?

As bytes, by cloudpickle, so that functions and classes from a notebook's cells travel too. What cannot leave this
process is named before any rank starts.

Read next: `pool.py`, which sends the call; `worker.py`, which sends the result.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import inspect
import io
import pickle
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

from ddp_course.launcher.settings import WrongType


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

    A tensor that is a small part of a large memory is sent alone: pickle would take the memory with it. One of a GPU
    arrives on the CPU: the other process may not have that GPU, and should not take its memory. What `functools` has
    wrapped goes as the functions in it and is wrapped again: pickle knows a cache by its name alone, and refuses the
    lock in a cached property (until Python 3.11) and the weak references of a dispatch. So does a module that cannot be
    imported, but is an attribute of one that can: torch has some, which its decorators use. One of a class of its own,
    such as `torch._dynamo.config`, goes as its name.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and obj.__name__ not in sys.modules:
            parent, _, name = obj.__name__.rpartition(".")
            if getattr(sys.modules.get(parent), name, None) is obj:
                return getattr, (sys.modules[parent], name)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and obj.__name__ in sys.modules:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, functools.cached_property):
            return _cached_property, (obj.func, obj.attrname)
        if isinstance(obj, _CACHED | types.FunctionType) and (
            obj.__module__ == "__main__" or "<locals>" in obj.__qualname__
        ):
            if isinstance(obj, _CACHED):
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            if isinstance(getattr(obj, "registry", None), types.MappingProxyType):
                return _dispatching, tuple(obj.registry.items())
        if isinstance(obj, io.IOBase) and obj not in (sys.stdout, sys.stderr, sys.stdin):
            raise pickle.PicklingError(f"it uses the open file {getattr(obj, 'name', obj)!r}")
        if type(obj) is torch.Tensor and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(self.proto)
        if type(obj) is torch.Tensor and _is_small_part(obj):
            return obj.clone().__reduce_ex__(self.proto)
        return super().reducer_override(obj)


def _cached(fn: Callable, settings: dict[str, Any]) -> Callable:
    return functools.lru_cache(**settings)(fn)


_CACHED = type(_cached(len, {}))


def _cached_property(fn: Callable, name: str) -> functools.cached_property:
    prop = functools.cached_property(fn)
    prop.__set_name__(None, name)
    return prop


def _dispatching(first: tuple[type, Callable], *others: tuple[type, Callable]) -> Callable:
    fn = functools.singledispatch(first[1])  # the one for `object`
    for cls, special in others:
        fn.register(cls, special)
    return fn


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


def unpack(packed: bytes, deadline: float) -> Any:
    """Rebuild a value from its bytes, which runs the value's own code: it may raise anything, or take its time.

    Raises:
        TimeoutError: the deadline, on the clock of `time.monotonic`, came first; the thread at work is left behind.
    """
    if deadline == float("inf"):
        return cloudpickle.loads(packed)
    done: concurrent.futures.Future = concurrent.futures.Future()

    def work() -> None:
        try:
            done.set_result(cloudpickle.loads(packed))
        except BaseException as error:  # passed on to whoever waits
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done.result(max(0.0, deadline - time.monotonic()))
