"""Is a lesson plain PyTorch, short, and free of questions about the course's own objects? The third edition's rules.

At least half of a lesson's code stands in cells that a learner could paste into a script of their own.
"""

import ast
import re

import pytest

from tests.notebooks.test_lessons import LESSONS, cells_of

OF_TORCH = re.compile(r"\b(torch|dist|nn|F|DDP|DistributedDataParallel|DataLoader|DistributedSampler)\b")
SHOWS = {"launch", "RankPool", "RankError", "draw"}  # what starts ranks and draws what they did
MOST = {"names": 4, "words": 3000, "cells": 26, "questions": 8, "Booleans": 4, "brackets": 2, "sliced": 0}


def names_of_the_course(source: str) -> set[str]:
    """Return what a cell imports from `ddp_course` beside what shows."""
    python = re.sub(r"(?m)^\s*[%!].*$", "", source) if not source.startswith("%%") else ""
    nodes = (node for node in ast.walk(ast.parse(python)) if isinstance(node, ast.ImportFrom))
    found = [node for node in nodes if (node.module or "").startswith("ddp_course")]
    return {alias.asname or alias.name for node in found for alias in node.names} - SHOWS


def code_lines(source: str) -> list[str]:
    lines = (line.strip() for line in source.splitlines())
    return [line for line in lines if line and not line.startswith(("#", "%%writefile"))]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_is_plain_and_short(path):
    cells, prose = cells_of(path, "code"), "\n".join(cell.source for cell in cells_of(path, "markdown"))
    names = set().union(*(names_of_the_course(cell.source) for cell in cells))
    own = [cell for cell in cells if any(re.search(rf"\b{name}\b", cell.source) for name in names)]
    pasted = [cell for cell in cells if cell not in own and OF_TORCH.search(cell.source)]
    printed = "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "")
        for cell in cells
        for output in cell.outputs
    )
    found = {
        "names": len(names),
        "words": len(re.sub(r"<[^>]+>", "", prose).split()),
        "cells": len(cells),
        "questions": len(re.findall(r"\*\*(?:Predict|Choose)", prose)),
        "Booleans": len(re.findall(r"\b(?:True|False)\b", printed)),
        "brackets": len(re.findall(r"\([^()]{60,}\)", prose)),
        "sliced": sum("getsource(" in cell.source for cell in cells),
    }
    assert {what: count for what, count in found.items() if count > MOST[what]} == {}
    lines = [len(code_lines(cell.source)) for cell in cells]
    assert sum(len(code_lines(cell.source)) for cell in pasted) >= sum(lines) / 2
    assert any(cell.source.startswith("%%writefile") for cell in cells), "no program to take away"
