"""What failed, in one word, and in one line of a log that programs read.

A report is for people, and its sentences may change. Whoever must tell failures apart, a judge, `ddp-course read` or a
test, goes by the code. In logs the code stands in a line of its own after the report, as JSON; in a notebook, where
`RankError.code` is at hand, that line is left out.

Read next: `failure_report.py` and `hang_report.py`, where codes are given.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

CODES = {
    "raised": "a rank raised an exception of its own",
    "died": "a rank's process is gone, and it neither returned nor raised",
    "start": "a rank could not start, or not in time",
    "result": "what a rank returned cannot travel to the parent",
    "absent": "ranks wait in a call that others never entered",
    "uneven": "all have returned, and some have made more calls than others",
    "disagree": "ranks meet in one call with different operations, sizes, dtypes, roots, ways to reduce, or groups",
    "sizes": "gloo ended a rank, because another met it with a tensor of another size",
    "circle": "ranks wait for each other in a circle",
    "store": "ranks wait at the store for a key that no rank has set",
    "cut-off": "a rank lost the connection to a peer, and nothing tells which rank left first",
    "stuck": "all have entered a call, and it does not end",
    "outside-group": "a rank called a collective on a group that it is not in",
    "limit": "no result within limit_s",
}
MARK = "ddp-course: "
_LINE = re.compile(rf"{MARK}(\{{.*\}})")


def in_notebook() -> bool:
    """Whether IPython shows errors here, to a person."""
    return "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None


def written(facts: dict[str, Any]) -> str:
    """Return the line of a log that says what failed."""
    return f"{MARK}{json.dumps({name: value for name, value in facts.items() if value not in ('', {})})}"


def found_in(text: str) -> dict[str, Any]:
    """Read the first such line; {} if there is none."""
    for found in _LINE.finditer(text) if MARK in text else ():
        try:
            facts = json.loads(found[1])
        except ValueError:
            continue
        if facts.get("code") in CODES:
            return facts
    return {}


def fits(pattern: str, code: str, report: str) -> bool:
    """Whether a failure is meant.

    Args:
        pattern: codes, as in "absent|disagree"; codes, and a pattern that must be in the report besides, as in
            "limit: waited in barrier"; a pattern alone, for what others than we have written; or several of these,
            of which one must fit, as in "absent; limit: waited in barrier".
    """
    return any(_one_fits(each, code, report) for each in pattern.split("; "))


def _one_fits(pattern: str, code: str, report: str) -> bool:
    names, _, words = pattern.partition(": ")
    if set(names.split("|")) <= CODES.keys():
        return code in names.split("|") and bool(re.search(words, report))
    return bool(re.search(pattern, report))
