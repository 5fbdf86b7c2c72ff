"""Lesson 02's solutions, held to one pass over the whole batch: their judges ask nothing but them."""

import threading

import pytest
import torch
from torch import nn

from ddp_course.grading.source import function_of, solution_of


def test_replicas_meet_and_the_error_of_one_comes_out():
    apply = function_of("02.1", "parallel_apply", solution_of("02.1"))
    meeting = threading.Barrier(3, timeout=10)

    def meets(x):
        meeting.wait()
        return x / 2, torch.is_grad_enabled()

    with torch.no_grad():
        assert apply([meets] * 3, [(2,), (4,), (6,)]) == [(1, False), (2, False), (3, False)]
    with pytest.raises(ZeroDivisionError):
        apply([lambda x: 1 / x] * 2, [(1,), (0,)])


def test_the_gradients_of_all_replicas_come_home():
    replicate = function_of("02.2", "replicate", solution_of("02.2"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, bias=False))).double()
    model[1][0].weight = model[0].weight
    x = torch.randn(6, 4, dtype=torch.float64)
    right = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    replicas = replicate(model, 3)
    torch.cat([replica(part) for replica, part in zip(replicas, x.chunk(3), strict=True)]).square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(right))
    assert len({replica[0].weight.data_ptr() for replica in replicas}) == 3
