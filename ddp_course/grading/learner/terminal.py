"""How does `ddp-course check 03` work? It runs the saved answers, and each exercise's check after its answer.

The notebook runs in a kernel of its own, as in JupyterLab; cells that end or block it cost only themselves. The
notebook's own check and test cells are left out, so it does not matter whether somebody changed them.

Left out on purpose: writing anything into the notebook.
Read next: `answer/execute.py`, how a notebook is run when its cells may kill the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from ddp_course.grading.answer.execute import SturdyClient, cell_role
from ddp_course.grading.exercise import Exercise
from ddp_course.grading.registry import answer_cell, exercises_of, find_exercise

_CHECK = "from ddp_course.grading import check as _check\n_check({id!r}, {function}, seed={seed})"


def chosen_exercises(what: str) -> tuple[Exercise, ...]:
    """Return the exercises of a lesson ("03") or a single one ("03.2").

    Raises:
        ValueError: there is none.
    """
    return (find_exercise(what),) if "." in what else exercises_of(what)


def check_notebook(
    path: Path, exercises: tuple[Exercise, ...], seed: int = 0, say: Callable[[str], None] = print, **limits: int
) -> dict[str, float]:
    """Run a notebook's cells, check each exercise after its answer, and return the points by exercise.

    Args:
        seed: of the checks.
        say: is given the text to show, as soon as it is known.
        limits: settings of `SturdyClient`, such as `answer_timeout=30`.
    Raises:
        OSError: the file cannot be read. ValueError: it is no notebook.
    """
    notebook, tests = with_checks(read_notebook(path), exercises, seed)
    client = _Reporter(notebook, tests, say, resources={"metadata": {"path": str(path.parent)}}, **limits)
    client.execute()
    return client.points


def read_notebook(path: Path) -> NotebookNode:
    """Read a notebook.

    Raises:
        OSError: it cannot be read. ValueError: it is none.
    """
    try:
        return nbformat.read(path, as_version=4)
    except OSError:
        raise
    except Exception:  # whatever is wrong with what is in the file
        raise ValueError(f"{path} is not a notebook") from None


def with_checks(
    notebook: NotebookNode, exercises: tuple[Exercise, ...], seed: int
) -> tuple[NotebookNode, dict[str, Exercise]]:
    """Return the notebook with our checks in place of its own, and which cell checks which exercise."""
    cells = [cell for cell in notebook.cells if cell_role(cell) not in ("text", "check", "test")]
    tests = {}
    for exercise in exercises:
        source = _CHECK.format(id=exercise.id, function=exercise.function, seed=seed)
        marks = {"grade": True, "solution": False, "locked": True}
        test = nbformat.v4.new_code_cell(source, metadata={"nbgrader": marks})
        cells.insert(_position(cells, exercise) + 1, test)
        tests[test.id] = exercise
    notebook.cells = cells
    return notebook, tests


def _position(cells: list[NotebookNode], exercise: Exercise) -> int:
    """The last cell that belongs to the exercise: all up to the next exercise's answer, or to the end."""
    key = answer_cell(exercise.id)
    start = next((i for i, c in enumerate(cells) if c.metadata.get("nbgrader", {}).get("grade_id") == key), None)
    if start is None:
        return len(cells) - 1
    later = (i for i in range(start + 1, len(cells)) if cell_role(cells[i]) in ("answer", "test"))
    return next(later, len(cells)) - 1


class _Reporter(SturdyClient):
    """Tells about each exercise when its check is done."""

    def __init__(self, notebook: NotebookNode, tests: dict[str, Exercise], say: Callable[[str], None], **settings):
        super().__init__(notebook, kernel_name="python3", **settings)
        self.tests, self.say = tests, say
        self.points: dict[str, float] = {}

    async def async_execute_cell(self, cell: NotebookNode, cell_index: int, *args, **kwargs) -> NotebookNode:
        await super().async_execute_cell(cell, cell_index, *args, **kwargs)
        if cell.cell_type != "code":
            return cell
        exercise = self.tests.get(cell.id)
        if exercise:
            self.report(exercise, cell)
        else:
            for output in cell.outputs:
                if output.output_type == "error" and output.ename != "NotImplementedError":
                    self.say(f"in the cell that begins with {cell.source.strip().splitlines()[0][:60]!r}:")
                    self.say(f"    {output.ename}: {output.evalue}\n")
        return cell

    def report(self, exercise: Exercise, cell: NotebookNode) -> None:
        text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        results = [output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result"]
        errors = [output for output in cell.outputs if output.output_type == "error"]
        self.points[exercise.id] = 0.0 if errors or not results else float(results[0])
        if errors:
            error = errors[0]
            missing = error.ename == "NameError" and exercise.function in error.evalue
            said = (
                f"there is no function {exercise.function}; its cell did not run"
                if missing
                else f"{error.ename}: {error.evalue}"
            )
            text += f"{exercise.id} {exercise.title}\n✗ {said}\n0 of {exercise.points} points\n"
        self.say(text)
