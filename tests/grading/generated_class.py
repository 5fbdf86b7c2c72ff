"""Make the submissions of a class, to try the grading with: `python -m tests.grading.generated_class FOLDER`

The answers are those of the judges' tables: right ones, wrong ones, and mixtures of both. Some notebooks are
untouched, some hang, crash or leave processes behind, some are damaged files, and some help themselves to points. The
same seed makes the same class. Of what kind each is, is written to kinds.json beside the students' folders.
"""

import argparse
import json
from pathlib import Path
from random import Random

import nbformat

from ddp_course.grading.registry import LESSONS, exercises_of, find_exercise
from ddp_course.grading.source import solution_of
from tests.grading.submissions import cell_of, filled, solutions, submit

KINDS = ("right", "otherwise right", "wrong", "mixed", "untouched", "hanging", "crashing", "leaving", "tampered")
DAMAGED = ("empty", "not JSON", "no notebook", "no file")
ENDLESS = "while True:\n    pass"
CRASH = "import os\nos._exit(1)"
LEAVES = """import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)", "left_by_a_student"], start_new_session=True)"""


def make_class(folder: Path, students: int, lesson: str, seed: int) -> dict[str, str]:
    """Write the submissions of `students` students, and return what kind each is."""
    rng, kinds = Random(seed), {}
    for number in range(students):
        name = f"student{number:02}"
        # Every kind comes once, whatever the size of the class; then most are ordinary.
        ordinary = rng.choices(KINDS, weights=(6, 6, 8, 10, 2, 2, 2, 1, 1))[0]
        any_kind = ordinary if rng.random() < 0.9 else rng.choice(DAMAGED)
        kinds[name] = (KINDS + DAMAGED)[number] if number < len(KINDS + DAMAGED) else any_kind
        write_one(folder, name, kinds[name], lesson, rng)
    return kinds


def write_one(folder: Path, name: str, kind: str, lesson: str, rng: Random) -> None:
    """Write the submission of one student."""
    if kind == "no file":
        (folder / name / LESSONS[lesson]).mkdir(parents=True)
    elif kind in DAMAGED:
        text = {"empty": "", "not JSON": "print('hello')", "no notebook": '{"cells": 3, "nbformat": 4}'}[kind]
        submit(folder, name, text, lesson)
    else:
        notebook = filled(lesson, answers_of(kind, lesson, rng))
        if kind == "tampered":
            tamper(notebook, lesson)
        submit(folder, name, notebook, lesson)


def answers_of(kind: str, lesson: str, rng: Random) -> dict[str, str]:
    """Return the text of each answer cell."""
    if kind in ("untouched", "tampered"):
        return {}
    right = solutions(lesson)
    if kind == "right":
        return right
    chosen = {"otherwise right": (True,), "wrong": (False,)}.get(kind, (True, False))
    answers = {key: from_tables(key, rng.choice(chosen), rng) for key in right}
    special = {"hanging": ENDLESS, "crashing": CRASH, "leaving": LEAVES}.get(kind)
    if special:
        answers[rng.choice(sorted(answers))] = special
    return answers


def from_tables(exercise: str, right: bool, rng: Random) -> str:
    """Return a right or a wrong answer."""
    spec = find_exercise(exercise)
    wrong = [mistake.source for mistake in spec.mistakes]
    return rng.choice([solution_of(exercise), *(text for _, text in spec.rights)] if right else wrong)


def tamper(notebook: nbformat.NotebookNode, lesson: str) -> None:
    """Help yourself: change the test cells of an untouched notebook, and take the last one out."""
    names = [f"ex-{exercise.id.replace('.', '-')}-test" for exercise in exercises_of(lesson)]
    for name in names:
        cell_of(notebook, name).source = "100"
    cell_of(notebook, names[0]).metadata.nbgrader.points = 500
    notebook.cells.remove(cell_of(notebook, names[-1]))


def main() -> None:
    """Make the class that the command line asks for."""
    parser = argparse.ArgumentParser(description="make the submissions of a class, to try the grading with")
    parser.add_argument("folder", type=Path, help="where to write; must be empty or not there yet")
    parser.add_argument("--students", type=int, default=60)
    parser.add_argument("--lesson", default="03", choices=LESSONS)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.folder.exists() and any(chosen.folder.iterdir()):
        parser.error(f"{chosen.folder} is not empty")
    kinds = make_class(chosen.folder, chosen.students, chosen.lesson, chosen.seed)
    (chosen.folder / "kinds.json").write_text(json.dumps(kinds, indent=1) + "\n", encoding="utf-8")
    print(f"{len(kinds)} submissions in {chosen.folder}; kinds.json says what each is")


if __name__ == "__main__":
    main()
