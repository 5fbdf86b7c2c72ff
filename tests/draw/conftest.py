"""What do the tests of all pictures share? No window opens, no figure stays, and one check of what a reader sees."""

from collections.abc import Iterable

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from tests.draw.readable import text_problems, texts_of


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def readable(tmp_path):
    """Assert of each figure that no text collides, and that it fits a notebook in pixels and in bytes."""

    def check(figures: Iterable[Figure], most_bytes: int = 60_000) -> None:
        for figure in figures:
            assert text_problems(figure) == [], texts_of(figure)
            assert figure.get_figwidth() * figure.dpi <= 800
            figure.savefig(tmp_path / "picture.png", dpi=figure.dpi)
            assert (tmp_path / "picture.png").stat().st_size < most_bytes, texts_of(figure)
            plt.close(figure)

    return check
