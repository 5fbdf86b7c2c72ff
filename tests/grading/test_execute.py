"""A cell that kills or blocks its kernel costs only itself."""

import nbformat
import pytest

from ddp_course.grading.answer.execute import KERNEL_DIED, NO_SCORE, NOT_RUN, TIMEOUT, SturdyClient, cell_role

MARKS = {
    "setup": {"grade": False, "solution": False, "locked": True},
    "answer": {"grade": False, "solution": True, "locked": False},
    "test": {"grade": True, "solution": False, "locked": True, "points": 1},
}


def cell(role: str, source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(source, metadata={"nbgrader": MARKS[role]} if role in MARKS else {})


def run(cells: list, **settings) -> list[list[str]]:
    """Run the cells; return for each what its outputs say, errors by name."""
    client = SturdyClient(nbformat.v4.new_notebook(cells=cells), kernel_name="python3", **settings)
    client.execute()
    return [[_said(output) for output in c.outputs] for c in client.nb.cells]


def _said(output) -> str:
    if output.output_type == "error":
        return output.ename
    return output.text if output.output_type == "stream" else output.data["text/plain"]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_what_a_cell_breaks_is_mended_before_the_next():
    cells = [
        cell("setup", "x = 1"),
        cell("answer", "import os\nprint('last words', flush=True)\nos._exit(1)"),
        cell("test", "x + 10"),
        cell("free", "y = 2\nwhile True:\n    pass"),
        cell("test", "x + y"),  # what the cell did before its loop stays
        cell("answer", "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    pass"),
        cell("test", "x + 20"),
        cell("answer", "import signal, os\nz = 3\nos.kill(os.getpid(), signal.SIGKILL)"),
        cell("test", "x + z"),
        cell("test", "import sys\nprint('a warning', file=sys.stderr)\nx + 30"),
        cell("test", "x + 40;"),
        cell("answer", "import sys\nsys.exit(3)"),
        cell("test", "x + 50"),
    ]
    said = run(cells, answer_timeout=2, timeout=30)
    # The kernel hands its last words to a thread that sends them; os._exit may be quicker.
    assert said[1] in (["last words\n", KERNEL_DIED], [KERNEL_DIED])
    assert said[2] == ["11"]
    assert said[3] == ["KeyboardInterrupt", TIMEOUT] and said[4] == ["3"]
    assert said[5] == [KERNEL_DIED] and said[6] == ["21"]
    assert said[7] == [KERNEL_DIED] and said[8] == ["NameError"]
    assert (
        said[9] == ["a warning\n", "31"] and cells[9].outputs[0].name == "stdout"
    )  # nbgrader counts stderr as failure
    assert said[10] == [NO_SCORE]  # nbgrader would give full marks
    assert said[11][0] == "SystemExit" and said[12] == ["51"]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_kernel_that_dies_later_is_laid_to_the_learner_not_to_the_test():
    timer = "import threading, os\nthreading.Timer(0.3, lambda: os._exit(3)).start()\na = 1"
    said = run([cell("answer", timer), cell("test", "import time\ntime.sleep(2)\n5"), cell("test", "6")])
    assert said == [[KERNEL_DIED], ["5"], ["6"]]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_whole_notebook_has_a_limit():
    loop = "while True:\n    pass"
    said = run(
        [cell("answer", loop), cell("answer", loop), cell("test", "1")], answer_timeout=60, total_timeout=15
    )  # kernel start included
    assert said[0][-1] == TIMEOUT and said[1] == said[2] == [NOT_RUN]


def test_roles():
    check = cell("setup", "check()")
    check.metadata.tags = ["check"]
    roles = [cell_role(c) for c in (cell("setup", ""), cell("answer", ""), cell("test", ""), cell("free", ""), check)]
    assert roles == ["setup", "answer", "test", "free", "check"]
    assert cell_role(nbformat.v4.new_markdown_cell("words")) == "text"
