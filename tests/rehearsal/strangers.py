"""What do `lint` and `rehearse` find in scripts whose writers had seen neither?

    python -m tests.rehearsal.strangers                  # lint and rehearse them all: about half an hour
    python -m tests.rehearsal.strangers padded slow      # those with such words in their names

`strangers.jsonl` and `newcomers.jsonl` have a script a line: its text, its arguments, and the fault that its writer put
in, with the lines that a reviewer would point at. The first set was used to improve the tools; of the second, the tools
were measured before they were improved, too. docs/verified.md has the tables that this prints.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ddp_course.rehearsal.finding import WRONG, Finding
from ddp_course.rehearsal.lint import lint
from ddp_course.rehearsal.rehearse import rehearse

NEAR = 3  # lines
SETS = ("strangers", "newcomers")
# What the first set's words are called where the cause is told, not the symptom.
CAUSES = {
    "drift": {
        "past-the-replica",
        "changed-after-wrapping",
        "thawed-after-wrapping",
        "rates-differ",
        "step-without-sync",
    },
    "not-averaged": {"past-the-replica", "step-without-sync"},
    "same-rows": {"same-draws", "sampler-differs"},
    "mean-of-means": {"loss-of-unequal-counts"},
    "collective-under-rank-0": {"forward-on-one-rank", "decided-by-one-rank"},
}


def scripts(name: str = "strangers") -> list[dict]:
    path = Path(__file__).with_name(f"{name}.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rehearsed(script: dict) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, script["name"])
        path.write_text(script["text"], encoding="utf-8")
        return rehearse(path, script["arguments"], wait_s=20).findings


def verdict(script: dict, findings: Iterable[Finding]) -> str:
    """Say whether the fault was named, and where; of a right script, whether it was left alone."""
    wanted = {name: each.get("lines", [each["line"]]) for each in script["faults"]
              for name in {each["fault"], *CAUSES.get(each["fault"], ())}}  # fmt: skip
    named = [each for each in findings if each.fault in wanted]
    if not wanted:
        return "false alarm" if any(each.grade == WRONG for each in findings) else "left alone"
    if not named:
        return "missed"
    near = any(abs((named[0].line or 0) - line) <= NEAR for line in wanted[named[0].fault])
    return "named" if near else "named elsewhere"


def main(words: list[str]) -> None:
    for name in SETS:
        told: dict[str, Counter] = {"lint": Counter(), "rehearse": Counter()}
        for script in scripts(name):
            if words and not any(word in script["name"] for word in words):
                continue
            found = {}
            for tool, look, meant in (
                ("lint", lambda s: lint(s["text"]), "in_text"),
                ("rehearse", rehearsed, "in_run"),
            ):
                found[tool] = verdict(script, look(script)) if script.get(meant, True) else "not its matter"
                told[tool][found[tool]] += 1
            print(f"{script['name']:44} lint: {found['lint']:16} rehearse: {found['rehearse']}", flush=True)
        for tool, counts in told.items():
            print(f"{name}, {tool}: {dict(counts)}")


if __name__ == "__main__":
    main(sys.argv[1:])
