"""Are the table's numbers made rightly of the ranks' seconds? Planted numbers; no time is asserted."""

import pytest

from benchmarks import collectives
from benchmarks.measure import Plan


def test_a_block_takes_as_long_as_its_slowest_rank_and_ratios_are_formed_within_blocks():
    rows = {row.key: row for row in collectives.empty_rows(2)}
    quick_rank = {"all_reduce": [1.0, 4.0], "ring": [2.0, 4.0], "tree": [1.0, 1.0]}
    slow_rank = {"all_reduce": [2.0, 3.0], "ring": [3.0, 2.0], "tree": [4.0, 2.0]}
    collectives.fill(rows, "1MB", [quick_rank, slow_rank])
    assert rows["all_reduce_1MB"].samples == [2.0, 4.0]
    assert rows["ring_1MB"].samples == [3.0, 4.0]
    assert rows["ring_ratio_1MB"].samples == [1.5, 1.0]
    assert rows["tree_ratio_1MB"].samples == [2.0, 0.5]
    assert not rows["ring_4kB"].samples


def test_an_unknown_row_is_refused():
    with pytest.raises(SystemExit, match="collectives has no row rings; choose from all_reduce_16MB, "):
        collectives.measure(Plan(only=frozenset({"rings"})))
