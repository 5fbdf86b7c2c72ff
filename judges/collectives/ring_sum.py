"""A tensor on each rank becomes the sum over all; when it does not, where did the ring go wrong?

Every rank brings numbers of its own power of a base, as in the lesson, so that a wrong sum tells which ranks are in it
and how often. Read next: `ring.py`, which runs the cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import Expect
from ddp_course.grading.vocabulary.play import Note, Seen
from ddp_course.grading.vocabulary.provenance import BASE, counts, stakes, whose

LARGE_BASE = 10**17  # beyond what a float64 holds
NEVER_TALKED = "the ranks never talked; the numbers of the others must be received"


def summed(call: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Note:
    """Note what a rank's tensor holds after a call, in its old memory, and whatever other tensor came back."""
    memory = tensor.detach()
    returned = call(tensor)
    other = isinstance(returned, torch.Tensor) and returned is not tensor
    return Note(held=memory.flatten().tolist(), returned=returned.flatten().tolist() if other else None)


def the_sum(cause: Callable[[Seen, list, list[int]], str]) -> Expect:
    """Expect the exact sum in the tensor; else the cause of (seen, the right sums, the places that are wrong)."""

    def expect(seen: Seen) -> Fault | None:
        if seen["ended"]:
            return seen["ended"]
        brought, held = seen.case.brought, seen["held"]
        totals = [sum(column) for column in zip(*brought, strict=True)]
        wrong = [i for i, total in enumerate(totals) if held[i] != total]
        if not wrong:
            return None
        i = wrong[0]
        parts = " + ".join(str(own[i]) for own in brought)
        if not seen["calls"]:
            why = NEVER_TALKED
        elif held == brought[seen.rank] and seen["returned"] == totals:
            why = "the sum is in what the function returns; it is to be written into the tensor that it was given"
        else:
            why = cause(seen, totals, wrong)
        found = f"{held[i]:.12g}, and {len(wrong)} of {len(totals)} elements are wrong"
        return Fault(f"element {i} of {len(totals)}, with {seen.case}: {parts} = {totals[i]}", found, seen.rank, why)

    return expect


@dataclass(frozen=True)
class Case:
    """What each rank brings, and as which kind of tensor."""

    brought: list[list[float]]
    base: int = BASE
    dtype: str = "float32"
    shape: tuple[int, ...] = (-1,)
    transposed: bool = False
    rounded: bool = False  # the sum depends on the order in which it is made

    def __str__(self) -> str:
        return f"{len(self.brought)} ranks" + f" and shape {list(self.shape)}" * (len(self.shape) > 1)

    def tensor(self, rank: int) -> torch.Tensor:
        """Return what a rank brings; a transposed tensor is no single piece of memory."""
        shaped = torch.tensor(self.brought[rank], dtype=getattr(torch, self.dtype)).reshape(self.shape)
        return shaped.t().contiguous().t() if self.transposed else shaped


def make_case(world_size: int, n: int, rng: Random, base: int = BASE, **kind: Any) -> Case:
    """Choose what each rank brings; `kind` may name another dtype or shape, or ask for a transposed tensor."""
    return Case(stakes(rng, world_size, n, base), base, **kind)


def rounding_case(world_size: int, n: int, rng: Random) -> Case:
    """Numbers whose sum in float32 depends on the order in which they are added."""
    brought = [[rng.uniform(-1, 1) * 2.0 ** rng.randint(-8, 8) for _ in range(n)] for _ in range(world_size)]
    return Case(brought, rounded=True)


def _mistake(seen: Seen, totals: list, wrong: list[int]) -> str:
    case, held, world_size = seen.case, seen["held"], seen.world_size
    columns = list(zip(*case.brought, strict=True))
    if held == case.brought[seen.rank]:
        why = "; this one is transposed, so reshape and flatten give a copy of it, not a view" * case.transposed
        return f"nothing was written into the tensor{why}; work on views of it, or copy the sum back at the end"
    if all(abs(held[i] * world_size - totals[i]) < 1e-6 * totals[i] for i in wrong):
        return "this is the mean; the sum is asked for"
    if case.base == LARGE_BASE and held == torch.tensor(totals, dtype=torch.float32).tolist():
        return "these whole numbers were rounded on the way; keep the dtype of the tensor: torch.empty_like"
    often = {i: counts(held[i], columns[i], case.base) for i in wrong}
    if None in often.values():
        return "numbers of other places are mixed in; both sides of a message must mean the same chunk"
    twice = next((i for i in wrong if max(often[i]) > 1), None)
    if twice is not None:
        return (
            f"{whose(held[twice], columns[twice], case.base)}: a sum that was complete was added again. W-1 steps add, "
            "the W-1 steps after them copy; what a step sends is what the step before it changed"
        )
    alone = all(often[i][seen.rank] == 1 and sum(often[i]) == 1 for i in wrong)
    if alone and len(wrong) < world_size <= wrong[-1] + 1:
        return "these elements are in no chunk: the last ones are left over; tensor_split(W) cuts any size into W"
    if len(wrong) <= len(totals) * (1 - 1 / world_size) + world_size:
        return (
            "the elements that are right are one chunk, or little more: each rank has completed its own. The second "
            "half is missing or wrong: complete chunks must go round, W-1 steps, and be copied"
        )
    return (
        f"{whose(held[wrong[0]], columns[wrong[0]], case.base)}; each chunk must go round in W-1 steps that add, and "
        "the steps that copy must begin with the chunk that was completed last"
    )


ring_sum = the_sum(_mistake)
