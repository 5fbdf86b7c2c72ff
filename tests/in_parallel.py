"""Which tests run at the same time, when there are several processes? Files, lessons, and each lesson's answers.

What belongs together is run by one process, in its order; what takes longest comes first. A test marked `alone` runs
while no other does; files of such tests come last, where nothing else is left that would wait for them.

All tests hold one lock together; an `alone` one holds it by itself. Whoever wants the lock first passes a gate, at
which an `alone` test stays until it has the lock, so that it does not wait for ever. No time limit of a test runs
meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

PLACE = Path(tempfile.gettempdir())  # now: tests may change it

# These begin first, or one of them would be waited for at the end.
LONG = (
    "notebooks/",
    "tests/site/",
    "tests/cluster/",
    "tests/grading/test_classroom",
    "tests/notebooks/",
    "tests/rehearsal/",
)
LAST = ("tests/launcher/test_faults", "tests/cluster/test_slurm")
LESSONS_ANSWERS = re.compile(r"(tests/grading/test_judges\.py)::test_\w+\[(\d\d)\.")


class LongestFirst(LoadScopeScheduling):
    """Deals out files; of the judges' tests, lessons. Each that is done gets a line."""

    def __init__(self, config: pytest.Config, log: object):
        super().__init__(config, log)
        self.seconds: Counter[str] = Counter()
        self.done = 0

    def mark_test_complete(self, node: object, item_index: int, duration: float = 0) -> None:
        scope = self._split_scope(self.registered_collections[node][item_index])
        self.seconds[scope] += duration
        self.done += 1
        super().mark_test_complete(node, item_index, duration)
        tests = self.assigned_work[node].get(scope)
        if tests and all(tests.values()):
            share = f"[{100 * self.done // len(self.collection):3}%]"
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"{share} {scope}: {len(tests)} tests, {self.seconds[scope]:.0f} s")

    def _split_scope(self, nodeid: str) -> str:
        lesson = LESSONS_ANSWERS.match(nodeid)
        return "::".join(lesson.groups()) if lesson else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: object) -> None:
        def place(scope: str) -> tuple[bool, bool, int]:
            return not scope.startswith(LAST), scope.startswith(LONG), len(self.workqueue[scope])

        longest = max(self.workqueue, key=place)
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)  # also where xdist is switched off
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return LongestFirst(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """Where each file gets a line, a test that passed gets no dot."""
    if (
        report.passed
        and report.when == "call"
        and config.pluginmanager.has_plugin("dsession")
        and not config.option.verbose > 0
    ):
        return "passed", "", ""
    return None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:  # one process: every test is alone
        return (yield)
    with ExitStack() as held:
        with locked(f"ddp_course_gate_{run}", fcntl.LOCK_EX):
            how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
            held.enter_context(locked(f"ddp_course_tests_{run}", how))
        return (yield)


@contextmanager
def locked(name: str, how: int) -> Iterator[None]:
    """Hold a lock that the system lets go of when the process ends."""
    with open(PLACE / name, "a") as file:
        fcntl.flock(file, how)
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    run = getattr(session.config, "workerinput", None)
    if run is None and (xdist := session.config.pluginmanager.get_plugin("dsession")):  # all workers have ended
        for name in ("gate", "tests"):
            (PLACE / f"ddp_course_{name}_{xdist.nodemanager.testrunuid}").unlink(missing_ok=True)
