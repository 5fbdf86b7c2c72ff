"""03.3 `node_sum` and 03.4 `from_leader` (rank, world_size, ranks_per_node, value): does each node talk by itself?

Which ranks take part in each collective is noted, and which groups each rank makes. So it does not matter how an
answer makes its groups, or with which collective it talks.
Read next: `grading/checking.py`, which prints what is found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

from ddp_course.grading import fences, observe
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from judges.process_groups.join import sum_fault


def node_driver(
    rank: int, world_size: int, function: Callable, path: str, values: list[int], shapes: list[int]
) -> list[dict]:
    """Call the function for each number of ranks per node; note its result, its groups and its collectives."""
    notes = []
    with fences.same_groups_everywhere(rank, world_size, path) as made:
        for ranks_per_node in shapes:
            before = len(made)
            with observe.Collectives() as seen:
                result = plain(function(rank, world_size, ranks_per_node, values[rank]))
            talks = [call.ranks for call in seen.calls if call.op != "barrier"]
            notes.append({"result": result, "groups": len(made) - before, "talks": talks})
    return notes


def node_judge(answer: Answer, rng: Random, fault_of: Callable) -> Iterator[tuple[str, Fault | None]]:
    """Two nodes first; then other shapes. Each node must have its own result, made inside its own group."""
    values, notes = _on_nodes(answer, 4, [2], rng)
    yield "nodes", _first_fault(fault_of, values, [2], notes)
    world_size = rng.choice((4, 6))
    shapes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    more_values, more_notes = _on_nodes(answer, world_size, shapes, rng)
    yield "shapes", _first_fault(fault_of, more_values, shapes, more_notes)
    yield "inside", next(filter(None, (_inside_fault(rank, 2, note[0]) for rank, note in enumerate(notes))), None)
    yield "groups", next(filter(None, (_groups_fault(rank, note[0]) for rank, note in enumerate(notes))), None)


def _on_nodes(answer: Answer, world_size: int, shapes: list[int], rng: Random) -> tuple[list[int], list[list[dict]]]:
    values = sorted(rng.sample(range(1, 100), world_size))
    with tempfile.TemporaryDirectory() as folder:
        return values, answer.run(node_driver, world_size, f"{folder}/groups", values, shapes, init=True)


def _first_fault(fault_of: Callable, values: list[int], shapes: list[int], notes: list[list[dict]]) -> Fault | None:
    for index, size in enumerate(shapes):
        for rank, note in enumerate(notes):
            start = rank // size * size
            if fault := fault_of(values[start : start + size], rank, note[index]["result"], values):
                return _explained(fault, fault_of, values, size, rank, note[index]["result"])
    return None


def _explained(fault: Fault, fault_of: Callable, values: list[int], size: int, rank: int, found: Any) -> Fault:
    """Say for which shape it is, and recognise nodes dealt out like cards."""
    cause, nodes = fault.cause, len(values) // size
    if fault_of is sum_fault and nodes > 1 and size > 1 and found == sum(values[rank % nodes :: nodes]):
        cause = "the groups hold every other rank; a node's ranks are neighbours: 0 and 1, then 2 and 3"
    expected = f"{fault.expected}, with {len(values)} ranks, {size} per node"
    return Fault(expected, fault.found, fault.rank, cause)


def leader_fault(members: list[int], rank: int, found: Any, everyone: list[int]) -> Fault | None:
    """Compare one rank's result with the value of its node's first rank, and guess how it went wrong."""
    if not isinstance(found, bool | str) and found == members[0]:
        return None
    if found is None:
        cause = "broadcast changes the tensor in place and returns None; return the tensor"
    elif found == everyone[rank]:
        cause = "this is the rank's own value: nothing reached it; broadcast on its node's group, from its leader"
    elif found == everyone[0]:
        cause = "this is rank 0's value; every node has a leader of its own"
    elif found == sum(everyone[:: len(members)]):
        cause = "this is the sum over all leaders; give the collective the node's group: group=..."
    else:
        cause = "the leader is the first rank of the node: RANK // ranks_per_node * ranks_per_node"
    return Fault(f"{members[0]}, the value of the node's first rank", repr(found), rank, cause)


def _inside_fault(rank: int, size: int, note: dict) -> Fault | None:
    start = rank // size * size
    mine = tuple(range(start, start + size))
    expected = f"collectives among ranks {list(mine)} only"
    if not note["talks"]:
        return Fault(
            expected,
            "no collective",
            rank,
            "the value did not come from the other ranks; use a collective on the node's group",
        )
    outside = next((ranks for ranks in note["talks"] if ranks != mine), None)
    if outside is None:
        return None
    cause = "give the collective the node's group: group=...; without it, all nodes talk and wait for each other"
    return Fault(expected, f"a collective among ranks {list(outside)}", rank, cause)


def _groups_fault(rank: int, note: dict) -> Fault | None:
    if note["groups"]:
        return None
    return Fault(
        "new groups, made alike by every rank",
        "no new group",
        rank,
        "make one group for each node, with dist.new_group",
    )


NODE_SUM = Exercise(
    "03.3",
    "One sum for each node",
    "node_sum",
    20,
    (
        Check("nodes", "each node has its own sum", 2),
        Check("shapes", "so it is for other numbers of ranks per node", 1),
        Check("inside", "the sum is made inside the node's group", 1),
        Check("groups", "every rank makes every group", 1),
    ),
    partial(node_judge, fault_of=sum_fault),
    refused=("ddp_course.groups.split_group",),
    hints=((r"on a group that it is not in", "keep the group that this rank is in, not the last one made"),),
)

FROM_LEADER = Exercise(
    "03.4",
    "From the leader of each node (stretch)",
    "from_leader",
    10,
    (
        Check("nodes", "each rank has its leader's value", 1),
        Check("shapes", "so it is for other numbers of ranks per node", 1),
        Check("inside", "the value travels inside the node's group", 1),
    ),
    partial(node_judge, fault_of=leader_fault),
    refused=("ddp_course.groups.split_group",),
    hints=(
        (
            r"Global rank \d+ is not part of group|not part of",
            "src is a rank of the whole job, not of the group; name the leader's global rank, or say group_src=0",
        ),
        (
            r"different ranks as src|waited (\S+ s )?in broadcast",
            "when all ranks of a group are in the same broadcast, they name different ones as src; "
            "a node has one leader, whom all its ranks must name",
        ),
    ),
)
