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
    ("ours", "power 1"),
    ("ours", "power 16"),
]


@pytest.fixture(scope="module")
def runs(two_ranks):
    return two_ranks.run(on_ranks.hooked_all, (PAIRS,))


@pytest.mark.timeout(60)
def test_every_hook_leaves_the_replicas_equal(runs):
    for pair in PAIRS:
        assert torch.equal(runs[0][pair][0], runs[1][pair][0]), pair


@pytest.mark.timeout(60)
def test_the_plain_hook_changes_nothing(runs):
    assert torch.equal(runs[0]["ours", "all_reduce"][0], runs[0]["ours", None][0])
    torch.testing.assert_close(runs[0]["ours", None][0], runs[0]["torch", None][0], rtol=0, atol=1e-6)


@pytest.mark.timeout(60)
def test_torchs_own_hooks_do_on_our_buckets_what_they_do_on_theirs(runs):
    assert torch.equal(runs[0]["ours", "torch fp16"][0], runs[0]["torch", "torch fp16"][0])
    assert torch.equal(runs[0]["ours", "torch power"][0], runs[0]["torch", "torch power"][0])


@pytest.mark.timeout(60)
def test_float16_is_near_and_not_the_same(runs):
    off = (runs[0]["ours", "fp16"][0] - runs[0]["ours", None][0]).abs().max()
    assert 0 < off < 1e-3
    torch.testing.assert_close(runs[0]["ours", "fp16"][0], runs[0]["ours", "torch fp16"][0], rtol=0, atol=1e-6)


@pytest.mark.timeout(60)
def test_power_sgd_of_full_rank_is_exact_and_of_rank_one_sends_less(runs):
    exact, all_bytes = runs[0]["ours", "power 16"]
    torch.testing.assert_close(exact, runs[0]["ours", None][0], rtol=0, atol=1e-5)
    shapes = [(16, 6), (16, 16), (3, 16)]
    whole = sum(n * m + n for n, m in shapes)
    assert all_bytes == 30 * 4 * whole  # no factor is thinner than the matrix: everything goes as it is
    assert runs[0]["ours", "power 1"][1] == 30 * 4 * sum(n + m + n for n, m in shapes)


@pytest.mark.timeout(60)
def test_what_power_sgd_leaves_out_of_a_step_comes_with_later_ones(two_ranks):
    for mean, balances, sent in two_ranks.run(on_ranks.power_sgd_sums):
        for steps, (total, owed) in enumerate(balances, start=1):
            torch.testing.assert_close(total + owed, steps * mean, rtol=1e-4, atol=1e-3)
        first, last = (
            (total / steps - mean).norm() / mean.norm() for steps, total in ((1, balances[0][0]), (40, total))
        )
        assert first > 0.5 and last < 0.2
        assert sent == 40 * 4 * (9 + 12)
