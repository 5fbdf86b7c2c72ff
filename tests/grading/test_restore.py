"""Of a submission the answers and the added cells are taken; everything else is as it was released."""

import copy
from html.parser import HTMLParser

import nbformat
import pytest
from nbconvert.filters import markdown2html

from ddp_course.grading.instructor.restore import read, restored, unreadable
from tests.grading.submissions import cell_of, filled, released, solutions

ANSWER = "ex-03-1-answer"


def release() -> nbformat.NotebookNode:
    return nbformat.read(released("03"), as_version=4)


def sources(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.fixture
def submitted() -> nbformat.NotebookNode:
    return filled("03", solutions("03"))


def test_an_honest_notebook_is_as_it_was(submitted):
    assert sources(restored(release(), copy.deepcopy(submitted))) == sources(submitted)


def test_what_is_not_the_learners_is_put_back(submitted):
    changed = copy.deepcopy(submitted)
    cell_of(changed, "ex-03-1-text").source = "<script>alert(1)</script>"
    cell_of(changed, "ex-03-1-test").cell_type = "markdown"
    cell_of(changed, "ex-03-2-test").source = "5"
    cell_of(changed, "ex-03-2-test").metadata.nbgrader.points = 500
    cell_of(changed, "setup").source = "check = lambda *_, **__: 5"
    changed.cells.remove(cell_of(changed, "ex-03-3-test"))
    changed.cells.append(copy.deepcopy(cell_of(changed, "ex-03-2-test")))
    changed.cells.append(nbformat.v4.new_markdown_cell("<img src=x onerror=alert(1)>"))
    changed.metadata.kernelspec = {"name": "mine", "display_name": "mine"}
    found = restored(release(), changed)
    assert sources(found) == sources(submitted) and found.metadata == release().metadata
    assert cell_of(found, "ex-03-2-test").metadata.nbgrader.points == 5


def test_an_answer_cell_of_another_type_is_an_answer(submitted):
    changed = copy.deepcopy(submitted)
    cell_of(changed, ANSWER).cell_type = "raw"
    assert sources(restored(release(), changed)) == sources(submitted)


WORDS = [
    "<script>alert(1)</script> and <img src=x onerror=alert(1)>",
    "[a](javascript:alert(1)) ![b](https://example.org/seen.png) $\\href{javascript:alert(1)}{x}$",
    "```\n\n````\n<script>alert(1)</script>\n`````\n<b>out?</b>\n~~~\n<i>out?</i>",
    "    four spaces\n\n<!-- --><svg onload=alert(1)>\n" + "long " * 300,
]


@pytest.mark.parametrize("words", WORDS, ids=["html", "links", "fences", "spaces"])
def test_an_answer_in_words_is_shown_as_it_is_and_nothing_of_it_runs(submitted, words):
    cell_of(submitted, "ex-03-question").source = words
    found = cell_of(restored(release(), submitted), "ex-03-question")
    page = HTMLParts(markdown2html(found.source))
    assert page.tags <= {"div", "pre", "span", "code"} and page.attributes <= {"class"}
    assert "".join(page.text.split()) == "".join(words.split())
    assert max(map(len, found.source.splitlines())) <= 101


def test_an_answer_in_words_that_is_not_there_is_the_released_one(submitted):
    untouched = cell_of(release(), "ex-03-question").source
    submitted.cells.remove(cell_of(submitted, "ex-03-question"))
    assert cell_of(restored(release(), submitted), "ex-03-question").source == untouched
    assert cell_of(restored(release(), filled("03", {})), "ex-03-question").source == untouched


class HTMLParts(HTMLParser):
    """The tags of a page, the names of their attributes, and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def test_an_answer_that_lost_its_name_runs_where_it_stands(submitted):
    changed = copy.deepcopy(submitted)
    answer = cell_of(changed, ANSWER)
    answer.metadata = {}
    cells = restored(release(), changed).cells
    place = next(i for i, cell in enumerate(cells) if cell.source == answer.source)
    assert cells[place - 1].metadata.nbgrader.grade_id == "ex-03-1-text"
    assert cell_of(restored(release(), changed), ANSWER).source == ""


def test_added_cells_and_a_second_answer_stand_after_what_they_stood_after(submitted):
    changed = copy.deepcopy(submitted)
    place = changed.cells.index(cell_of(changed, ANSWER))
    again = copy.deepcopy(changed.cells[place])
    again.source = "def place(environ, gpus): ..."
    changed.cells[place + 1 : place + 1] = [nbformat.v4.new_code_cell("helper = 1"), again]
    changed.cells.insert(0, nbformat.v4.new_code_cell("first = 1"))
    found = sources(restored(release(), changed))
    assert found[0] == ("code", "first = 1")
    place = found.index(("code", solutions("03")["03.1"]))
    assert found[place + 1 : place + 3] == [("code", "helper = 1"), ("code", again.source)]


@pytest.mark.parametrize("marks", [None, 3, [], {"grade_id": 5}, {"grade_id": ["x"]}], ids=str)
def test_odd_metadata_harm_nobody(submitted, marks):
    changed = copy.deepcopy(submitted)
    changed.cells[0].metadata["nbgrader"] = marks
    assert sources(restored(release(), changed)) == sources(submitted)


def test_a_byte_order_mark_is_read_over(tmp_path, submitted):
    path = tmp_path / "03.ipynb"
    path.write_text("\ufeff" + nbformat.writes(submitted), encoding="utf-8")
    assert unreadable(path) == "" and sources(read(path)) == sources(submitted)


@pytest.mark.parametrize("link", ["ada/03", "ada", "ada/03/03.ipynb"])
def test_a_link_is_not_followed(tmp_path, submitted, link):
    theirs = tmp_path / "real" / "ada" / "03"
    theirs.mkdir(parents=True)
    (theirs / "03.ipynb").write_text(nbformat.writes(submitted))
    place = tmp_path / link
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(tmp_path / "real" / link)
    assert "is a link" in unreadable(tmp_path / "ada" / "03" / "03.ipynb")
