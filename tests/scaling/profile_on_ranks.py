"""Functions that the tests of step_profile.py run on ranks."""

from __future__ import annotations

import torch
from torch import nn

from ddp_course.parallel import BucketedDDP
from ddp_course.scaling.link import LINKS, SimulatedLink
from ddp_course.scaling.step_profile import Gradient, Profile, _slowest, profile_model


def slow_second_rank(rank, world_size):
    """Planted profiles of two ranks, merged, the second half a second late; and one measured on a link."""
    plan = [(1.0, (1.0, 6.0), 6.0, 1.0), (3.0, (1.0, 2.0), 2.0, 2.0)][rank]
    forward_s, ready, backward_s, optimizer_s = plan
    gradients = tuple(Gradient(name, 4, at) for name, at in zip("ba", ready, strict=True))
    merged = _slowest(Profile(forward_s, gradients, backward_s, optimizer_s), 100.0 + 0.5 * rank, None)
    with SimulatedLink(LINKS["10gbe"]) as link:
        replica = link.attach(BucketedDDP(nn.Linear(6, 3)))
        profile = profile_model(replica, (torch.ones(2, 6),), torch.sum, repeats=2, all_ranks=True)
        launched = len(link.spans())
    return merged, (forward_s, backward_s), launched, profile
