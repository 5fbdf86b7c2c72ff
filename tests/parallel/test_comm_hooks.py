"""Do hooks average as they promise, and do torch's own hooks run on our buckets?"""

from __future__ import annotations

import pytest
import torch

from tests.parallel import replicas_on_ranks as on_ranks

PAIRS = [
    ("torch", None),
    ("ours", None),
    ("ours", "all_reduce"),
    ("ours", "fp16"),
    ("ours", "torch fp16"),
    ("torch", "torch fp16"),
    ("ours", "torch power"),
    ("torch", "torch power"),
]


@pytest.fixture(scope="module")
def runs(two_ranks):
    return two_ranks.run(on_ranks.hooked_all, (PAIRS,))


@pytest.mark.timeout(60)
def test_every_hook_leaves_the_replicas_equal(runs):
    for pair in PAIRS:
        assert torch.equal(runs[0][pair], runs[1][pair]), pair


@pytest.mark.timeout(60)
def test_the_plain_hook_changes_nothing(runs):
    assert torch.equal(runs[0]["ours", "all_reduce"], runs[0]["ours", None])
    torch.testing.assert_close(runs[0]["ours", None], runs[0]["torch", None], rtol=0, atol=1e-6)


@pytest.mark.timeout(60)
def test_torchs_own_hooks_do_on_our_buckets_what_they_do_on_theirs(runs):
    assert torch.equal(runs[0]["ours", "torch fp16"], runs[0]["torch", "torch fp16"])
    assert torch.equal(runs[0]["ours", "torch power"], runs[0]["torch", "torch power"])


@pytest.mark.timeout(60)
def test_float16_is_near_and_not_the_same(runs):
    off = (runs[0]["ours", "fp16"] - runs[0]["ours", None]).abs().max()
    assert 0 < off < 1e-3
    torch.testing.assert_close(runs[0]["ours", "fp16"], runs[0]["ours", "torch fp16"], rtol=0, atol=1e-6)
