"""Do the pictures of lesson 12 show who waits for whom?"""

from ddp_course.draw.failures import ALARM, hang
from ddp_course.launcher.lines import Line
from ddp_course.launcher.rank_status import Collective, Whereabouts
from tests.draw.readable import texts_of


def calls(rank: int, n: int, entered: int, op: str = "all_reduce") -> list[Collective]:
    return [
        Collective(i, i, op, "float32", ((4,),), "", tuple(range(n)), i < entered, 1000 * i + rank)
        for i in range(1, entered + 1)
    ]


def hung(n: int, absent: int, at: int, status: str = "running") -> list[Whereabouts]:
    """All ranks wait in collective number `at`, but one."""
    line = Line("train.py", 7, "train", "while rank == 2 and there_is_something_long_to_do(): pass")
    ranks = [Whereabouts(rank, "raised", recent=calls(rank, n, at)) for rank in range(n)]
    ranks[absent] = Whereabouts(absent, status, line=line, recent=calls(absent, n, at)[:-1])
    return ranks


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    pictures = (
        hang(hung(4, 2, 3), 2),
        hang(hung(3, 0, 1), 2.5),
        hang(hung(5, 4, 40, "returned"), 600),
    )
    readable(pictures, most_bytes=105_000)


def test_hang_shows_who_waits_in_what_and_who_never_came():
    figure = hang(hung(4, 2, 3), 2)
    texts = texts_of(figure)
    assert texts.count("all_reduce #3: waits 2 s") == 3
    assert [text for text in texts if text.startswith("never came")] == ["never came: while rank == 2 and ..."]
    inks = [text.get_color() for text in figure.axes[0].texts if text.get_text().startswith("never")]
    assert inks == [ALARM]
    assert texts.count("all_reduce #2") == 4  # that one all of them left


def test_hang_says_in_which_step_a_collective_was_called():
    texts = texts_of(hang(hung(4, 2, 3), 2, steps=[[0, 1, 2], [0, 1, 2], [0, 2, 3], [0, 1, 2]]))
    assert texts.count("all_reduce #2\nin step 1") == 3 and texts.count("all_reduce #2\nin step 2") == 1
    assert texts.count("all_reduce #3: waits 2 s\nin step 2") == 3
    assert "all_reduce #1\nvalidation" in texts_of(
        hang(hung(4, 2, 3), 2, steps=[["validation", 1, 2], *[[0, 1, 2]] * 3])
    )


def test_hang_says_that_a_rank_had_returned_and_shows_the_last_of_many_collectives():
    texts = texts_of(hang(hung(3, 1, 40, "returned"), 2))
    assert "never came: had returned" in texts
    assert "#35" not in " ".join(texts) and texts.count("#39") == 3
