"""Each program is plain PyTorch, fits a cell, and is the very text that a lesson writes."""

import json

import pytest

from tests.programs.running import PROGRAMS, ROOT

SPAWN = "ddp_spawn.py"  # the README names it, and no lesson
CELLS = [
    "".join(cell["source"])
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    for cell in json.loads(path.read_text("utf-8"))["cells"]
]


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.name)
def test_a_program_is_plain_and_the_lesson_writes_it(path):
    source = path.read_text()
    assert len(source.splitlines()) < 110 and "ddp_course" not in source
    written = [cell.partition("\n")[2] for cell in CELLS if cell.startswith(f"%%writefile {path.name}\n")]
    assert written == ([] if path.name == SPAWN else [source.rstrip("\n")])
