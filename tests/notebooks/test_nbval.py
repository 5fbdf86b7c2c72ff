"""Does comparing the stored outputs find what it should? nbval is given lessons that were tampered with."""

import copy
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import islice
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from tests.notebooks import execute

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

SOURCES = [
    "import matplotlib.pyplot as plt\nprint('printed 5')",
    "{'returned': 5}",
    "plt.figure(figsize=(2, 2))\nplt.show()",
    "raise ValueError('raised 5')",
    "from IPython.display import HTML\nHTML('<b>shown 5</b>')",
    "import warnings\nwarnings.warn('warned 5')",
    "silent = 5",
]


STORED_AND_NEW = [  # what is printed on two machines, and whether that is a difference
    ("<function f at 0x7f01aa02bb90>", "<function f at 0x7fffaa02bb00>", False),
    ("took 1.25 s", "took 31.04 s", False),
    ("a limit of 5 s", "a limit of 6 s", True),
    ("2026-01-02 10:11:12", "2027-10-12 01:02:03", False),
    ("tcp://127.0.0.1:41234", "tcp://127.0.0.1:9", False),
    ("port 41234", "port 5", False),
    ("pid 311", "pid 4", False),
    ("4 ranks on cpu, gloo", "4 ranks on cuda, nccl", False),
    ("4 ranks on cpu, gloo", "2 ranks on cpu, gloo", True),
    ("tensor([6.])", "tensor([6.], device='cuda:0')", False),
    ("tensor([6.])", "tensor([7.])", True),
    ("loss 0.251", "loss 0.252", True),
]
LESSON = execute.ROOT / "notebooks" / "03_process_groups.ipynb"


def tamper(outputs: list[NotebookNode]) -> None:
    """Change the first of a cell's outputs in one place that a reader would see."""
    output = outputs[0]
    if output.output_type == "stream":
        output.text = output.text.replace("5", "6") if "5" in output.text else output.text + "more\n"
    elif output.output_type == "error":
        output.evalue += " more"
    else:
        kind = next(kind for kind in output.data if kind != "image/png")
        output.data[kind] = output.data[kind] + " more"


def small_lesson(folder: Path) -> list[NotebookNode]:
    """Return cells with an output of each kind, as `make notebooks` stores them."""
    cells = [new_code_cell(source) for source in SOURCES]
    cells[3].metadata.tags = ["raises-exception"]
    path = folder / "stored.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    assert execute.main([str(path)]) == 0
    return execute.read(path).cells


def printed_elsewhere() -> list[NotebookNode]:
    cells = []
    for stored, new, _ in STORED_AND_NEW:
        shown = nbformat.from_dict({"output_type": "stream", "name": "stdout", "text": stored + "\n"})
        cells.append(new_code_cell(f"print({new!r})", execution_count=1, outputs=[shown]))
    return cells


def compared(notebook: NotebookNode) -> dict[int, NotebookNode]:
    """Return the cells whose outputs nbval compares, by their number among the code cells."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {
        number: cell
        for number, cell in enumerate(code)
        if cell.outputs and "nbval-ignore-output" not in cell.metadata.get("tags", [])
    }


def run_nbval(*paths: Path) -> list[bool]:
    """Run nbval as `make test` does; return for each code cell whether it failed."""
    report = paths[0].with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-c", "pyproject.toml", "--rootdir", "."]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", *map(str, paths)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        command, cwd=execute.ROOT, env=environment, capture_output=True, text=True, timeout=260, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return [case.find("failure") is not None for case in ElementTree.parse(report).iter("testcase")]


def test_what_was_changed_fails_in_exactly_its_cell(tmp_path):
    """One run for all: starting kernels is what costs."""
    cells, lesson = small_lesson(tmp_path), execute.read(LESSON)
    untouched, tampered, missing, extra, numberless = (copy.deepcopy(cells) for _ in range(5))
    for cell in (*tampered[:-1], *compared(lesson).values()):
        tamper(cell.outputs)
    missing[0].outputs = []
    extra[6].outputs = cells[0].outputs
    numberless[0].update(outputs=[], execution_count=None)
    parts = {
        "untouched": (untouched, []),
        "tampered": (tampered, [0, 1, 2, 3, 4, 5]),
        "missing": (missing, [0]),
        "extra": (extra, [6]),
        # nbval's way: it is why test_lessons.py asks for a number on every code cell.
        "numberless": (numberless, []),
        "elsewhere": (printed_elsewhere(), [n for n, (_, _, differs) in enumerate(STORED_AND_NEW) if differs]),
    }
    small = [cell for cells, _ in parts.values() for cell in cells]
    for number, cell in enumerate(small):
        cell.id = f"cell{number}"
    nbformat.write(new_notebook(metadata=execute.METADATA, cells=small), tmp_path / "small.ipynb")
    nbformat.write(lesson, tmp_path / "lesson.ipynb")

    failed = iter(run_nbval(tmp_path / "small.ipynb", tmp_path / "lesson.ipynb"))
    for part, (cells, expected) in parts.items():
        found = [number for number, failure in enumerate(islice(failed, len(cells))) if failure]
        assert found == expected, part
    assert [number for number, failure in enumerate(failed) if failure] == list(compared(lesson))
    assert len(compared(lesson)) > 5
