"""07.1 `plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes)`: which gradients share a bucket?

The plan is a pure function of sizes and dtypes, so one process is enough. What each check looks at is a property of the
plan, so that one slip costs one check where it can. Read next: `overlap.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import Expect, exercise
from ddp_course.grading.vocabulary.play import Round, Seen

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

    def bytes_of(self, plan: Plan) -> list[int]:
        """Return the bytes of each bucket."""
        return [sum(self.sizes[index] for index in bucket) for bucket in plan]


def act(function, case: Case, rank: int, world_size: int) -> Any:
    """Call the function."""
    return function(case.sizes, [getattr(torch, name) for name in case.dtypes], case.cap, case.first_cap)


def rounds(rng: Random) -> list[Round]:
    """One dtype and one cap, then a first cap, then two dtypes, then the corners."""
    layers, weight, bias = rng.randint(6, 9), 100 * rng.randint(5, 9), 10 * rng.randint(2, 6)
    some = ["float16", "float32", "bfloat16", "float16"] * 4

    def plain(sizes: list[int], cap: int, first_cap: int = 0) -> Case:
        return Case(sizes, ["float32"] * len(sizes), cap, first_cap or cap)

    cases = {
        "even": plain([weight, bias] * layers, int(2.5 * weight)),
        "first": plain([10 * rng.randint(8, 30) for _ in range(14)], 805, 305),
        "larger": plain([10 * rng.randint(8, 30) for _ in range(14)], 305, 805),
        "nothing": plain([0, 50, 50, 0], 100),  # parameters without elements
        "huge": plain([40, 50, 5000, 60, 70, 80], 200),
        "behind": plain([40, 50, 5000, 60, 70], 200),  # the open bucket has something already
        "exact": plain([weight] * 6, 2 * weight),
        "mixed": Case([20 * rng.randint(8, 20) for _ in range(16)], some, 910, 510),
        # The first bucket of float32 is opened before that of float16 and closes after it.
        "late": Case([100] * 9, ["float32"] * 5 + ["float16"] * 3 + ["float32"], 250, 250),
        "empty": plain([], 100),
    }
    return [Round(1, list(cases.items()), init=False)]


def greedy(case: Case) -> Plan:
    """Return the plan of the text's rule."""
    closed, opened, started = [], {}, set()
    for index in reversed(range(len(case.sizes))):
        dtype = case.dtypes[index]
        opened.setdefault(dtype, []).append(index)
        if case.bytes_of([opened[dtype]])[0] >= (case.cap if dtype in started else case.first_cap):
            closed.append(opened.pop(dtype))
            started.add(dtype)
    return sorted([*closed, *opened.values()], key=lambda bucket: -bucket[0])


# --- What is expected: functions of a case and its plan that return a cause, or nothing -------------


def rule(expected: Callable[[Case], str], cause_of: Callable[[Case, Any], str]) -> Expect:
    """Expect of a plan that no cause is found; empty buckets are told by `once` alone."""

    def expect(seen: Seen) -> Fault | None:
        case, found = seen.case, seen["value"]
        usable = _is_plan(found) and any(found) and all(i in range(len(case.sizes)) for b in found for i in b)
        if usable and cause_of is not once:
            cause = cause_of(case, [bucket for bucket in found if bucket])
        else:
            cause = once(case, found)
        return Fault(f"{expected(case)}, from {case.said}", str(found), cause=cause) if cause else None

    return expect


def _is_plan(found: Any) -> bool:
    lists = isinstance(found, list) and all(isinstance(bucket, list) for bucket in found)
    return lists and all(type(index) is int for bucket in found for index in bucket)


def once(case: Case, found: Any) -> str:
    """Each index is in one bucket."""
    if not _is_plan(found):
        return "return a list of buckets; each is a list of indices, whole numbers from 0"
    indices, wanted = sum(found, []), list(range(len(case.sizes)))
    if [] in found:
        return "there is an empty bucket; open a new one when a gradient needs it, not when the last has closed"
    if missing := sorted(set(wanted) - set(indices)):
        return f"{missing} is in no bucket; the bucket that is still open at the end belongs to the plan, too"
    return "" if sorted(indices) == wanted else "some indices come twice, or do not exist"


def order(case: Case, plan: Plan) -> str:
    """The indices fall, through all buckets."""
    indices = sum(plan, [])
    if indices[0] == len(case.sizes) - 1 and indices == sorted(indices, reverse=True):
        return ""
    if indices == sorted(indices):
        return "this is the order of the model; backward reaches the last layer first, so go through it in reverse"
    if plan == sorted(plan, key=lambda bucket: -bucket[0]):
        return "the buckets are in order, the indices inside a bucket are not: the last parameter comes first there too"
    return "gradients are ready in reverse order of the parameters; the plan must keep that order"


def _closes_late(case: Case, bucket: list[int], cap: int) -> bool:
    """Whether the bucket was full before its last gradient came, whichever end that is."""
    return all(sum(case.sizes[i] for i in bucket) - case.sizes[end] >= cap for end in (bucket[0], bucket[-1]))


def cap(case: Case, plan: Plan) -> str:
    """A bucket closes when it has reached the cap, and the last one may be smaller."""
    totals = case.bytes_of(plan)
    if any(_closes_late(case, bucket, case.cap) for bucket in plan):
        return "a bucket goes on after it has reached the cap; close it when its size is at least the cap"
    if all(total >= case.cap for total in totals[:-1]):
        return ""
    if len(plan) == len(case.sizes):
        return "every gradient has a bucket of its own; a bucket stays open until it has reached the cap"
    if totals[0] < case.cap <= totals[-1] and plan[0][0] > plan[-1][0]:
        return "the left-over is in the first bucket: this was planned forwards, then reversed; plan in reverse order"
    return "a bucket closes before it has reached the cap; the gradient that fills it belongs to it"


def first(case: Case, plan: Plan) -> str:
    """The first bucket has the first cap, and no other one has."""
    totals = case.bytes_of(plan)
    if totals[0] < case.first_cap or _closes_late(case, plan[0], case.first_cap):
        unused = "first_cap_bytes is not used: " * (totals[0] >= case.cap)
        return f"{unused}the bucket that leaves first closes when it has reached first_cap_bytes"
    more = any(total < case.cap for total in totals[1:-1])
    return "first_cap_bytes is used for more than the first bucket; all others close at cap_bytes" if more else ""


def dtypes(case: Case, plan: Plan) -> str:
    """Each dtype is planned as if there were no other."""
    right = greedy(case)
    if plan == right or (incomplete := once(case, plan)):
        return "" if plan == right else incomplete
    if any(len({case.dtypes[i] for i in bucket}) > 1 for bucket in plan):
        return "a bucket is one tensor, so it has one dtype; here two of them share one, such as float16 and bfloat16"
    if sorted(plan) == sorted(right):
        return "the buckets are right, their order is not: sort them by their first gradient, the highest index first"
    if all(bucket == list(range(bucket[0], bucket[-1] - 1, -1)) for bucket in plan):
        return "a change of dtype closes the bucket; keep one open bucket for each dtype, so that it can go on"
    of = {t: [[b for b in each if case.dtypes[b[0]] == t] for each in (plan, right)] for t in case.dtypes}
    if any(found == wanted for found, wanted in of.values()):
        return "the other dtype's first bucket does not close at first_cap_bytes; each dtype has a small first bucket"
    return "for each dtype by itself, the plan is the same as if there were no other"


complete = rule(lambda case: f"each of {list(range(len(case.sizes)))} once", once)
falling = rule(lambda case: f"indices that fall from {len(case.sizes) - 1} to 0, through all buckets", order)
full = rule(lambda case: f"buckets of {case.bytes_of(greedy(case))} bytes", cap)
small_first = rule(lambda case: f"buckets of {case.bytes_of(greedy(case))} bytes, the first one small", first)
apart = rule(lambda case: str(greedy(case)), dtypes)

PLAN = exercise(
    *("07.1", "Plan the buckets", "plan_buckets", 15),
    act=act,
    rounds=rounds,
    checks={
        "once": (
            *("each parameter is in one bucket, and no bucket is empty", 1, complete),
            "even first larger huge behind exact nothing mixed late empty",
        ),
        "order": ("what backward computes first comes first", 1, falling, "even first huge behind exact"),
        "cap": ("a bucket closes when it has reached the cap", 1, full, "even exact nothing huge behind"),
        "first": ("the first bucket has a cap of its own", 1, small_first, "first larger"),
        "dtypes": ("each dtype has its own buckets", 1, apart, "mixed late"),
    },
    refused=("ddp_course.parallel.bucketing.plan_buckets", "torch.distributed._compute_bucket_assignment_by_size"),
    hints={r"IndexError|max\(\) .* empty|min\(\) .* empty": "a model without parameters has an empty plan: return []"},
)
