"""Is the formula a permutation, and does it look like chance?"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_course.data.permutation import Permutation


def order(length: int, *key: int) -> np.ndarray:
    return Permutation(length, *key)(np.arange(length, dtype=np.uint64)).astype(np.int64)


@settings(deadline=None, max_examples=200)  # a busy machine is no mistake
@given(st.integers(1, 3000), st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1))
def test_each_sample_occurs_once(length, seed, epoch):
    assert np.array_equal(np.sort(order(length, seed, epoch)), np.arange(length))


@pytest.mark.parametrize("length", [1, 2, 3, 2**16 - 1, 2**16, 2**16 + 1, 1_000_000])
def test_each_sample_occurs_once_around_powers_of_two_and_in_a_million(length):
    assert np.array_equal(np.sort(order(length, 7)), np.arange(length))


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 2**62), st.integers(0, 9), st.data())
def test_large_orders_stay_inside_and_never_meet(length, seed, data):
    positions = np.array(data.draw(st.lists(st.integers(0, length - 1), unique=True, max_size=50)), dtype=np.uint64)
    samples = Permutation(length, seed)(positions)
    assert samples.dtype == np.uint64 and (samples < length).all() and len(set(samples.tolist())) == len(positions)


def test_any_piece_is_the_same_as_in_the_whole_and_the_input_stays():
    positions = np.arange(100, 200, 7)
    assert np.array_equal(Permutation(1000, 3)(positions), order(1000, 3)[100:200:7])
    assert np.array_equal(positions, np.arange(100, 200, 7))


def test_the_order_is_the_same_on_every_machine():
    """Ranks on hosts with other versions of NumPy must agree; a change here would also break saved positions."""
    assert order(10, 0, 0).tolist() == [7, 9, 6, 2, 3, 1, 4, 8, 5, 0]
    assert Permutation(10**9, 1, 2)(np.array([0, 1, 10**9 - 1])).tolist() == [718280126, 962321657, 301754577]


def test_lengths_out_of_range_are_refused():
    for length in (0, -1, 2**62 + 1):
        with pytest.raises(ValueError, match=r"must be from 1 to 2\*\*62"):
            Permutation(length)


# --- Does it look like chance? The seeds are fixed, so these either always hold or never ------------


def test_all_24_orders_of_four_samples_occur_about_equally():
    seeds = 6000
    counts = Counter(tuple(order(4, seed).tolist()) for seed in range(seeds))
    expected = seeds / 24
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == 24
    assert chi_square < 49.7, counts  # 23 degrees of freedom: chance is above it once in a thousand


@pytest.mark.parametrize("length", [5, 10, 33])
def test_every_sample_is_about_equally_often_at_every_position(length):
    seeds = 3000
    counts = np.zeros((length, length))
    for seed in range(seeds):
        counts[np.arange(length), order(length, seed)] += 1
    expected = seeds / length
    freedom = (length - 1) ** 2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5  # four standard deviations


def correlation(one: np.ndarray, two: np.ndarray) -> float:
    return abs(np.corrcoef(one, two)[0, 1]) * len(one) ** 0.5  # about a standard normal's size, if by chance


@pytest.mark.parametrize("length", [1797, 60_000, 2**17, 300_007])
def test_samples_do_not_depend_on_positions_neighbours_or_other_epochs(length):
    first, second = order(length, 0, 0), order(length, 0, 1)
    assert correlation(first, np.arange(length)) < 4
    for apart in (1, 2, 3, 4, 8, 256):
        assert correlation(first[:-apart], first[apart:]) < 4, apart
    assert correlation(first, second) < 4
    assert correlation(first, order(length, 1, 0)) < 4
    assert correlation(order(length, 1, 0), second) < 4  # seed + epoch is the same, the order is not
    assert np.count_nonzero(first == second) < 10  # by chance: 1 on average


def test_a_batch_of_neighbours_spreads_over_the_whole_dataset():
    """A billion samples: the first thousand positions fall evenly into 50 parts of the dataset."""
    samples = Permutation(10**9, 0, 0)(np.arange(1000))
    counts = np.bincount((samples // (10**9 // 50)).astype(np.int64), minlength=50)
    assert ((counts - 20) ** 2 / 20).sum() < 85.4  # 49 degrees of freedom: chance is above it once in a thousand
