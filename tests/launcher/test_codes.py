"""Is a failure known by its code, from the error and from a log, whatever its sentences say?"""

import json

import pytest

from ddp_course.launcher import codes
from ddp_course.launcher.failure_report import RankError
from ddp_course.launcher.lines import Line
from ddp_course.launcher.rank_status import Collective, Whereabouts

LINE = Line("/home/ada/train.py", 41, "step", "dist.all_reduce(loss)")
CALL = Collective(3, 3, "all_reduce", "float32", ((2,),), "", (0, 1), False, 0, line=LINE)


def absent() -> RankError:
    ranks = [Whereabouts(0, "running", LINE), Whereabouts(1, "returned")]
    return RankError("absent", 1, "any words", ranks, calls={0: CALL})


def test_a_log_has_one_line_for_programs_and_the_report_for_people_has_none():
    error = absent()
    assert error.__notes__[-1] == error.log_line and "\n" not in error.log_line
    assert error.log_line not in error.report and error.report.startswith("any words\n\nWhere the ranks were:")
    facts = json.loads(error.log_line.removeprefix("ddp-course: "))
    assert (facts["code"], facts["rank"], facts["op"], facts["number"]) == ("absent", 1, "all_reduce", 3)
    assert facts["line"].endswith("train.py:41") and facts["calls"] == {"0": "all_reduce #3 (float32 [2], 8 B)"}


def test_a_notebook_shows_no_such_line(monkeypatch):
    monkeypatch.setattr(codes, "in_notebook", lambda: True)
    assert [note for note in absent().__notes__ if "ddp-course" in note] == []


def test_the_line_is_found_behind_what_launchers_write_before_it():
    line = absent().log_line
    assert codes.found_in(f"W1121 run.py\n[rank0]: {line}\nE1121 failed")["code"] == "absent"
    assert codes.found_in('ddp-course: {"code": "unheard of"}\nddp-course: {broken}') == {}
    assert codes.found_in(f'ddp-course: {{"code": "none"}}\n{line}')["rank"] == 1


@pytest.mark.parametrize(
    "pattern, code, report, fits",
    [
        ("absent", "absent", "any words", True),
        ("absent", "limit", "the word absent", False),  # a code is no word of a report
        ("absent|limit", "limit", "", True),
        ("limit: waited in barrier", "limit", "rank 1 waited in barrier #1", True),
        ("limit: waited in barrier", "limit", "rank 1 was running", False),
        ("limit: waited in barrier", "absent", "rank 1 waited in barrier #1", False),
        ("absent; limit: waited in", "limit", "waited in send", True),
        ("sizes; (?i)enforce fail", "raised", "ENFORCE FAIL", True),
        (r"raised \w+Error", "raised", "rank 1 of 2 raised KeyError: 'x'", True),
        ("mismatch: of sizes", "absent", "mismatch: of sizes", True),  # no code, so a pattern
    ],
)
def test_a_pattern_is_codes_or_words_or_both(pattern, code, report, fits):
    assert codes.fits(pattern, code, report) is fits
