"""Do the pictures of lesson 09 show the numbers they were given, and stay readable?"""

from ddp_course.draw.metrics import mean_weights, own_losses, sums_and_counts
from tests.draw.readable import texts_of


def pictures():
    for world_size in (1, 2, 4, 8):
        totals = [154.8836 + rank for rank in range(world_size)]
        rows = [450 - rank for rank in range(world_size)]
        yield sums_and_counts(totals, rows, sum(totals) / sum(rows))
        yield sums_and_counts(totals, rows, 0.25)
        yield own_losses([[2.0, 0.5, 0.1]] * world_size, [2.0, 0.6, 0.05])
    yield mean_weights([0.3651, 0.1898, 0.0084], [64, 64, 2])
    yield mean_weights([0.3, 0.2], [2, 3])


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    readable(pictures())


def test_mean_weights_draws_parts_as_wide_as_their_rows_and_then_all_alike():
    left, right = mean_weights([4.0, 7.0], [4, 1]).axes
    assert [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in left.patches] == [(0, 4, 4.0), (4, 1, 7.0)]
    assert [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in right.patches] == [(0, 1, 4.0), (1, 1, 7.0)]
    assert [ax.lines[0].get_ydata()[0] for ax in (left, right)] == [4.6, 5.5]
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["1", "2\n1 sample"]
    assert [ax.get_title() for ax in (left, right)] == ["by samples: 4.6000", "mean of means: 5.5000"]


def test_sums_and_counts_divides_once_and_tells_when_the_ranks_got_something_else():
    texts = texts_of(sums_and_counts([16.0, 7.0, 0.0], [4, 1, 0], 4.6))
    assert "23      5 samples" in texts and "23 / 5 = 4.6, on every rank" in texts
    assert [text for text in texts if "mean" in text] == ["own mean 4.0000", "own mean 7.0000", "no mean"]
    wrong = texts_of(sums_and_counts([16.0, 7.0], [4, 1], 5.5))
    assert "23 / 5 = 4.6, but the ranks received 5.5" in wrong


def test_own_losses_are_shown_in_percent_of_the_loss_over_all_ranks():
    lines = own_losses([[3.0, 1.0], [1.0, 3.0]], [2.0, 2.0]).axes[0].lines
    shown = {line.get_label(): [float(y) for y in line.get_ydata()] for line in lines}
    assert shown == {"rank 0": [50.0, -50.0], "rank 1": [-50.0, 50.0], "all ranks": [0.0, 0.0]}
