"""Which exercises are there? Each lesson's are in a file of their own, loaded when asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from ddp_course.grading.exercise import Exercise

# Lesson -> the folder of its notebook in exercises/ and solutions/. In judges/ it is called the same, without number.
LESSONS = {
    "00": "00_start_here",
    "01": "01_why_data_parallel",
    "02": "02_data_parallel",
    "03": "03_process_groups",
    "04": "04_collectives",
    "05": "05_samplers",
    "06": "06_ddp_from_scratch",
    "07": "07_gradient_bucketing",
    "08": "08_sync_batchnorm",
    "09": "09_logging",
    "10": "10_checkpointing",
    "11": "11_your_own_program",
    "12": "12_failure_lab",
    "13": "13_silent_errors",
    "14": "14_scaling",
    "15": "15_fault_tolerance",
    "16": "16_gpt2",
    "17": "17_sharding",
    "18": "18_model_parallel",
    "19": "19_reinforcement_learning",
}


QUESTION_POINTS = 3  # of each lesson's question, which a person reads


def exercises_of(lesson: str) -> tuple[Exercise, ...]:
    """Return the exercises of one lesson, such as "03".

    Raises:
        ValueError: the lesson has no exercises; names those that have.
    """
    if lesson not in LESSONS:
        raise ValueError(f"lesson {lesson!r} has no exercises; there are exercises for {', '.join(LESSONS)}")
    return judges(lesson).EXERCISES


def judges(lesson: str = "") -> ModuleType:
    """Return the package of a lesson's judges, or of all."""
    return import_module(f"judges.{LESSONS[lesson][3:]}" if lesson else "judges")


def find_exercise(exercise_id: str) -> Exercise:
    """Return the exercise with this number, such as "03.1".

    Raises:
        ValueError: there is none; names those of its lesson.
    """
    exercises = exercises_of(exercise_id.partition(".")[0])
    found = next((exercise for exercise in exercises if exercise.id == exercise_id), None)
    if found is None:
        raise ValueError(f"no exercise {exercise_id!r}; there are {', '.join(e.id for e in exercises)}")
    return found


def notebook_of(exercise_id: str, root: Path) -> Path:
    """Return where the exercises of a lesson are below `root`: of "03.1" or "03"."""
    folder = LESSONS[exercise_id.partition(".")[0]]
    return root / "exercises" / folder / f"{folder}.ipynb"


def answer_cell(exercise_id: str) -> str:
    """Return the name of an exercise's answer cell: "ex-03-1-answer"."""
    return f"ex-{exercise_id.replace('.', '-')}-answer"


def test_cell(exercise_id: str) -> str:
    """Return the name of an exercise's test cell: "ex-03-1-test"."""
    return f"ex-{exercise_id.replace('.', '-')}-test"


def question_cell(lesson: str) -> str:
    """Return the name of the cell with the answer that a person reads: "ex-03-question"."""
    return f"ex-{lesson}-question"


def exercise_of(cell: str) -> str:
    """Return the exercise of a cell with this name: "03.1"."""
    _, lesson, number, _ = cell.split("-")
    return f"{lesson}.{number}"
