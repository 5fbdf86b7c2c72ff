"""How do the exercises come out of the solutions? `python -m ddp_course.grading.release`

Each notebook in solutions/ passes through nbgrader's own preprocessors, as `nbgrader generate_assignment` would do it,
but without a database: solutions are taken out, hidden tests too, and each protected cell gets a checksum. The same
source always gives the same bytes, so `--check` can tell whether exercises/ is what solutions/ generates.

A notebook in exercises/ that holds answers is kept, unless `--force` is given. Needs nbgrader.
Read next: nbgrader's `converters/generate_assignment.py`; `classroom.py`, which grades what comes back.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ddp_course.grading.places import course_root, need_nbgrader

# Those of nbgrader's GenerateAssignment that work without a database, in its order.
STEPS = (
    "LockCells", "ClearSolutions", "ClearOutput", "CheckCellMetadata", "ComputeChecksums",
    "ClearHiddenTests", "ClearMarkScheme", "ComputeChecksums", "CheckCellMetadata",
)  # fmt: skip


def released(source: Path) -> str:
    """Return the text of the exercise notebook that a solution notebook generates.

    Raises:
        RuntimeError: nbgrader is not installed, or a region in the notebook is not closed.
    """
    need_nbgrader()
    from nbconvert.exporters import NotebookExporter
    from nbgrader import preprocessors
    from nbgrader.nbgraderformat import read
    from traitlets.config import Config

    exporter = NotebookExporter(config=Config({"Exporter": {"default_preprocessors": []}}))
    for step in STEPS:
        exporter.register_preprocessor(getattr(preprocessors, step), enabled=True)
    with source.open(encoding="utf-8") as file:
        notebook = read(file, as_version=4)
    text, _ = exporter.from_notebook_node(notebook)
    return text


def holds_answers(exercise: Path) -> bool:
    """Whether somebody has written into this exercise notebook: an answer cell no longer fits its checksum."""
    import nbformat
    from nbgrader.utils import compute_checksum, is_solution

    cells = [cell for cell in nbformat.read(exercise, as_version=4).cells if is_solution(cell)]
    return any(cell.metadata.nbgrader.get("checksum") != compute_checksum(cell) for cell in cells)


def main(arguments: list[str] | None = None) -> int:
    """Write exercises/, or with `--check` say which of its notebooks are stale; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_course.grading.release", description="exercises/ from solutions/"
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when something is stale")
    parser.add_argument("--force", action="store_true", help="replace notebooks that hold answers, too")
    parser.add_argument("--root", type=Path, default=None, help="the course's folder")
    chosen = parser.parse_args(arguments)
    root = chosen.root or course_root()
    try:
        texts = {source: released(source) for source in sorted(root.glob("solutions/*/*.ipynb"))}
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    exercises = {root / "exercises" / source.relative_to(root / "solutions"): text for source, text in texts.items()}
    if chosen.check:
        return _check(root, exercises)
    return max([0, *(_write(root, path, text, chosen.force) for path, text in exercises.items())])


def _check(root: Path, exercises: dict[Path, str]) -> int:
    stale = [
        f"{path.relative_to(root)} is not what solutions/ generates"
        for path, text in exercises.items()
        if _old(path) != text
    ]
    strangers = set(root.glob("exercises/*/*.ipynb")) - set(exercises)
    stale += [f"{path.relative_to(root)} has no source in solutions/" for path in sorted(strangers)]
    for sentence in stale:
        print(f"{sentence}; run: make exercises", file=sys.stderr)
    return 1 if stale else 0


def _write(root: Path, path: Path, text: str, force: bool) -> int:
    name = path.relative_to(root)
    if _old(path) == text:
        print(f"{name} is up to date")
        return 0
    if path.exists() and not force and holds_answers(path):
        print(f"{name} holds answers and was kept; move it away, or use --force to replace it", file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"{name} written")
    return 0


def _old(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
