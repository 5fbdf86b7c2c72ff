"""04.4 `sum_over_nodes(rank, world_size, ranks_per_node, tensor)`: does little travel between the nodes?

What each rank brings to a collective whose ranks are on several nodes is counted, whatever the collective is.
Read next: `grading/checking.py`, which prints what is found.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from random import Random

import torch

from ddp_course.grading.answer import fences
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import NEVER_TALKED, all_of, exercise
from ddp_course.grading.vocabulary.observe import MESSAGES
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from ddp_course.grading.vocabulary.provenance import stakes
from judges.collectives.ring_sum import summed, the_sum

BYTES_EACH = 8  # of an int64


@dataclass(frozen=True)
class Case:
    """What each rank brings, how many ranks a node has, and a path for the grader's own store."""

    brought: list[list[int]]
    ranks_per_node: int
    path: str

    def __str__(self) -> str:
        return f"{len(self.brought)} ranks, {self.ranks_per_node} per node"

    def node(self, rank: int) -> list[int]:
        """Return the ranks of its node."""
        start = rank // self.ranks_per_node * self.ranks_per_node
        return list(range(start, start + self.ranks_per_node))

    def peers(self, rank: int) -> list[int]:
        """Return the ranks with its local rank."""
        return list(range(rank % self.ranks_per_node, len(self.brought), self.ranks_per_node))


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the sum."""
    with fences.same_groups_everywhere(rank, world_size, case.path):
        tensor = torch.tensor(case.brought[rank])
        return summed(lambda tensor: function(rank, world_size, case.ranks_per_node, tensor), tensor)


def rounds(rng: Random, folder: str) -> list[Round]:
    """Two nodes of two first, then other shapes; one rank per node and one node are among them."""

    def case(world_size: int, size: int, name: str) -> Case:
        n = size * (12 * rng.randint(3, 5) + 1)  # so that a part need not divide among the nodes
        return Case(stakes(rng, world_size, n, base=1000), size, f"{folder}/{name}{size}")

    first, world_size = case(4, 2, "two"), rng.choice((4, 6))
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    shapes = [("shapes", case(world_size, size, "shape")) for size in sizes]
    return [Round(4, [("two", first)]), Round(world_size, shapes)]


def _mistake(seen: Seen, totals: list[int], wrong: list[int]) -> str:
    case, held, rank = seen.case, seen["held"], seen.rank
    part = len(totals) // case.ranks_per_node
    own = slice(rank % case.ranks_per_node * part, (rank % case.ranks_per_node + 1) * part)
    node, peers = (
        [sum(case.brought[other][i] for other in ranks) for i in range(len(totals))]
        for ranks in (case.node(rank), case.peers(rank))
    )
    if held == case.brought[rank]:
        return "nothing was written into the tensor; the last collective must write into it, or copy the sum back"
    if held == node:
        return "this is the sum of the node alone; the parts must be summed over the nodes, too"
    if held == peers:
        return "this is the sum over the ranks with the same local rank; the node's other ranks are missing"
    if sorted(held) == sorted(totals):
        return "the parts are in the wrong places: part k of the tensor belongs to local rank k of every node"
    if held[own] == totals[own]:
        return "only this rank's part is right: the parts must be gathered inside the node at the end"
    return "sum inside the node so that each rank has one part, sum the part over the nodes, gather in the node"


def between(seen: Seen) -> Fault | None:
    """A rank brings its part, or little more, to what crosses from node to node."""
    size, everyone = seen.case.ranks_per_node, list(range(seen.world_size))
    node, payload = seen.case.node(seen.rank), len(seen.case.brought[0]) * BYTES_EACH
    if node == everyone:
        return None
    limit, n_nodes = payload // size, seen.world_size // size
    crossing = [c for c in seen["calls"] if {*(c.ranks if c.peer is None else [c.peer])} - set(node)]
    n_bytes = sum(call.n_bytes for call in crossing)
    part = f"1/{size} of the tensor's {payload:,}" if size > 1 else "the whole tensor"
    expected = f"{limit:,} bytes, {part}, brought between the nodes by each rank; {seen.case}"
    # A sum in two halves brings the part, then a share of it, perhaps padded.
    if crossing and n_bytes <= limit + limit // n_nodes + 2 * n_nodes * BYTES_EACH:
        return None
    cause = "reduce_scatter inside the node first, so that only a part has to cross, then all_reduce that part"
    if not crossing:
        cause = "no number of this rank went to the other node; every rank carries its part"
    elif size == 1:
        cause = "with one rank per node there is one sum over all ranks, once; take ranks_per_node as it is given"
    elif any(call.peer is None and len(call.ranks) == len(everyone) for call in crossing):
        cause = f"a collective over all ranks carries the whole tensor between the nodes; {cause}"
    else:
        cause = f"whole tensors cross; {cause}"
    ops = " and ".join(dict.fromkeys(f"{call.op} among ranks {list(call.ranks)}" for call in crossing))
    return Fault(expected, f"{n_bytes:,} bytes, in {ops or 'no collective'}", seen.rank, cause)


def inside(seen: Seen) -> Fault | None:
    """Collectives are among the ranks of a node, or those with one local rank; messages go anywhere."""
    mine, peers = seen.case.node(seen.rank), seen.case.peers(seen.rank)
    calls = seen["calls"] + seen["barriers"]
    outside = [c for c in calls if sorted(c.ranks) not in (mine, peers) and c.op not in MESSAGES]
    if seen["calls"] and not outside:
        return None
    cause = "make two kinds of groups: one for each node, and one for each local rank; name one in each call"
    expected = f"collectives among ranks {mine}, its node, or {peers}, those with its local rank"
    found = f"{outside[0].op} among ranks {list(outside[0].ranks)}" if outside else "no collective"
    return Fault(expected, found, seen.rank, cause if outside else NEVER_TALKED)


right = the_sum(_mistake)

TWO_LEVELS = exercise(
    "04.4",
    "Sum inside the nodes first (stretch)",
    "sum_over_nodes",
    25,
    act=act,
    rounds=rounds,
    within=tempfile.TemporaryDirectory,
    checks={
        "sum": ("every rank's tensor becomes the sum over all ranks", 1, right, "two"),
        "between": ("only each rank's part travels between the nodes", 2, between, "two"),
        "inside": ("every collective stays among the node's ranks, or among one of each node", 1, inside, "two"),
        "shapes": ("so it is for other numbers of ranks per node", 1, all_of(right, between, inside), "shapes"),
    },
    refused=("ddp_course.groups.split_group",),
    hints={
        "sizes; disagree: different sizes; must be the same size|outputShape|invalid tensor size|expected size": ""
        "reduce_scatter gives each of the node's ranks 1/k of the tensor; its output has numel // k elements",
        r"not part of group|not part of": "a group is used by a rank that is not in it; keep those that hold this rank",
        r"UnboundLocalError|cannot access local variable": "some rank found no group of its own; every rank is in one "
        "node's group and in one of its local rank",
        "limit|absent; imed out": "some ranks of a group wait in a collective that another one skips; "
        "every rank of it must call it, the last one, too",
    },
)
