"""Are the table's numbers made rightly of what was measured? Planted numbers; no time is asserted."""

import pytest

from benchmarks import checks
from benchmarks.measure import Plan, Row


def test_targets_look_at_the_slowest_exercise():
    rows = [Row("00.1", "", 1, samples=[0.5, 0.7]), Row("10.1", "", 1, samples=[4.0, 8.0]), Row("10.2", "", 1)]
    hangs = [Row("00.1_hang", "", 1, samples=[10.5])]
    first, sign = Row("first", "", 1, samples=[9.0, 13.0, 14.0]), Row("first_line", "", 1, samples=[0.1])
    found = checks.targets(first, sign, rows, hangs)
    assert [target.measured for target in found] == pytest.approx([13.0, 0.1, 3.3, 6.0, 10.5])
    assert [target.holds for target in found] == [False, True, False, False, True]
    assert [target.holds for target in checks.targets(Row("", "", 1), Row("", "", 1), [], [])] == [None] * 5


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_one_exercise_is_measured_and_a_wrong_result_is_no_time():
    result = checks.measure(Plan(quick=True, only=frozenset(["01.1"])))
    assert [(row.key, len(row.samples), row.failed) for row in result.rows] == [
        ("first", 1, ""),
        ("first_line", 1, ""),
        ("01.1", 1, ""),
    ]
    row = Row("01.1", "", 1)
    checks.took(row, checks.solution("01.1"), 99)
    assert not row.samples and "01.1: 5 points instead of 99" in row.failed


def test_what_the_cells_before_an_answer_print_stays_out_of_the_tables(capsys):
    assert callable(checks.solution("11.1"))  # its lesson's first cell prints a whole program
    assert capsys.readouterr().out == ""
