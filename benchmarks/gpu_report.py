"""What became of everything that needs a GPU? The report, as text and as JSON.

A `Part` is one thing that was run: all tests, one benchmark or one lesson. What pytest says of it is read from its
JUnit file. A lesson's cell that raises has failed. One whose output is not the stored one `differs`, which need be no
failure: GPUs round in their own way.

Read next: `gpu_run.py`, which fills it.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measure
from ddp_course.diagnose.machine_facts import about_torch

DONE, NO_TIME = "done", "not run: no time was left"
MOST_LINES = 25  # of a failure in the report for people


@dataclass
class Part:
    """One thing that was run: all tests, one benchmark or one lesson."""

    name: str
    ended: str = NO_TIME  # or DONE, "ended after its limit", "ended with status N"
    seconds: float = 0.0
    cases: list[dict[str, str]] = field(default_factory=list)  # name, outcome, told; outcome as in `outcome_of`
    said: str = ""  # the end of what it printed, if it was not done
    figures: dict[str, Any] | None = None  # a benchmark's, as `measure.as_json` has them
    table: str = ""  # the same for people

    @property
    def failures(self) -> list[str]:
        """Everything that went wrong, a text each."""
        failed = [f"{case['name']}\n{case['told']}" for case in self.cases if case["outcome"] == "failed"]
        failed += [row["failed"] for row in self.figures["rows"] if row["failed"]] if self.figures else []
        if self.ended.startswith("ended") and not failed:
            failed = [f"{self.ended}\n{self.said}"]
        return list(dict.fromkeys(failed))

    def count(self, outcome: str) -> int:
        return sum(case["outcome"] == outcome for case in self.cases)


def read_junit(text: str) -> list[dict[str, str]]:
    """Return each test's name, its outcome and why it is that."""
    found = []
    for case in ElementTree.fromstring(text).iter("testcase"):
        outcome, told = outcome_of(case)
        found.append({"name": f"{case.get('classname')}::{case.get('name')}", "outcome": outcome, "told": told})
    return found


def outcome_of(case: ElementTree.Element) -> tuple[str, str]:
    for kind in ("failure", "error", "skipped"):
        if (node := case.find(kind)) is not None:
            told = re.sub(r"#x1B\[[\d;]*m", "", node.text or "").strip()  # colours, as JUnit's XML has them
            if kind == "skipped":
                return "skipped", node.get("message", "")
            return ("differs" if "Cell outputs differ" in told else "failed"), told
    return "passed", ""


def markdown(report: dict[str, Any], found: list[Part]) -> str:
    """Lay the report out for people: the machine, each part's outcome, figures, failures, why tests were skipped."""
    dry = " (a dry run on the CPU)" if report["dry"] else ""
    lines = [f"# GPU report{dry}, {report['started']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in report["machine"].items()]
    lines += ["", "| part | ended | seconds | passed | failed | differs | skipped |", "|---|---|---|---|---|---|---|"]
    for part in sorted(found, key=lambda part: part.name if part.name[0].isdigit() else ""):  # lessons by their numbers
        counts = [part.count("passed"), len(part.failures), part.count("differs"), part.count("skipped")]
        lines.append(f"| {part.name} | {part.ended} | {part.seconds:.0f} | {' | '.join(map(str, counts))} |")
    for part in found:
        lines += ["", f"## Figures: {part.name}", "", "```", part.table, "```"] if part.table else []
    for part in found:
        for failure in part.failures:
            lines += ["", f"## Failed: {part.name}", "", "```", *failure.splitlines()[-MOST_LINES:], "```"]
    for part in found:
        cells = [case["name"].rpartition("::")[2] for case in part.cases if case["outcome"] == "differs"]
        lines += ["", f"Other outputs than the stored ones, {part.name}: {', '.join(cells)}"] if cells else []
    skipped = Counter(case["told"] for part in found for case in part.cases if case["outcome"] == "skipped")
    lines += ["", "## Skipped", "", *(f"- {many}: {why}" for why, many in skipped.items())] if skipped else []
    return "\n".join([*lines, ""])


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    here, torch = measure.machine_state(), about_torch()
    wanted = ("torch", "torchvision", "cuda", "nccl", "driver")
    links = sorted(set(torch["links"].values()))
    return {
        "GPUs": ", ".join(torch["gpus"]) or "none",
        **{name: torch[name] for name in wanted},
        **({"links between GPUs": ", ".join(links)} if links else {}),
        **{name: here[name] for name in ("python", "system", "processor", "cores", "load_before")},
    }


def save(report: dict[str, Any], parts: list[Part], folder: Path) -> None:
    """Write report.json and report.md."""
    as_json = report | {"parts": [asdict(part) | {"failures": part.failures} for part in parts]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(as_json, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(report, parts), encoding="utf-8")
