"""Does `ddp-course problems` list, ask and judge?"""

from __future__ import annotations

import sys

import pytest

from ddp_course import cli
from ddp_course.problems import problems


def test_without_a_lesson_it_lists_all_titles(capsys):
    assert cli.main(["problems"]) == 0
    told = capsys.readouterr().out
    assert told.count("\nLesson ") == 4 and told.startswith("Lesson 04\n   1  What a GPU sends in an all-reduce\n")
    assert "\n  12  Steps of an epoch on a mesh\n" in told


def test_the_seed_is_printed_and_gives_the_same_again(capsys):
    assert cli.main(["problems", "14"]) == 0
    told = capsys.readouterr().out
    seed = told.split("seed ")[1].split(".")[0]
    assert cli.main(["problems", "14", "--seed", seed]) == 0
    assert capsys.readouterr().out == told
    assert f"ddp-course problems 14 --seed {seed} --answer 1 VALUE" in told


def test_answers_are_judged(capsys):
    right = problems(4, 7).instance(1).answer
    assert cli.main(["problems", "4", "--seed", "7", "--answer", "1", right]) == 0
    assert capsys.readouterr().out == f"Right: {right}.\n"
    both = problems(4, 7).instance(1).true * 2 / 1e9
    argv = ["problems", "4", "--seed", "7", "--answer", "1", f"{both:.3g} GB", "--answer", "2", "1 B"]
    assert cli.main(argv) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("1: That is double: ") and second == "2: Not right: that is too little."


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("3", "lesson 3 has no problems; these have: 4, 14, 15, 17, 18"),
        ("14 --answer 1 5%", "give the --seed that was printed"),
        ("14 --seed 7 --answer 13 5%", "lesson 14 has problems 1 to 12, not 13"),
        ("14 --seed 7 --answer x 5%", "'x' is no problem's number"),
        ("14 --seed 7 --answer 1 5", "the unit is missing: expected a share such as 12 %"),
        ("--seed 7", "name the lesson"),
    ],
)
def test_what_makes_no_sense_is_refused(argv, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["problems", *argv.split()])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_a_terminal_is_asked_one_after_the_other(monkeypatch, capsys):
    instances = problems(14, 7).instances
    lines = iter(["5", "0.5%", instances[0].answer, "", instances[2].answer, "q"])
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert cli.main(["problems", "14", "--seed", "7"]) == 1
    told = capsys.readouterr().out
    assert "the unit is missing" in told and "Not right: that is too little." in told
    assert f"It is {instances[1].answer}." in told and told.endswith("1 of 3 at the first try.\n")
    assert "\n 4. " in told and "\n 5. " not in told
