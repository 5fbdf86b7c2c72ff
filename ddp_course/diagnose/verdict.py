"""What does a check say?

A verdict is one line: ok, warning or problem, what was found, and the cure. The checks of one machine and the meeting
of several give the same kind of line, so one table shows both.

Read next: `machine_checks.py`, which turns facts into verdicts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
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


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a line for each verdict, each cure below what it cures, and the sum of it all."""
    lines = []
    for verdict in verdicts:
        lines += _folded(f"{MARK[verdict.state]:8} {verdict.name:16} ", verdict.found)
        if verdict.cure:
            lines += _folded(f"{'':25} -> ", verdict.cure)
    problems, warnings = (sum(each.state == state for each in verdicts) for state in ("problem", "warning"))
    return "\n".join([*lines, f"\n{len(verdicts)} checks: {problems} problems, {warnings} warnings"])


def _folded(head: str, text: str) -> list[str]:
    """`text` after `head`, folded so that no line runs off a page; words, paths and commands stay whole."""
    indents = {"initial_indent": head, "subsequent_indent": " " * len(head)}
    folded = textwrap.wrap(text, MOST_LETTERS, **indents, break_long_words=False, break_on_hyphens=False)
    return folded or [head.rstrip()]


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """Return 1 if there is a problem, else 0: a warning stops nobody."""
    return int(any(verdict.state == "problem" for verdict in verdicts))
