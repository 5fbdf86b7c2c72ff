"""How do the stored outputs of the lessons come about?

Each lesson is run in a kernel of its own, cell by cell, the way nbval runs it when it compares; then it is
made tidy, so that a second run changes nothing but measured times. A lesson with a cell that failed
unexpectedly is not saved. Run it with `make notebooks`, or on chosen lessons:

    .venv/bin/python tests/notebooks/execute.py notebooks/03_*.ipynb

Next: test_lessons.py holds the rules for what is stored, sanitize.cfg what is not compared.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path

import nbformat
import oxipng
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal

ROOT = Path(__file__).parents[2]
CELL_LIMIT_S = 120
EXPECTED_TO_RAISE = "raises-exception"
KEPT_CELL_METADATA = ("tags", "reason")
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read(path: Path) -> nbformat.NotebookNode:
    """Read a notebook; cells without an id of their own get one that depends on their text alone."""
    content = json.loads(path.read_text(encoding="utf-8"))
    taken: set[str] = set()
    for cell in content["cells"]:
        cell["id"] = _stable_id(cell, taken)
        taken.add(cell["id"])
    content["nbformat"], content["nbformat_minor"] = 4, 5
    return nbformat.reads(json.dumps(content), as_version=4)


def _stable_id(cell: dict, taken: set[str]) -> str:
    own = cell.get("id", "")
    if re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", own) and own not in taken:
        return own
    derived = hashlib.sha256("".join(cell["source"]).encode()).hexdigest()[:8]
    repeats = (f"{derived}-{n}" for n in range(2, len(taken) + 3))
    return derived if derived not in taken else next(i for i in repeats if i not in taken)


def run(notebook: nbformat.NotebookNode, folder: Path, limit_s: float = CELL_LIMIT_S) -> None:
    """Run every code cell in a new kernel working in `folder`, and store its outputs in the notebook.

    Raises:
        RuntimeError: a cell failed, was not done within `limit_s`, or did not raise although it is tagged
            `raises-exception`; names the cell.
    """
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=limit_s,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    # As under nbval: there, the kernel does not see what other processes write to its file descriptors.
    with client.setup_kernel(env={**os.environ, "PYTEST_CURRENT_TEST": "make notebooks"}):
        count = 0
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "code":
                count += 1
                _run_cell(client, cell, index, count)


def _run_cell(client: NotebookClient, cell: nbformat.NotebookNode, index: int, count: int) -> None:
    # nbval keeps no history, so neither does this. Tracebacks should name the cell's number all the same.
    client.kc.execute(f"get_ipython().execution_count = {count}", silent=True, store_history=False)
    started = time.monotonic()
    try:
        client.execute_cell(cell, index, execution_count=count, store_history=False)
    except (CellControlSignal, RuntimeError) as error:
        seconds = time.monotonic() - started
        raise RuntimeError(f"cell [{count}] failed after {seconds:.0f} s:\n{cell.source}\n\n{error}") from error
    raised = any(output.output_type == "error" for output in cell.outputs)
    if not raised and EXPECTED_TO_RAISE in cell.metadata.get("tags", []):
        raise RuntimeError(f"cell [{count}] is tagged {EXPECTED_TO_RAISE}, but raised nothing:\n{cell.source}")


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Remove whatever would differ between machines, or between two runs, and says nothing."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for count, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), start=1):
        cell.outputs = _merge_streams(cell.outputs)
        cell.execution_count = count if cell.execution_count else None
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = cell.execution_count
            if "metadata" in output:
                picture = output.metadata.get("image/png", {})
                output.metadata = nbformat.from_dict({"image/png": {"alt": picture["alt"]}} if "alt" in picture else {})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in KEPT_CELL_METADATA})


def _packed(picture: str) -> str:
    """Return the same pixels in fewer bytes."""
    return base64.b64encode(oxipng.optimize_from_memory(base64.b64decode(picture), level=2)).decode()


def _merge_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    merged: list[nbformat.NotebookNode] = []
    for output in outputs:
        before = merged[-1] if merged else None
        if before and output.output_type == "stream" == before.output_type and output.name == before.name:
            before.text += output.text
        else:
            merged.append(output)
    for output in merged:
        if output.output_type == "stream":
            # A progress bar returns to the start of its line: keep what was left to be seen.
            output.text = re.sub(r"^.*\r(?=[^\n])", "", output.text, flags=re.MULTILINE)
    return merged


def refresh(path: Path) -> str:
    """Run one lesson and save it; returns a line that says how long it took and how large it is."""
    notebook = read(path)
    started = time.monotonic()
    run(notebook, path.parent)
    seconds = time.monotonic() - started
    tidy(notebook)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = _packed(output.data["image/png"])
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    return f"{path.name:40} {seconds:6.1f} s {path.stat().st_size / 1024:6.0f} KB"


def main(names: list[str]) -> int:
    paths = [Path(name) for name in names] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    failed = 0
    for path in paths:
        try:
            print(refresh(path), flush=True)
        except RuntimeError as error:
            failed += 1
            print(f"{path.name}: not saved; {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
