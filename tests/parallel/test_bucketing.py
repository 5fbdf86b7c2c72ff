"""Is the plan torch's own, and does it hold every gradient once?"""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_course.models import resnet18_small
from ddp_course.parallel import plan_buckets

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TENSORS = st.lists(st.tuples(st.integers(0, 300), st.sampled_from(DTYPES)), min_size=1, max_size=25)


def torchs_plan(named, cap_bytes, first_cap_bytes) -> list[list[str]]:
    """What torch's reducer makes of the same tensors in the order of backward, which it notes in its first step."""
    backward = list(reversed(named))
    tensors = [tensor for _, tensor in backward]
    indices, _ = dist._compute_bucket_assignment_by_size(
        tensors, [first_cap_bytes, cap_bytes], [False] * len(tensors), list(range(len(tensors)))
    )
    return [[backward[i][0] for i in bucket] for bucket in indices]


@settings(max_examples=150, deadline=None)
@given(TENSORS, st.integers(1, 2000), st.integers(1, 500))
def test_the_buckets_are_those_of_torch(sizes, cap_bytes, first_cap_bytes):
    named = [(f"p{i}", torch.empty(numel, dtype=dtype)) for i, (numel, dtype) in enumerate(sizes)]
    plan = plan_buckets(named, cap_bytes, first_cap_bytes)
    theirs = torchs_plan(named, cap_bytes, first_cap_bytes)
    assert sorted(list(bucket.names) for bucket in plan) == sorted(theirs)
    assert sorted(name for bucket in plan for name in bucket.names) == sorted(name for name, _ in named)
    first_places = [int(bucket.names[0][1:]) for bucket in plan]
    assert first_places == sorted(first_places, reverse=True)  # what backward finishes first is launched first
    assert [bucket.index for bucket in plan] == list(range(len(plan)))


def test_a_bucket_closes_with_the_gradient_that_fills_it_and_the_first_one_early():
    named = [(f"p{i}", torch.empty(100)) for i in range(6)]  # 400 bytes each
    plan = plan_buckets(named, cap_bytes=800, first_cap_bytes=300)
    assert [bucket.names for bucket in plan] == [("p5",), ("p4", "p3"), ("p2", "p1"), ("p0",)]
    assert [bucket.nbytes for bucket in plan] == [400, 800, 800, 400]


def test_a_resnet_has_the_buckets_that_the_defaults_give():
    model = resnet18_small(10, 3)
    named = list(model.named_parameters())
    plan = plan_buckets(named)
    assert plan[0].names[:2] == ("fc.bias", "fc.weight") and plan[0].nbytes >= 2**20
    assert sum(bucket.numel for bucket in plan) == sum(param.numel() for param in model.parameters())
    assert [list(bucket.names) for bucket in plan] == torchs_plan(named, 25 * 2**20, 2**20)
