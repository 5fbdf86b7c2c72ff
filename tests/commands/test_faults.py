"""The command `ddp-course faults`."""

import json

import pytest

from ddp_course.commands import faults as cli
from ddp_course.diagnose.faults.catalogue import FAULTS, INCIDENTS
from ddp_course.diagnose.faults.fault import Diagnosis

QUICK = "world-size-mismatch"  # it is reported at once


def test_without_a_name_all_are_listed(capsys):
    assert cli.main([]) == 0
    faults, title, incidents = capsys.readouterr().out.split("\n\n")
    assert title == "real incidents"
    for listed, known in ((faults, FAULTS), (incidents, INCIDENTS)):
        assert [line.split()[0] for line in listed.splitlines()] == list(known)


def test_an_unknown_name_is_said(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["skiped-collective"])
    assert stopped.value.code == 2 and "no fault is called 'skiped-collective'" in capsys.readouterr().err


def test_both_programs_can_be_read(capsys):
    assert cli.main(["--code", "skipped-collective"]) == 0
    shown = capsys.readouterr().out
    assert "def skip_a_collective()" in shown and "def join_every_collective()" in shown


@pytest.mark.timeout(60)
def test_one_fault_from_symptom_to_cure(capsys, nothing_left):
    assert cli.main([QUICK]) == 0
    shown = capsys.readouterr().out
    words = ("what you see", "the report", "rank 1 has 3", "diagnosis", f"{QUICK}, rank 1", "cause", "cure", "fixed")
    places = [shown.index(word) for word in words]
    assert places == sorted(places)


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_an_incident_from_what_people_saw_to_its_thread(capsys, nothing_left):
    assert cli.main(["loss-not-divided"]) == 0
    shown = capsys.readouterr().out
    words = ("the printed loss is four times", "the report", "rank 1: ", "diagnosis", "How it is found")
    words += ("divide each micro-batch's", "https://github.com/agokrani/distillKitPlus/issues/5", "1.00 times")
    places = [shown.index(word) for word in words]
    assert places == sorted(places)


@pytest.mark.timeout(60)
def test_for_a_program(capsys):
    assert cli.main(["--json", QUICK]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["broken"]["fault"], told["broken"]["rank"], told["fixed"]["fault"]) == (QUICK, 1, None)


@pytest.mark.parametrize("broken, fixed", [(None, None), ("port-taken", None), (QUICK, QUICK)])
def test_a_wrong_diagnosis_fails(broken, fixed, monkeypatch, capsys):
    fault = FAULTS[QUICK]
    swapped = {"provoke": lambda: Diagnosis(broken, None, "words"), "fix": lambda: Diagnosis(fixed, None, "words")}
    monkeypatch.setitem(cli.FAULTS, QUICK, type(fault)(**{**fault.__dict__, **swapped}))
    assert cli.main([QUICK]) == 1
