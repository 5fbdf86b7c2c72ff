"""What does a check say?

A verdict is one line: ok, warning or problem, what was found, and the cure. The doctor's checks of one machine and
the meeting of several give the same kind of line, so one table shows both.

Read next: `checks.py`, which turns facts into verdicts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

MOST_LETTERS = 100  # of a line: a notebook's output is not much wider
MARK = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Verdict:
    """One line of the table."""

    name: str
    state: str  # "ok", "warning" or "problem"
    found: str
    cure: str = ""


class Problem(Exception):
    """A problem that ends what was being tried; carries its line of the table."""

    def __init__(self, name: str, found: str, cure: str) -> None:
        super().__init__(found)
        self.verdict = Verdict(name, "problem", found, cure)


def table(verdicts: Iterable[Verdict]) -> str:
    """Return a line for each verdict, each cure below what it cures, and the sum of it all."""
    verdicts, lines = list(verdicts), []
    for verdict in verdicts:
        lines += _folded(f"{MARK[verdict.state]:8} {verdict.name:16} ", verdict.found)
        if verdict.cure:
            lines += _folded(f"{'':25} -> ", verdict.cure)
    count = {state: sum(verdict.state == state for verdict in verdicts) for state in MARK}
    lines.append(f"\n{len(verdicts)} checks: {count['problem']} problems, {count['warning']} warnings")
    return "\n".join(lines)


def _folded(head: str, text: str) -> list[str]:
    """`text` after `head`, folded so that no line runs off a page; words, paths and commands stay whole."""
    return textwrap.wrap(
        text,
        MOST_LETTERS,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]


def exit_status(verdicts: Iterable[Verdict]) -> int:
    """Return 1 if there is a problem, else 0: a warning stops nobody."""
    return int(any(verdict.state == "problem" for verdict in verdicts))
