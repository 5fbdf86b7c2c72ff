"""Tests run several at a time, each file in one process; one marked `alone` runs while no other does.

All tests hold one lock together; an `alone` one holds it by itself. Whoever wants the lock first passes a gate, at
which an `alone` test stays until it has the lock, so that it does not wait for ever. No time limit of a test runs
meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PLACE = Path(tempfile.gettempdir())  # now: tests may change it


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
