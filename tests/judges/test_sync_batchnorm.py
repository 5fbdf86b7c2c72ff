"""The solutions of lesson 08 are held to what torch's BatchNorm computes in one process that has all rows."""

import torch
from torch import nn

from ddp_course.grading.source import function_of, solution_of
from ddp_course.parallel import SyncBatchNorm

SIZES, EPS = [3, 6], 0.1


def answer(exercise: str, name: str):
    return function_of(exercise, name, solution_of(exercise))


def rows(seed: int) -> torch.Tensor:
    return 7 + 2 * torch.randn(sum(SIZES), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def trained(rank: int, world_size: int) -> list[torch.Tensor]:
    """Statistics of a batch, then output and gradients of Normalise, and two steps and an evaluation of the layer."""
    own, two, weight, bias = (value.clone() for value in (*(rows(n).split(SIZES)[rank] for n in (0, 1)), *rows(2)[:2]))
    found = list(answer("08.1", "global_statistics")(own))
    leaves = [value.requires_grad_() for value in (own, weight, bias)]
    y = answer("08.3", "Normalise").apply(*leaves, EPS)
    (y * two).sum().backward()
    found += [y.detach(), *(leaf.grad for leaf in leaves)]
    layer = answer("08.2", "MySyncBatchNorm")(4, eps=EPS, momentum=0.3).double()
    steps = [layer(part.detach()).detach() for part in (own, two)]
    return [*found, *steps, layer.running_mean, layer.running_var, layer.eval()(own).detach()]


def test_the_solutions_are_a_batchnorm_of_all_rows(ranks):
    mean, var, count, y, dx, weight, bias, one, two, *kept, evaluated = zip(*ranks(2).run(trained), strict=True)
    whole, layer = rows(0), nn.BatchNorm1d(4, eps=EPS, momentum=0.3).double()
    torch.testing.assert_close((mean[0], var[1], int(count[0])), (whole.mean(0), whole.var(0, correction=0), 9))

    leaves = [value.clone().requires_grad_() for value in (whole, *rows(2)[:2])]
    right = nn.functional.batch_norm(leaves[0], None, None, *leaves[1:], training=True, eps=EPS)
    (right * rows(1)).sum().backward()
    found = [torch.cat(y), torch.cat(dx), sum(weight), sum(bias)]
    torch.testing.assert_close(found, [right.detach(), *(leaf.grad for leaf in leaves)])

    steps = [layer(value).detach() for value in (whole, rows(1))]
    torch.testing.assert_close([torch.cat(one), torch.cat(two)], steps)
    torch.testing.assert_close([part[1] for part in kept], [layer.running_mean, layer.running_var])
    torch.testing.assert_close(torch.cat(evaluated), layer.eval()(whole).detach())


def verdict(rank: int, world_size: int, right: bool) -> bool:
    return answer("08.4", "agrees")(rank, world_size, SyncBatchNorm if right else nn.BatchNorm1d)


def test_08_4_tells_a_synchronised_layer_from_a_plain_one(ranks):
    assert [ranks(2).run(verdict, (right,)) for right in (True, False)] == [[True, True], [False, False]]
