"""`make notebooks`: what it stores is what nbval will see, and no failed lesson is saved."""

import json
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.notebooks import execute

pytestmark = pytest.mark.timeout(120)


def write(path: Path, *cells: nbformat.NotebookNode) -> Path:
    nbformat.write(new_notebook(cells=list(cells)), path)
    return path


def test_an_id_is_kept_and_a_missing_or_repeated_one_depends_on_the_text(tmp_path):
    cells = [{"id": "same", "source": text} for text in ("1", "2", "2", "2")]
    cells = [{"cell_type": "markdown", "metadata": {}, **cell} for cell in cells]
    del cells[1]["id"]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}))
    ids = [cell.id for cell in execute.read(path).cells]
    assert ids[0] == "same"
    assert ids[2:] == [f"{ids[1]}-2", f"{ids[1]}-3"]
    assert ids == [cell.id for cell in execute.read(path).cells]


def test_tidy_merges_neighbouring_streams_and_keeps_the_end_of_a_progress_line():
    def stream(text, name="stdout"):
        return {"output_type": "stream", "name": name, "text": text}

    shown = {"output_type": "display_data", "data": {"text/plain": "x"}, "metadata": {"isolated": True}}
    outputs = [stream("a\n"), stream("b\n"), shown, stream("c"), stream(" 10%\r 99%\rdone\n", "stderr")]
    cell = new_code_cell("...", execution_count=7, outputs=[nbformat.from_dict(o) for o in outputs])
    cell.metadata = nbformat.from_dict({"collapsed": True, "tags": ["t"], "reason": "r"})
    notebook = new_notebook(cells=[new_markdown_cell("# T"), cell], metadata={"widgets": {}})
    execute.tidy(notebook)
    texts = [o.get("text", o.get("data")) for o in cell.outputs]
    assert texts == ["a\nb\n", {"text/plain": "x"}, "c", "done\n"]
    assert cell.outputs[1].metadata == {}
    assert (cell.execution_count, cell.metadata) == (1, {"tags": ["t"], "reason": "r"})
    assert notebook.metadata == execute.METADATA


@pytest.mark.slow
def test_outputs_are_stored_as_nbval_sees_them_and_a_second_run_changes_no_byte(tmp_path, capsys):
    cells = [
        new_code_cell("import os, subprocess\nprint('one')\nprint('two')"),
        # A child's own writes, and a result before a semicolon: JupyterLab and nbval differ on both.
        new_code_cell("subprocess.run(['echo', 'from a child'], check=True)\n6 * 7;"),
        new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]}),
        new_code_cell("x = 1"),
    ]
    path = write(tmp_path / "a.ipynb", *cells)
    assert execute.main([str(path)]) == 0
    first = path.read_bytes()
    assert execute.main([str(path)]) == 0
    assert path.read_bytes() == first
    stored = execute.read(path).cells
    assert [cell.execution_count for cell in stored] == [1, 2, 3, 4]
    assert stored[0].outputs[0].text == "one\ntwo\n"
    assert [output.data for output in stored[1].outputs] == [{"text/plain": "42"}]
    assert stored[2].outputs[0].evalue == "division by zero"
    assert "In[3]" in "".join(stored[2].outputs[0].traceback)
    assert stored[3].outputs == []
    assert "a.ipynb" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "tags", "found"),
    [
        ("1 / 0", [], "ZeroDivisionError"),
        ("1 / 1", ["raises-exception"], "raised nothing"),
        ("import os; os._exit(3)", [], "Kernel died"),
    ],
)
def test_a_failed_lesson_is_not_saved_and_its_cell_is_named(tmp_path, capsys, source, tags, found):
    path = write(tmp_path / "a.ipynb", new_code_cell("1"), new_code_cell(source, metadata={"tags": tags}))
    before = path.read_bytes()
    assert execute.main([str(path)]) == 1
    assert path.read_bytes() == before
    said = capsys.readouterr().err
    assert "cell [2]" in said and found in said


@pytest.mark.slow
def test_a_cell_that_never_ends_is_stopped_at_its_limit(tmp_path):
    notebook = new_notebook(cells=[new_code_cell("while True: pass")])
    with pytest.raises(RuntimeError, match=r"cell \[1\] failed after \d s"):
        execute.run(notebook, tmp_path, limit_s=3)
