"""Has an answer changed its process for good?

Before and after a run a rank writes down what a later run could stumble over: groups, threads, children, the
environment, torch's settings, hooks and modes, signal handlers, functions of torch and Python that somebody may have
replaced. What differs afterwards is the harm, by name. What can be made as it was at no cost, is: the random generators
and garbage.

Left out on purpose: what only an answer that looks for it could find, such as a file left open.
Read next: `worker_pool.py`, which throws harmed ranks away.
"""

from __future__ import annotations

import _thread
import builtins
import functools
import gc
import os
import random
import resource
import signal
import site
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle.cloudpickle
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ddp_course.launcher.interception import recorder

FIRST_SEED = 67280421310721  # of torch, in a process that has set none
MODULES = (
    *("builtins", "os", "time", "random", "json", "pickle", "io", "signal", "socket", "threading", "subprocess"),
    *("warnings", "multiprocessing", "torch", "torch.nn", "torch.nn.functional", "torch.nn.utils", "torch.autograd"),
    *("torch.optim", "torch.utils.data", "torch.utils.checkpoint", "torch.multiprocessing", "torch.serialization"),
    *("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.nn.functional"),
    *("torch.distributed._functional_collectives", "ddp_course.collectives", "ddp_course.groups"),
)
CLASSES = (
    *(torch.Tensor, nn.Module, nn.Parameter, nn.parallel.DistributedDataParallel, torch.autograd.Function),
    *(torch.optim.Optimizer, torch.optim.SGD, torch.optim.Adam, torch.utils.data.DataLoader, torch.Generator),
    *(dist.Work, dist.Store, dist.FileStore, dist.TCPStore, dist.ProcessGroup, threading.Thread),
)
OWN = tuple(  # where modules lie that no learner edits
    str(Path(place)) for place in (*site.getsitepackages(), *sysconfig.get_paths().values(), Path(__file__).parents[3])
)


def looked_after(rank: int, world_size: int, fn: Callable, call: tuple, init: bool) -> tuple[Any, list[str]]:
    """Return what `fn(rank, world_size, *call)` returns, and the names of what it has changed for good."""
    _begin_alike()
    _before[:] = [init, state(init), _functions()]
    result = fn(rank, world_size, *call)
    return result, changed(rank, world_size)


def changed(rank: int, world_size: int) -> list[str]:
    """Return the names of what the last run on this rank has changed for good, also a run that raised."""
    init, before, functions = _before
    gc.collect()  # a replica that nobody holds any more, with its hooks
    after = state(init)
    return [name for name in before if before[name] != after[name]] + ["functions"] * _replaced(functions)


_before: list = []  # of this rank's last run: whether there was a group, what was the state, and the functions


def _begin_alike() -> None:
    gc.freeze()  # so that collecting garbage looks at what the run has made, and not at all of torch
    torch.manual_seed(FIRST_SEED)
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.set_state(_numpys_state())
    # Else a class that was sent before comes back with what the last run has written into it.
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()


@functools.cache
def _numpys_state() -> tuple:
    return sys.modules["numpy"].random.get_state()


def state(init: bool) -> dict[str, Any]:
    """Return what must be the same after a run; `init`: collectives are no change."""
    return {
        "process groups": _groups() + ([] if init else [recorder().total]),
        "threads": _thread._count(),
        "child processes": _children(),
        "environment": dict(os.environ),
        "working directory": _directory(),
        "torch's settings": _settings(),
        "hooks and modes": _hooks(),
        "signal handlers": _signals(),
        "limits": [resource.getrlimit(number) for name, number in vars(resource).items() if name.startswith("RLIMIT")],
        "warnings": list(warnings.filters),
        "modules": _modules(),
    }


def _groups() -> list:
    world = c10d._world
    ended = [words for words, _ in recorder().oddities]
    return [set(world.pg_map), world.group_count, c10d.GroupMember.WORLD, ended]


def _children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _directory() -> str:
    with suppress(OSError):  # it was removed
        return os.getcwd()
    return ""


def _settings() -> list:
    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.cuda.is_initialized(),  # it holds memory of the GPU
        (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    ]


def _hooks() -> list:
    of_modules = vars(nn.modules.module)
    return [
        {name: len(hooks) for name, hooks in of_modules.items() if name.startswith("_global_") and hooks},
        (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)),
        (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        len(torch.serialization._package_registry),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        (sys.gettrace(), sys.getprofile(), sys.excepthook, threading.excepthook, sys.unraisablehook),
        (sys.stdin, sys.stdout, sys.stderr, sys.getrecursionlimit(), gc.isenabled(), builtins.print),
    ]


def _signals() -> list:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return [handlers, signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getitimer(signal.ITIMER_REAL)]


def _functions() -> dict[tuple[object, str], object]:
    with warnings.catch_warnings(action="ignore"):  # some of torch's names warn when they are looked at
        return {
            (place, name): _unhooked(value) if name == "step" else value
            for place in (*filter(None, map(sys.modules.get, MODULES)), *CLASSES)
            for name, value in list(vars(place).items())
            if callable(value) or isinstance(value, classmethod | staticmethod | property)
        }


def _replaced(before: dict[tuple[object, str], object]) -> bool:
    now = _functions()
    over = any(isinstance(place, type) for place, _ in now.keys() - before.keys())  # one that was inherited
    return over or any(now.get(at) is not function for at, function in before.items())


def _unhooked(step: Callable) -> Callable:
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # torch wraps it when it is first used


def _modules() -> set[str]:
    """Imported modules of the learner's own, which may read otherwise at the next check."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {name for name, file in files.items() if file and not file.startswith(OWN)}
