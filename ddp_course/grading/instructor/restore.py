"""What is taken of a submitted notebook? The answers, and the code cells that the learner added. All else is ours.

Cells are known by the names that nbgrader gives them. A text, check or test cell that was changed, copied, turned into
Markdown or taken out is as it was released. So is the place of an answer; a second cell with an answer's name, or an
answer that has lost its name, is a cell that the learner added, and runs where it stands. An answer in words becomes
plain text.

Read next: `sandbox/boxed.py`, which runs the notebook.
"""

from __future__ import annotations

import json
import re
import textwrap
from itertools import islice
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

MOST_BYTES = 20 * 2**20  # of one file of a submission; read, it takes thirty times as much memory at most
MOST_FILES, MOST_BYTES_OF_ALL = 1000, 200 * 2**20  # beside the notebook
MOST_WORDS = 20_000  # letters of an answer in words


def unreadable(path: Path) -> str:
    """Return why a submission cannot be graded at all, or nothing."""
    if link := next((place.name for place in (path.parent.parent, path.parent, path) if place.is_symlink()), ""):
        return f"{link} is a link, which may lead to somebody else's work"
    if not path.is_file():
        return f"no {path.name} in {path.parent.name}/"
    if path.stat().st_size == 0:
        return "the file is empty"
    if path.stat().st_size > MOST_BYTES:
        size = f"{path.stat().st_size / 2**20:.0f} MiB, where {MOST_BYTES / 2**20:.0f} may be"
        return f"the file has {size}; clear its outputs and hand it in again"
    sizes = [each.lstat().st_size for each in islice(path.parent.rglob("*"), MOST_FILES + 1)]
    if len(sizes) > MOST_FILES or sum(sizes) > MOST_BYTES_OF_ALL:
        return f"more than {MOST_FILES} files or {MOST_BYTES_OF_ALL / 2**20:.0f} MiB beside the notebook"
    try:
        read(path)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return "the file is not JSON, so not a notebook"
    except ValueError as error:
        return f"the file is not a notebook: {str(error)[:100]}"
    return ""


def read(path: Path) -> NotebookNode:
    """Return a notebook of the cells in a file: their texts, kinds and names, and nothing else that stands there.

    Raises:
        ValueError: it is no notebook; says what is missing. nbformat's own reader would go through all of the file's
            metadata and outputs, which in a damaged file may be of any size and kind.
    """
    found = json.loads(path.read_text(encoding="utf-8-sig"))  # editors of other systems begin it with this mark
    cells = found.get("cells") if isinstance(found, dict) else None
    if not isinstance(cells, list):
        raise ValueError("no list of cells")
    return nbformat.v4.new_notebook(cells=[_cell(number, cell) for number, cell in enumerate(cells)])


def _cell(number: int, cell: Any) -> NotebookNode:
    if not isinstance(cell, dict) or cell.get("cell_type") not in _NEW:
        raise ValueError(f"cell {number} is none")
    lines = cell.get("source", "")
    text = "".join(lines) if isinstance(lines, list) and all(isinstance(line, str) for line in lines) else lines
    if not isinstance(text, str):
        raise ValueError(f"cell {number} has no text")
    marks = cell["metadata"].get("nbgrader") if isinstance(cell.get("metadata"), dict) else None
    name = marks.get("grade_id") if isinstance(marks, dict) else None
    return _NEW[cell["cell_type"]](text, metadata={"nbgrader": {"grade_id": name}} if isinstance(name, str) else {})


_NEW = {
    "code": nbformat.v4.new_code_cell,
    "markdown": nbformat.v4.new_markdown_cell,
    "raw": nbformat.v4.new_raw_cell,
}


def restored(release: NotebookNode, submitted: NotebookNode) -> NotebookNode:
    """Return the released notebook with what the learner wrote in it."""
    known = {_name(cell): cell for cell in release.cells if _name(cell)}
    answers = {name for name, cell in known.items() if cell.metadata.nbgrader.get("solution")}
    missing, added, place = set(known), {}, ""
    for cell in submitted.cells:
        name = _name(cell)
        if name in missing:
            missing.remove(name)
            place = name
            if name in answers and cell.source != known[name].source:
                known[name].source = cell.source if known[name].cell_type == "code" else _as_text(cell.source)
        elif cell.cell_type == "code" and (name in answers or name not in known):
            added.setdefault(place, []).append(nbformat.v4.new_code_cell(cell.source))
    for name in missing & answers:
        if known[name].cell_type == "code":
            known[name].source = ""  # not the released one, which would hide an answer that has lost its name
    release.cells = added.get("", []) + [
        c for cell in release.cells for c in (cell, *added.get(_name(cell) or None, []))
    ]
    return release


def _as_text(source: str) -> str:
    """Return Markdown that shows these words as they are: no link, picture, formula or HTML of a learner's.

    It is shown on the learner's page, and in formgrader, where a script would have the instructor's rights.
    """
    lines = [part for line in source[:MOST_WORDS].splitlines() for part in textwrap.wrap(line, 100) or [""]]
    fence = "`" * (3 + max(map(len, re.findall("`+", source)), default=0))
    return "\n".join([f"{fence}text", *lines, fence])


def _name(cell: NotebookNode) -> str:
    marks = cell.metadata.get("nbgrader")
    return str(marks.get("grade_id", "")) if isinstance(marks, dict) else ""
