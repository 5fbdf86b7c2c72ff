"""Do the judges of lesson 14 and the course's own functions come to the same numbers?"""

from random import Random

import pytest

from ddp_course.grading.vocabulary.play import Seen
from ddp_course.scaling.collective_cost import bus_factor, fit_link
from ddp_course.scaling.link import Link
from ddp_course.scaling.simulate import Gradient, Profile, predict
from judges.scaling import event_step, message_cost

SEEDS = range(8)


@pytest.mark.parametrize("op", list(message_cost.FACTORS))
@pytest.mark.parametrize("seed", SEEDS)
def test_message_cost(op, seed):
    case = message_cost._case(Random(seed), op, 0.1)
    cost = fit_link(op, message_cost._counted(op, case.world_size, case.nbytes), case.seconds, case.world_size)
    assert [cost.alpha_s, cost.beta_s] == pytest.approx(message_cost.worked(Seen(case, 0, []))[:2])
    assert message_cost.FACTORS[op](case.world_size) == bus_factor(op, case.world_size)


@pytest.mark.parametrize("load", [0.3, 1.6])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_step(load, seed):
    for case in (event_step._case(Random(seed), 3, load), event_step._early(event_step._case(Random(seed), 3, load))):
        gradients = tuple(Gradient(str(i), nbytes, ready) for i, (nbytes, ready) in enumerate(case.gradients))
        profile = Profile(case.forward_s, gradients, case.backward_s, case.optimizer_s)
        plan = [[str(i) for i in bucket] for bucket in case.buckets]
        link = Link("made up", case.latency_s, case.bytes_per_s)
        step = predict(profile, plan, case.world_size, link)
        seen = Seen(case, 0, [])
        assert (step.step_s, step.exposed_s) == pytest.approx((event_step.step(seen), event_step.exposed(seen)[0]))
