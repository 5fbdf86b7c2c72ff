"""The rules for what a lesson stores: everything was run, everything is compared, nothing is too large."""

import json
import re
from pathlib import Path

import nbformat
import pytest

from tests.notebooks import execute

LESSONS = sorted((execute.ROOT / "notebooks").glob("*.ipynb"))
EXERCISES = sorted((execute.ROOT / "exercises").glob("*/*.ipynb"))
MAX_BYTES = 400 * 1024
MAX_CELL_LINES = 15
MAX_PROGRAM_LINES = 110  # of a cell that writes a whole program
MAX_COLUMNS = 88  # the site shows no more of a line
MAX_UNCOMPARED = 0.20
IGNORED = "nbval-ignore-output"
KNOWN_TAGS = {IGNORED, "raises-exception"}

each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def cells_of(path: Path, kind: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_the_lessons_are_there():
    names = [path.name for path in LESSONS]
    assert {"00_start_here.ipynb", "03_process_groups.ipynb"} <= set(names)
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", name) for name in names)


@each_lesson
def test_every_code_cell_was_run_in_order(path):
    # nbval never compares a cell without a number, and says nothing about it.
    code = cells_of(path, "code")
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(cell.source.strip() for cell in code), "a code cell is empty"
    assert any(cell.outputs for cell in code), "no outputs are stored: make notebooks"


@each_lesson
def test_only_expected_failures_are_stored(path):
    for cell in cells_of(path, "code"):
        raised = any(output.output_type == "error" for output in cell.outputs)
        assert raised == ("raises-exception" in cell.metadata.get("tags", [])), cell.source


@each_lesson
def test_no_tag_or_comment_hides_a_cell_from_nbval(path):
    for cell in cells_of(path, "code"):
        assert set(cell.metadata.get("tags", [])) <= KNOWN_TAGS, cell.source
        assert not re.search(r"#+\s*(NBVAL_|PYTEST_VALIDATE)", cell.source), cell.source


@each_lesson
def test_at_least_80_percent_of_outputs_are_compared_and_the_others_say_why_not(path):
    shown = [cell for cell in cells_of(path, "code") if cell.outputs]
    ignored = [cell for cell in shown if IGNORED in cell.metadata.get("tags", [])]
    assert len(ignored) <= MAX_UNCOMPARED * len(shown)
    for cell in ignored:
        assert cell.metadata.get("reason"), f"give the cell a metadata entry 'reason':\n{cell.source}"


@each_lesson
def test_cells_and_file_are_small(path):
    assert path.stat().st_size < MAX_BYTES
    for cell in cells_of(path, "code"):
        most = MAX_PROGRAM_LINES if cell.source.startswith("%%writefile") else MAX_CELL_LINES
        assert cell.source.count("\n") + 1 <= most, cell.source


@pytest.mark.parametrize("path", LESSONS + EXERCISES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_code_line_is_cut_on_the_site(path):
    wide = [line for cell in cells_of(path, "code") for line in cell.source.splitlines() if len(line) > MAX_COLUMNS]
    assert not wide, "\n".join(wide)


@each_lesson
def test_it_has_a_title_sections_and_a_picture(path):
    text = "\n".join(cell.source for cell in cells_of(path, "markdown"))
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert 3 <= len(re.findall(r"^## ", text, re.MULTILINE)) <= 6
    outputs = [output for cell in cells_of(path, "code") for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no picture"


@each_lesson
def test_every_picture_is_described_in_words(path):
    outputs = [output for cell in cells_of(path, "code") for output in cell.outputs]
    for output in outputs:
        if "image/png" in output.get("data", {}):
            words = output.metadata.get("image/png", {}).get("alt", "")
            assert len(words) >= 60, "no words for a picture: import ddp_course.draw, and make notebooks"


@each_lesson
def test_ids_are_its_own_and_metadata_is_tidy(path):
    raw = json.loads(path.read_text(encoding="utf-8"))
    ids = [cell.get("id") for cell in raw["cells"]]
    assert None not in ids and len(set(ids)) == len(ids)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    tidied = nbformat.from_dict(notebook)
    execute.tidy(tidied)
    assert notebook == tidied, "make notebooks would store it differently"


@pytest.mark.parametrize("page", ["README.md", "notebooks/00_start_here.ipynb"])
def test_the_map_leads_to_every_lesson(page):
    path = execute.ROOT / page
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join(cell.source for cell in cells_of(path, "markdown"))
    rows = re.findall(r"^\| .*?\[.*?([a-z0-9_]+)\]\(([\w/]+\.ipynb)\) \|", text, re.MULTILINE)
    assert [(path.parent / link).resolve() for _, link in rows] == LESSONS
    assert all(Path(link).stem.endswith(f"_{name}") for name, link in rows)
