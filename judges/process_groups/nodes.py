"""03.3 `node_sum` and 03.5 `from_leader` (rank, world_size, ranks_per_node, value): does each node talk by itself?

Which ranks take part in each collective is noted, and which groups each rank makes. So it does not matter how an
answer makes its groups, or with which collective it talks.
Read next: `program.py`, a whole program.
"""

from __future__ import annotations

import tempfile
from random import Random
from typing import NamedTuple

from ddp_course.grading.answer import forbidden
from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise, value
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.process_groups.join import LARGE


class Case(NamedTuple):
    values: list  # of each rank
    per_node: int
    path: str  # of a file for the grader's own store

    def node(self, rank: int) -> list[int]:
        start = rank // self.per_node * self.per_node
        return list(range(start, start + self.per_node))


def cases(rng: Random, folder: str, fraction: float = 0) -> list[Round]:
    """Two nodes and large numbers first; then other shapes. Each node must have its own result, of its own group."""
    shapes = rng.choice((4, 6))
    large, small = (rng.sample([*range(-60, -9), *range(10, 61)], size) for size in (4, shapes))
    large, small = sorted(LARGE * value for value in large), sorted(value + fraction for value in small)
    sizes = [size for size in range(1, shapes + 1) if shapes % size == 0]
    return [
        Round(4, [("two", Case(large, 2, f"{folder}/two"))]),
        Round(shapes, [("shapes", Case(small, size, f"{folder}/shapes{size}")) for size in sizes]),
    ]


def with_fractions(rng: Random, folder: str) -> list[Round]:
    return cases(rng, folder, 0.5)


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the result, and how many groups were made."""
    with forbidden.same_groups_everywhere(rank, world_size, case.path) as made:
        return Note(value=plain(function(rank, world_size, case.per_node, case.values[rank])), groups=len(made))


def said(seen: Seen) -> str:
    return f"{seen.case.values} on {seen.world_size} ranks, {seen.case.per_node} per node:"


def inside(seen: Seen) -> str:
    """All collectives are among the ranks of the node; one that is alone there need not call any."""
    mine = seen.case.node(seen.rank)
    outside = (list(call.ranks) for call in seen["calls"] + seen["barriers"] if list(call.ranks) != mine)
    if found := next(outside, None):
        return f"a collective among ranks {found}"
    return f"collectives among ranks {mine} only" if seen["calls"] or len(mine) == 1 else "no collective"


def groups(seen: Seen) -> str:
    return "new groups" if seen["groups"] else "no new group"


INSIDE = "give the collective the node's group: group=...; without it, all nodes talk and wait for each other"
EVERY = "every rank must call new_group for every group"

MISTAKES = f"""
no group in the call | nodes shapes inside | {INSIDE}
    , group=mine =>
a barrier of the whole job | inside | {INSIDE}
    return total => dist.barrier()
    return total
two per node, always | shapes inside | ranks_per_node is not used
    for first in => ranks_per_node = 2
    for first in
every other rank | nodes shapes inside | a node's ranks are neighbours: 0 and 1, then 2 and 3
    range(0, world_size, ranks_per_node) => range(world_size // ranks_per_node)
    range(first, first + ranks_per_node) => range(first, world_size, world_size // ranks_per_node)
own value | nodes shapes inside | this is the rank's own value: no collective was called
    dist.all_reduce(total, group=mine) => pass
mean | nodes shapes | this is the mean; the sum is asked for
    return total => return total / ranks_per_node
what all_reduce returns | nodes shapes | all_reduce works in place and returns None; return the tensor
    dist.all_reduce => total = dist.all_reduce
reduced to the leader | nodes shapes | reduce leaves the whole sum on one rank only: take all_reduce
    all_reduce(total, => reduce(total, group_dst=0,
in float32 | nodes | right to five digits or more: is something computed in float32 here
    torch.tensor(value) => torch.tensor(float(value))
its own group only | all | {EVERY} | tests
    for first in range(0, world_size, ranks_per_node): => for first in [rank - rank % ranks_per_node]:
the last group made | all | not the last one made | tests
    group=mine => group=group
the leader does not join the sum | all | one rank skips a collective | tests
    dist.all_reduce => rank % ranks_per_node and dist.all_reduce
everybody's values, then a local sum | inside groups | {INSIDE} | tests
    def node_sum(rank, world_size, ranks_per_node, value):
        everyone = [None] * world_size
        dist.all_gather_object(everyone, value)
        first = rank // ranks_per_node * ranks_per_node
        return sum(everyone[first : first + ranks_per_node])
the course's own | all | this exercise is to write | tests
    from ddp_course.groups import split_group

    def node_sum(rank, world_size, ranks_per_node, value):
        total = torch.tensor(value)
        dist.all_reduce(total, group=split_group(ranks_per_node))
        return total
"""

SUM = "some ranks' values are missing, or counted twice; note that reduce leaves the whole sum on dst only"
NODE_SUM = exercise(
    *("03.3", "One sum for each node", "node_sum", 20),
    cases=cases,
    act=act,
    within=tempfile.TemporaryDirectory,
    said=said,
    mistakes=MISTAKES,
    tolerance=1e-12,
    checks={
        "nodes": ("each node has its own sum", 2, "two", value, SUM),
        "shapes": ("so it is for other numbers of ranks per node", 1, "shapes", value, SUM),
        "inside": ("the sum is made inside the node's group", 1, "two shapes", inside, INSIDE),
        "groups": ("every rank makes every group", 1, "two", groups, "make a group for each node, with dist.new_group"),
    },
    refused=("ddp_course.groups.split_group",),
    hints={r"on a group that it is not in": "keep the group that this rank is in, not the last one made"},
    right="""
only its own group, with local synchronisation; all_gather
    def node_sum(rank, world_size, ranks_per_node, value):
        first = rank - rank % ranks_per_node
        group = dist.new_group(range(first, first + ranks_per_node), use_local_synchronization=True)
        everyone = [torch.zeros((), dtype=torch.int64) for _ in range(ranks_per_node)]
        dist.all_gather(everyone, torch.tensor(value), group=group)
        return int(sum(everyone))
""",
)  # fmt: skip

LEADER = "the leader is the first rank of the node: rank // ranks_per_node * ranks_per_node"
LEADER_MISTAKES = f"""
the fraction is cut off | shapes | the fraction is cut off: make the tensor of the value as it is
    torch.tensor(value) => torch.tensor(int(value))
in float32 | nodes | right to five digits or more: is something computed in float32 here
    torch.tensor(value) => torch.tensor(float(value))
the last rank of the node | nodes shapes | {LEADER}
    src=leader => src=leader + ranks_per_node - 1
from rank 0 to everybody | all | this is rank 0's value; every node has a leader of its own, and a group
    src=leader, group=mine => src=0
the sum over all leaders | all | this is the sum over all leaders; give the collective the node's group: group=...
    torch.tensor(value) => torch.tensor(value if rank == leader else 0)
    broadcast(received, src=leader, group=mine) => all_reduce(received)
own value | all | this is the rank's own value: no collective was called
    dist.broadcast(received, src=leader, group=mine) => pass
MAX against zeros | nodes shapes | zero is more than a leader's negative value; broadcast it from the leader
    torch.tensor(value) => torch.tensor(value if rank == leader else 0).double()
    broadcast(received, src=leader, group=mine) => all_reduce(received, op=dist.ReduceOp.MAX, group=mine)
what broadcast returns | nodes shapes | broadcast works in place and returns None; return the tensor
    dist.broadcast => received = dist.broadcast
each leader to all ranks | inside | {INSIDE}
    dist.broadcast(received, src=leader, group=mine) => for each in range(0, world_size, ranks_per_node):
        sent = torch.tensor(value)
        dist.broadcast(sent, src=each)
        received = sent if each == leader else received
src is always rank 0 | all | src is a rank of the whole job | tests
    src=leader => src=0
only the leader broadcasts | all | one rank skips a collective | tests
    dist.broadcast => rank == leader and dist.broadcast
every rank names itself | all | they name different ones as src | hangs
    src=leader => src=rank
all ranks' values, then a look-up | inside | {INSIDE} | tests
    def from_leader(rank, world_size, ranks_per_node, value):
        everyone = [None] * world_size
        dist.all_gather_object(everyone, value)
        return everyone[rank // ranks_per_node * ranks_per_node]
made by hand, whole numbers only | shapes | the fraction is cut off | tests
    def from_leader(rank, world_size, ranks_per_node, value):
        nodes = [list(range(n, n + ranks_per_node)) for n in range(0, world_size, ranks_per_node)]
        groups = [dist.new_group(node) for node in nodes]
        received = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(received, group_src=0, group=groups[rank // ranks_per_node])
        return received
"""

FROM_LEADER = exercise(
    *("03.5", "From the leader of each node (stretch)", "from_leader", 10),
    cases=with_fractions,
    act=act,
    within=tempfile.TemporaryDirectory,
    said=said,
    mistakes=LEADER_MISTAKES,
    tolerance=1e-12,
    checks={
        "nodes": ("each rank has its leader's value", 1, "two", value, LEADER),
        "shapes": ("so it is for other numbers of ranks per node", 1, "shapes", value, LEADER),
        "inside": ("the value travels inside the node's group", 1, "two shapes", inside, INSIDE),
    },
    refused=("ddp_course.groups.split_group",),
    hints={
        r"Global rank \d+ is not part of group|not part of": "src is a rank of the whole job, not of the group; name "
        "the leader's global rank, or say group_src=0",
        r"different ranks as src|waited (\S+ s )?in broadcast": "when all ranks of a group are in the same broadcast, "
        "they name different ones as src; a node has one leader, whom all its ranks must name",
    },
    right="""
gathered in the group
    for first in range(0, world_size, ranks_per_node): => for first in [rank - rank % ranks_per_node]:
    dist.new_group(ranks) => dist.new_group(ranks, use_local_synchronization=True)
    dist.broadcast(received, src=leader, group=mine) => everyone = [torch.zeros_like(received) for _ in ranks]
    dist.all_gather(everyone, received, group=mine)
    received = everyone[0]
""",
)  # fmt: skip
