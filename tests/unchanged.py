"""Which lessons, and which judges, are as they were when they last passed here? They need not run again.

A hash tells: of the notebook, or of the solutions with their judges; of the modules that these import, and those
import in turn; and of the versions. It is kept in pytest's cache. A fresh clone has none, so CI runs everything. So
does `--again`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pytest

from ddp_course.grading.registry import LESSONS

ROOT = Path(__file__).parents[1]
LITTER = {"__pycache__", ".ipynb_checkpoints"}
JUDGING = ("submissions.py", "test_judges.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", action="store_true", help="leave no lesson and no judge out")


def groups() -> dict[str, str]:
    """Return what passes or not as a whole, with its hash."""
    versions = [ROOT / "versions.txt"]
    judging = [ROOT / "judges/solutions.json", *(ROOT / "tests/grading" / name for name in JUDGING)]
    found = {}
    for name in LESSONS.values():
        bank, notebook = ROOT / "solutions" / name, ROOT / f"notebooks/{name}.ipynb"
        judged = [*judging, *files_in(bank), *files_in(ROOT / "judges" / name[3:])]
        found[f"solutions/{name}"] = digest({*judged, *imported(judged), *versions})
        compared = [notebook, ROOT / "tests/notebooks/sanitize.cfg"]
        found[f"notebooks/{name}.ipynb"] = digest({*compared, *imported([notebook]), *versions})
    return found


def imported(files: Iterable[Path]) -> set[Path]:
    """Return the project's modules that these files import, and those that they import in turn."""
    found: set[Path] = set()
    new = set(files)
    while new:
        found |= new
        new = {module for file in new for module in named_in(file)} - found
    return found


@functools.cache
def named_in(path: Path) -> set[Path]:
    """Return the modules that a file imports anywhere in it, or of which it holds the full name in quotes."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        if any("ddp-course" in cell for cell in cells):  # it finds its words by their names
            return {path for name, path in modules().items() if name.startswith("ddp_course")}
        python = (cell for cell in cells if not re.match(r"%%(bash|writefile .*\.sh)\b", cell))
        text = "\n".join(re.sub(r"(?m)^(\s*)[!%].*$", r"\1pass", cell) for cell in python)
    names = set()
    for node in ast.walk(ast.parse(text if path.suffix in (".py", ".ipynb") else "")):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    # What is around a module is imported before it; the last part may be a function's name.
    around = {name[:end] for name in names for end in (*(m.start() for m in re.finditer(r"\.", name)), None)}
    return {modules()[name] for name in around & modules().keys()}


@functools.cache
def modules() -> dict[str, Path]:
    """Return the project's modules by name."""
    found = {}
    for room in ("ddp_course", "judges", "tests"):
        for path in files_in(ROOT / room, "*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    return [path for path in folder.rglob(pattern) if path.is_file() and not LITTER & set(path.parts)]


def digest(files: set[Path]) -> str:
    """Return the hash of files, and of what runs them."""
    hashed = hashlib.sha256(f"{platform.python_version()} {version('torch')}".encode())
    for path in sorted(files):
        hashed.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return hashed.hexdigest()


def group_of(item: pytest.Item) -> str | None:
    """Return the group of a test, if it belongs to one."""
    if item.nodeid.startswith("notebooks/"):
        return item.nodeid.partition("::")[0]
    params = getattr(getattr(item, "callspec", None), "params", {})
    if exercise := getattr(params.get("answer"), "exercise", getattr(params.get("exercise"), "id", None)):
        return f"solutions/{LESSONS[exercise[:2]]}"
    return None


class Unchanged:
    """Leaves out what has passed, and remembers what passes as a whole."""

    def __init__(self, config: pytest.Config):
        self.cache = config.cache
        self.now = groups()
        self.by_day = "not nightly" in config.getoption("markexpr", "")
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
            if (group := group_of(item)) in self.now and not (self.by_day and item.get_closest_marker("nightly")):
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
