"""What people do to a wrapper that the fuzz does not draw, each as a small program for torch's DDP and for ours."""

from __future__ import annotations

import copy
import gc
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.parallel import BucketedDDP
from tests.refusals import message_of


def ones(*sizes: int) -> nn.Linear:
    layer = nn.Linear(*sizes, bias=False)
    nn.init.ones_(layer.weight)
    return layer


class TwoHeads(nn.Module):
    """Two outputs, each behind a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = ones(3, 1), ones(3, 1)

    def forward(self, x):
        return self.a(x), self.b(x)


class OneHead(TwoHeads):
    def forward(self, x, name):
        return getattr(self, name)(x)


class _FirstOnly(torch.autograd.Function):
    """Adds two tensors, and has no gradient for the second."""

    @staticmethod
    def forward(ctx, first, second):
        return first + second

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Undefined(TwoHeads):
    def forward(self, x):
        return _FirstOnly.apply(self.a(x), self.b(x))


def gradients(module: nn.Module) -> list[float | None]:
    """One number of each gradient: in these models all numbers of a gradient are equal."""
    return [None if param.grad is None else param.grad.flatten()[0].item() for param in module.parameters()]


# --- The programs: each takes the class, and rows of this rank -----------------------------------------------------


def wrapped_three_times(wrap, x, keep=False, **first_options):
    """Run a cell three times that wraps a model of an earlier cell; the model is larger than the fuzz's."""
    layer, kept, found = ones(200, 200), [], []
    for options in (first_options, {}, {}):
        replica = wrap(layer, **options)
        kept += [replica] * keep
        layer.zero_grad()
        replica(x[:, :1].expand(1, 200)).sum().backward()
        found += gradients(layer)
    return found


def unused_found_by_the_first_of_three(wrap, x):
    return wrapped_three_times(wrap, x, keep=True, find_unused_parameters=True)


def only_plain_module(wrap, x):
    """The module itself, beside its wrapper and after it; then rank 0 alone, which must not wait for anybody."""
    layer = ones(3, 3)
    replica = wrap(layer)
    replica.module(x).sum().backward()
    beside = gradients(layer)
    del replica
    gc.collect()
    layer(x).sum().backward()
    if dist.get_rank() == 0:
        layer(x).sum().backward()
    return beside + gradients(layer)


def undefined_gradient(wrap, x):
    model = Undefined()
    replica = wrap(model)
    replica(x).sum().backward()
    return gradients(model)


def undefined_gradient_of_an_unused(wrap, x):
    model = Undefined()
    replica = wrap(model, find_unused_parameters=True)  # torch's must outlive the backward pass
    replica(x).sum().backward()
    return gradients(model)


PROGRAMS = [
    wrapped_three_times,
    unused_found_by_the_first_of_three,
    only_plain_module,
    undefined_gradient,
    undefined_gradient_of_an_unused,
]


def run_all(rank, world_size):
    """What each program finds with torch's wrapper and with ours, by its name."""
    x = torch.full((1, 3), float(rank + 1))
    wrappers = DistributedDataParallel, BucketedDDP
    return {program.__name__: [program(wrap, x) for wrap in wrappers] for program in PROGRAMS}


# --- Where ours says more than torch's -----------------------------------------------------------------------------


def refused(rank, world_size):
    """The sentence for each program that torch lets pass, or refuses one step later."""
    x = torch.full((1, 3), float(rank + 1))

    def step_of_half():
        model = TwoHeads()
        replica = BucketedDDP(model)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (ones(1, 1), model)]
        replica(x)[0].sum().backward()
        optimizers[0].step()  # of another model, so it may
        optimizers[1].step()

    def both_wrappers(views):
        layer = ones(3, 1)
        first, second = (BucketedDDP(layer, gradient_as_bucket_view=views) for _ in range(2))
        (first(x) + second(x)).sum().backward()
        return gradients(layer)

    def copied_from_a_subgroup():
        return copy.deepcopy(BucketedDDP(ones(3, 1), dist.new_group(list(range(world_size)))))

    def two_passes_by_other_branches():
        """torch's looks at the second pass alone, and then raises that a parameter is ready twice."""
        model = OneHead()
        replica = BucketedDDP(model, find_unused_parameters=True)
        (replica(x, "a") + replica(x, "b")).sum().backward()
        return gradients(model)

    return {
        "two passes": two_passes_by_other_branches(),
        "step": message_of(step_of_half),
        "both": message_of(lambda: both_wrappers(views=True)),
        "both, copies": both_wrappers(views=False),
        "copy": message_of(copied_from_a_subgroup),
    }


def buckets_after_wrapping_again(rank, world_size):
    """Whether the first wrapper's buckets live while the second has the same parameters: before and after its end."""
    layer = ones(3, 3)
    first, second = BucketedDDP(layer), BucketedDDP(layer)
    bucket = weakref.ref(first._work[0])
    found = [bucket() is not None]
    del first
    gc.collect()
    second(torch.ones(1, 3)).sum().backward()
    return [*found, bucket() is not None]
