"""07.1 `plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes)`: which gradients share a bucket? A pure function.

Each check looks at a property of the plan, so that a mistake costs one check where it can. Read next: `overlap.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round, Seen

AT_CAP = "each bucket closed at its cap"


def act(function, case: tuple, rank: int, world_size: int) -> Any:
    """Call the function; dtypes travel as text."""
    sizes, dtypes, cap, first_cap = case
    return function(sizes, [getattr(torch, name) for name in dtypes], cap, first_cap)


def cases(rng: Random) -> list[Round]:
    """One dtype and one cap, then a first cap, then two dtypes, then the corners."""
    layers, weight, bias = rng.randint(6, 9), 100 * rng.randint(5, 9), 10 * rng.randint(2, 6)
    some = ["float16", "float32", "bfloat16", "float16"] * 4

    def plain(sizes: list[int], cap: int, first_cap: int = 0) -> tuple:
        return sizes, ["float32"] * len(sizes), cap, first_cap or cap

    named = {
        "even": plain([weight, bias] * layers, int(2.5 * weight)),
        "first": plain([10 * rng.randint(8, 30) for _ in range(14)], 805, 305),
        "larger": plain([10 * rng.randint(8, 30) for _ in range(14)], 305, 805),
        "nothing": plain([0, 50, 50, 0], 100),  # parameters without elements
        "huge": plain([40, 50, 5000, 60, 70, 80], 200),
        "behind": plain([40, 50, 5000, 60, 70], 200),  # the open bucket has something already
        "exact": plain([weight] * 6, 2 * weight),
        "mixed": ([20 * rng.randint(8, 20) for _ in range(16)], some, 910, 510),
        # The first bucket of float32 is opened before that of float16 and closes after it.
        "late": ([100] * 9, ["float32"] * 5 + ["float16"] * 3 + ["float32"], 250, 250),
        "empty": plain([], 100),
    }
    return [Round(1, list(named.items()), init=False)]


def said(seen: Seen) -> str:
    sizes, dtypes, cap, first_cap = seen.case
    names = f"[{dtypes[0]}] * {len(dtypes)}" if len(set(dtypes)) == 1 else f"[{', '.join(dtypes)}]"
    return f"plan_buckets({sizes}, {names}, {cap}, {first_cap}):"


def plan(seen: Seen) -> list[list[int]]:
    """The buckets, but for empty ones, which one check tells; an index of no parameter is an error."""
    buckets = [bucket for bucket in seen["value"] if bucket]
    if any(type(index) is not int or not 0 <= index < len(seen.case[0]) for bucket in buckets for index in bucket):
        raise IndexError
    return buckets


def once(seen: Seen) -> dict:
    return {"all indices": sorted(sum(plan(seen), [])), "empty buckets": len(seen["value"]) - len(plan(seen))}


def order(seen: Seen) -> Any:
    indices = sum(plan(seen), [])
    return "falling indices" if indices == list(range(len(seen.case[0])))[: -len(indices) - 1 : -1] else indices


def ill_closed(seen: Seen, cap: int, buckets: slice, whole: slice = slice(0)) -> list[str]:
    """Which buckets were closed after they had the cap, and which of the whole ones before it.

    Whether a bucket had it before its last gradient came is asked of both ends: the order is another check's.
    """
    sizes, numbered = seen.case[0], list(enumerate(plan(seen)))
    total = [sum(sizes[index] for index in bucket) for _, bucket in numbered]
    early = [f"bucket {n} too early" for n, _ in numbered[whole] if total[n] < cap]
    late = (n for n, b in numbered[buckets] if total[n] - max(sizes[b[0]], sizes[b[-1]]) >= cap)
    return early + [f"bucket {n} too late" for n in late] + ["no bucket at all"] * (not numbered)


def by_cap(seen: Seen) -> str:
    return ", ".join(ill_closed(seen, seen.case[2], slice(None), slice(-1))) or AT_CAP


def by_first_cap(seen: Seen) -> str:
    first, others = slice(1), slice(1, -1)
    ill = ill_closed(seen, seen.case[3], first, first) + ill_closed(seen, seen.case[2], slice(0), others)
    return ", ".join(ill) or AT_CAP


MISTAKES = """
the model's order | order dtypes | this is the order of the model; backward reaches the last layer first: go in reverse
    reversed(range(len(sizes))) => range(len(sizes))
    , reverse=True =>
planned forwards, then reversed | cap first dtypes
| the left-over is in the first bucket: this was planned forwards, then reversed; plan in reverse order
    reversed(range(len(sizes))) => range(len(sizes))
    closed + list(opened.values()) => [bucket[::-1] for bucket in closed + list(opened.values())]
rising inside a bucket | order dtypes
| the buckets are in order, the indices inside a bucket are not: the last parameter comes first there, too
    closed + list(opened.values()) => [sorted(bucket) for bucket in closed + list(opened.values())]
never over the cap | cap first dtypes
| a bucket closes before it has reached the cap; the gradient that fills it belongs to it
    bucket.append(index) => if bucket and sum(sizes[i] for i in bucket) + sizes[index] > cap:
        closed.append(bucket)
        opened[dtype] = bucket = []
        caps[dtype] = cap_bytes
    bucket.append(index)
    bucket = opened => cap = caps.get(dtype, first_cap_bytes)
    bucket = opened
    if sum => if 0 * sum
over the cap | cap | a bucket goes on after it has reached the cap; close it when its size is at least the cap
    >= caps => > caps
left-over lost | once dtypes | what is still open at the end belongs to the plan, too
    closed + list(opened.values()) => closed
an empty bucket | once | there is an empty bucket; open a new one when a gradient needs it, not when the last has closed
    closed.append(opened.pop(dtype)) => closed.append(opened.pop(dtype))
    opened[dtype] = []
    key=lambda bucket: bucket[0] => key=lambda bucket: bucket or [-1]
one cap | first dtypes
| first_cap_bytes is not used: the bucket that leaves first closes when it has reached first_cap_bytes
    caps.get(dtype, first_cap_bytes) => cap_bytes
the first cap for all | first dtypes
| first_cap_bytes is used for more than the first bucket; all others close at cap_bytes
    caps.get(dtype, first_cap_bytes) => first_cap_bytes
never more than cap_bytes | first | the bucket that leaves first closes when it has reached first_cap_bytes
    caps.get(dtype, first_cap_bytes) => min(cap_bytes, caps.get(dtype, first_cap_bytes))
one small first bucket | dtypes
| the other dtype's first bucket does not close at first_cap_bytes; each dtype has a small first bucket
    caps[dtype] = cap_bytes => first_cap_bytes = cap_bytes
by size of elements | dtypes
| a bucket is one tensor, so it has one dtype; here two of them share one, such as float16 and bfloat16
    dtype = dtypes[index] => dtype = dtypes[index].itemsize
a change closes | dtypes
| a change of dtype closes the bucket; keep one open bucket for each dtype, so that it can go on
    bucket = opened.setdefault(dtype, []) => for other in set(opened) - {dtype}:
        closed.append(opened.pop(other))
    bucket = opened.setdefault(dtype, [])
in the order of closing | dtypes
| the buckets are right, their order is not: sort them by their first gradient, the highest index first
    sorted(closed + list(opened.values()), key=lambda bucket: bucket[0], reverse=True) => closed + list(opened.values())
no look at an empty model | all | a model without parameters has an empty plan: return []
    closed, opened => largest = max(sizes)
    closed, opened
endless loop | all | an endless loop | hangs
    if sum => while sum
    closed.append(opened.pop(dtype)) => bucket = list(bucket)
the example of the text | all | an index is in no bucket | tests
    def plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes):
        return [[4], [3, 2], [1, 0]]
torch's own | all | this exercise is to write | tests
    def plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes):
        tensors = [torch.empty(size // dtype.itemsize, dtype=dtype) for size, dtype in zip(sizes, dtypes)][::-1]
        plan, _ = dist._compute_bucket_assignment_by_size(tensors, [first_cap_bytes, cap_bytes])
        return [[len(sizes) - 1 - i for i in bucket] for bucket in plan]
"""

PLAN = exercise(
    *("07.1", "Plan the buckets", "plan_buckets", 15),
    cases=cases,
    act=act,
    said=said,
    mistakes=MISTAKES,
    checks={
        "once": ("each parameter is in one bucket, and no bucket is empty", 1,
                 "even first larger huge behind exact nothing mixed late empty", once,
                 "an index is in no bucket, or in two, or is none; return a list of buckets, each a list of indices"),
        "order": ("what backward computes first comes first", 1, "even first huge behind exact", order,
                  "gradients are ready in reverse order of the parameters; the plan must keep that order"),
        "cap": ("a bucket closes when it has reached the cap", 1, "even exact nothing huge behind", by_cap,
                "a bucket stays open until it has reached the cap, and no longer"),
        "first": ("the first bucket has a cap of its own", 1, "first larger", by_first_cap,
                  "the bucket that leaves first closes when it has reached first_cap_bytes, all others at cap_bytes"),
        "dtypes": ("each dtype has its own buckets", 1, "mixed late", plan,
                   "for each dtype by itself, the plan is the same as if there were no other"),
    },
    refused=("ddp_course.parallel.bucketing.plan_buckets", "torch.distributed._compute_bucket_assignment_by_size"),
    hints={r"IndexError|max\(\) .* empty|min\(\) .* empty": "a model without parameters has an empty plan: return []"},
)  # fmt: skip
