"""How does a text become an answer? The solutions' texts, edits of them, and what they define.

Read next: `differential.py`, which runs them beside a learner's answer.
"""

from __future__ import annotations

import ast
import functools
import json
import linecache
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import resources
from io import StringIO


@dataclass(frozen=True)
class Mistake:
    """A wrong answer, the checks that it fails, and what is said of it.

    `how` is "" for one that a check tries; "hangs" for one that does not return, which the report's hints know;
    "tests" for one that is there for the tests alone, because it was written without the solution, or is slow.
    """

    name: str
    fails: tuple[str, ...]
    cause: str
    source: str
    how: str = ""

    @property
    def tried(self) -> bool:
        """Whether a check may run it."""
        return not self.how


@functools.cache
def _texts() -> dict[str, str]:
    return json.loads((resources.files("judges") / "solutions.json").read_text(encoding="utf-8"))


def solution_of(exercise_id: str) -> str:
    """Return the text of the course's own answer, such as to "04.1"."""
    return _texts()[exercise_id]


@functools.cache
def setup_of(exercise_id: str) -> str:
    """Return what the answers of a lesson's notebook count on: the imports of its first cell, not what it shows."""
    cell = ast.parse(_texts()[exercise_id[:2]])
    return "\n".join(ast.unparse(each) for each in cell.body if isinstance(each, ast.Import | ast.ImportFrom))


def function_of(exercise_id: str, name: str, source: str) -> Callable:
    """Return what `source` defines under this name, as if it had been run in the lesson's notebook."""
    source = f"{setup_of(exercise_id)}\n{source}"
    cell = f"<ipython-input-{abs(hash(source))}>"
    linecache.cache[cell] = (len(source), None, source.splitlines(True), cell)
    namespace = {"__name__": "__main__"}  # so that it travels by value
    with redirect_stdout(StringIO()):  # a first cell may print
        exec(compile(source, cell, "exec"), namespace)
    return namespace[name]


def mistakes_of(exercise_id: str, table: str, checks: tuple[str, ...]) -> tuple[Mistake, ...]:
    """Read a table of mistakes: `name | keys of the checks that fail | cause`, maybe `| hangs` or `| tests`.

    "all" are all checks. Below each are edits of the solution, or a whole answer, as `variants_of` says.
    """
    found = []
    for head, source in variants_of(exercise_id, table):
        name, keys, cause, *how = head.split(" | ")
        if how not in ([], ["hangs"], ["tests"]):
            raise ValueError(f"{exercise_id}, {name}: expected a name, checks, a cause, maybe hangs or tests")
        found.append(Mistake(name, checks if keys == "all" else tuple(keys.split()), cause, source, *how))
    return tuple(found)


def variants_of(exercise_id: str, table: str) -> tuple[tuple[str, str], ...]:
    """Read a table of answers: a head line, and below it, indented by four, edits of the solution or a whole answer.

    An edit is `old => new`. It replaces every `old`; further lines of `new` begin where the line of `old` begins.
    A field that does not fit into the head's line has a line of its own, which begins with a bar.

    Raises:
        ValueError: an edit whose `old` is not in the solution, or a text that is not Python; names the entry.
    """
    return tuple(_variants(solution_of(exercise_id), table)) if table.strip() else ()


def _variants(solution: str, table: str) -> Iterator[tuple[str, str]]:
    for entry in re.split(r"\n(?=\S)", table.strip("\n").replace("\n| ", " | ")):
        head, _, body = entry.partition("\n")
        body, source = re.sub("(?m)^ {4}", "", body), solution
        if re.match(r"(def|class|from|import|@) ?", body) and " => " not in body.partition("\n")[0]:
            source = f"{body}\n"
        else:
            for edit in re.split(r"\n(?=.* =>)", body):
                old, new = re.split(" => ?", edit, maxsplit=1)
                if old not in source:
                    raise ValueError(f"{head}: there is no {old!r} to edit")
                source = _edited(source, old, new)
        try:
            compile(source, head, "exec")
        except SyntaxError as error:
            raise ValueError(f"{head}: {error}") from None
        yield head, source


def _edited(source: str, old: str, new: str) -> str:
    before, *rest = source.split(old)
    for part in rest:
        line = before.rpartition("\n")[2]
        before += new.replace("\n", "\n" + line[: len(line) - len(line.lstrip())]) + part
    return before
