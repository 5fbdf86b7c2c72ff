"""Do layers that are cut compute what the whole ones do, forward and backward, with as few collectives as they say?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_course.beyond.tensor_parallel import ColumnParallelLinear, RowParallelLinear, linear_pairs, parallelize
from ddp_course.grading.vocabulary.observe import Collectives
from tests.beyond.strategies_on_ranks import TOLERANCE, alone, collectives, network, off_by, rows, trained


def pair(bias: bool) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 12, bias=bias), nn.GELU(), nn.Linear(12, 7, bias=bias)).double()


def compared(rank: int, world_size: int, bias: bool) -> dict:
    """Outputs and gradients of a pair, whole and cut, for inputs of three dimensions; and what was sent."""
    whole, ours = pair(bias), parallelize(pair(bias), [("0", "2")])
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x_whole, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = whole(x_whole)
    factor = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (out * factor).sum().backward()
    with Collectives() as seen:
        cut = ours(x_ours)
        forward = len(seen.calls)
        (cut * factor).sum().backward()

    def part(grad, dim):
        return grad.chunk(world_size, dim)[rank]

    pairs = [(cut, out), (x_ours.grad, x_whole.grad), (ours[0].weight.grad, part(whole[0].weight.grad, 0))]
    pairs += [(ours[2].weight.grad, part(whole[2].weight.grad, 1))]
    if bias:
        pairs += [(ours[0].bias.grad, part(whole[0].bias.grad, 0)), (ours[2].bias.grad, whole[2].bias.grad)]
    return {
        "off by": max((a - b).abs().max().item() for a, b in pairs),
        "calls": [(call.op, call.n_bytes, call.in_backward) for call in seen.calls],
        "forward": forward,
        "shapes": [tuple(p.shape) for p in ours.parameters()],
        "types": [type(ours[0]) is ColumnParallelLinear, type(ours[2]) is RowParallelLinear],
    }


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("bias", [True, False])
def test_a_pair_is_the_whole_layers_with_one_all_reduce_each_way(ranks, bias):
    found = ranks.run(compared, (bias,))
    world_size = len(found)
    for facts in found:
        assert facts["off by"] < TOLERANCE
        assert facts["calls"] == [("all_reduce", 2 * 3 * 7 * 8, False), ("all_reduce", 2 * 3 * 5 * 8, True)]
        assert facts["forward"] == 1
        width = 12 // world_size
        shapes = [(width, 5), (width,), (7, width), (7,)] if bias else [(width, 5), (7, width)]
        assert facts["shapes"] == shapes
        assert facts["types"] == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("by", ["course", "torch"])
def test_training_is_that_of_one_process(ranks, by):
    expected = alone()
    found = ranks.run(trained, ("tensor_parallel", {"by": by}))
    whole_biases = sum(network()[index].bias.nbytes for index in (2, 6))  # of the row-parallel layers
    cut = expected.held["parameters"] - whole_biases
    for one in found:
        assert off_by(one, expected) < TOLERANCE
        assert one.held["parameters"] == one.held["gradients"] == cut // len(found) + whole_biases


@pytest.mark.timeout(60)
@pytest.mark.parametrize("by", ["course", "torch"])
def test_a_step_has_one_all_reduce_forward_per_pair_and_none_for_the_rows(ranks, by):
    for calls in ranks.run(collectives, ("tensor_parallel", {"by": by})):
        sums = [n_bytes for op, n_bytes in calls if op == "all_reduce"]
        assert sums == [24 * 24 * 8, 24 * 3 * 8, 24 * 24 * 8]  # forward of two pairs, backward of the second


def test_linear_layers_are_paired_in_order_and_a_last_one_stays_whole():
    assert linear_pairs(network()) == [("0", "2"), ("4", "6")]
    assert linear_pairs(network()[:5]) == [("0", "2")]
    assert linear_pairs(nn.Sequential(nn.Tanh())) == []


def odd(rank: int, world_size: int) -> float:
    """Three linear layers: the last is on every rank, and stays the same there without a collective."""
    whole, ours = network()[:5], parallelize(network()[:5], [("0", "2")])
    x, _ = rows()
    whole(x).square().sum().backward()
    ours(x).square().sum().backward()
    return (whole[4].weight.grad - ours[4].weight.grad).abs().max().item()


@pytest.mark.timeout(60)
def test_a_layer_without_a_partner_gets_the_whole_gradient(ranks):
    assert max(ranks.run(odd)) < TOLERANCE
