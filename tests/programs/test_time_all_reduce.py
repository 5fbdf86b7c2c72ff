"""The sums, sizes and formulas of lesson 04's benchmark hold on 1, 2 and 4 ranks.

What it measures varies, and so nothing here compares a time.
"""

import pytest

from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "time_all_reduce.py"
OPTIONS = ("--largest", str(2**18), "--warmup", "1", "--repeat", "2")
SIZES = [2**12, 2**14, 2**16, 2**18]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def rows(said: str, world_size: int) -> list[list[float]]:
    """The table's numbers, which name the ranks that made them, and whose bandwidths follow from bytes and time."""
    title, columns, *lines = said.strip().splitlines()
    assert title == f"all_reduce, float32, {world_size} ranks, gloo"
    assert columns.split() == ["bytes", "time", "(us)", "algbw", "(GB/s)", "busbw", "(GB/s)", "#wrong"]
    found = [[float(word) for word in line.split()] for line in lines]
    for n_bytes, time_us, algbw, busbw, _ in found:
        assert algbw == pytest.approx(n_bytes / time_us / 1e3, rel=1e-2, abs=1e-4)
        factor = {1: 0.0, 2: 1.0, 4: 1.5}[world_size]  # 2(W-1)/W
        assert busbw == pytest.approx(factor * algbw, abs=2e-4)
    return found


@pytest.mark.parametrize("world_size", [1, 4])
def test_each_size_is_summed_and_one_rank_prints_the_table(world_size):
    said, *others = on_ranks(PROGRAM, world_size, *OPTIONS)
    assert [(n_bytes, wrong) for n_bytes, *_, wrong in rows(said, world_size)] == [(size, 0) for size in SIZES]
    assert others == [""] * (world_size - 1)


def test_torchrun_runs_it_as_it_stands():
    said = by_torchrun(PROGRAM, 2, *OPTIONS)
    assert [(n_bytes, wrong) for n_bytes, *_, wrong in rows(said, 2)] == [(size, 0) for size in SIZES]


def test_elements_that_are_not_the_sum_are_counted_on_all_ranks(tmp_path):
    broken = edited(
        PROGRAM, tmp_path, ("    dist.all_reduce(x)\n    wrong =", "    dist.all_reduce(x[:100])\n    wrong =")
    )
    said = on_ranks(broken, 2, *OPTIONS)[0]
    assert [wrong for *_, wrong in rows(said, 2)] == [2 * (size // 4 - 100) for size in SIZES]
