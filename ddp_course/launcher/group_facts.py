"""Which process group is that?

A group has a name and an age, because torch gives the names of groups that have ended to new ones; in reports it has a
label, and for the default group none.

Read next: `recorder.py`, which counts calls on each group apart.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class GroupFacts:
    """A process group, as its calls are told of."""

    name: str
    born: int  # which group of this name it is: names come again once a group has ended
    label: str  # "" for the default group
    members: tuple[int, ...]
    rank: int  # this process, in the default group
    gloo: bool  # which, unlike NCCL, waits on the CPU, and gathers tensors of one size only


class Groups:
    """What is told of each process group. A group that has ended is not kept alive by this."""

    def __init__(self, forget: Callable[[str], None]):
        self._forget = forget  # called with the label of a name that comes again
        self._known: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupFacts] = weakref.WeakKeyDictionary()
        self._born: Counter[str] = Counter()  # by name

    def facts(self, group: dist.ProcessGroup) -> GroupFacts | None:
        """Return what is told of a group; None while torch is still making it."""
        if (known := self._known.get(group)) is None:
            try:
                members = tuple(dist.get_process_group_ranks(group))
            except (KeyError, ValueError):
                return None
            name = group.group_name
            label = "" if group.group_desc == "default_pg" else f"subgroup {name[:8]}"
            if self._born[name]:
                self._forget(label)
            rank = members[group.rank()]
            known = GroupFacts(name, self._born[name], label, members, rank, group.name() == "gloo")
            self._known[group] = known
            self._born[name] += 1
        return known

    def ended_with(self, group: dist.ProcessGroup | None) -> set[str]:
        """Return the labels of the groups that end with this one: with the default group, all do."""
        if group in (None, dist.group.WORLD):
            return {facts.label for facts in self._known.values()}
        return {self._known[group].label} if group in self._known else set()
