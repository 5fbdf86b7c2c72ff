"""What is asked of torch, and passes no dispatcher?

Waiting for a call, waiting at the store, making a group and ending one, and a call on a group that this rank is not in,
at which torch only warns. torch's own functions for these are wrapped; where one is missing, a report says less.

Read next: `interception.py`, which sees all the rest.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_course.launcher.lines import own_place
from ddp_course.launcher.recorder import Note, Recorder

NOT_IN_IT = "on a group that it is not in"


def wrap(made: Recorder) -> None:
    """Have `made` told of what passes no dispatcher."""
    for owner, name, stand_in in (
        (c10d, "destroy_process_group", _ending),
        (c10d, "_warn_not_in_group", _outside),
        (c10d, "_new_group_with_tag", _making_a_group),
        (dist.Work, "wait", _at_work),
        (dist.Store, "get", _at_store),
        (dist.Store, "wait", _at_store),
    ):
        if hasattr(owner, name):
            setattr(owner, name, _standing_in(stand_in, made, getattr(owner, name)))
    dist.destroy_process_group = c10d.destroy_process_group


def _standing_in(stand_in: Callable, made: Recorder, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return stand_in(made, function, *args, **kwargs)

    return call


def _ending(made: Recorder, function: Callable, group: dist.ProcessGroup | None = None) -> None:
    made.oddities.append(("ended a process group", own_place(sys._getframe())))
    made.ended |= made.groups.ended_with(group)
    function(group)


def _outside(made: Recorder, function: Callable, op: str) -> None:
    made.oddities.append((f"called {op} {NOT_IN_IT}", own_place(sys._getframe())))
    function(op)


def _making_a_group(
    made: Recorder, function: Callable, ranks: list[int] | None = None, *args: Any, **kwargs: Any
) -> Any:
    """All ranks make a group, also those that will not be in it; only with local synchronisation its members do."""
    facts = made.groups.facts(dist.group.WORLD) if dist.is_initialized() else None
    if facts is None or kwargs.get("use_local_synchronization"):
        return function(ranks, *args, **kwargs)
    of = f"ranks {sorted(facts.members if ranks is None else ranks)}"
    note = Note(facts, "new_group", facts.members, own_place(sys._getframe()), of=of)
    made.enter(note)
    try:
        group = function(ranks, *args, **kwargs)
    except Exception:
        made.withdraw(note)
        raise
    note.finished = True
    return group


def _at_work(made: Recorder, function: Callable, work: dist.Work, *args: Any, **kwargs: Any) -> Any:
    try:
        done = function(work, *args, **kwargs)
    except RuntimeError:
        made.waited(work, well=False)
        raise
    made.waited(work, well=True)
    return done


def _at_store(made: Recorder, function: Callable, store: dist.Store, keys: str | list[str], *args: Any) -> Any:
    if threading.current_thread() is not threading.main_thread():
        return function(store, keys, *args)
    made.key_since_ns, made.key = time.time_ns(), keys if isinstance(keys, str) else ", ".join(keys)
    try:
        return function(store, keys, *args)
    finally:
        made.key = ""
