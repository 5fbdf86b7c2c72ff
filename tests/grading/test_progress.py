"""Progress: what a check notes, what is shown of it, and that a note cut short spoils no other."""

import json
import os

import pytest

from ddp_course.cli import main
from ddp_course.grading import check, journal
from ddp_course.grading.learner import progress
from ddp_course.grading.registry import LESSONS, exercises_of, find_exercise
from ddp_course.grading.source import function_of, solution_of

PLACE = solution_of("03.1")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The file in which this test's checks are noted."""
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "progress"))
    return tmp_path / "progress"


def note(path, exercise: str, points: int) -> None:
    journal.append(path, {"exercise": exercise, "points": points, "of": 5, "when": "2026-01-01T00:00:00+0000"})


def rows(text: str) -> dict[str, list[str]]:
    """The figures of each lesson's row: exercises done and there, points earned and there."""
    return {
        line.split()[0]: [word for word in line.split() if word.isdigit()][-4:] for line in text.splitlines() if line
    }


@pytest.mark.timeout(120)
def test_a_visible_check_is_noted_and_a_graders_is_not(kept):
    place = function_of("03.1", "place", PLACE)
    check("03.1", place)
    check("03.1", function_of("03.1", "place", PLACE.replace("rank // local_world_size", "rank")))
    check("03.1", place, seed=1)
    assert [(n["exercise"], n["points"], n["of"]) for n in journal.notes(kept)] == [("03.1", 5, 5), ("03.1", 3, 5)]


def test_the_best_try_counts_and_what_comes_next_is_named(kept, capsys):
    first, second = exercises_of("00")[:2]
    for exercise, points in ((first.id, 0), (first.id, first.points), (first.id, 0), ("03.2", 2)):
        note(kept, exercise, points)
    assert main(["progress"]) == 0
    said = capsys.readouterr().out
    found = rows(said)
    full = {lesson: sum(e.points for e in exercises_of(lesson)) for lesson in LESSONS}
    assert found["00"] == ["1", str(len(exercises_of("00"))), str(first.points), str(full["00"])]
    assert found["03"] == ["0", "5", "2", "23"]
    count = sum(len(exercises_of(lesson)) for lesson in LESSONS)
    assert found["all"] == ["1", str(count), str(first.points + 2), str(sum(full.values()))]
    assert f"begun: 03.2 {find_exercise('03.2').title} (exercises/03_process_groups" in said
    assert main(["progress", "--json"]) == 0
    as_json = {row["exercise"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(as_json) == count and as_json["03.2"] == {"exercise": "03.2", "points": 2, "of": 5, "tries": 1}
    assert f"next: {second.id} {second.title}" in said and f"{second.minutes} minutes" in said


def test_all_points_of_all_exercises(kept, capsys):
    for lesson in LESSONS:
        for exercise in exercises_of(lesson):
            note(kept, exercise.id, exercise.points)
    assert main(["progress"]) == 0
    said = capsys.readouterr().out
    assert "All points of all exercises" in said and "next:" not in said


def test_no_notes_and_forgotten_ones(kept, capsys):
    assert main(["progress"]) == 0 and not kept.exists()
    note(kept, "03.1", 5)
    assert main(["progress", "--forget"]) == 0 and not kept.exists()
    assert capsys.readouterr().out.count("next: 00.1") == 2


def test_strange_lines_are_passed_over(kept):
    note(kept, "03.1", 3)
    with kept.open("ab") as file:
        file.write(
            b'[1, 2]\n\xff\xfe\n{"exercise": 3, "points": 5}\n{"exercise": "03.1", "points": 900}\n{"exercise": "03.'
        )
    note(kept, "03.2", 4)
    standings = progress.standings(kept)["03"]
    assert [(s.tries, s.best) for s in standings] == [(2, 5), (1, 4), (0, 0), (0, 0), (0, 0)]


@pytest.mark.timeout(120)
def test_a_check_still_answers_where_nothing_can_be_noted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "no folder" / "progress"))
    assert check("03.1", function_of("03.1", "place", PLACE)) == 5
    assert "your progress was not noted: " in capsys.readouterr().out
    monkeypatch.setenv(progress.VARIABLE, "")
    assert progress.note_points(find_exercise("03.1"), 5) == "" and main(["progress"]) == 2


def test_a_journal_keeps_what_was_whole(tmp_path):
    path = tmp_path / "journal"
    journal.append(path, {"n": 1, "text": "ä\n"})
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        journal.append(path, {"n": 2})
        found = list(journal.notes(path))
        assert found[0] == {"n": 1, "text": "ä\n"} and found[-1] == {"n": 2} and len(found) <= 3
    assert json.loads(path.read_text().splitlines()[0])["n"] == 1 and not os.listdir(tmp_path)[1:]
