"""What people do to a wrapper beside calling it, each as a small program for torch's DDP and for ours."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.parallel import BucketedDDP

KINDS = {"torch": DistributedDataParallel, "ours": BucketedDDP}


def ones(*sizes: int) -> nn.Linear:
    layer = nn.Linear(*sizes, bias=False)
    nn.init.ones_(layer.weight)
    return layer


class TwoHeads(nn.Module):
    """Two outputs, each behind a parameter of its own."""

    def __init__(self, as_dict: bool = False):
        super().__init__()
        self.a, self.b, self.as_dict = ones(3, 1), ones(3, 1), as_dict

    def forward(self, x, only=None):
        if only:
            return getattr(self, only)(x)
        return {"a": self.a(x), "b": self.b(x)} if self.as_dict else (self.a(x), self.b(x))


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


def wrapped_three_times(wrap, x, features=200, keep=False, **first_options):
    """Run a cell three times that wraps a model of an earlier cell."""
    layer, kept, found = ones(features, features), [], []
    for run in range(3):
        replica = wrap(layer, **(first_options if run == 0 else {}))
        kept += [replica] * keep
        layer.zero_grad()
        replica(x[:, :1].expand(1, features)).sum().backward()
        found += gradients(layer)
    return found


def small_wrapped_three_times(wrap, x):
    return wrapped_three_times(wrap, x, features=3, keep=True)


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


def copies(wrap, x):
    replica = wrap(ones(3, 1))
    copied = copy.deepcopy(replica)
    file = io.BytesIO()
    torch.save(replica, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)  # our own bytes, from memory
    for each in (copied, loaded):
        each(x).sum().backward()
    return gradients(copied) + gradients(loaded) + gradients(replica)


def branches_by_pass(wrap, x):
    model = TwoHeads()
    replica = wrap(model, find_unused_parameters=True)
    with replica.no_sync():
        replica(x, only="a").sum().backward()
    replica(x, only="b").sum().backward()
    return gradients(model)


def unused_output(wrap, x, as_dict=False):
    model = TwoHeads(as_dict)
    replica, found = wrap(model, find_unused_parameters=True), []
    for _ in range(2):
        outputs = replica(x)
        outputs["a" if as_dict else 0].sum().backward()
        found += gradients(model)
    return found


def unused_output_in_a_dict(wrap, x):
    return unused_output(wrap, x, as_dict=True)


def backward_by_parts(wrap, x):
    model = TwoHeads()
    replica = wrap(model)
    a, b = replica(x)
    a.sum().backward()
    b.sum().backward()
    return gradients(model)


def backward_twice(wrap, x):
    model = TwoHeads()
    replica = wrap(model)
    a, b = replica(x)
    loss = (a + b).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def no_sync_around_forward(wrap, x):
    model = TwoHeads()
    replica = wrap(model)
    with replica.no_sync():
        a, b = replica(x)
    (a + b).sum().backward()
    return gradients(model)


def no_sync_around_backward(wrap, x):
    model = TwoHeads()
    replica = wrap(model)
    a, b = replica(x)
    with replica.no_sync():
        (a + b).sum().backward()
    return gradients(model)


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


def buffers(wrap, x, **options):
    """Rank 0's at construction? And before which of four passes: averaged, without gradients, again, averaged?"""
    norm = nn.BatchNorm1d(3)
    norm.running_mean.fill_(dist.get_rank())
    replica = wrap(norm, **options)
    found = [norm.running_mean[0].item()]
    for with_grad in (True, False, False, True):
        norm.running_mean.fill_(dist.get_rank())
        with torch.set_grad_enabled(with_grad):
            replica(torch.ones(2, 3))
        found.append(round(norm.running_mean[0].item(), 4))
    return found


def buffers_by_the_older_name(wrap, x):
    return buffers(wrap, x, broadcast_buffers=False)


def buffers_stay(wrap, x):
    return buffers(wrap, x, forward_sync_buffers=False)


def two_passes_through_a_norm(wrap, x):
    """The second pass brings rank 0's buffers while the graph of the first still waits for its backward."""
    norm = nn.BatchNorm1d(3)
    replica = wrap(norm)
    rows = torch.cat([x, 2 * x, 4 * x])
    (replica(rows).square().sum() + replica(rows + 1).square().sum()).backward()
    return gradients(norm)


PROGRAMS = [
    wrapped_three_times, small_wrapped_three_times, unused_found_by_the_first_of_three, only_plain_module, copies,
    branches_by_pass, unused_output, unused_output_in_a_dict, backward_by_parts, backward_twice,
    no_sync_around_forward, no_sync_around_backward, undefined_gradient, undefined_gradient_of_an_unused,
    buffers, buffers_by_the_older_name, buffers_stay, two_passes_through_a_norm,
]  # fmt: skip


def run_all(rank, world_size):
    """What each program finds, by its name and the kind of wrapper."""
    x = torch.full((1, 3), float(rank + 1))
    return {program.__name__: {kind: _found(program, KINDS[kind], x) for kind in KINDS} for program in PROGRAMS}


def _found(program, wrap, x):
    try:
        return program(wrap, x)
    except (RuntimeError, TypeError) as error:  # TypeError: this torch does not know the argument yet
        return f"{type(error).__name__}: {error}"


# --- Where ours says more than torch's -----------------------------------------------------------------------------


def refused(rank, world_size):
    """The sentence for each program that torch lets pass, or refuses one step later."""
    x, said = torch.full((1, 3), float(rank + 1)), {}

    def note(name, program):
        try:
            said[name] = f"no error, {program()}"
        except RuntimeError as error:
            said[name] = str(error)

    def step_of_half():
        model = TwoHeads()
        replica = BucketedDDP(model)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (ones(1, 1), model)]
        replica(x, only="a").sum().backward()
        optimizers[0].step()  # of another model, so it may
        optimizers[1].step()

    def both_wrappers():
        layer = ones(3, 1)
        first, second = BucketedDDP(layer), BucketedDDP(layer)
        (first(x) + second(x)).sum().backward()
        return gradients(layer)

    def both_wrappers_with_copies():
        layer = ones(3, 1)
        first, second = (BucketedDDP(layer, gradient_as_bucket_view=False) for _ in range(2))
        (first(x) + second(x)).sum().backward()
        return gradients(layer)

    def copied_from_a_subgroup():
        return copy.deepcopy(BucketedDDP(ones(3, 1), dist.new_group(list(range(world_size)))))

    note("step", step_of_half)
    note("both", both_wrappers)
    note("both, copies", both_wrappers_with_copies)
    note("copy", copied_from_a_subgroup)
    return said


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
