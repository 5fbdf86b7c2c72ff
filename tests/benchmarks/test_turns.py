"""Are ratios formed within blocks, of the slowest ranks? Planted numbers; no time is asserted."""

from benchmarks import ddp
from benchmarks.measure import Plan
from benchmarks.turns import in_turns

QUICK_RANK = {"base": [1.0, 4.0], "one": [2.0, 4.0], "other": [1.0, 1.0]}
SLOW_RANK = {"base": [2.0, 3.0], "one": [3.0, 2.0], "other": [4.0, 2.0]}


def test_a_block_takes_as_long_as_its_slowest_rank_and_ratios_are_formed_within_blocks():
    comparison, base, one, other = ddp.COMPARISON, "torch", "naive", "flat"
    first, second, *_ = comparison.cases
    rows = {row.key: row for row in comparison.rows(2)}
    names = dict.fromkeys(comparison.ways, "base") | {one: "one", other: "other"}
    comparison.fill(
        rows, first, [{way: seconds[name] for way, name in names.items()} for seconds in (QUICK_RANK, SLOW_RANK)]
    )
    assert rows[f"{base}_{first}"].samples == [2.0, 4.0]
    assert rows[f"{one}_{first}"].samples == [3.0, 4.0]
    assert rows[f"{one}_ratio_{first}"].samples == [1.5, 1.0]
    assert rows[f"{other}_ratio_{first}"].samples == [2.0, 0.5]
    assert f"{base}_ratio_{first}" not in rows and not rows[f"{one}_{second}"].samples


def test_every_way_has_its_turn_in_every_block():
    taken = []
    assert in_turns("abc", 4, lambda way: taken.append(way) or way) == {way: [way] * 4 for way in "abc"}
    blocks = [taken[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(block) == list("abc") for block in blocks) and len(set(map(tuple, blocks))) > 1


def test_only_what_is_wanted_is_timed_and_what_fails_does_not_stop_the_rest():
    tried = []

    def timed(world_size: int, case: str) -> list:
        tried.append((world_size, case))
        if world_size == 2:
            raise RuntimeError("no")
        return [{way: [1.0] for way in ddp.WAYS}]

    wanted = Plan(only=frozenset({"naive_wide"}))
    two, four = ddp.COMPARISON.measure(wanted, (2, 4), timed)
    assert tried == [(2, "wide"), (4, "wide")]
    assert (two.failed, two.samples, four.failed, four.samples) == ("wide: RuntimeError: no", [], "", [1.0])
