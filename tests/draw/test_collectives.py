"""Do the pictures of collectives show what they were given, and stay readable?"""

import pytest
from matplotlib.colors import to_hex

from ddp_course import draw
from ddp_course.draw import style, words
from tests.draw.readable import texts_of


def ring_snapshots(world_size: int) -> list[list[list[int]]]:
    """A ring played without ranks: rank r brings 10^r in every chunk, so a sum names its ranks."""
    held = [[10**rank] * world_size for rank in range(world_size)]
    snapshots = [held]
    for step in range(2 * (world_size - 1)):
        arrived = [list(chunks) for chunks in held]
        for rank in range(world_size):
            left, adding = (rank - 1) % world_size, step < world_size - 1
            chunk = (left - step - (1 if adding else 0)) % world_size
            chunk = chunk if adding else (left - (step - world_size + 1)) % world_size
            arrived[rank][chunk] = held[left][chunk] + (held[rank][chunk] if adding else 0)
        held = arrived
        snapshots.append(held)
    return snapshots


def tree_rounds() -> list[list[tuple[int, int, int]]]:
    up = [[(1, 0, 400), (3, 2, 400)], [(2, 0, 400)]]
    return [*up, [(0, 2, 400)], [(0, 1, 400), (2, 3, 1_600_000)]]


def pictures():
    for world_size in (2, 3, 4, 8):
        values = [[100 * rank + slot for slot in range(world_size)] for rank in range(world_size)]
        nothing = [None] * (world_size - 1)
        yield draw.collective(values, values[::-1], "reduce_scatter")
        yield draw.collective([[7.5]] * world_size, [values[1], *nothing], "gather")
    for world_size in (2, 3, 4):
        yield draw.ring_steps(ring_snapshots(world_size))
    yield draw.message_rounds(tree_rounds(), 4)
    yield draw.message_rounds([[(0, 1, 4)]], 2)


@pytest.mark.slow
def test_no_text_collides_leaves_its_box_or_leaves_the_page_and_pictures_stay_small(readable):
    readable(pictures())


def boxes_of(figure) -> dict[str, list[str]]:
    """The edge colours of boxes, by the text in their middle."""
    found: dict[str, list[str]] = {}
    (ax,) = figure.axes
    for text in ax.texts:
        for shape in ax.patches:
            spot = shape.get_path().get_extents()
            if spot.contains(*text.get_position()):
                found.setdefault(text.get_text(), []).append(to_hex(shape.get_edgecolor()).upper())
    return found


def test_a_value_keeps_the_colour_of_the_rank_that_brought_it_and_a_new_one_is_grey():
    found = boxes_of(draw.collective([[1, 5], [2, 5]], [[1, 2], [3, 5]], "made up"))
    assert found["1"] == [draw.rank_colour(0)] * 2
    assert found["2"] == [draw.rank_colour(1)] * 2
    assert found["3"] == [style.SHARED]
    assert found["5"] == [style.SHARED] * 3  # two ranks brought it, so it names neither


def test_a_rank_without_values_is_shown_as_such():
    texts = texts_of(draw.collective([[1], [2]], [[1, 2], None], "gather"))
    assert texts.count("nothing") == 1 and texts.count("gather") == 1


def test_the_ring_marks_what_just_arrived_and_what_is_complete():
    figure = draw.ring_steps(ring_snapshots(3))
    titles = [text for text in texts_of(figure) if "step " in text and ":" in text or text == "before"]
    assert titles == ["before", "step 1: add", "step 2: add", "step 3: copy", "step 4: copy"]
    found = boxes_of(figure)
    assert len(found["111"]) == 3 * (1 + 2 + 3)  # a complete chunk each, then two, then all three
    senders = {draw.rank_colour(rank).upper() for rank in range(3)}
    thick = [shape for shape in figure.axes[0].patches if shape.get_linewidth() > 2]
    assert len(thick) == 4 * 3  # in every step one chunk arrives on each rank
    assert {to_hex(shape.get_edgecolor()).upper() for shape in thick} == senders


def test_a_ring_with_a_step_missing_or_too_many_ranks_is_refused():
    with pytest.raises(ValueError, match=r"3 ranks take 2\(W-1\) = 4 steps; found 3"):
        draw.ring_steps(ring_snapshots(3)[:-1])
    with pytest.raises(ValueError, match="5 ranks: the picture has room for 2 to 4"):
        draw.ring_steps(ring_snapshots(5))


def test_rounds_count_their_messages_and_bytes():
    figure = draw.message_rounds(tree_rounds(), 4)
    title, *texts = texts_of(figure)
    assert title == "4 ranks need 4 rounds and 6 messages"
    assert words.described(figure).startswith(f"{title}. Round 1, 2 messages of 400 B: ")
    assert [text for text in texts if "message" in text] == [
        "2 messages of 400 B",
        "1 message of 400 B",
        "1 message of 400 B",
        "2 messages of 400 to 1,600,000 B",
    ]


def test_a_picture_of_a_collective_says_what_each_rank_held():
    said = words.described(draw.collective([[10, 11], None], [[10], [11]], "scatter"))
    told = "scatter: each gets its part. scatter. Before: rank 0 has 10, 11; rank 1 has nothing."
    assert said == f"{told} After: rank 0 has 10; rank 1 has 11."
    times = draw.collective([[0.1]], [["0.3"]], "barrier", ("comes at (s)", "leaves at (s)"))
    assert "Comes at (s): rank 0 has 0.1. Leaves at (s): rank 0 has 0.3." in words.described(times)
