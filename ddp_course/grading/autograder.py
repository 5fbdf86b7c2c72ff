"""How does nbgrader grade a submission? As always, but for two steps that are made sturdier here.

`nbgrader_config.py` puts these classes where nbgrader has its own. With nbgrader's `Execute`, an `os._exit` in one
cell loses the whole notebook; its `OverwriteCells` cannot put a test cell back when a locked cell stands before it.
Needs nbgrader. Read next: `execute.py`, which does the work.
"""

from nbformat import NotebookNode
from nbgrader.preprocessors import Execute, OverwriteCells
from nbgrader.utils import is_grade

from ddp_course.grading.execute import SturdyClient, cell_role


class SturdyExecute(SturdyClient, Execute):
    """Runs a submission; a cell that loses the kernel costs only itself.

    The visible checks are left out: the test cell after each makes the same check, on other values.
    """

    async def async_execute_cell(self, cell: NotebookNode, cell_index: int, *args, **kwargs) -> NotebookNode:
        """Run one cell, unless it is a visible check."""
        if cell_role(cell) == "check":
            return cell
        return await super().async_execute_cell(cell, cell_index, *args, **kwargs)


class RestoreCells(OverwriteCells):
    """Restores changed test cells in their place, and missing ones at the end of the notebook."""

    def add_missing_grade_cells(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        """Append every test cell that the submission lacks."""
        source = self.gradebook.find_notebook(self.notebook_id, self.assignment_id)
        present = {cell.metadata.nbgrader["grade_id"] for cell in nb.cells if is_grade(cell)}
        sources = {cell.name: cell for cell in source.source_cells}
        for grade_cell in sorted(source.grade_cells, key=lambda cell: cell.name):
            if grade_cell.name not in present:
                restored = self.missing_cell_transform(sources[grade_cell.name], grade_cell.max_score)
                restored.id = grade_cell.name
                nb.cells.append(restored)
        return nb, resources
