"""Do the pictures of measured scaling show the numbers they were given, and stay readable?"""

import pytest

from ddp_course import draw
from ddp_course.scaling.collective_cost import SIZES, fit_link
from ddp_course.scaling.efficiency import PARTS, Sample, Scaling


def sample(rows: int, *ms: float) -> Sample:
    return Sample(rows, dict(zip(PARTS, (t / 1e3 for t in ms), strict=True)))


TITLE = "mlp of width 1024 on digits, batches of 64 in 4 passes a step, course replicas, over a simulated link (10 GbE)"
SCALING = Scaling(
    "weak",
    {
        1: (sample(64, 1, 2, 5, 0, 2), sample(64, 1, 2, 6, 0, 2)),
        2: (sample(128, 1, 2, 6, 3, 2), sample(128, 1, 2, 7, 3, 2)),
        4: (sample(256, 1, 2, 7, 9, 2), sample(256, 1, 2, 9, 9, 2)),
    },
    TITLE,
)
COST = fit_link("all_reduce", SIZES, [(60e-6 + size / 1e9) * (1 + 0.1 * (-1) ** i) for i, size in enumerate(SIZES)], 2)


@pytest.mark.slow
def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    readable((draw.step_split(SCALING), draw.collective_fit(COST)))


def test_the_bars_are_as_high_as_the_step():
    (ax,) = draw.step_split(SCALING).axes
    assert ax.patches[-1].get_y() + ax.patches[-1].get_height() == pytest.approx(22.0)
    assert [text.get_text() for text in ax.texts] == ["10.5 ms", "14.5 ms", "22.0 ms"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(reversed(PARTS))
    assert "simulated link (10 GbE)" in ax.get_title()


def test_the_fit_and_what_it_leaves_over():
    top, bottom = draw.collective_fit(COST).axes
    assert list(top.lines[1].get_ydata()) == pytest.approx([1e6 * t for t in COST.seconds])
    assert top.lines[0].get_ydata()[0] == pytest.approx(1e6 * COST.predicted_s(SIZES[0]))
    assert list(bottom.lines[-1].get_ydata()) == pytest.approx([100 * left for left in COST.residuals])
    assert top.get_legend().get_texts()[2].get_text() == f"half is latency: {COST.half_bytes / 1024:,.0f} KiB"
