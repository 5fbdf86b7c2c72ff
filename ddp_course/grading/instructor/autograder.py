"""How does nbgrader grade a submission? As always, but that it runs in a box, and is judged outside of it.

`nbgrader_config.py` puts this class where nbgrader has its own `Execute`, for which a test cell is a cell of the
learner's kernel, and an `os._exit` in one cell loses the whole notebook.
Needs nbgrader. Read next: `sandbox/boxed.py`, which does the work.
"""

from nbformat import NotebookNode
from nbgrader.preprocessors import Execute

from ddp_course.grading.answer.execute import NOT_GRADED, add_error, cell_role
from ddp_course.grading.sandbox.boxed import BoxedClient


class BoxedExecute(BoxedClient, Execute):
    """Runs a submission; a cell that loses the kernel costs only itself.

    A notebook that stands for one that cannot be graded says so in its metadata, and is not run.
    """

    def preprocess(self, nb: NotebookNode, resources: dict | None = None) -> tuple[NotebookNode, dict]:
        """Run all cells (called by nbgrader)."""
        if not (reason := nb.metadata.get(NOT_GRADED)):
            return super().preprocess(nb, resources)
        for cell in nb.cells:
            if cell_role(cell) == "test":
                add_error(cell, NOT_GRADED, reason)
        return nb, resources or {}
