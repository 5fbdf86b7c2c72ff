"""Do the parts explain the whole, in numbers planted so that they can be worked out by hand?"""

from dataclasses import replace

import pytest

from ddp_course.scaling.efficiency import BACKWARD, EXPOSED, PARTS, Sample, Scaling


def sample(rows: int, *ms: float, waiting_ms: float = 0.0) -> Sample:
    return Sample(rows, dict(zip(PARTS, (t / 1e3 for t in ms), strict=True)), waiting_ms / 1e3)


WEAK = Scaling(
    "weak",
    {
        1: (sample(64, 1, 2, 5, 0, 2), sample(64, 1, 2, 6, 0, 2)),  # 10 and 11 ms
        2: (sample(128, 1, 2, 6, 3, 2, waiting_ms=1), sample(128, 1, 2, 7, 3, 2, waiting_ms=2)),  # 14 and 15 ms
    },
    "planted",
)
STRONG = Scaling("strong", {1: (sample(64, 0, 4, 8, 0, 2),) * 3, 4: (sample(64, 0, 1, 2, 1, 2),) * 3})


def test_throughput_is_all_rows_by_all_seconds():
    assert WEAK.throughput(1).value == pytest.approx(128 / 0.021)
    assert WEAK.throughput(2).value == pytest.approx(256 / 0.029)


def test_weak_scaling_holds_the_steps_against_each_other():
    assert WEAK.efficiency(1).value == 1.0
    assert WEAK.efficiency(2).value == pytest.approx(21 / 29)
    # Both rounds were a millisecond slower, so the quotient is known better than either time.
    assert WEAK.efficiency(2).high - WEAK.efficiency(2).low < 0.3


def test_strong_scaling_expects_a_quarter_of_the_step_from_four_ranks():
    assert STRONG.efficiency(4).value == pytest.approx(14 / 4 / 6)
    assert STRONG.missing(4)["forward"].value == pytest.approx(0)
    assert STRONG.missing(4)["optimizer"].value == pytest.approx((2 - 0.5) / 6)


@pytest.mark.parametrize("scaling, size", [(WEAK, 2), (STRONG, 4)])
def test_the_parts_add_up_to_what_is_missing(scaling, size):
    missing = scaling.missing(size)
    assert sum(share.value for share in missing.values()) == pytest.approx(1 - scaling.efficiency(size).value)
    assert missing[EXPOSED].value > 0


def test_without_one_rank_the_smallest_is_the_base():
    scaling = Scaling("weak", {2: WEAK.samples[1], 4: WEAK.samples[2]})
    assert scaling.base == 2 and scaling.efficiency(4).value == pytest.approx(21 / 29)


def test_the_sentence_has_the_numbers():
    said = WEAK.explain(2)
    assert said.startswith("2 ranks train at 72.4 %") and "of 2 times the rate of one rank" in said
    assert "27.6 are missing" in said and "exposed communication +20.7, backward +6.9" in said
    assert "3.00 ms pass" in said and "1.50 of them until the slowest rank" in said


def test_an_interval_that_holds_100_percent_claims_no_loss():
    wild = {1: (sample(1, 0, 0, 1, 0, 0), sample(1, 0, 0, 9, 0, 0)), 2: (sample(2, 0, 0, 9, 0, 0),) * 2}
    scaling = Scaling("weak", wild)
    assert "neither loss nor gain" in scaling.explain(2)
    assert scaling.throughput(1).low == 0.0  # the bell curve goes on below
    assert "Most is lost in backward" in scaling.explain(2) and scaling.missing(2)[BACKWARD].value > 0


def test_the_table_tells_what_was_measured():
    table = WEAK.table().splitlines()
    assert table[0] == "weak scaling of planted; 2 rounds, times of a step in ms"
    assert table[3].split()[0] == "1" and "1 by definition" in table[3]
    rate = WEAK.throughput(2)
    assert f"{rate.value:,.0f} ± {100 * (rate.high - rate.value) / rate.value:.1f} %" in table[4]
    long = replace(WEAK, title="mlp of width 1024 on digits, batches of 64, torch replicas").table().splitlines()
    assert len(long) == len(table) + 1 and max(map(len, long)) <= 100
    assert table[4].split()[-6:] == ["14.50", "1.00", "2.00", "6.50", "3.00", "2.00"]
    assert WEAK.efficiency(2).value == pytest.approx(21 / 29) and WEAK.waiting_s(2) == pytest.approx(0.0015)
    assert WEAK.split(2)[EXPOSED] == pytest.approx(0.003)
