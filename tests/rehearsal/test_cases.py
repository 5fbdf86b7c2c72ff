"""Programs from outside, written after public reports: the cause of a fault is named on its line; right ones are not.

`cases.jsonl` has a program a line: of each case one with one fault, `bad.py`, and right ones that do the same thing.
"""

import json
from pathlib import Path

import pytest

from ddp_course.rehearsal.finding import WRONG
from ddp_course.rehearsal.lint import lint
from ddp_course.rehearsal.rehearse import rehearse
from tests.rehearsal.strangers import rehearsed, scripts, verdict

CASES = [json.loads(line) for line in Path(__file__).with_name("cases.jsonl").read_text().splitlines()]
NEAR = 1  # lines
NO_DATA = "min/rows_in_function_file.py"  # it reads files that are not there


def wrong(findings) -> list:
    return [each for each in findings if each.grade == WRONG]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_fault_is_named_once_by_its_cause_and_a_right_program_is_left_alone(case, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(case["text"])
    found = rehearse(path)
    assert [each.fault for each in wrong(found.findings)] == [each["fault"] for each in case["faults"]]
    for each, meant in zip(wrong(found.findings), case["faults"], strict=True):
        assert abs(each.line - meant["line"]) <= NEAR
    assert found.status == (2 if case["name"] == NO_DATA else len(case["faults"]))


@pytest.mark.parametrize("case", [each for each in CASES if not each["faults"]], ids=lambda case: case["name"])
def test_the_text_of_a_right_program_shows_nothing_wrong(case):
    found = lint(case["text"])
    assert wrong(found) == []
    if case["name"].startswith("min/"):
        assert found == []


@pytest.mark.parametrize(
    "script", [each for each in scripts("newcomers") if not each["faults"]], ids=lambda s: s["name"]
)
def test_the_text_of_a_newcomers_right_program_shows_nothing_wrong(script):
    assert wrong(lint(script["text"])) == []


# Of the newcomers' scripts, one for each cause that no case above has.
SAMPLE = [
    *("length_buckets", "multitask_heads", "stream_ctr", "gru_accum", "continue_run", "spawn_trainer"),
    *("holdout_probe", "uneven_sites", "momentum_resume", "per_class_table"),
    *("rare_class", "quiet_meter", "lr_groups", "gossip_pairs", "probe_group", "deepening", "best_reload"),
    *("join_uneven", "nan_consensus", "spawn_dataclass", "gan_pair", "ring_reduce"),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_newcomers_script_is_judged_as_its_writer_says(name):
    script = next(each for each in scripts("newcomers") if each["name"] == f"{name}.py")
    assert verdict(script, rehearsed(script)) == ("named" if script["faults"] else "left alone")
