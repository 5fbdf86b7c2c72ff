"""Does a wrapper do what torch's does when people do to it what people do?"""

from __future__ import annotations

import pytest

from ddp_course import launch
from tests.parallel import as_torch_on_ranks as on_ranks


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_program_finds_what_torch_finds(world_size):
    by_rank = launch(on_ranks.run_all, world_size, start_method="forkserver", timeout_s=20, quiet=True)
    for found in by_rank:
        assert {name for name, (theirs, ours) in found.items() if theirs != ours} == set()
    mean = (world_size + 1) / 2  # of the ranks' own gradients, which are 1, 2, ...
    ours = [{name: pair[1] for name, pair in found.items()} for found in by_rank]
    assert [found["wrapped_three_times"] for found in ours] == [[mean] * 3] * world_size
    assert ours[-1]["only_plain_module"][0] == world_size  # its own, not the mean
    assert ours[0]["undefined_gradient_of_an_unused"] == [mean, None]


@pytest.mark.timeout(60)
def test_what_torch_would_let_pass_is_refused(two_ranks):
    for rank, said in enumerate(two_ranks.run(on_ranks.refused)):
        assert said["step"].startswith(
            f"RuntimeError: rank {rank}: no gradient for b.weight, so the averages are incomplete"
        )
        assert "weight: its gradient was replaced during backward" in said["both"]
        assert said["both, copies"] == [3.0]  # of both passes, each the mean of 1 and 2
        assert said["two passes"] == [1.5, 1.5]
        assert "only a replica on the default one is copied" in said["copy"]


@pytest.mark.timeout(60)
def test_a_wrapper_that_is_gone_leaves_no_hook_behind(two_ranks):
    assert two_ranks.run(on_ranks.buckets_after_wrapping_again) == [[True, False]] * 2
