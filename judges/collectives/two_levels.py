"""04.4 `sum_over_nodes(rank, world_size, ranks_per_node, tensor)`: does little travel between the nodes?

What each rank brings to a collective whose ranks are on several nodes is counted, whatever the collective is.
Read next: `grading/checking.py`, which prints what is found.
"""

from __future__ import annotations

import tempfile
from random import Random
from typing import Any

import torch

from ddp_course.grading.answer import forbidden
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.observe import MESSAGES
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

BYTES_EACH = 8  # of an int64


def cases(rng: Random, folder: str) -> list[Round]:
    """Two nodes of two first, then other shapes; one rank per node and one node are among them."""

    def case(ranks: int, size: int, name: str) -> tuple:
        n = size * (12 * rng.randint(3, 5) + 1)  # so that a part need not divide among the nodes
        return [[rng.randint(1, 9999) for _ in range(n)] for _ in range(ranks)], size, f"{folder}/{name}{size}"

    ranks = rng.choice((4, 6))
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [Round(4, [("two", case(4, 2, "two"))]), Round(ranks, [("shapes", case(ranks, k, "other")) for k in sizes])]


def act(function, case: tuple, rank: int, world_size: int) -> Note:
    """Note what the tensor holds; the path is for the grader's own store."""
    numbers, size, path = case
    with forbidden.same_groups_everywhere(rank, world_size, path):
        tensor = torch.tensor(numbers[rank])
        memory = tensor.detach()
        function(rank, world_size, size, tensor)
        return Note(held=memory.tolist())


def node(seen: Seen) -> list[int]:
    """The ranks of this rank's node."""
    first = seen.rank // seen.case[1] * seen.case[1]
    return list(range(first, first + seen.case[1]))


def the_sum(seen: Seen) -> dict[str, Any]:
    return {"element": seen["held"]}


def between(seen: Seen) -> dict[str, str]:
    """A rank brings its part, or little more, to what crosses from node to node."""
    n, size, own = len(seen.case[0][0]), seen.case[1], node(seen)
    crossing = [call for call in seen["calls"] if {*(call.ranks if call.peer is None else [call.peer])} - set(own)]
    n_bytes, limit, n_nodes = sum(call.n_bytes for call in crossing), n * BYTES_EACH // size, seen.world_size // size
    # A sum in two halves brings the part, then a share of it, perhaps padded.
    as_told = n_nodes == 1 or (crossing and n_bytes <= limit + limit // n_nodes + 2 * n_nodes * BYTES_EACH)
    return {"brought between the nodes:": "its part" if as_told else f"{n_bytes / limit:.3g} times its part"}


def inside(seen: Seen) -> dict[str, Any]:
    """Collectives are among the ranks of a node, or those with one local rank; messages go anywhere."""
    peers = list(range(seen.rank % seen.case[1], seen.world_size, seen.case[1]))
    calls = [call for call in seen["calls"] + seen["barriers"] if call.op not in MESSAGES]
    others = sorted({call.ranks for call in calls if sorted(call.ranks) not in (node(seen), peers)})
    return {f"collectives among other ranks than {node(seen)} or {peers}:": others if seen["calls"] else "none at all"}


MISTAKES = """
whole tensors cross | between shapes
| whole tensors cross; reduce_scatter inside the node first, so that only a part has to, then all_reduce that part
    dist.reduce_scatter_tensor(part, tensor, group=in_nodes[node]) => dist.all_reduce(tensor, group=in_nodes[node])
    dist.all_reduce(part, => dist.all_reduce(tensor,
    dist.all_gather_into_tensor(tensor, part, group=in_nodes[node]) =>
one all-reduce over all | between inside shapes | a collective over all ranks carries the whole tensor between the nodes
    dist.reduce_scatter_tensor(part, tensor, group=in_nodes[node]) => return dist.all_reduce(tensor)
leaders carry everything | between shapes | whole tensors cross; every rank is to carry its part
    dist.reduce_scatter_tensor(part, tensor, => dist.reduce(tensor, group_dst=0,
    dist.all_reduce(part, => local_rank or dist.all_reduce(tensor,
    dist.all_gather_into_tensor(tensor, part, group => dist.broadcast(tensor, group_src=0, group
the node alone | sum between shapes | this is the sum of the node alone; the parts must be summed over the nodes, too
    dist.all_reduce(part, group=between_nodes[local_rank]) => pass
its place in the nodes alone | sum shapes
| this is the sum over the ranks with the same local rank; the node's other ranks are missing
    tensor.new_empty(tensor.numel() // ranks_per_node) => tensor.view(ranks_per_node, -1)[local_rank].clone()
    reduce_scatter_tensor(part, => reduce_scatter_tensor(part.clone(),
a barrier of the whole job | inside shapes | make two kinds of groups: one for each node, and one for each local rank
    dist.all_reduce => dist.barrier()
    dist.all_reduce
nothing gathered | sum shapes | only this rank's part is right: the parts must be gathered inside the node at the end
    dist.all_gather_into_tensor(tensor, part, group=in_nodes[node]) => tensor.copy_(part.repeat(ranks_per_node))
parts in the wrong places | sum shapes
| the parts are in the wrong places: part k of the tensor belongs to local rank k of every node
    part = tensor.new => whole, tensor = tensor, tensor.reshape(ranks_per_node, -1).flip(0).flatten()
    part = tensor.new
    dist.all_gather_into_tensor(tensor, => dist.all_gather_into_tensor(whole,
a copy of the tensor | sum shapes
| nothing was written into the tensor; the last collective must write into it, or copy the sum back
    dist.all_gather_into_tensor(tensor, part => return dist.all_gather_into_tensor(tensor.clone(), part
two per node, always | shapes | gives each of the node's ranks 1/k of the tensor | tests
    def sum_over_nodes(rank, world_size, ranks_per_node, tensor):
        nodes = [dist.new_group([n, n + 1]) for n in range(0, world_size, 2)]
        places = [dist.new_group(list(range(n, world_size, 2))) for n in (0, 1)]
        part = tensor.new_empty(len(tensor) // 2)
        dist.reduce_scatter_tensor(part, tensor, group=nodes[rank // 2])
        dist.all_reduce(part, group=places[rank % 2])
        dist.all_gather_into_tensor(tensor, part, group=nodes[rank // 2])
parts that the nodes must divide | all | gives each of the node's ranks 1/k of the tensor
    dist.all_reduce(part, group=between_nodes[local_rank]) => n_nodes = world_size // ranks_per_node
    share = part.new_empty(len(part) // n_nodes)
    dist.reduce_scatter_tensor(share, part, group=between_nodes[local_rank])
makes its own groups only | all | every rank must call new_group for every group | tests
    def sum_over_nodes(rank, world_size, ranks_per_node, tensor):
        first = rank // ranks_per_node * ranks_per_node
        dist.all_reduce(tensor, group=dist.new_group(range(first, first + ranks_per_node)))
the last rank does not gather | all | in a collective that another one skips | hangs
    dist.all_gather => rank == world_size - 1 or dist.all_gather
"""

PARTS = "sum inside the node so that each rank has one part, sum the part over the nodes, gather in the node"

TWO_LEVELS = exercise(
    *("04.4", "Sum inside the nodes first (stretch)", "sum_over_nodes", 25),
    cases=cases,
    act=act,
    within=tempfile.TemporaryDirectory,
    said=lambda seen: f"{seen.world_size} ranks, {seen.case[1]} per node:",
    mistakes=MISTAKES,
    checks={
        "sum": ("every rank's tensor becomes the sum over all ranks", 1, "two", the_sum, PARTS),
        "between": ("only each rank's part travels between the nodes", 2, "two", between, PARTS),
        "inside": ("every collective stays among the node's ranks, or among one of each node", 1, "two", inside,
                   "make two kinds of groups: one for each node, and one for each local rank; name one in each call"),
        "shapes": ("so it is for other numbers of ranks per node", 1, "shapes",
                   lambda seen: {**the_sum(seen), **between(seen), **inside(seen)},
                   "the number of ranks per node is an argument: take ranks_per_node as it is given"),
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
)  # fmt: skip
