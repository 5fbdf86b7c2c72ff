"""How is a learner's notebook run, when any of its cells may kill or block the kernel?

Each cell runs in the notebook's kernel, as in JupyterLab. A cell that ends the kernel, or that cannot be
interrupted at its time limit, gets that as its error output; a fresh kernel is started, the cells that had worked
are run again, and the notebook goes on. So a crash costs only itself. The whole notebook has a time limit too.

`ddp-course check` uses `SturdyClient` itself; the autograder mixes it into nbgrader's own preprocessor
(`instructor/autograder.py`). Read next: nbclient/client.py.
"""

from math import ceil
from time import monotonic

import nbformat
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets import Bool, Dict, Integer, List, Unicode

from ddp_course.grading.answer.limits import patience

TIMEOUT = "CellTimeoutError"
KERNEL_DIED = "KernelDied"
NOT_RUN = "NotRun"
NO_SCORE = "NoScore"
NOT_JUDGED = "NotJudged"
NOT_GRADED = "NotGraded"


def cell_role(cell: NotebookNode) -> str:
    """What a cell of an exercise notebook is for: "text", "answer", "test", "check", "setup" or "free".

    A "free" cell is one that the learner added.
    """
    marks = cell.metadata.get("nbgrader", {})
    if cell.cell_type != "code":
        return "text"
    if marks.get("grade"):
        return "test"
    if marks.get("solution"):
        return "answer"
    if "check" in cell.metadata.get("tags", []):
        return "check"
    return "setup" if marks.get("locked") else "free"


def add_error(cell: NotebookNode, name: str, reason: str) -> None:
    """Append an error output that says why the cell has no result."""
    cell.outputs.append(nbformat.v4.new_output("error", ename=name, evalue=reason, traceback=[f"{name}: {reason}"]))


def has_error(cell: NotebookNode) -> bool:
    """Whether the cell's outputs hold an error."""
    return any(output.output_type == "error" for output in cell.outputs)


def settle_score(cell: NotebookNode) -> None:
    """Make the outputs of a test cell say what they mean to nbgrader.

    For nbgrader, text on stderr is a failure, though it may be a library's warning; and no result is full marks,
    though it may mean that the result was suppressed.
    """
    for output in cell.outputs:
        if output.output_type == "stream":
            output.name = "stdout"
    if not has_error(cell) and not any(output.output_type == "execute_result" for output in cell.outputs):
        add_error(cell, NO_SCORE, "the check did not return its points")


class SturdyClient(NotebookClient):
    """A notebook client for which what one cell breaks is fixed before the next one runs."""

    total_timeout = Integer(300, help="Seconds for the whole notebook; later cells are not run.").tag(config=True)
    answer_timeout = Integer(30, help="Seconds for one cell that the learner wrote.").tag(config=True)
    timeout = Integer(60, help="Seconds for any other cell.", allow_none=True).tag(config=True)
    allow_errors = Bool(True).tag(config=True)
    interrupt_on_timeout = Bool(True).tag(config=True)
    raise_on_iopub_timeout = Bool(True).tag(config=True)  # how nbclient says that an interrupt had no effect
    startup_timeout = Integer(300, help="Seconds for the kernel to start.").tag(config=True)
    extra_arguments = List(["--log-level=40"]).tag(config=True)  # the kernel's own remarks help nobody here
    shutdown_kernel = Unicode("immediate").tag(config=True)
    error_on_timeout = Dict(
        {
            "ename": TIMEOUT,
            "evalue": "the cell ran past its time limit and was interrupted",
            "traceback": [f"{TIMEOUT}: the cell ran past its time limit and was interrupted"],
        }
    ).tag(config=True)

    def reset_execution_trackers(self) -> None:
        """Forget the last notebook (called by nbclient before each)."""
        super().reset_execution_trackers()
        self._worked: list[int] = []  # cells to run again in a fresh kernel, by position
        self._started, self._patience = monotonic(), 1.0

    def _left(self) -> float:
        """Seconds that the notebook may still take; the busiest moment so far decides."""
        self._patience = max(self._patience, patience())
        return self._started + self.total_timeout * self._patience - monotonic()

    def _get_timeout(self, cell: NotebookNode | None) -> int | None:
        left = max(1, ceil(self._left()))
        if cell is None or not self.timeout:
            return left
        limit = self.answer_timeout if cell_role(cell) in ("answer", "free") else self.timeout
        return min(ceil(cell.metadata.get("limit_s", limit) * patience()), left)

    def on_cell_executed(self, cell: NotebookNode, execute_reply: dict, **_) -> None:
        """Record an error that only the reply tells, as at a time limit (called by nbclient)."""
        reply = execute_reply["content"]
        recorded = [output.ename for output in cell.outputs if output.output_type == "error"]
        if reply["status"] == "error" and reply["ename"] not in recorded:
            add_error(cell, reply["ename"], reply["evalue"])

    async def async_execute_cell(self, cell: NotebookNode, cell_index: int, *args, **kwargs) -> NotebookNode:
        """Run one cell; whatever it breaks is recorded in its outputs, and the kernel is alive afterwards."""
        if cell.cell_type != "code" or not cell.source.strip():
            return cell
        cell.outputs = []
        if self._left() < 0:
            add_error(cell, NOT_RUN, f"the notebook had used up its {self.total_timeout} s")
            return cell
        reason = await self._attempt(cell, cell_index, *args, **kwargs)
        if reason and cell_role(cell) not in ("answer", "free"):
            reason = await self._attempt_again(reason, cell, cell_index, *args, **kwargs)
        if reason:
            add_error(cell, KERNEL_DIED, reason)
            await self._fresh_kernel()
        elif cell_role(cell) == "test":
            settle_score(cell)
        elif not has_error(cell) and cell_role(cell) != "check":
            self._worked.append(cell_index)
        return cell

    async def _attempt(self, cell: NotebookNode, cell_index: int, *args, **kwargs) -> str | None:
        """Run the cell; return why the kernel is lost, or None."""
        try:
            await super().async_execute_cell(cell, cell_index, *args, **kwargs)
        except DeadKernelError:
            return "the kernel died while this cell ran"
        except CellTimeoutError:
            return "the cell ran past its time limit and could not be interrupted; its kernel was ended"
        return None

    async def _attempt_again(self, reason: str, cell: NotebookNode, cell_index: int, *args, **kwargs) -> str | None:
        """A cell that is not the learner's lost the kernel: the cause is an earlier one, such as a timer.

        Tried once with all earlier cells. After that, the learner's last cell is the suspect, and is left out.
        """
        await self._fresh_kernel()
        again = await self._attempt(cell, cell_index, *args, **kwargs)
        suspects = [i for i in self._worked if cell_role(self.nb.cells[i]) in ("answer", "free")]
        if not again or not suspects:
            return again
        self._worked.remove(suspects[-1])
        add_error(self.nb.cells[suspects[-1]], KERNEL_DIED, "the kernel died twice while the next cell ran")
        await self._fresh_kernel()
        return await self._attempt(cell, cell_index, *args, **kwargs)

    async def _fresh_kernel(self) -> None:
        """Start a kernel in the place of the lost one, and run again what had worked."""
        pending = list(self._worked)
        await self._restart()
        while pending and self._left() > 0:
            index = pending.pop(0)
            copy = nbformat.from_dict(self.nb.cells[index])
            keep = self.nb.cells[index]
            lost = await self._attempt(copy, index)
            self.nb.cells[index] = keep
            if lost:
                self._worked.remove(index)
                pending = list(self._worked)
                await self._restart()

    async def _restart(self) -> None:
        await self._async_cleanup_kernel()
        self.km = self.create_kernel_manager()
        await self.async_start_new_kernel()
        await self.async_start_new_kernel_client()

    def execute_cell(self, *args, **kwargs) -> NotebookNode:
        """Run one cell, for callers that are not asynchronous."""
        return run_sync(self.async_execute_cell)(*args, **kwargs)
