"""Are models compared before they are shared, and are they equal afterwards?"""

from __future__ import annotations

import pytest
import torch

from tests.parallel import replicas_on_ranks as on_ranks


@pytest.mark.timeout(60)
def test_the_first_difference_is_named_on_every_rank(two_ranks):
    for said in two_ranks.run(on_ranks.refusals):
        assert "rank 0 has weight (2, 4) torch.float32, rank 1 has weight (3, 4) torch.float32" in said["shape"]
        assert "rank 0 has nothing, rank 1 has 1.weight (2, 2) torch.float32" in said["one more"]
        assert (
            "rank 0 has weight (2, 2) torch.float32, rank 1 has weight (2, 2) torch.float32, frozen" in said["frozen"]
        )
        assert "rank 0 has running_mean (2,) torch.float32, a buffer, rank 1 has nothing" in said["buffer"]
        assert said["none"] == "no error"
        assert all("build the model identically" in said[name] for name in ("shape", "one more", "frozen", "buffer"))


@pytest.mark.timeout(60)
def test_broadcast_gives_all_tensors_of_the_source_whatever_their_strides(two_ranks):
    before, after = zip(*two_ranks.run(on_ranks.broadcast_all), strict=True)
    assert not torch.equal(before[0]["layers.0.weight"], before[1]["layers.0.weight"])
    for name, tensor in before[1].items():
        assert torch.equal(after[0][name], tensor) and torch.equal(after[1][name], tensor), name
    assert after[0]["layers.1.running_mean"].tolist() == [1.0] * 8
