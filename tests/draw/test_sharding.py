"""The picture of owners shows the rank of each cell, grey for all ranks, and no text collides."""

from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from ddp_course import draw
from ddp_course.draw.style import FAINT, PAPER
from tests.draw.readable import texts_of

HIDDEN = [0] * 6 + [1] * 6
PAIR = {
    "x": ("sample", "input", [["all"] * 8] * 5),
    "A": ("input", "hidden unit", [HIDDEN] * 8),
    "f(xA)": ("sample", "hidden unit", [HIDDEN] * 5),
    "B": ("hidden unit", "output", [[rank] * 3 for rank in HIDDEN]),
    "y": ("sample", "output", [["all"] * 3] * 5),
}
CAUSAL = [[query // 4] * (query + 1) + [None] * (7 - query) for query in range(8)]


def test_matrices_of_different_sizes_stand_side_by_side(readable):
    readable([draw.owners(PAIR, "Each rank has half"), draw.owners({"10 and 26": ("query", "key", CAUSAL)}, "Causal")])


def test_a_cell_has_its_rank_and_is_grey_or_white_where_it_belongs_to_all_or_to_none():
    figure = draw.owners({"one": ("row", "column", [[0, 1, "all"], [None, 1, 1]])}, "What is seen")
    faces = [to_hex(patch.get_facecolor()) for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert [face in (to_hex(FAINT), to_hex(PAPER)) for face in faces] == [False, False, True, True, False, False]
    assert (faces[2], faces[3]) == (to_hex(FAINT), to_hex(PAPER)) and faces[1] == faces[4] != faces[0]
    assert sorted(text for text in texts_of(figure) if text.isdigit()) == ["0", "1", "1", "1"]
    assert figure.axes[0].get_title("left") == "What is seen"


def test_grey_is_explained_where_it_occurs():
    assert any("grey" in text for text in texts_of(draw.owners(PAIR, "")))
    assert not any("grey" in text for text in texts_of(draw.owners({"a": ("row", "column", [[0, None]])}, "")))
