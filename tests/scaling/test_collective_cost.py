"""Is the line the right one, and is the bus bandwidth that of nccl-tests?"""

import random

import pytest

from ddp_course.scaling.collective_cost import (
    COLLECTIVES,
    SIZES,
    bus_factor,
    call_seconds,
    fit_link,
    measure_collectives,
)

ALPHA, BETA = 50e-6, 0.5e-9


def line(sizes=SIZES) -> list[float]:
    return [ALPHA + BETA * size for size in sizes]


def test_the_factors_are_those_of_nccl_tests():
    found = {op: (bus_factor(op, 2), bus_factor(op, 8)) for op in COLLECTIVES}
    assert found == {
        "all_reduce": (1.0, 1.75),
        "all_gather": (0.5, 0.875),
        "reduce_scatter": (0.5, 0.875),
        "broadcast": (1.0, 1.0),
        "reduce": (1.0, 1.0),
        "all_to_all": (0.5, 0.875),
    }


def test_a_line_is_found_again_with_nothing_left_over():
    cost = fit_link("all_reduce", SIZES, line(), 4)
    assert (cost.alpha_s, cost.beta_s) == pytest.approx((ALPHA, BETA))
    assert cost.residuals == pytest.approx([0] * len(SIZES), abs=1e-12)
    assert cost.peak_bus_bytes_per_s == pytest.approx(1.5 / BETA) and cost.half_bytes == pytest.approx(ALPHA / BETA)
    assert cost.bus_bytes_per_s[-1] == pytest.approx(1.5 * SIZES[-1] / line()[-1])


def test_errors_of_some_percent_do_not_lose_the_latency():
    # Plain least squares would follow the largest size, whose error is a hundred times the latency.
    chance = random.Random(1)
    for _ in range(50):
        seconds = [t * (1 + chance.uniform(-0.05, 0.05)) for t in line()]
        cost = fit_link("broadcast", SIZES, seconds, 2)
        assert cost.alpha_s == pytest.approx(ALPHA, rel=0.06) and cost.beta_s == pytest.approx(BETA, rel=0.06)


def test_no_other_line_has_smaller_relative_errors():
    seconds = [t * (1 + 0.2 * (-1) ** i) for i, t in enumerate(line())]
    cost = fit_link("all_reduce", SIZES, seconds, 2)

    def loss(alpha, beta):
        return sum(((alpha + beta * s) / t - 1) ** 2 for s, t in zip(SIZES, seconds, strict=True))

    best = loss(cost.alpha_s, cost.beta_s)
    for a in (0.99, 1, 1.01):
        for b in (0.99, 1, 1.01):
            assert loss(cost.alpha_s * a, cost.beta_s * b) >= best
    assert cost.residuals[0] > 0 > cost.residuals[1]  # above the line, below it


def test_neither_is_negative():
    cost = fit_link("reduce", (1000, 2000, 4000), (1.0, 4.0, 16.0), 2)
    assert cost.alpha_s == 0 and cost.beta_s > 0
    falling = fit_link("reduce", (1, 1000), (2.0, 1.0), 2)
    assert falling.beta_s == 0 and falling.peak_bus_bytes_per_s == float("inf")
    assert 1 < falling.alpha_s < 2


def test_as_a_link_a_ring_takes_the_times_of_the_line():
    link = fit_link("all_reduce", SIZES, line(), 3).as_link()
    for size in SIZES:
        assert link.all_reduce_seconds(size, 3) == pytest.approx(ALPHA + BETA * size)
    with pytest.raises(ValueError, match="found broadcast"):
        fit_link("broadcast", SIZES, line(), 3).as_link()


@pytest.mark.parametrize("op, sizes, seconds, world_size, sentence", [
    ("gather", SIZES, line(), 2, "choose from all_reduce"),
    ("reduce", SIZES, line(), 1, "two ranks or more"),
    ("reduce", (8, 8), (1.0, 1.0), 2, "two sizes or more"),
    ("reduce", (8, 16), (1.0, 0.0), 2, "positive time"),
])  # fmt: skip
def test_what_cannot_be_fitted_is_refused(op, sizes, seconds, world_size, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit_link(op, sizes, seconds, world_size)


def test_a_call_lasts_from_the_last_that_enters_to_the_last_that_leaves():
    root, late = [(0.0, 1.0), (10.0, 10.5)], [(3.0, 7.0), (10.25, 12.25)]
    assert call_seconds([root, late]) == [4.0, 2.0]


@pytest.mark.timeout(120)
def test_every_collective_runs_between_three_ranks():
    costs = measure_collectives(3, tuple(COLLECTIVES), (4, 1000), rounds=1)
    assert list(costs) == list(COLLECTIVES)
    for op, cost in costs.items():
        assert cost.sizes == (12, 1008) and min(cost.seconds) > 0 and cost.world_size == 3
        assert cost.sentence().startswith(f"{op}, 3 ranks: alpha")
        assert len(cost.table().splitlines()) == 4
