"""What the ring's cases are, and what is wrong with a sum.

Every rank brings numbers of its own power of a base, as in the lesson, so that a wrong sum tells which ranks are in it
and how often. Read next: `ring.py`, which runs the cases.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.provenance import BASE, stakes
from ddp_course.grading.provenance import counts as counts_of

LARGE_BASE = 10**9
NEVER_TALKED = "the ranks never talked; the numbers of the others must be received"

Case = dict  # what each rank brings, and as which kind of tensor


def make_case(world_size: int, n: int, rng: Random, base: int = BASE, **kind: Any) -> Case:
    """Choose what each rank brings; `kind` may name another dtype or shape, or ask for a transposed tensor."""
    return {"brought": stakes(rng, world_size, n, base), "base": base, "dtype": "float32", "shape": (-1,), **kind}


def rounding_case(world_size: int, n: int, rng: Random) -> Case:
    """Numbers whose sum in float32 depends on the order in which they are added."""
    case = make_case(world_size, n, rng)
    spread = [[rng.uniform(-1, 1) * 2.0 ** rng.randint(-8, 8) for _ in range(n)] for _ in range(world_size)]
    return {**case, "brought": spread}


def tensor_of(case: Case, rank: int) -> torch.Tensor:
    """Return what a rank brings; a transposed tensor is no single piece of memory."""
    flat = torch.tensor(case["brought"][rank], dtype=getattr(torch, case["dtype"]))
    shaped = flat.reshape(case["shape"])
    return shaped.t().contiguous().t() if case.get("transposed") else shaped


def sum_fault(case: Case, notes: list[dict]) -> Fault | None:
    """Compare what the ranks hold with the sum; the first rank that is wrong is told its first wrong element."""
    brought, world_size = case["brought"], len(case["brought"])
    totals = [sum(column) for column in zip(*brought, strict=True)]
    for rank, note in enumerate(notes):
        wrong = [i for i, total in enumerate(totals) if note["held"][i] != total]
        if not wrong:
            continue
        i = wrong[0]
        parts = " + ".join(str(of_rank[i]) for of_rank in brought)
        shape = f" of shape {list(case['shape'])}" if len(case["shape"]) > 1 else ""
        expected = f"element {i} of {len(totals)}{shape}, {world_size} ranks: {parts} = {totals[i]}"
        found = f"{note['held'][i]:.12g}, and {len(wrong)} of {len(totals)} elements are wrong"
        return Fault(expected, found, rank, _sum_cause(case, rank, note, totals, wrong))
    return None


def _sum_cause(case: Case, rank: int, note: dict, totals: list, wrong: list[int]) -> str:
    brought, held, world_size = case["brought"], note["held"], len(case["brought"])
    if not note["traffic"]:
        return NEVER_TALKED
    if held == brought[rank]:
        if note.get("returned") == totals:
            return "the sum is in what the function returns; it is to be written into the tensor that it was given"
        if case.get("transposed"):
            return (
                "nothing was written into the tensor: this one is transposed, so reshape and flatten give a copy of "
                "it, not a view; copy the sum back"
            )
        return "nothing was written into the tensor; work on views of it, or copy the sum back at the end"
    if all(abs(held[i] * world_size - totals[i]) < 1e-6 * totals[i] for i in wrong):
        return "this is the mean; the sum is asked for"
    counts = {i: counts_of(held[i], [of_rank[i] for of_rank in brought], case["base"]) for i in wrong}
    if case["base"] == LARGE_BASE and held == _rounded(totals):
        return "these whole numbers were rounded on the way; keep the dtype of the tensor: torch.empty_like"
    if None in counts.values():
        return "numbers of other places are mixed in; both sides of a message must mean the same chunk"
    often = [i for i in wrong if max(counts[i]) > 1]
    if often:
        twice = counts[often[0]].index(max(counts[often[0]]))
        return (
            f"rank {twice}'s number is in it {max(counts[often[0]])} times: a sum that was complete was added again. "
            "W-1 steps add, the W-1 steps after them copy; what a step sends is what the step before it changed"
        )
    if all(counts[i][rank] == 1 and sum(counts[i]) == 1 for i in wrong) and len(wrong) < world_size <= wrong[-1] + 1:
        return "these elements are in no chunk: the last ones are left over; tensor_split(W) cuts any size into W"
    if len(wrong) <= len(totals) * (1 - 1 / world_size) + world_size:
        return (
            "the elements that are right are one chunk, or little more: each rank has completed its own. The second "
            "half is missing or wrong: complete chunks must go round, W-1 steps, and be copied"
        )
    missing = [other for other in range(world_size) if not counts[wrong[0]][other]]
    return (
        f"no number of rank {', '.join(map(str, missing))} is in it; each chunk must go round in W-1 steps that add, "
        "and the steps that copy must begin with the chunk that was completed last"
    )


def _rounded(numbers: list[int]) -> list[float]:
    return torch.tensor(numbers, dtype=torch.float32).tolist()
