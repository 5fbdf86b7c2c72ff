"""Does a profile know every gradient and its moment, on one rank and over all?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_course.scaling import step_profile
from ddp_course.scaling.step_profile import Gradient, Profile
from tests.scaling import profile_on_ranks as on_ranks

# Forward 2 s; four gradients of 100 bytes, 1 s apart in backward; then 1 s of optimizer.
FOUR = Profile(2.0, tuple(Gradient(name, 100, ready) for ready, name in enumerate("dcba", start=1)), 4.0, 1.0)


def test_overheads_are_a_line_over_the_number_of_buckets():
    found = step_profile.with_overheads(FOUR, {2: 0.5, 6: 0.7, 10: 0.9}, finish_s=0.3)
    assert found.finish_s == 0.3 == step_profile.median_profile([found]).finish_s
    assert found.launch_s == pytest.approx(0.05)
    assert found.busy_s_per_byte * 400 == pytest.approx(0.4)
    assert step_profile.with_overheads(FOUR, {2: 0.5, 6: 0.1}).launch_s == 0  # noise: no launch gains time
    with pytest.raises(ValueError, match="expected the seconds of two numbers of buckets or more, found 1"):
        step_profile.with_overheads(FOUR, {2: 0.5})


def test_the_machines_own_all_reduce_is_a_line_over_the_bytes():
    found = step_profile.with_overheads(FOUR, {2: 0.5, 6: 0.7}, own_s={100: 0.3, 400: 0.6})
    assert found.own_seconds(200) == pytest.approx(0.4) == step_profile.median_profile([found]).own_seconds(200)
    assert FOUR.own_seconds(200) == 0
    with pytest.raises(ValueError, match="expected the seconds of two sizes or more, found 1"):
        step_profile.with_overheads(FOUR, {2: 0.5, 6: 0.7}, own_s={100: 0.3})


def test_the_median_profile_has_the_median_of_every_moment():
    other = Profile(5.0, tuple(g._replace(ready_s=g.ready_s * 3) for g in FOUR.gradients), 12.0, 0.5)
    third = Profile(3.0, tuple(g._replace(ready_s=g.ready_s + 1) for g in FOUR.gradients), 5.0, 2.0)
    found = step_profile.median_profile([FOUR, other, third])
    assert (found.forward_s, found.backward_s, found.optimizer_s) == (3.0, 5.0, 1.0)
    assert [gradient.ready_s for gradient in found.gradients] == [2.0, 3.0, 4.0, 5.0]


def test_a_profile_knows_every_gradient_in_the_order_of_backward():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = step_profile.profile_model(model, (torch.randn(5, 6),), lambda y: y.square().mean(), optimizer, repeats=3)
    assert [gradient.name for gradient in profile.gradients] == [
        name for name, _ in reversed(list(model.named_parameters()))
    ]
    assert [gradient.nbytes for gradient in profile.gradients] == [12, 96, 32, 256, 32, 192]
    # A layer's gradients come after those of the layers behind it.
    ready = {gradient.name: gradient.ready_s for gradient in profile.gradients}
    assert 0 < ready["4.weight"] < ready["2.weight"] < ready["0.weight"] <= profile.backward_s
    assert profile.forward_s > 0 and profile.optimizer_s > 0
    assert not torch.equal(before, model[0].weight)  # it has trained
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_a_silent_parameter_is_named():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)
    with pytest.raises(ValueError, match="no gradient for idle.weight, idle.bias; profile a step that uses every"):
        step_profile.profile_model(model, (torch.ones(1, 2),), torch.sum)


@pytest.mark.timeout(60)
def test_over_all_ranks_every_moment_is_the_slowest_rank_s(two_ranks):
    for merged, own, launched, profile in two_ranks.run(on_ranks.slow_second_rank):
        assert merged.forward_s == 3.5 and merged.optimizer_s == 2.0  # rank 1 began half a second late
        # Rank 0 is ahead in forward and behind in backward.
        assert [gradient.ready_s for gradient in merged.gradients] == [1.0, 3.5]
        assert merged.backward_s == 3.5
        assert own in ((1.0, 6.0), (3.0, 2.0))
        assert launched == 0  # inside no_sync nothing travels
        assert profile.nbytes == 4 * (6 * 3 + 3)
