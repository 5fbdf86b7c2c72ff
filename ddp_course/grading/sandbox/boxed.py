"""How is a stranger's notebook graded? Its cells run in a box; its test cells do not run at all.

Where a test cell stands, the judge is asked, outside of the box, and what he says becomes the cell's output. So nothing
in the box can give points, or see where they are kept. The kernel in the box is talked to through sockets in one of the
box's folders; a reply comes back as a file, which is opened as what it should be and nothing else.

Read next: `outside.py`, the judge; `answer/execute.py`, what happens when a cell kills the kernel.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import stat
import subprocess

import nbformat
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from traitlets import Instance, Unicode

from ddp_course.grading.answer.execute import NOT_JUDGED, SturdyClient, add_error, cell_role
from ddp_course.grading.answer.isolated import NotJudged
from ddp_course.grading.answer.limits import Watch
from ddp_course.grading.exercise import AnswerFailed, Fault, summary
from ddp_course.grading.registry import exercise_of
from ddp_course.grading.sandbox.box import Box
from ddp_course.grading.sandbox.outside import verdicts_on
from ddp_course.grading.sandbox.protocol import MOST_LETTERS

ROUND_S = 200.0  # for one round of a check: ranks that start, and the answer's own limit
MOST_OUTPUT = 200_000  # letters of a cell's output that are kept
SHOWN = ("text/plain", "image/png")  # what a page may have of a stranger's output: nothing that runs in a browser
CASES = 8  # sets of cases that a class has
VERDICTS = "verdicts"  # in the metadata of a test cell that was judged, for `instructor/class_report.py`
SERVE = "__import__('ddp_course.grading.sandbox.inside', fromlist=['serve']).serve({asked!r}, {told!r}, globals())"


class BoxedKernelManager(AsyncKernelManager):
    """Starts its kernel in a box."""

    box = Instance(Box)
    watch: Watch | None = None

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        """Return the command that starts the kernel."""
        return self.box.command(super().format_kernel_cmd(extra_arguments))

    async def _async_launch_kernel(self, kernel_cmd: list[str], **kw) -> None:
        own = {"env": self.box.environment(), "cwd": str(self.box.home)}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        await super()._async_launch_kernel(kernel_cmd, **{**kw, **own, **quiet})
        self.watch = Watch(self.provisioner.process.pid, self.box.folder)


class BoxedClient(SturdyClient):
    """Runs a notebook in a box, and has its test cells judged outside."""

    way = Unicode("", help="How boxes are made: bwrap, unshare, or nothing for no walls.").tag(config=True)
    seed = Unicode("", help="Chooses, with the hand-in, the cases of the checks; a secret of the class.").tag(
        config=True
    )

    def create_kernel_manager(self) -> BoxedKernelManager:
        """Make a box, and the manager of a kernel in it, with sockets in the box's folder."""
        self.box = Box(self.way)
        self._cases = cases_of(self.seed, self.nb)
        self._wire = os.open(self.box.wire, os.O_RDONLY | os.O_DIRECTORY)
        if beside := self.resources.get("metadata", {}).get("path"):  # a learner's own modules
            shutil.copytree(beside, self.box.home, dirs_exist_ok=True, symlinks=True)
        # Not of a class that a setting could replace: then there would be no box.
        self.km = manager = BoxedKernelManager(kernel_name="python3", box=self.box, transport="ipc")
        manager.connection_file, manager.ip = str(self.box.wire / "kernel.json"), str(self.box.wire / "kernel")
        manager.kernel_spec.interrupt_mode = "message"  # its process number is another one in there
        return manager

    async def _async_cleanup_kernel(self) -> None:
        if self.km.watch:
            self.km.watch.stop()
        await super()._async_cleanup_kernel()
        os.close(self._wire)
        self.box.remove()

    _cleanup_kernel = run_sync(_async_cleanup_kernel)  # nbclient's own is bound to its own function

    def _update_display_id(self, *_: object) -> None:
        """Change no output that is there already (called by nbclient): one cell could write another's points."""

    def output(self, outs: list[NotebookNode], msg: dict, *args) -> NotebookNode | None:
        """Keep an output of a cell (called by nbclient): so much of it, and only what a page can show safely."""
        content = msg["content"]
        self._letters += len(content.get("text", "")) + len(str(content.get("data", "")))
        if self._letters > MOST_OUTPUT:
            if self._letters > 100 * MOST_OUTPUT:
                self.km.watch.end("more output than anybody reads")
            return None
        if "data" in content:
            content["data"] = {kind: content["data"][kind] for kind in SHOWN if kind in content["data"]}
            content["metadata"] = {}
        return super().output(outs, msg, *args)

    async def async_execute_cell(self, cell: NotebookNode, cell_index: int, *args, **kwargs) -> NotebookNode:
        """Run one cell, unless it is a visible check: the test cell after it stands for the same, on other values."""
        if cell_role(cell) == "check":
            return cell
        self._letters = 0
        return await super().async_execute_cell(cell, cell_index, *args, **kwargs)

    async def _attempt(self, cell: NotebookNode, cell_index: int, *args, **kwargs) -> str | None:
        try:
            if cell_role(cell) == "test":
                await self._judge(cell, cell_index)
                return None
            lost = await super()._attempt(cell, cell_index, *args, **kwargs)
        except DeadKernelError:
            lost = "the kernel died while this answer was judged"
        return f"ended for using {self.km.watch.reason}" if lost and self.km.watch.reason else lost

    async def _judge(self, cell: NotebookNode, cell_index: int) -> None:
        """Ask the judge, and write what he says as the cell's output."""
        loop = asyncio.get_running_loop()

        def ask(request: bytes) -> str:
            return asyncio.run_coroutine_threadsafe(self._ask(request, cell_index), loop).result()

        exercise = exercise_of(cell.metadata.nbgrader.grade_id)
        try:
            verdicts, text = await asyncio.to_thread(verdicts_on, exercise, ask, self._cases, self.box.scratch)
        except NotJudged as error:
            add_error(cell, NOT_JUDGED, str(error))
            return
        cell.metadata[VERDICTS] = [summary(verdict) for verdict in verdicts]
        data = {"text/plain": str(sum(verdict.points for verdict in verdicts))}
        cell.outputs = [
            nbformat.v4.new_output("stream", text=text + "\n"),
            nbformat.v4.new_output("execute_result", data, execution_count=None),
        ]

    async def _ask(self, request: bytes, cell_index: int) -> str:
        """Have the kernel serve one request, and return the text that it told."""
        asked, told = secrets.token_hex(8), secrets.token_hex(8)
        with open(asked, "wb", opener=lambda name, _: os.open(name, _NEW, 0o600, dir_fd=self._wire)) as file:
            file.write(request)
        source = SERVE.format(asked=str(self.box.wire / asked), told=str(self.box.wire / told))
        cell, kept = nbformat.v4.new_code_cell(source, metadata={"limit_s": ROUND_S}), self.nb.cells[cell_index]
        try:
            await NotebookClient.async_execute_cell(self, cell, cell_index)
        finally:
            self.nb.cells[cell_index] = kept
        return self._told(told, cell)

    def _told(self, name: str, cell: NotebookNode) -> str:
        try:
            with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._wire), "rb") as file:
                facts = os.fstat(file.fileno())
                if stat.S_ISREG(facts.st_mode) and facts.st_size <= MOST_LETTERS:
                    return file.read(MOST_LETTERS).decode()
        except (OSError, UnicodeDecodeError):
            pass
        errors = [f"{out.ename}: {out.evalue}" for out in cell.outputs if out.output_type == "error"]
        raise AnswerFailed(
            Fault("a result", (errors or ["none"])[-1][:300], cause="the kernel could not run the answer")
        )


def cases_of(secret: str, notebook: NotebookNode) -> str:
    """Return the seed of a hand-in, one of CASES: the same file gets the same cases, an improved one mostly others.

    So what the feedback on a first hand-in tells about its cases is seldom of use for a second one; and what the
    answers are compared with runs CASES times for a class, not once for each hand-in.
    """
    texts = json.dumps([cell.source for cell in notebook.cells])
    number = int(hashlib.sha256(f"{secret}/{texts}".encode()).hexdigest(), 16) % CASES
    return hashlib.sha256(f"{secret}/{number}".encode()).hexdigest()


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
