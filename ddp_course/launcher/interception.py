"""How does one see every collective that torch is asked for, whoever asks?

Each of them passes torch's dispatcher: those of a Python function, of DDP's C++ reducer, functional ones. Our kernel
stands there before the backend's, tells the recorder, and hands the call on. Four things pass no dispatcher: waiting
for a call, waiting at the store, making a group and ending one. torch's own functions for these are wrapped. All that
is private in torch is here; where it is missing, a report says less.

Left out on purpose: what happens on the wire. Telling the recorder costs some 30 microseconds a call.
Read next: `recorder.py`, which is told.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_course.launcher.calls import MESSAGES, Collective
from ddp_course.launcher.failure import is_talking
from ddp_course.launcher.lines import own_place
from ddp_course.launcher.recorder import GroupFacts, Note, Recorder

NOT_IN_IT = "on a group that it is not in"
# torch's operators, by the names of the functions that people call
OPERATORS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "gather_": "gather",
    "gather_into_tensor_": "gather_into_tensor",
    "scatter_": "scatter",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
GIVEN = ("input_tensors", "input_tensor", "inputs", "input_list", "input", "tensors", "tensor")  # by this rank
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


@functools.cache
def recorder() -> Recorder:
    """Return the recorder of this process; the first call switches it on."""
    made = Recorder()
    made.library = torch.library.Library("c10d", "IMPL")  # its end would take the kernels away
    groups = _Groups(made)
    for name in OPERATORS:
        if hasattr(torch.ops.c10d, name):  # older torches have fewer
            kernel = _Kernel(name, made, groups)
            made.library.impl(name, kernel, "BackendSelect", with_keyset=True)
    _wrap(made, groups)
    return made


def mark() -> dict[str, int]:
    """Return what `recorded` needs in order to count from here; switches the recorder on."""
    return recorder().mark()


def recorded(since: dict[str, int] | None = None) -> list[Collective]:
    """Return the last collectives and messages of this process, oldest first; those after the `mark`, if given."""
    return recorder().recorded(since)


class _Groups:
    """What is told of each process group. A group that has ended is not kept alive by this."""

    def __init__(self, made: Recorder):
        self._recorder = made
        self._known: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupFacts] = weakref.WeakKeyDictionary()
        self._born: Counter[str] = Counter()  # by name

    def facts(self, group: dist.ProcessGroup) -> GroupFacts | None:
        if group not in self._known:
            try:
                members = tuple(dist.get_process_group_ranks(group))
            except (KeyError, ValueError):  # torch is still making it
                return None
            name = group.group_name
            label = "" if group.group_desc == "default_pg" else f"subgroup {name[:8]}"
            if self._born[name]:
                self._recorder.forget(label)
            rank = members[group.rank()]
            self._known[group] = GroupFacts(name, self._born[name], label, members, rank, group.name() == "gloo")
            self._born[name] += 1
        return self._known[group]

    def ended_with(self, group: dist.ProcessGroup | None) -> set[str]:
        """Return the labels of the groups that end with this one: with the default group, all do."""
        if group in (None, dist.group.WORLD):
            return {facts.label for facts in self._known.values()}
        return {self._known[group].label} if group in self._known else set()


class _Kernel:
    """What runs before the backend's kernel of one operator."""

    def __init__(self, name: str, made: Recorder, groups: _Groups):
        self.operator, self.op = getattr(torch.ops.c10d, name).default, OPERATORS[name]
        self.recorder, self.groups = made, groups
        place = {argument.name: index for index, argument in enumerate(self.operator._schema.arguments)}
        self.group, self.given = place["process_group"], next(place[name] for name in GIVEN if name in place)
        self.root = next((place[name] for name in ("root_rank", "dst", "src") if name in place), None)
        self.reduce, self.tag = place.get("reduce_op"), place.get("tag")

    def __call__(self, keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        facts = self.groups.facts(dist.ProcessGroup.unbox(args[self.group]))
        if facts is None:
            return self.operator.redispatch(keys & _BELOW, *args)
        note = self.note(facts, args)
        self.recorder.enter(note)
        try:
            result = self.operator.redispatch(keys & _BELOW, *args)
        except Exception as error:
            if not is_talking(error):  # refused for its arguments, and never entered
                self.recorder.withdraw(note)
            raise
        last = result[-1] if isinstance(result, tuple) and result else result
        note.work = dist.Work.unbox(last) if isinstance(last, torch.ScriptObject) else None
        note.finished = note.work is None
        return result

    def note(self, facts: GroupFacts, args: tuple) -> Note:
        note = Note(facts, self.op, facts.members, own_place(sys._getframe(2)))
        if "barrier" not in self.op:
            tensors = _flat(args[self.given])
            note.dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
            note.sizes = tuple(tuple(tensor.shape) for tensor in tensors)
        if self.reduce is not None:
            note.reduce = dist.ReduceOp.unbox(args[self.reduce]).op.name.lower()
        if self.root is not None:
            note.root = facts.members[args[self.root]]
        if self.op in MESSAGES:
            note.tag = args[self.tag]
            other = -1 if note.root is None else note.root
            note.members = (facts.rank, other) if self.op == "send" else (other, facts.rank)
        return note


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in _flat(part)]


# --- What passes no dispatcher ---------------------------------------------------------------------


def _wrap(made: Recorder, groups: _Groups) -> None:
    c10d.destroy_process_group = dist.destroy_process_group = _ending(made, groups, c10d.destroy_process_group)
    if hasattr(c10d, "_warn_not_in_group"):
        c10d._warn_not_in_group = _outside(made, c10d._warn_not_in_group)
    if hasattr(c10d, "_new_group_with_tag"):
        c10d._new_group_with_tag = _making_a_group(made, groups, c10d._new_group_with_tag)
    for name in ("get", "wait"):
        setattr(dist.Store, name, _at_store(made, getattr(dist.Store, name)))
    dist.Work.wait = _at_work(made, dist.Work.wait)


def _ending(made: Recorder, groups: _Groups, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(group: dist.ProcessGroup | None = None) -> None:
        made.oddities.append(("ended a process group", own_place(sys._getframe(1))))
        made.ended |= groups.ended_with(group)
        function(group)

    return call


def _outside(made: Recorder, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(op: str) -> None:
        made.oddities.append((f"called {op} {NOT_IN_IT}", own_place(sys._getframe(1))))
        function(op)

    return call


def _making_a_group(made: Recorder, groups: _Groups, function: Callable) -> Callable:
    """All ranks make a group, also those that will not be in it; only with local synchronisation its members do."""

    @functools.wraps(function)
    def call(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        facts = groups.facts(dist.group.WORLD) if dist.is_initialized() else None
        if facts is None or kwargs.get("use_local_synchronization"):
            return function(ranks, *args, **kwargs)
        of = f"ranks {sorted(facts.members if ranks is None else ranks)}"
        note = Note(facts, "new_group", facts.members, own_place(sys._getframe(1)), of=of)
        made.enter(note)
        try:
            group = function(ranks, *args, **kwargs)
        except Exception:
            made.withdraw(note)
            raise
        note.finished = True
        return group

    return call


def _at_work(made: Recorder, function: Callable) -> Callable:
    @functools.wraps(function)
    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        done = function(work, *args, **kwargs)
        made.waited(work)
        return done

    return wait


def _at_store(made: Recorder, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(store: dist.Store, keys: str | list[str], *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return function(store, keys, *args)
        made.key_since_ns, made.key = time.time_ns(), keys if isinstance(keys, str) else ", ".join(keys)
        try:
            return function(store, keys, *args)
        finally:
            made.key = ""

    return call
