"""What does a learner work on? A copy of lessons and exercises, in a folder that git ignores.

So running a lesson changes nothing in the checkout, and `git pull` is never in the way. Outputs are cleared: a
prediction is worth little with the answer below it. What a learner has edited is never overwritten: a newer version of
it comes as another file beside it. A notebook counts as edited if the text of its cells is; outputs don't matter. The
plain programs of `programs/` come too.

Read next: `commands/lab.py`, which opens it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import nbformat

from ddp_course.grading.paths import GIVEN

NEWER = " (newer)"


def bring(course: Path, work: Path) -> list[str]:
    """Bring the folder up to the course's version; return in sentences what a learner should know of it.

    Raises:
        OSError: the folder cannot be written.
    """
    work.mkdir(parents=True, exist_ok=True)
    given = json.loads((work / GIVEN).read_text()) if (work / GIVEN).exists() else {}
    told, new = [], not given
    sources = (course.glob(pattern) for pattern in ("notebooks/*.ipynb", "exercises/*/*.ipynb", "programs/*.py"))
    for source in sorted(path for found in sources for path in found):
        name = source.relative_to(course).as_posix()
        version, path = _version(source), work / name
        if given.get(name) != version or not path.exists():
            sentence = _give(source, path, given.get(name))
            told += [sentence] if sentence and not new else []
            given[name] = version
    _write(work / GIVEN, json.dumps(given, indent=1))
    return [f"your copy of the course is in {work}; the checkout stays as it is"] if new else told


def _give(source: Path, path: Path, before: str | None) -> str:
    """Write a file, or beside it if it is edited; return what there is to say."""
    there = path.exists()
    edited = there and _version(path) not in (before, _version(source))
    target = path.with_name(f"{path.stem}{NEWER}{path.suffix}") if edited else path
    target.parent.mkdir(parents=True, exist_ok=True)
    _write(target, _cleared(source) if source.suffix == ".ipynb" else source.read_text("utf-8"))
    if edited:
        return f"{path.name} is yours and stays; the newer version is {target.name} beside it"
    return f"{path.name} is the newer version now" if there else f"{path.name} is new"


def _cleared(source: Path) -> str:
    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nbformat.writes(notebook)


def _version(path: Path) -> str:
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = nbformat.reads(text, as_version=4).cells
        text = json.dumps([[cell.cell_type, cell.source] for cell in cells], ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
