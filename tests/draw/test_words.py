"""The words for a picture hold its title, its axes with units, its numbers and what is written into it."""

import matplotlib.pyplot as plt
import pytest
from matplotlib_inline import backend_inline

from ddp_course.draw import words


@pytest.fixture
def axes():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_a_line_of_few_points_is_told_whole_and_of_many_its_ends_and_range(axes):
    axes.set(title="The loss falls", xlabel="step", ylabel="loss, nats")
    axes.plot([0, 1, 2], [3.0, 2.5, 1.25], label="two ranks")
    axes.plot(range(100), [abs(50 - n) for n in range(100)], label="one process")
    said = words.described(axes.figure)
    assert said.startswith("The loss falls. Axes: across: step, up: loss, nats.")
    assert 'Line "two ranks": 3, 2.5, 1.25.' in said
    assert 'Line "one process": 100 values, from 50 to 49, between 0 and 50.' in said


def test_a_limit_is_told_by_its_place(axes):
    axes.axvline(72, label="may be filled")
    assert 'Line "may be filled" at 72.' in words.described(axes.figure)


def test_bars_are_told_with_their_names_whichever_way_they_lie(axes):
    axes.barh(["gradients", "statistics"], [45, 0.02], label="MB")
    said = words.described(axes.figure)
    assert 'Bars "MB": 45, 0.02.' in said and "Marked: gradients, statistics." in said


def test_what_is_written_into_a_drawing_is_told_once(axes):
    axes.axis("off")
    for _ in range(2):
        axes.text(0, 0, "rank 1\nwaits")
    assert words.described(axes.figure) == "Written in it: rank 1 waits."


def test_images_of_one_size_are_counted_and_marks_and_powers_left_out(axes):
    for place in range(3):
        axes.imshow([[0, 1]], extent=(place, place + 1, 0, 1))
    axes.plot([1, 1], [0.2, 0.8])  # the end of a step, say
    axes.set_xscale("log")
    axes.figure.canvas.draw()
    assert words.described(axes.figure) == "3 images of 1 by 2 cells."


def test_a_long_story_is_cut(axes):
    axes.text(0, 0, "x" * 5000)
    assert len(words.described(axes.figure)) == words.MOST_LETTERS


def test_a_kernel_stores_the_words_beside_the_picture(axes):
    axes.set_title("A title that stands for many words")
    words.install()  # again: once is enough
    assert backend_inline._fetch_figure_metadata(axes.figure)["image/png"]["alt"] == words.described(axes.figure)
