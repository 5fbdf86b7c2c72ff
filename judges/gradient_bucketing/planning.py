"""07.1 `plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes)`: which gradients share a bucket?

The plan is a pure function of sizes and dtypes, so the cases go to one process, each as one call. What each check looks
at is a property of the plan, so that one slip costs one check where it can. Read next: `overlap.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

Plan = list[list[int]]


@dataclass(frozen=True)
class Case:
    """The arguments of one call; dtypes by name, so that they travel as text."""

    sizes: list[int]
    dtypes: list[str]
    cap: int
    first_cap: int

    @property
    def said(self) -> str:
        """The call, for the learner to repeat."""
        one = len(set(self.dtypes)) == 1
        dtypes = f"[{self.dtypes[0]}] * {len(self.dtypes)}" if one else f"[{', '.join(self.dtypes)}]"
        return f"plan_buckets({self.sizes}, {dtypes}, {self.cap}, {self.first_cap})"


def plan_driver(rank: int, world_size: int, function: Callable, cases: list[Case]) -> list[Any]:
    """Call the function for each case."""
    plans = []
    for case in cases:
        dtypes = [getattr(torch, name) for name in case.dtypes]
        plans.append(plain(function(list(case.sizes), dtypes, case.cap, case.first_cap)))
    return plans


def greedy(case: Case) -> Plan:
    """Return the plan of the text's rule."""
    closed, opened, bytes_in, started = [], {}, {}, set()
    for index in reversed(range(len(case.sizes))):
        dtype = case.dtypes[index]
        opened.setdefault(dtype, []).append(index)
        bytes_in[dtype] = bytes_in.get(dtype, 0) + case.sizes[index]
        if bytes_in[dtype] >= (case.cap if dtype in started else case.first_cap):
            closed.append(opened.pop(dtype))
            bytes_in[dtype] = 0
            started.add(dtype)
    return sorted([*closed, *opened.values()], key=lambda bucket: -bucket[0])


def plan_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """One dtype and one cap, then a first cap, then two dtypes, then the corners."""
    layers = rng.randint(6, 9)
    weight, bias = 100 * rng.randint(5, 9), 10 * rng.randint(2, 6)
    even = Case([weight, bias] * layers, ["float32"] * 2 * layers, int(2.5 * weight), int(2.5 * weight))
    first = Case([10 * rng.randint(8, 30) for _ in range(14)], ["float32"] * 14, 805, 305)
    huge = Case([40, 50, 5000, 60, 70, 80], ["float32"] * 6, 200, 200)
    exact = Case([weight] * 6, ["float32"] * 6, 2 * weight, 2 * weight)
    mixed = Case(
        [20 * rng.randint(8, 20) for _ in range(16)], ["float16", "float32", "float32", "float16"] * 4, 910, 510
    )
    # The first bucket of float32 is opened before that of float16 and closes after it.
    late = Case([100] * 9, ["float32"] * 5 + ["float16"] * 3 + ["float32"], 250, 250)
    empty = Case([], [], 100, 100)
    cases = [even, first, huge, exact, mixed, late, empty]
    plans = dict(zip(map(id, cases), answer.run(plan_driver, 1, cases)[0], strict=True))

    def first_fault(fault_of: Callable, *chosen: Case) -> Fault | None:
        return next(filter(None, (fault_of(case, plans[id(case)]) for case in chosen)), None)

    yield "once", first_fault(_once_fault, *cases)
    yield "order", first_fault(_order_fault, even, first, huge, exact)
    yield "cap", first_fault(_cap_fault, even, exact, huge)
    yield "first", first_fault(_first_fault, first)
    yield "dtypes", first_fault(_dtypes_fault, mixed, late)


def _is_plan(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(bucket, list) and all(type(index) is int for index in bucket) for bucket in found
    )


def _once_fault(case: Case, found: Any) -> Fault | None:
    count = len(case.sizes)
    expected = f"each of {list(range(count))} once, from {case.said}"
    if not _is_plan(found):
        cause = "return a list of buckets; each is a list of indices, whole numbers from 0"
        return Fault(expected, repr(found), cause=cause)
    indices = [index for bucket in found for index in bucket]
    if [] in found:
        cause = "there is an empty bucket; open a new one when a gradient needs it, not when the last has closed"
    elif missing := sorted(set(range(count)) - set(indices)):
        cause = f"{missing} is in no bucket; the bucket that is still open at the end belongs to the plan, too"
    elif len(indices) > count or sorted(indices) != list(range(count)):
        cause = "some indices come twice, or do not exist"
    else:
        return None
    return Fault(expected, str(found), cause=cause)


def _unusable(case: Case, found: Any) -> Fault | None:
    """Say what is wrong with a plan that cannot be looked at: no lists, nothing in them, indices that do not exist."""
    usable = _is_plan(found) and any(found) and all(i in range(len(case.sizes)) for b in found for i in b)
    return None if usable else _once_fault(case, found)


def _order_fault(case: Case, found: Any) -> Fault | None:
    if fault := _unusable(case, found):
        return fault
    indices = [index for bucket in found for index in bucket]
    if indices[:1] == [len(case.sizes) - 1] and indices == sorted(indices, reverse=True):
        return None
    expected = f"indices that fall from {len(case.sizes) - 1} to 0, through all buckets, from {case.said}"
    if indices == sorted(indices):
        cause = "this is the order of the model; backward reaches the last layer first, so go through it in reverse"
    elif [bucket[:1] for bucket in found] == sorted((b[:1] for b in found), reverse=True):
        cause = (
            "the buckets are in order, the indices inside a bucket are not: the last parameter comes first there too"
        )
    else:
        cause = "gradients are ready in reverse order of the parameters; the plan must keep that order"
    return Fault(expected, str(found), cause=cause)


def _closes_late(bucket: list[int], sizes: list[int], cap: int) -> bool:
    """Whether the bucket was full before its last gradient came, whichever end that is."""
    total = sum(sizes[index] for index in bucket)
    return bool(bucket) and all(total - sizes[index] >= cap for index in (bucket[0], bucket[-1]))


def _cap_fault(case: Case, found: Any) -> Fault | None:
    expected = f"{_bytes_of(greedy(case), case)} bytes, from {case.said}"
    if fault := _unusable(case, found):
        return fault
    found = [bucket for bucket in found if bucket]
    totals = [sum(case.sizes[i] for i in bucket) for bucket in found]
    if any(_closes_late(bucket, case.sizes, case.cap) for bucket in found):
        cause = "a bucket goes on after it has reached the cap; close it when its size is at least the cap"
    elif all(total >= case.cap for total in totals[:-1]):
        return None
    elif len(found) == len(case.sizes):
        cause = "every gradient has a bucket of its own; a bucket stays open until it has reached the cap"
    elif totals[0] < case.cap <= totals[-1] and found[0][0] > found[-1][0]:
        cause = "the left-over is in the first bucket: this was planned forwards, then reversed; plan in reverse order"
    else:
        cause = "a bucket closes before it has reached the cap; the gradient that fills it belongs to it"
    return Fault(expected, f"{_bytes_of(found, case)} bytes", cause=cause)


def _bytes_of(plan: Plan, case: Case) -> list[int]:
    return [sum(case.sizes[i] for i in bucket) for bucket in plan]


def _first_fault(case: Case, found: Any) -> Fault | None:
    expected = f"a first bucket of {_bytes_of(greedy(case), case)[0]} bytes, from {case.said}"
    if fault := _unusable(case, found):
        return fault
    found = [bucket for bucket in found if bucket]
    totals = _bytes_of(found, case)
    if not totals[0] >= case.first_cap or _closes_late(found[0], case.sizes, case.first_cap):
        cause = "the bucket that leaves first closes when it has reached first_cap_bytes"
        if totals[0] >= case.cap:
            cause = "first_cap_bytes is not used: " + cause
        return Fault(expected, f"{totals[0]} bytes", cause=cause)
    if any(total < case.cap for total in totals[1:-1]):
        expected = f"buckets of {_bytes_of(greedy(case), case)} bytes, from {case.said}"
        cause = "first_cap_bytes is used for more than the first bucket; all others close at cap_bytes"
        return Fault(expected, f"{totals} bytes", cause=cause)
    return None


def _dtypes_fault(case: Case, found: Any) -> Fault | None:
    right = greedy(case)
    found = [bucket for bucket in found if bucket] if _is_plan(found) else found
    if found == right:
        return None
    fault = Fault(str(right) + f", from {case.said}", repr(found))
    if incomplete := _once_fault(case, found):
        return incomplete
    if any(len({case.dtypes[i] for i in bucket}) > 1 for bucket in found):
        cause = "a bucket is one tensor, so it has one dtype; here float16 and float32 share one"
    elif sorted(found) == sorted(right):
        cause = "the buckets are right, their order is not: sort them by their first gradient, the highest index first"
    elif all(bucket == list(range(bucket[0], bucket[-1] - 1, -1)) for bucket in found):
        cause = "a change of dtype closes the bucket; keep one open bucket for each dtype, so that it can go on"
    elif any(_of(found, name, case) == _of(right, name, case) for name in case.dtypes):
        cause = "the other dtype's first bucket does not close at first_cap_bytes; each dtype has a small first bucket"
    else:
        cause = "for each dtype by itself, the plan is the same as if there were no other"
    return Fault(fault.expected, fault.found, cause=cause)


def _of(plan: Plan, dtype: str, case: Case) -> Plan:
    return [bucket for bucket in plan if case.dtypes[bucket[0]] == dtype]


PLAN = Exercise(
    "07.1",
    "Plan the buckets",
    "plan_buckets",
    15,
    (
        Check("once", "each parameter is in one bucket, and no bucket is empty", 1),
        Check("order", "what backward computes first comes first", 1),
        Check("cap", "a bucket closes when it has reached the cap", 1),
        Check("first", "the first bucket has a cap of its own", 1),
        Check("dtypes", "each dtype has its own buckets", 1),
    ),
    plan_judge,
    refused=("ddp_course.parallel.bucketing.plan_buckets", "torch.distributed._compute_bucket_assignment_by_size"),
    hints=(
        (r"IndexError|max\(\) .* empty|min\(\) .* empty", "a model without parameters has an empty plan: return []"),
    ),
)
