"""Do the pictures of lesson 11 show the numbers they were given, and stay readable?"""

import numpy as np
import pytest

from ddp_course.draw import end_to_end

IMAGE = np.eye(8)
PLACES = [0.5, 1.0, 1.5]
RUNS = {"2 ranks": ([1.9, 0.5], [0.4, 0.93]), "one process": ([1.9, 0.6], [0.4, 0.92])}
DISTANCES = {"float32": [1e-7, 1e-6], "float64": [1e-16, 1e-15], "without SyncBatchNorm": [1e-2, 1e-1]}
SHARES = {str(digit): 1 - digit / 50 for digit in range(10)}


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    pictures = (
        end_to_end.learning_rates({"constant": (PLACES, [0.1] * 3), "cosine": (PLACES, [0.1, 0.05, 0])}),
        end_to_end.changed_images({"as it is": [IMAGE] * 6, "epoch 0": [IMAGE] * 6, "epoch 1": [IMAGE] * 6}, "abcdef"),
        end_to_end.changed_images({"as it is": [IMAGE]}, ["row 1436"]),
        end_to_end.number_formats(),
        end_to_end.distances(DISTANCES),
        end_to_end.learning_curves(RUNS),
        end_to_end.class_accuracies(SHARES, 0.91),
        end_to_end.class_accuracies({"0": 1.0}, 1.0),
    )
    readable(pictures)


def test_the_charts_show_their_numbers():
    by_name = {line.get_label(): list(line.get_ydata()) for line in end_to_end.distances(DISTANCES).axes[0].lines}
    assert by_name == DISTANCES
    loss, accuracy = end_to_end.learning_curves(RUNS).axes
    assert [list(line.get_ydata()) for line in loss.lines] == [run[0] for run in RUNS.values()]
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[40, 93], [40, 92]]
    ax = end_to_end.class_accuracies(SHARES, 0.91).axes[0]
    assert ax.lines[0].get_ydata() == pytest.approx([9, 9]) and ax.texts[0].get_text() == "all: 9.0%"
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([100 * (1 - share) for share in SHARES.values()])


def test_the_formats_have_the_bits_that_torch_says():
    import torch

    for name, exponent, fraction in end_to_end.FORMATS:
        info = torch.finfo(getattr(torch, name))
        assert info.bits == 1 + exponent + fraction and info.eps == 2.0**-fraction
        assert 2.0 ** (2 ** (exponent - 1) - 1) < info.max < 2.0 ** (2 ** (exponent - 1))
