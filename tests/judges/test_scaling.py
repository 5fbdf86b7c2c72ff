"""Do the solutions of lesson 14 and the course's own functions come to the same numbers?"""

from random import Random

import numpy as np
import pytest

from ddp_course.grading.source import function_of, solution_of
from ddp_course.scaling.link import Link
from ddp_course.scaling.simulate import Gradient, Profile, predict
from judges.scaling import event_step, message_cost

SEEDS = range(8)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("seed", SEEDS)
def test_message_cost_is_numpys_weighted_line(op, seed):
    _, world_size, nbytes, seconds = case = message_cost.made(Random(seed), op, 0.1)
    sizes = np.array(nbytes, float) * (world_size if op == "all_gather" else 1)
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
    moved = {"all_reduce": 2 - 2 / world_size, "broadcast": 1.0}.get(op, 1 - 1 / world_size)
    found = function_of("14.1", "message_cost", solution_of("14.1"))(*case)
    assert found == pytest.approx((alpha, beta, moved / beta), rel=1e-6)


@pytest.mark.parametrize("load", [0.3, 1.6])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_step(load, seed):
    for case in (event_step._case(Random(seed), 3, load), event_step._early(event_step._case(Random(seed), 3, load))):
        gradients = tuple(Gradient(str(i), nbytes, ready) for i, (nbytes, ready) in enumerate(case.gradients))
        profile = Profile(case.forward_s, gradients, case.backward_s, case.optimizer_s)
        plan = [[str(i) for i in bucket] for bucket in case.buckets]
        step = predict(profile, plan, case.world_size, Link("made up", case.latency_s, case.bytes_per_s))
        found = function_of("14.3", "step_seconds", solution_of("14.3"))(*case)
        assert found == pytest.approx((step.step_s, step.exposed_s))
