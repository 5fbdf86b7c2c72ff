"""Do torch's own hooks do on our buckets what they do on torch's?"""

from __future__ import annotations

import pytest
import torch

from tests.parallel import replicas_on_ranks as on_ranks

HOOKS = (None, "all_reduce", "fp16", "power")
PAIRS = [(way, hook) for way in ("ours", "torch") for hook in HOOKS]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def runs(two_ranks):
    return two_ranks.run(on_ranks.hooked_all, (PAIRS,))


def test_every_hook_leaves_the_replicas_equal(runs):
    for pair in PAIRS:
        assert torch.equal(runs[0][pair], runs[1][pair]), pair


def test_a_hook_ends_with_the_bits_that_it_has_on_torchs_buckets(runs):
    assert torch.equal(runs[0]["ours", "all_reduce"], runs[0]["ours", None])
    torch.testing.assert_close(runs[0]["ours", None], runs[0]["torch", None], rtol=0, atol=1e-6)
    for hook in ("fp16", "power"):
        assert torch.equal(runs[0]["ours", hook], runs[0]["torch", hook]), hook
        assert not torch.equal(runs[0]["ours", hook], runs[0]["ours", None]), hook
