"""Do the pictures of lesson 10 show the numbers they were given, and stay readable?"""

from matplotlib.patches import FancyArrowPatch

from ddp_course.draw.checkpointing import ALARM, NEW, landings, resume_differences, write_kills
from tests.draw.readable import texts_of

PLAIN = [(n / 20, "torn") for n in range(20)] + [(1.0, "new"), (0.0, "old")]
SEALED = [(n / 20, "old") for n in range(20)] + [(1.0, "old"), (2.0, "old"), (3.0, "new"), (4.0, "new")]
DIFFERENCES = {"nothing": 0.0, "optimizer": 0.02, "generators": 1.5e-3, "sampler position": 0.3}


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    pictures = (
        write_kills(PLAIN, SEALED),
        write_kills([(0.5, "torn")] * 12, [(0.5, "old")] * 12),
        landings(["cuda:0"] * 4, "1.2 GB"),
        landings(["cuda:0"] * 2, "400 MB"),
        resume_differences(DIFFERENCES),
        resume_differences({"nothing": 0.0}),
    )
    readable(pictures)


def test_write_kills_marks_each_kill_by_its_outcome_and_counts_them():
    figure = write_kills(PLAIN, SEALED)
    texts = texts_of(figure)
    assert "22 kills: 1 old, 1 new, 20 torn" in texts and "24 kills: 22 old, 2 new" in texts
    assert "write into last.pt" in texts and "write into .last.pt.unfinished" in texts
    marks = [line.get_marker() for line in figure.axes[0].lines]
    assert [marks.count(mark) for mark in "osX"] == [23 + 1, 3 + 1, 20 + 1]  # and one each in the legend
    assert figure.axes[0].says.startswith("torch.save to the final name: 22 kills: 1 old, 1 new, 20 torn.")
    assert "nothing: torn" not in texts_of(write_kills([(0.5, "old")], [(0.5, "old")]))


def test_a_kill_after_the_rename_stands_right_of_the_rename():
    ax = write_kills([], [(1.0, "old"), (2.0, "old"), (3.0, "new"), (4.0, "new")]).axes[0]
    places = [line.get_xdata()[0] for line in ax.lines if line.get_marker() in "os" and line.get_markersize() == 8]
    rename = next(box for box in ax.texts if box.get_text() == "rename").get_position()[0]
    assert places[-4:] == sorted(places[-4:]) and places[-3] < rename < places[-2]


def test_landings_counts_the_copies_on_each_gpu_and_points_there():
    figure = landings(["cuda:0", "cuda:0", "cuda:2"], "1 GB")
    texts = texts_of(figure)
    assert [texts.count(text) for text in ("2 x\n1 GB", "1 x\n1 GB", "no copy")] == [1, 1 + 3, 1]
    arrows = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) == 6


def test_resume_differences_draws_what_it_is_given():
    ax = resume_differences(DIFFERENCES).axes[0]
    bars = [line for line in ax.lines if line.get_linewidth() == 9]
    assert [float(bar.get_xdata()[1]) for bar in bars[1:]] == [0.02, 1.5e-3, 0.3]
    assert [bar.get_color() for bar in bars] == [NEW, ALARM, ALARM, ALARM]
    assert "0, every bit is the same" in [text.get_text() for text in ax.texts]
