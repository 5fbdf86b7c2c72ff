"""The core as a book: it reads from first to last, and is short enough to be read."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from core import CHAPTERS, chapter  # noqa: E402

FILES = [source for sources, _ in CHAPTERS.values() for source in sources]


def imported(source: str) -> set[str]:
    """The course's own files that a file imports, as `CHAPTERS` names them."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"ddp_course/{source}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_course"):
            module = node.module.removeprefix("ddp_course").removeprefix(".").replace(".", "/")
            inner = [f"{module}/{each.name}" for each in node.names]
            found |= {name if (ROOT / f"ddp_course/{name}.py").exists() else module for name in inner}
    return found


@pytest.mark.parametrize("source", FILES)
def test_a_file_imports_only_what_stands_before_it(source):
    assert imported(source) <= set(FILES[: FILES.index(source)])


def test_the_order_is_that_of_read_next():
    for source, after in zip(FILES, FILES[1:], strict=False):
        said = ast.get_docstring(ast.parse((ROOT / f"ddp_course/{source}.py").read_text())).partition("Read next:")[2]
        assert f"{after.rpartition('/')[2]}.py" in said, f"{source}.py does not lead to {after}.py"


def test_ten_chapters_that_can_be_read_in_a_day():
    lines = [len((ROOT / f"ddp_course/{source}.py").read_text().splitlines()) for source in FILES]
    assert len(CHAPTERS) == 10 and sum(lines) <= 2400


def test_a_chapter_has_the_question_the_code_and_the_proofs():
    page = chapter("Buckets")
    assert "parallel/bucketing.py: Which gradients travel together, and in which order?" in page
    assert "literalinclude} ../../../ddp_course/parallel/grad_bucket.py" in page
    assert "\n- " in page.partition("What the tests prove")[2]
