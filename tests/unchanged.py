"""Which lessons, and which answer banks, are as they were when they last passed here? They need not run again.

A hash tells: of the notebook, or of the bank with its judges; of the whole package, for any of it may be imported; and
of the versions. It is kept in pytest's cache. A fresh clone has none, so CI runs everything. So does `--again`.
"""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from ddp_course.grading.registry import LESSONS

ROOT = Path(__file__).parents[1]
JUDGING = ("bank.py", "submissions.py", "test_banks.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", action="store_true", help="leave no lesson and no bank out")


def groups() -> dict[str, str]:
    """Return what passes or not as a whole, with its hash."""
    shared = digest(ROOT / "ddp_course", ROOT / "versions.txt") + platform.python_version() + version("torch")
    judging = digest(*(ROOT / "tests/grading" / name for name in JUDGING))
    comparing = digest(ROOT / "tests/notebooks/sanitize.cfg")
    found = {}
    for name in LESSONS.values():
        bank, notebook = f"solutions/{name}", f"notebooks/{name}.ipynb"
        found[bank] = shared + judging + digest(ROOT / bank, ROOT / "judges" / name[3:])
        found[notebook] = shared + comparing + digest(ROOT / notebook)
    return found


def digest(*places: Path) -> str:
    """Return the hash of files, and of the files in folders."""
    hashed = hashlib.sha256()
    for place in places:
        for path in sorted(place.rglob("*") if place.is_dir() else [place]):
            if path.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & set(path.parts):
                hashed.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return hashed.hexdigest()


def group_of(item: pytest.Item) -> str | None:
    """Return the group of a test, if it belongs to one."""
    if item.nodeid.startswith("notebooks/"):
        return item.nodeid.partition("::")[0]
    answer = getattr(getattr(item, "callspec", None), "params", {}).get("answer")
    return f"solutions/{LESSONS[answer.exercise[:2]]}" if answer else None


class Unchanged:
    """Leaves out what has passed, and remembers what passes as a whole."""

    def __init__(self, config: pytest.Config):
        self.cache = config.cache
        self.now = groups()
        everything = config.getoption("again") or "CI" in os.environ
        self.left_out = (
            set() if everything else {g for g, mark in self.now.items() if self.cache.get(key(g), "") == mark}
        )
        self.parts = any("::" in argument for argument in config.args)
        self.to_pass: dict[str, set[str]] = {}
        self.group: dict[str, str] = {}

    def pytest_report_header(self) -> str | None:
        names = ", ".join(sorted(self.left_out))
        return f"as when they last passed, so not run (--again runs them): {names}" if names else None

    @pytest.hookimpl(tryfirst=True)  # before -k and -m: a group of which these leave some out has not passed
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            if (group := group_of(item)) in self.now:
                self.group[item.nodeid] = group
                self.to_pass.setdefault(group, set()).add(item.nodeid)
        again = [item for item in items if self.group.get(item.nodeid) in self.left_out]
        if again:
            config.hook.pytest_deselected(items=again)
            items[:] = [item for item in items if self.group.get(item.nodeid) not in self.left_out]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        group = self.group.get(report.nodeid)
        if group is None or self.parts:
            return
        if report.failed:
            self.to_pass[group].add("one that failed")
        if report.when == "teardown":
            self.to_pass[group].discard(report.nodeid)
            if not self.to_pass[group]:
                self.cache.set(key(group), self.now[group])


def key(group: str) -> str:
    return f"passed/{group.replace('.', '_')}"


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config, "cache", None):
        config.pluginmanager.register(Unchanged(config), "unchanged")
