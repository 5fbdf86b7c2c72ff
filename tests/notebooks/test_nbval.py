"""Does comparing the stored outputs find what it should? nbval is given lessons that were tampered with."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nbformat
import pytest
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


def failed_cells(path: Path) -> list[int]:
    """Run nbval as `make test` does; returns the numbers of the cells that fail, counted from 0."""
    report = path.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-c", "pyproject.toml", "--rootdir", "."]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", str(path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        command, cwd=execute.ROOT, env=environment, capture_output=True, text=True, timeout=260, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert cases, done.stdout
    return [number for number, case in enumerate(cases) if case.find("failure") is not None]


def tamper(outputs: list[nbformat.NotebookNode]) -> None:
    """Change the first of a cell's outputs in one place that a reader would see."""
    output = outputs[0]
    if output.output_type == "stream":
        output.text = output.text.replace("5", "6") if "5" in output.text else output.text + "more\n"
    elif output.output_type == "error":
        output.evalue += " more"
    else:
        kind = next(kind for kind in output.data if kind != "image/png")
        output.data[kind] = output.data[kind] + " more"


@pytest.fixture(scope="module")
def small_lesson(tmp_path_factory) -> Path:
    cells = [new_code_cell(source) for source in SOURCES]
    cells[3].metadata.tags = ["raises-exception"]
    path = tmp_path_factory.mktemp("small") / "lesson.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    assert execute.main([str(path)]) == 0
    return path


def test_an_untouched_lesson_passes(small_lesson):
    assert failed_cells(small_lesson) == []


def test_every_kind_of_output_is_compared(small_lesson, tmp_path):
    notebook = execute.read(small_lesson)
    for cell in notebook.cells[:-1]:
        tamper(cell.outputs)
    nbformat.write(notebook, tmp_path / "lesson.ipynb")
    assert failed_cells(tmp_path / "lesson.ipynb") == [0, 1, 2, 3, 4, 5]


def test_a_missing_and_an_extra_output_are_found(small_lesson, tmp_path):
    notebook = execute.read(small_lesson)
    notebook.cells[6].outputs = notebook.cells[0].outputs
    notebook.cells[0].outputs = []
    nbformat.write(notebook, tmp_path / "lesson.ipynb")
    assert failed_cells(tmp_path / "lesson.ipynb") == [0, 6]


def test_a_cell_without_a_number_is_never_compared(small_lesson, tmp_path):
    # nbval's way: it is why test_lessons.py asks for a number on every code cell.
    notebook = execute.read(small_lesson)
    notebook.cells[0].update(outputs=[], execution_count=None)
    nbformat.write(notebook, tmp_path / "lesson.ipynb")
    assert failed_cells(tmp_path / "lesson.ipynb") == []


def test_what_differs_between_machines_is_not_compared_and_all_else_is(tmp_path):
    stored_and_new = [
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
    cells = []
    for stored, new, _ in stored_and_new:
        shown = nbformat.from_dict({"output_type": "stream", "name": "stdout", "text": stored + "\n"})
        cells.append(new_code_cell(f"print({new!r})", execution_count=1, outputs=[shown]))
    nbformat.write(new_notebook(cells=cells, metadata=execute.METADATA), tmp_path / "lesson.ipynb")
    expected = [number for number, (_, _, differs) in enumerate(stored_and_new) if differs]
    assert failed_cells(tmp_path / "lesson.ipynb") == expected


def test_changing_any_stored_output_of_a_lesson_fails_in_exactly_that_cell(tmp_path):
    lesson = execute.ROOT / "notebooks" / "03_process_groups.ipynb"
    notebook = execute.read(lesson)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    compared = [
        number
        for number, cell in enumerate(code)
        if cell.outputs and "nbval-ignore-output" not in cell.metadata.get("tags", [])
    ]
    assert len(compared) > 5
    for number in compared:
        tamper(code[number].outputs)
    nbformat.write(notebook, tmp_path / lesson.name)
    assert failed_cells(tmp_path / lesson.name) == compared
