"""How does one see every collective that torch is asked for, whoever asks?

Each of them passes torch's dispatcher: those of a Python function, of DDP's C++ reducer, functional ones. Our kernel
stands there before the backend's, tells the recorder, and passes the call on. What is private in torch is used here and
in `wrapped.py` alone; where it is missing, a report says less.

Left out on purpose: what happens on the wire. Telling the recorder costs some 30 microseconds a call.
Read next: `wrapped.py`, what passes no dispatcher; `recorder.py`, which is told.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist

from ddp_course.launcher import wrapped
from ddp_course.launcher.failure import is_talking
from ddp_course.launcher.group_facts import GroupFacts
from ddp_course.launcher.lines import own_place
from ddp_course.launcher.rank_status import MESSAGES, Collective
from ddp_course.launcher.recorder import Note, Recorder

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
    for name in OPERATORS:
        if hasattr(torch.ops.c10d, name):  # older torches have fewer
            made.library.impl(name, _Kernel(name, made), "BackendSelect", with_keyset=True)
    wrapped.wrap(made)
    return made


def mark() -> dict[str, int]:
    """Return what `recorded` needs in order to count from here; switches the recorder on."""
    return recorder().mark()


def recorded(since: dict[str, int] | None = None) -> list[Collective]:
    """Return the last collectives and messages of this process, oldest first; those after the `mark`, if given."""
    return recorder().recorded(since)


class _Kernel:
    """What runs before the backend's kernel of one operator."""

    def __init__(self, name: str, made: Recorder):
        self.operator, self.op = getattr(torch.ops.c10d, name).default, OPERATORS[name]
        self.recorder = made
        place = {argument.name: index for index, argument in enumerate(self.operator._schema.arguments)}
        self.group, self.given = place["process_group"], next(place[name] for name in GIVEN if name in place)
        self.root = next((place[name] for name in ("root_rank", "dst", "src") if name in place), None)
        self.reduce, self.tag = place.get("reduce_op"), place.get("tag")

    def __call__(self, keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        facts = self.recorder.groups.facts(dist.ProcessGroup.unbox(args[self.group]))
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
            note.reduce = dist.ReduceOp.RedOpType(args[self.reduce].op()).name.lower()
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
