"""03.3 `node_sum` and 03.4 `from_leader` (rank, world_size, ranks_per_node, value): does each node talk by itself?

Which ranks take part in each collective is noted, and which groups each rank makes. So it does not matter how an
answer makes its groups, or with which collective it talks.
Read next: `grading/checking.py`, which prints what is found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from ddp_course.grading.answer import fences
from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import equals, exercise, first_mistake
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.process_groups.join import LARGE, Case, number, the_sum


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the result, and how many groups were made."""
    with fences.same_groups_everywhere(rank, world_size, case.path) as made:
        return Note(value=plain(function(rank, world_size, case.per_group, case.values[rank])), groups=len(made))


def rounds(rng: Random, folder: str) -> list[Round]:
    """Two nodes and large numbers first; then other shapes. Each node must have its own result, of its own group."""
    chosen = []
    for name, world_size in (("two", 4), ("shapes", rng.choice((4, 6)))):
        times = LARGE if name == "two" else 1
        values = sorted(times * value for value in rng.sample([*range(-60, -9), *range(10, 61)], world_size))
        sizes = [2] if name == "two" else [size for size in range(1, world_size + 1) if world_size % size == 0]
        cases = [(name, Case(values, size, f"{folder}/{name}{size}")) for size in sizes]
        chosen.append(Round(world_size, cases))
    return chosen


def with_fractions(rng: Random, folder: str) -> list[Round]:
    """The same; the values of the second round are no whole numbers."""
    two, shapes = rounds(rng, folder)
    cases = [(name, replace(case, values=[value + 0.5 for value in case.values])) for name, case in shapes.cases]
    return [two, Round(shapes.world_size, cases)]


def _slips(seen: Seen) -> Iterator[tuple[str, int]]:
    values, own = seen.case.values, "broadcast on its node's group, from its leader"
    yield f"this is the rank's own value: nothing reached it; {own}", values[seen.rank]
    yield "this is rank 0's value; every node has a leader of its own", values[0]
    leaders = sum(values[:: seen.case.per_group])
    yield "this is the sum over all leaders; give the collective the node's group: group=...", leaders


leaders_value = equals(
    lambda seen, right: f"{right}, the value of the node's first rank{seen.case}",
    lambda seen: seen.case.members(seen.rank)[0],
    _slips,
    "the leader is the first rank of the node: RANK // ranks_per_node * ranks_per_node",
    form=number,
    tolerance=1e-12,
)


def inside(seen: Seen) -> Fault | None:
    """All collectives are among the ranks of the node; one that is alone there need not talk."""
    mine = seen.case.group(seen.rank)
    outside = next((list(call.ranks) for call in seen["calls"] + seen["barriers"] if list(call.ranks) != mine), None)
    mistakes = {
        "the value did not come from the other ranks; use a collective on the node's group":
            not seen["calls"] and len(mine) > 1 and "no collective",
        "give the collective the node's group: group=...; without it, all nodes talk and wait for each other":
            outside and f"a collective among ranks {outside}",
    }  # fmt: skip
    return first_mistake(f"collectives among ranks {mine} only", mistakes, seen.rank)


def groups(seen: Seen) -> Fault | None:
    """New groups were made."""
    cause = "make one group for each node, with dist.new_group"
    return first_mistake(
        "new groups, made alike by every rank", {cause: not seen["groups"] and "no new group"}, seen.rank
    )


NODE_SUM = exercise(
    "03.3",
    "One sum for each node",
    "node_sum",
    20,
    act=act,
    rounds=rounds,
    within=tempfile.TemporaryDirectory,
    checks={
        "nodes": ("each node has its own sum", 2, the_sum, "two"),
        "shapes": ("so it is for other numbers of ranks per node", 1, the_sum, "shapes"),
        "inside": ("the sum is made inside the node's group", 1, inside, "two shapes"),
        "groups": ("every rank makes every group", 1, groups, "two"),
    },
    refused=("ddp_course.groups.split_group",),
    hints={r"on a group that it is not in": "keep the group that this rank is in, not the last one made"},
)

FROM_LEADER = exercise(
    "03.4",
    "From the leader of each node (stretch)",
    "from_leader",
    10,
    act=act,
    rounds=with_fractions,
    within=tempfile.TemporaryDirectory,
    checks={
        "nodes": ("each rank has its leader's value", 1, leaders_value, "two"),
        "shapes": ("so it is for other numbers of ranks per node", 1, leaders_value, "shapes"),
        "inside": ("the value travels inside the node's group", 1, inside, "two shapes"),
    },
    refused=("ddp_course.groups.split_group",),
    hints={
        r"Global rank \d+ is not part of group|not part of": "src is a rank of the whole job, not of the group; name "
        "the leader's global rank, or say group_src=0",
        r"different ranks as src|waited (\S+ s )?in broadcast": "when all ranks of a group are in the same broadcast, "
        "they name different ones as src; a node has one leader, whom all its ranks must name",
    },
)
