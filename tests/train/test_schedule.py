"""The learning rate is a formula of the place in the run; torch's schedulers, which count, give the same numbers."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from ddp_course.train.schedule import START, share_of_rate


def torchs_rates(schedule: str, steps: int, warmup: int) -> list[float]:
    """What torch's own schedulers set for each step, one after the other."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    after = {
        "constant": lambda: LinearLR(optimizer, 1.0, 1.0, total_iters=steps),
        "cosine": lambda: CosineAnnealingLR(optimizer, T_max=steps - warmup),
    }
    parts = [LinearLR(optimizer, START, 1.0, total_iters=warmup)] if warmup else []
    scheduler = SequentialLR(optimizer, [*parts, after[schedule]()], milestones=[warmup] if warmup else [])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (10, 1), (90, 23), (400, 399)])
def test_it_is_torchs_linear_warmup_followed_by_torchs_own(schedule, steps, warmup):
    rates = [0.3 * share_of_rate(schedule, step, steps, warmup) for step in range(steps)]
    # torch multiplies its way from rate to rate, so its rounding errors add up.
    assert rates == pytest.approx(torchs_rates(schedule, steps, warmup), rel=1e-9, abs=1e-12)


def test_the_unit_does_not_matter():
    for step in range(37):
        by_steps, by_epochs = (share_of_rate("cosine", step / k, 37 / k, 5 / k) for k in (1, 37 / 4))
        assert by_steps == pytest.approx(by_epochs, rel=1e-12)


def test_the_landmarks():
    assert share_of_rate("cosine", 0.0, 4.0) == 1.0 and share_of_rate("cosine", 4.0, 4.0) == 0.0
    assert share_of_rate("cosine", 2.0, 4.0) == pytest.approx(0.5)
    assert share_of_rate("cosine", 0.0, 4.0, 1.0) == START
    assert share_of_rate("cosine", 1.0, 4.0, 1.0) == 1.0
    assert share_of_rate("constant", 0.5, 4.0, 1.0) == pytest.approx(START + (1 - START) / 2)
    # Without a warm-up nothing is multiplied by anything but 1: the bits of a constant rate stay as they were.
    assert {share_of_rate("constant", place / 7, 3.0) for place in range(21)} == {1.0}
    assert math.isclose(sum(share_of_rate("cosine", k + 0.5, 100) for k in range(100)), 50)
