"""Are the table's numbers made rightly of the seconds? Planted numbers; no time is asserted."""

import pytest
import torch

from benchmarks import checkpoint
from benchmarks.measure import Plan


def test_ratios_are_formed_within_blocks():
    rows = {row.key: row for row in checkpoint.empty_rows()}
    seconds = {"torch_save": [1.0, 2.0], "torch_save_fsync": [4.0, 2.0], "save": [2.0, 3.0]}
    checkpoint.fill(rows, "64MB", seconds | {"torch_load": [2.0, 1.0], "load": [3.0, 4.0]})
    assert rows["save_64MB"].samples == [2.0, 3.0]
    assert rows["save_ratio_64MB"].samples == [2.0, 1.5]
    assert rows["save_over_fsync_ratio_64MB"].samples == [0.5, 1.5]
    assert rows["load_ratio_64MB"].samples == [1.5, 4.0]
    assert not rows["save_1MB"].samples


def test_every_way_is_timed_in_every_block_and_read_back(tmp_path):
    found = checkpoint.timed_blocks(tmp_path, {"model": {"w": torch.ones(3)}, "step": 1}, blocks=2)
    assert {way: len(samples) for way, samples in found.items()} == dict.fromkeys(checkpoint.WAYS, 2)
    with pytest.raises(RuntimeError, match=r"load read other numbers than were written: \['w'\]"):
        checkpoint.check({"model": {"w": torch.zeros(3)}}, {"model": {"w": torch.ones(3)}}, "load")


def test_an_unknown_row_is_refused():
    with pytest.raises(SystemExit, match="checkpoint has no row saves; choose from load_1MB, "):
        checkpoint.measure(Plan(only=frozenset({"saves"})))
