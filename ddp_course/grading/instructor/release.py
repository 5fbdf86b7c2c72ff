"""How do the exercises come out of the solutions?

Each notebook in solutions/ passes through nbgrader's own preprocessors, as `nbgrader generate_assignment` would do it,
but without a database: solutions are taken out, hidden tests too, and each protected cell gets a checksum. The same
source always gives the same bytes. Needs nbgrader.
Read next: `commands/release.py`, which writes exercises/; nbgrader/converters/generate_assignment.py;
`classroom.py`, which grades what comes back.
"""

from __future__ import annotations

import json
from pathlib import Path

from ddp_course.grading.paths import need_nbgrader
from ddp_course.grading.registry import exercise_of

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


def for_judges(sources: list[Path]) -> str:
    """Return what judges need of the solution notebooks, as JSON: by lesson the setup, by exercise the answer.

    Judges have a copy, since a course may be given to learners without solutions/.
    """
    import nbformat

    found = {}
    for source in sources:
        for cell in nbformat.read(source, as_version=4).cells:
            name = cell.metadata.get("nbgrader", {}).get("grade_id", "")
            if name == "setup":
                found[source.stem[:2]] = cell.source
            elif name.endswith("-answer"):
                found[exercise_of(name)] = cell.source
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def holds_answers(exercise: Path) -> bool:
    """Whether somebody has written into this exercise notebook: an answer cell no longer fits its checksum."""
    import nbformat
    from nbgrader.utils import compute_checksum, is_solution

    cells = [cell for cell in nbformat.read(exercise, as_version=4).cells if is_solution(cell)]
    return any(cell.metadata.nbgrader.get("checksum") != compute_checksum(cell) for cell in cells)
