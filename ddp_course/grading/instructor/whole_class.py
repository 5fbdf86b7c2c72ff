"""How is a class graded? `ddp-course grade submissions` (`make grade SUBMISSIONS=submissions`)

First the course's own solutions are graded: where they do not get full marks, no other mark would mean anything. Then
some processes take one submission after the other. One that dies, or does not come to an end, costs only the submission
it had in hand. What is done is noted in grading.jsonl, so an interrupted run goes on where it was; a submission is
graded again when it, the exercises or the checks have changed.

Needs nbgrader and pebble. Read next: `classroom.py`, how one submission is graded; `marks.py` and `class_report.py`,
what an instructor gets.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import TimeoutError, as_completed
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from ddp_course.grading import journal
from ddp_course.grading.answer.limits import patience
from ddp_course.grading.instructor.classroom import Classroom, Graded
from ddp_course.grading.instructor.restore import MOST_BYTES
from ddp_course.grading.learner import progress
from ddp_course.grading.registry import LESSONS, judges

LIMIT_S = 900.0  # for one submission; the notebook's own limit, in execute.py, is far below
JOURNAL, SECRET = "grading.jsonl", "class_secret"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_classroom: Classroom | None = None  # of a worker process


class WholeClass:
    """All submissions in a folder.

    Args:
        root, submissions, into, settings: as in `Classroom`.
        workers: how many submissions at a time.
        way: how boxes are made, see `box.way_here`; "" is for submissions that are trusted.
        again: whether to grade also those that were graded before and have not changed.
    """

    def __init__(
        self,
        root: Path,
        submissions: Path,
        into: Path,
        workers: int,
        way: str,
        again: bool = False,
        settings: dict[str, Any] | None = None,
        limit_s: float = LIMIT_S,
    ):
        self.root, self.submissions, self.into = root, submissions, into
        self.settings = {**(settings or {})}
        self.settings["BoxedExecute"] = {"way": way, "seed": secret(into), **self.settings.get("BoxedExecute", {})}
        self.workers, self.limit_s = workers, limit_s
        self._scratch = tempfile.TemporaryDirectory(prefix="ddp_course_class_")
        self.classroom = Classroom(root, submissions, into, Path(self._scratch.name), self.settings)
        self.digests = {key: digest(root, submissions, *key) for key in self.classroom.found()}
        self.done = {} if again else self._graded_before()

    def grade(self) -> Iterator[Graded]:
        """Grade what is not done yet; yield each submission as soon as it is.

        Raises:
            RuntimeError: a lesson's solutions cannot be released, or do not get full marks on this machine.
        """
        todo = [key for key in self.digests if key not in self.done]
        for lesson in sorted({lesson for _, lesson in todo}):
            self.classroom.prepare(lesson)
            self.classroom.try_solutions(lesson)
        for graded in self._in_parallel(todo):
            self.done[_key(graded)] = graded
            if not graded.again:
                journal.append(self.into / JOURNAL, {**asdict(graded), "digest": self.digests[_key(graded)]})
            yield graded

    def graded(self) -> list[Graded]:
        """What is graded so far, with the points of the gradebook, where a person may have corrected them."""
        found = {key: self.done[key] for key in self.digests if key in self.done}
        room = self.classroom
        return [replace(each, points=room.points(*key), question=room.question(*key)) for key, each in found.items()]

    def _graded_before(self) -> dict[tuple[str, str], Graded]:
        done = {}
        for note in journal.notes(self.into / JOURNAL):
            with suppress(TypeError, KeyError):  # a note of another version
                told = note.pop("digest")
                graded = Graded(**note)
                if self.digests.get(_key(graded)) == told:
                    done[_key(graded)] = graded
                else:
                    done.pop(_key(graded), None)
        return done

    def _in_parallel(self, todo: list[tuple[str, str]]) -> Iterator[Graded]:
        from pebble import ProcessExpired, ProcessPool

        settings = (self.root, self.submissions, self.into, Path(self._scratch.name), self.settings)
        context = multiprocessing.get_context("spawn")
        pool = ProcessPool(self.workers, initializer=_start_worker, initargs=settings, context=context)
        try:
            running = {pool.schedule(_grade, args=[*key], timeout=self.limit_s): key for key in todo}
            for future in as_completed(running):
                try:
                    yield future.result()
                except TimeoutError:
                    reason = f"could not be graded: not done after {self.limit_s:g} s"
                    graded = self.classroom.grade(*running[future], reason)
                    graded.again = patience() > 1  # it may have been the machine
                    yield graded
                except ProcessExpired as error:
                    reason = f"could not be graded: it ended the grader's process (exit status {error.exitcode})"
                    yield self.classroom.grade(*running[future], reason)
                except Exception as error:  # whatever a stranger's notebook may do to those that read it
                    yield self.classroom.grade(*running[future], f"could not be graded: {type(error).__name__}")
        finally:
            pool.stop()  # at the end there is nothing to stop; after Ctrl-C there is
            pool.join()

    def __enter__(self) -> WholeClass:
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()


def secret(into: Path) -> str:
    """Return what chooses this class's cases: made once, and known to the instructor only."""
    path = into / SECRET
    if not path.exists():
        into.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(16))
    return path.read_text()


def digest(root: Path, submissions: Path, student: str, lesson: str) -> str:
    """Return a fingerprint of all that decides about the points: the submission, the exercises, the checks."""
    folder = LESSONS[lesson]
    found = ((path, path.lstat()) for path in (submissions / student / folder).rglob("*"))
    files = [path for path, facts in found if stat.S_ISREG(facts.st_mode) and facts.st_size <= MOST_BYTES]
    files += [root / "solutions" / folder / f"{folder}.ipynb", *Path(__file__).parents[1].rglob("*.py")]
    files += Path(judges(lesson).__file__).parent.glob("*.py")
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(os.fsencode(path.name) + f" {path.stat().st_size}\n".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def _start_worker(root: Path, submissions: Path, into: Path, scratch: Path, settings: dict | None) -> None:
    global _classroom
    os.environ[progress.VARIABLE] = ""  # a submission's own checks are not the instructor's progress
    if sys.platform == "linux":  # what a submission leaves behind becomes this process's child, to be ended
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _classroom = Classroom(root, submissions, into, scratch, settings)


def _grade(student: str, lesson: str) -> Graded:
    try:
        return _classroom.grade(student, lesson)
    finally:
        _end_what_is_left()


def _end_what_is_left() -> None:
    """End every process that the submission started and left running; the judge's own ranks stay for the next one."""
    import psutil

    server = forkserver._forkserver._forkserver_pid  # of the ranks on which references and mistakes run
    for process in psutil.Process().children():
        command = " ".join(_command(process))
        if process.pid != server and not any(helper in command for helper in ("resource_tracker", "janitor.py")):
            for each in (*process.children(recursive=True), process):
                with suppress(psutil.Error):
                    each.kill()
                    each.wait(5)


def _command(process) -> list[str]:
    import psutil

    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _key(graded: Graded) -> tuple[str, str]:
    return graded.student, graded.lesson
