"""Are the table's numbers made rightly of what was measured? Planted numbers; no time is asserted."""

import pytest

from benchmarks import sampler


def rows():
    return {row.key: row for row in sampler.empty_rows()}


def test_ratios_are_indices_per_second_within_a_block():
    mine = rows()
    sampler.fill_rates(mine, {"torch": [2e6, 4e6], "streaming": [5e6, 4e6], "compatible": [1e6, 4e6]})
    assert mine["streaming_rate_ratio"].samples == [2.5, 1.0] and mine["compatible_rate_ratio"].samples == [0.5, 1.0]
    assert mine["torch_rate"].samples == [2e6, 4e6]


def test_targets_hold_only_where_measured_numbers_keep_them():
    mine = rows()
    assert [target.holds for target in sampler.targets(list(mine.values()))] == [None, None, None]
    mine["streaming_first_s_1e9"].samples = [0.009]
    mine["streaming_first_MB_1e9"].samples = [11.0]
    mine["streaming_rate_ratio"].samples = [1.25]
    found = sampler.targets(list(mine.values()))
    assert [target.holds for target in found] == [True, False, True] and found[2].measured == 0.8
    mine["streaming_rate_ratio"].samples = [0.8]
    assert not sampler.targets(list(mine.values()))[2].holds


def test_a_billion_is_tried_only_by_the_formula():
    missing = {key for key, row in rows().items() if row.missing}
    assert missing == {f"{way}_first_{unit}_1e9" for way in ("torch", "compatible") for unit in ("s", "MB")}


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_fresh_process_reports_seconds_and_megabytes():
    found = sampler.in_fresh_process("torch", 3 * 10**5)  # a list of 3e5 entries and numbers: at least 8 MB
    assert found["s"] > 0 and 5 < found["MB"] < 100
    with pytest.raises(RuntimeError, match="mode='unknown' is not known"):
        sampler.in_fresh_process("unknown", 10)


def test_every_way_is_measured_in_every_block():
    rates = sampler.timed_blocks(1000, 2)
    assert {way: len(found) for way, found in rates.items()} == dict.fromkeys(sampler.WAYS, 2)
    assert all(rate > 0 for found in rates.values() for rate in found)
