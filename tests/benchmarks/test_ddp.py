"""Are the table's numbers made rightly of the ranks' seconds? Planted numbers; no time is asserted."""

import pytest
from torch import nn

from benchmarks import ddp
from benchmarks.measure import Plan


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)


def planted():
    rows = {row.key: row for row in ddp.empty_rows(2)}
    quick_rank = {"torch": [1.0, 4.0], "bucketed": [1.0, 4.0], "naive": [3.0, 4.0], "flat": [1.0, 1.0]}
    slow_rank = {"torch": [2.0, 3.0], "bucketed": [2.0, 5.0], "naive": [2.0, 8.0], "flat": [4.0, 2.0]}
    ddp.fill(rows, "wide", [quick_rank, slow_rank])
    return rows


def test_a_block_takes_as_long_as_its_slowest_rank_and_ratios_are_formed_within_blocks():
    rows = planted()
    assert rows["torch_wide"].samples == [2.0, 4.0]
    assert rows["naive_wide"].samples == [3.0, 8.0]
    assert rows["naive_ratio_wide"].samples == [1.5, 2.0]
    assert rows["flat_ratio_wide"].samples == [2.0, 0.5]
    assert not rows["torch_deep"].samples


def test_the_limit_is_for_the_median_of_the_bucketed_replica_and_what_was_not_measured_is_neither():
    verdicts = {target.what: (target.measured, target.holds) for target in ddp.targets(list(planted().values()))}
    assert verdicts["BucketedDDP / torch's DDP, wide, 2 ranks"] == (pytest.approx(1.125), False)
    assert verdicts["BucketedDDP / torch's DDP, deep, 2 ranks"] == (None, None)


def test_a_replica_with_other_parameters_is_refused():
    one, other = (Wrapped() for _ in range(2))
    other.load_state_dict(one.state_dict())
    ddp.refuse_other_parameters(0, "naive", one, other)
    other.module.bias.data[1] += 0.5
    with pytest.raises(RuntimeError, match=r"rank 1: naive has another bias than torch's DDP, off by 0.5"):
        ddp.refuse_other_parameters(1, "naive", one, other)


def test_an_unknown_row_is_refused():
    with pytest.raises(SystemExit, match="ddp has no row buckets; choose from bucketed_deep, "):
        ddp.measure(Plan(only=frozenset({"buckets"})))
