"""Is every way timed, and what it reads compared with what was written?"""

import pytest
import torch

from benchmarks import checkpoint


def test_every_way_is_timed_in_every_block_and_read_back(tmp_path):
    found = checkpoint.timed_blocks(tmp_path, {"model": {"w": torch.ones(3)}, "step": 1}, blocks=2)
    assert {way: len(samples) for way, samples in found.items()} == dict.fromkeys(checkpoint.WAYS, 2)
    with pytest.raises(RuntimeError, match=r"load read other numbers than were written: \['w'\]"):
        checkpoint.check({"model": {"w": torch.zeros(3)}}, {"model": {"w": torch.ones(3)}}, "load")
