"""04.4 `sum_over_nodes(rank, world_size, ranks_per_node, tensor)`: does little travel between the nodes?

What each rank brings to a collective whose ranks are on several nodes is counted, whatever the collective is.
Read next: `grading/checking.py`, which prints what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch

from ddp_course.grading import fences
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from ddp_course.grading.observe import MESSAGES, Collectives
from judges.collectives.traffic import each_case, run_cases, told

BYTES_EACH = 8  # of an int64


def nodes_driver(
    rank: int, world_size: int, function: Callable, path: str, cases: list[tuple[int, list[list[int]]]]
) -> list[dict]:
    """Call the function for each number of ranks per node; note the tensor afterwards, and what was brought where."""

    def look(case: tuple[int, list[list[int]]]) -> dict:
        ranks_per_node, brought = case
        tensor = torch.tensor(brought[rank])
        with Collectives() as seen:
            returned = function(rank, world_size, ranks_per_node, tensor)
        note = {"held": tensor.tolist(), "traffic": told(seen.talks)}
        if isinstance(returned, torch.Tensor) and returned is not tensor:
            note["returned"] = returned.tolist()
        return note

    with fences.same_groups_everywhere(rank, world_size, f"{path}.groups"):
        return each_case(rank, world_size, path, cases, look)


def nodes_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Two nodes of two first, then other shapes; one rank per node and one node are among them."""
    first = _case(4, 2, rng)
    notes = run_cases(answer, nodes_driver, 4, [first])
    yield "sum", _first(_sum_fault, first, notes, 0)
    yield "between", _first(_between_fault, first, notes, 0)
    yield "inside", _first(_inside_fault, first, notes, 0)
    world_size = rng.choice((4, 6))
    cases = [_case(world_size, size, rng) for size in range(1, world_size + 1) if world_size % size == 0]
    more = run_cases(answer, nodes_driver, world_size, cases)
    faults = (
        _first(fault_of, case, more, i) for fault_of in (_sum_fault, _between_fault) for i, case in enumerate(cases)
    )
    yield "shapes", next(filter(None, faults), None)


def _case(world_size: int, ranks_per_node: int, rng: Random) -> tuple[int, list[list[int]]]:
    n = 12 * ranks_per_node * rng.randint(3, 5)
    return ranks_per_node, [[rng.randint(1, 4) * 100**rank for _ in range(n)] for rank in range(world_size)]


def _first(fault_of: Callable, case: tuple, notes: list[list[dict]], index: int) -> Fault | None:
    return next(filter(None, (fault_of(rank, note[index], *case) for rank, note in enumerate(notes))), None)


def _sum_fault(rank: int, note: dict, size: int, brought: list[list[int]]) -> Fault | None:
    totals = [sum(column) for column in zip(*brought, strict=True)]
    held, start = note["held"], rank // size * size
    if held == totals:
        return None
    i = next(i for i, total in enumerate(totals) if held[i] != total)
    expected = f"element {i}: {' + '.join(str(of_rank[i]) for of_rank in brought)} = {totals[i]}"
    expected += f", with {len(brought)} ranks, {size} per node"
    node = [sum(of_rank[i] for of_rank in brought[start : start + size]) for i in range(len(totals))]
    peers = [sum(of_rank[i] for of_rank in brought[rank % size :: size]) for i in range(len(totals))]
    part = len(totals) // size
    own = slice(rank % size * part, (rank % size + 1) * part)
    if held == brought[rank]:
        cause = "nothing was written into the tensor; the last collective must write into it, or copy the sum back"
        if note.get("returned") == totals:
            cause = "the sum is in what the function returns; it is to be written into the tensor that it was given"
    elif held == node:
        cause = "this is the sum of the node alone; the parts must be summed over the nodes, too"
    elif held == peers:
        cause = "this is the sum over the ranks with the same local rank; the node's other ranks are missing"
    elif sorted(held) == sorted(totals):
        cause = "the parts are in the wrong places: part k of the tensor belongs to local rank k of every node"
    elif held[own] == totals[own]:
        cause = "only this rank's part is right: the parts must be gathered inside the node at the end"
    else:
        cause = "sum inside the node so that each rank has one part, sum the part over the nodes, gather in the node"
    return Fault(expected, str(held[i]), rank, cause)


def _between_fault(rank: int, note: dict, size: int, brought: list[list[int]]) -> Fault | None:
    payload = len(brought[0]) * BYTES_EACH
    if size == len(brought):
        return None  # there is one node
    limit = payload // size
    crossing = [entry for entry in note["traffic"] if _crosses(rank, entry, size)]
    n_bytes = sum(entry[2] for entry in crossing)
    part = f"1/{size} of the tensor's {payload:,}" if size > 1 else "the whole tensor"
    expected = f"{limit:,} bytes, {part}, brought between the nodes by each rank; {len(brought)} ranks, {size} per node"
    if not crossing:
        return Fault(
            expected, "none", rank, "no number of this rank went to the other node; every rank carries its part"
        )
    n_nodes = len(brought) // size  # a sum in two halves brings the part, then a share of it, perhaps padded
    if n_bytes <= limit + limit // n_nodes + 2 * n_nodes * BYTES_EACH:
        return None
    ops = " and ".join(dict.fromkeys(f"{op} among ranks {list(ranks)}" for op, ranks, _, _ in crossing))
    cause = "reduce_scatter inside the node first, so that only a part has to cross, then all_reduce that part"
    if any(set(ranks) == set(range(len(brought))) for _, ranks, _, _ in crossing) and size > 1:
        cause = "a collective over all ranks carries the whole tensor between the nodes; " + cause
    elif size > 1:
        cause = "whole tensors cross; " + cause
    else:
        cause = "with one rank per node there is one sum over all ranks, once; take ranks_per_node as it is given"
    return Fault(expected, f"{n_bytes:,} bytes, in {ops}", rank, cause)


def _inside_fault(rank: int, note: dict, size: int, brought: list[list[int]]) -> Fault | None:
    start = rank // size * size
    mine, peers = list(range(start, start + size)), list(range(rank % size, len(brought), size))
    expected = f"collectives among ranks {mine}, its node, or {peers}, those with its local rank"
    if not note["traffic"]:
        return Fault(expected, "no collective", rank, "the ranks never talked")
    for op, ranks, _, _ in note["traffic"]:
        if sorted(ranks) not in (mine, peers) and op not in MESSAGES:
            cause = "make two kinds of groups: one for each node, and one for each local rank; name one in each call"
            return Fault(expected, f"{op} among ranks {list(ranks)}", rank, cause)
    return None


def _crosses(rank: int, entry: tuple, size: int) -> bool:
    _, ranks, _, peer = entry
    others = [peer] if peer is not None else ranks
    return any(other // size != rank // size for other in others)


TWO_LEVELS = Exercise(
    "04.4",
    "Sum inside the nodes first (stretch)",
    "sum_over_nodes",
    25,
    (
        Check("sum", "every rank's tensor becomes the sum over all ranks", 1),
        Check("between", "only each rank's part travels between the nodes", 2),
        Check("inside", "every collective stays among the node's ranks, or among one of each node", 1),
        Check("shapes", "so it is for other numbers of ranks per node", 1),
    ),
    nodes_judge,
    refused=("ddp_course.groups.split_group",),
    hints=(
        (
            r"different sizes|must be the same size|outputShape|invalid tensor size|match expected size",
            "reduce_scatter gives each of the node's ranks 1/k of the tensor; its output has numel // k elements",
        ),
        (
            r"not part of group|not part of",
            "a group is used by a rank that is not in it; keep those that hold this rank",
        ),
        (
            r"UnboundLocalError|cannot access local variable",
            "some rank found no group of its own; every rank is in one node's group and in one of its local rank",
        ),
        (
            r"no result after|never entered|imed out",
            "some ranks of a group wait in a collective that another one skips; every rank of it must call it, the "
            "last one, too",
        ),
    ),
)
