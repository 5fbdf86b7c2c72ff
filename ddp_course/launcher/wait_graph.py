"""Who keeps whom waiting?

A rank in a collective waits for the members that have not entered it; a rank in a message waits for its peer. These are
arrows from rank to rank. Follow them: they end at ranks that wait for nobody, and one of those is to blame, or they go
round in a circle, and then none is. Where the arrows end at ranks that have returned, the numbers decide: one rank that
waits alone has made a call too many; one that is missed by most has left one out. Of two ranks nobody can tell.

Left out on purpose: what is said about it, which is `hang_report.py`'s part.
Read next: `hang_report.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_course.launcher.rank_status import MESSAGES, Collective, Whereabouts

# Collectives for which every rank must bring tensors of the same number of elements.
_SAME_SIZE = {
    *("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
}


@dataclass(frozen=True)
class Hang:
    """A call that will never be complete, and the ranks that can be blamed for it: those that surely can, or none."""

    call: Collective
    waiting: tuple[int, ...]  # ranks that have entered it
    absent: tuple[int, ...]  # members that have not
    blamed: tuple[int, ...]
    circle: tuple[tuple[int, Collective, int], ...] = ()  # rank, what it waits in, for whom: round and round


def missed(ranks: Sequence[Whereabouts], w: Whereabouts) -> tuple[Collective, tuple[int, ...]] | None:
    """Return the first call in which a rank waits, and the members that have not entered it; None if all have."""
    entered = {other.rank: other.entered for other in ranks}
    for call in w.recent:
        if call.finished and call.op not in MESSAGES:  # a message is "completed" also when a wait for it has failed
            continue
        others = [member for member in call.members if member != w.rank and member in entered]
        if absent := tuple(member for member in others if entered[member].get(call.channel, 0) < call.seq):
            return call, absent
    return None


def longest_s(ranks: Sequence[Whereabouts]) -> float:
    """Return for how long a rank has waited for one that did not come, or at the store; 0 if none does."""
    return max((w.waited_s for w in ranks if w.key or missed(ranks, w)), default=0.0)


def find_hang(ranks: Sequence[Whereabouts]) -> Hang | None:
    """Find the call that holds everything up, and who is to blame; None if no rank waits for another in a call."""
    waits = {w.rank: found for w in ranks if w.status != "returned" and (found := missed(ranks, w))}
    if not waits:
        return None
    ends = {rank for _, absent in waits.values() for rank in absent} - waits.keys()
    if not ends:
        return _circle(waits)
    calls: dict[tuple[str, int], list[int]] = {}
    for rank, (call, absent) in waits.items():
        if ends & set(absent):
            calls.setdefault((call.channel, call.seq), []).append(rank)
    key, waiting = max(calls.items(), key=lambda item: (len(item[1]), -item[0][1]))
    call, absent = waits[waiting[0]]
    status = {w.rank: w for w in ranks}
    missing = tuple(rank for rank in absent if rank in ends)
    blamed = _sent_elsewhere(call, waits) or _blamed([status[rank] for rank in missing], waiting)
    return Hang(call, tuple(waiting), absent, blamed)


def _sent_elsewhere(call: Collective, waits: dict[int, tuple[Collective, tuple[int, ...]]]) -> tuple[int, ...]:
    """The sender of a message that nobody receives, if somebody else waits for one from it."""
    if call.op != "send":
        return ()
    sender, receiver = call.members
    expecting = [other.op == "recv" and other.members[0] == sender for other, _ in waits.values()]
    crossed = receiver in waits and waits[receiver][0].members == call.members
    return (sender,) if any(expecting) and not crossed else ()


def _blamed(missing: Sequence[Whereabouts], waiting: Sequence[int]) -> tuple[int, ...]:
    """Of the ranks at which the arrows end, and those that wait for them, the ones that are surely wrong."""
    if busy := tuple(w.rank for w in missing if w.status != "returned"):
        return busy
    if odd := tuple(w.rank for w in missing if w.oddities):
        return odd
    if len(missing) < len(waiting):
        return tuple(w.rank for w in missing)
    return tuple(waiting) if len(waiting) == 1 < len(missing) else ()


def _circle(waits: dict[int, tuple[Collective, tuple[int, ...]]]) -> Hang:
    seen: list[int] = []
    rank = min(waits)
    while rank not in seen:
        seen.append(rank)
        rank = waits[rank][1][0]
    round_ = seen[seen.index(rank) :]
    steps = tuple((rank, waits[rank][0], waits[rank][1][0]) for rank in round_)
    call, absent = waits[round_[0]]
    return Hang(call, (round_[0],), absent, (), steps)


def find_uneven(ranks: Sequence[Whereabouts]) -> dict[int, int] | None:
    """Find a group, or a sender and receiver, whose ranks have made unequal numbers of calls though all have returned.

    Nobody waits, since the calls left over are asynchronous, or have failed and nobody cared; the next call would meet
    one of them. If a rank has ended the group, there will be no next one.

    Returns:
        The number of calls by rank; None if all are even.
    """
    entered = {w.rank: w.entered for w in ranks}
    ended = {label for w in ranks for label in w.ended}
    for channel, members in {channel: members for w in ranks for channel, members in w.members.items()}.items():
        made = {rank: entered[rank].get(channel, 0) for rank in members if rank in entered}
        if channel.partition(":")[0] not in ended and len(made) == len(members) and len(set(made.values())) > 1:
            return made
    return None


# --- Ranks that do not do the same -----------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The first call in which ranks did different things, and the one rank that stands alone, if there is one."""

    calls: dict[int, Collective]  # by rank
    alone: int | None


def find_difference(ranks: Sequence[Whereabouts]) -> Difference | None:
    """Find the first call at which two ranks of a group did different things; None if there is none."""
    by_call: dict[tuple[str, int], dict[int, Collective]] = {}
    for w in ranks:
        for call in w.recent:
            if call.op not in MESSAGES:
                by_call.setdefault((call.channel, call.seq), {})[w.rank] = call
    differ = [(key, calls) for key, calls in by_call.items() if len({_signature(c) for c in calls.values()}) > 1]
    if not differ:
        return None
    _, calls = min(differ, key=lambda item: min(call.entered_ns for call in item[1].values()))
    kinds: dict[tuple, list[int]] = {}
    for rank, call in calls.items():
        kinds.setdefault(_signature(call), []).append(rank)
    single = [members[0] for members in kinds.values() if len(members) == 1]
    return Difference(dict(sorted(calls.items())), single[0] if len(kinds) == 2 and len(single) == 1 else None)


def _signature(call: Collective) -> tuple:
    sizes = sum(map(math.prod, call.sizes)) if call.op in _SAME_SIZE else 0
    dtype = call.dtype if call.op in _SAME_SIZE else ""
    return call.op, dtype, sizes, call.reduce, call.root, call.members, call.of
