"""What may an answer not do, while it runs?

Do by calling torch what it is to write, read what the launcher has set, make a group that not every rank makes, or end
its group while another rank still talks. Each fence is a context manager inside a rank, and gives back what it changed.

Read next: `isolated.py`, which puts some around every run.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from types import ModuleType
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_course.grading.exercise import Fault, FaultFound

LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
MATCH_WAIT_S = 4.0  # for the other ranks to make the same group


@contextmanager
def same_groups_everywhere(rank: int, world_size: int, path: str) -> Iterator[list[list[int]]]:
    """Within the block, refuse a new group that not every rank makes; yields the groups made so far.

    torch does not notice: groups of different ranks get one name, and the job hangs, or the wrong ranks meet.

    Args:
        path: of a file for the grader's own store; fresh for each run, the same on all ranks.
    Raises:
        FaultFound: on every rank, when the ranks disagree about their next group or one makes none.
    """
    store, made = dist.FileStore(path, world_size), []
    make = c10d._new_group_with_tag

    def observed(ranks=None, *args, use_local_synchronization=False, **kwargs):
        chosen = sorted(ranks) if ranks is not None else list(range(world_size))
        if not use_local_synchronization:  # with it, torch asks only the members to call
            _compare(store, rank, world_size, len(made), chosen)
        made.append(chosen)
        return make(ranks, *args, use_local_synchronization=use_local_synchronization, **kwargs)

    with mock.patch.object(c10d, "_new_group_with_tag", observed):
        yield made


def _compare(store: dist.Store, rank: int, world_size: int, number: int, chosen: list[int]) -> None:
    keys = [f"{number}/{other}" for other in range(world_size)]
    store.set(keys[rank], str(chosen))
    with suppress(RuntimeError):  # who did not come is seen below
        store.wait(keys, timedelta(seconds=MATCH_WAIT_S))
    theirs = [store.get(key).decode() if store.check([key]) else "none" for key in keys]
    if len(set(theirs)) > 1:
        other = next(i for i, groups in enumerate(theirs) if groups != theirs[0])
        which = f"group number {number + 1}"
        expected = f"the same groups, in the same order, on every rank; rank 0 makes {theirs[0]} as {which}"
        raise FaultFound(
            Fault(
                expected=expected,
                found=f"{theirs[other]} as {which}",
                rank=other,
                cause="every rank must call new_group for every group, in the same order, also for those it is not in",
            )
        )


@contextmanager
def launcher_variables_hidden() -> Iterator[None]:
    """Within the block, `os.environ` has none of the variables that a launcher sets."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield


@contextmanager
def refused(names: tuple[str, ...]) -> Iterator[None]:
    """Within the block, these functions and classes say that the exercise is to write what they do.

    Args:
        names: such as "torch.nn.parallel.DistributedDataParallel". A function is refused under every name by which
            its package knows it, a class when it is made.
    """
    found = {name: pkgutil.resolve_name(name) for name in names}
    with ExitStack() as stack:
        for name, what in found.items():
            if isinstance(what, type):
                stack.enter_context(mock.patch.object(what, "__init__", _refuser(name)))
        functions = {name: what for name, what in found.items() if not isinstance(what, type)}
        for name, module, known_as in _places_of(functions):
            stack.enter_context(mock.patch.object(module, known_as, _refuser(name)))
        yield


def _places_of(functions: dict[str, Callable]) -> list[tuple[str, ModuleType, str]]:
    name_of = {id(function): name for name, function in functions.items()}
    packages_of = {  # pickle.dumps is of _pickle
        name: {each.partition(".")[0] for each in (function.__module__, name)} for name, function in functions.items()
    }
    packages = set().union(*packages_of.values())
    found = []
    for path, module in list(sys.modules.items()):
        if (package := path.partition(".")[0]) in packages and isinstance(module, ModuleType):
            names = _names_in(module, len(vars(module)))
            for known in names.keys() & name_of.keys():
                if package in packages_of[name_of[known]]:
                    found += [(name_of[known], module, known_as) for known_as in names[known]]
    return found


@functools.cache
def _names_in(module: ModuleType, size: int) -> dict[int, list[str]]:
    """All modules have a hundred thousand names, and every run waits: looked at again where some were added."""
    found: dict[int, list[str]] = {}
    for name, value in list(vars(module).items()):
        if callable(value):
            found.setdefault(id(value), []).append(name)
    return found


def _refuser(name: str) -> Callable:
    def refuse(*args, **kwargs):
        cause = "this exercise is to write what it does"
        raise FaultFound(Fault("an answer written by hand", f"a call of {name}", cause=cause))

    return refuse


@contextmanager
def nobody_leaves_early(limit_s: float = 1.0) -> Iterator[None]:
    """Let `destroy_process_group` wait, `limit_s` at most, until every rank of the group is about to call it.

    A rank that ends its group without a barrier cuts off a slower one that still talks, or not, by chance. Answers
    are not judged by chance.
    """
    destroy = c10d.destroy_process_group

    def destroy_together(group: dist.ProcessGroup | None = None) -> None:
        if group is None and dist.is_initialized():
            store, size = c10d._get_default_store(), dist.get_world_size()
            store.add("ddp_course/leaving", 1)
            deadline = time.monotonic() + limit_s
            while store.add("ddp_course/leaving", 0) < size and time.monotonic() < deadline:
                time.sleep(0.005)
        destroy(group)

    with (
        mock.patch.object(dist, "destroy_process_group", destroy_together),
        mock.patch.object(c10d, "destroy_process_group", destroy_together),
    ):
        yield
