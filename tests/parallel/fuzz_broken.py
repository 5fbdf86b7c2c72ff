"""Would the fuzz notice? torch's DistributedDataParallel, each time with one thing broken.

Subclasses, so that all the rest is exactly torch's. The first is not broken: its buckets are cut elsewhere, and that
should make no difference.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class OtherBuckets(DistributedDataParallel):
    def __init__(self, module, bucket_cap_mb=25, **options):
        super().__init__(module, bucket_cap_mb=5e-5 if bucket_cap_mb == 25 else 25, **options)


class ForgetsDivision(DistributedDataParallel):
    def __init__(self, module, **options):
        super().__init__(module, **options)
        super().register_comm_hook(None, add_up)

    def register_comm_hook(self, state, hook):
        pass


def add_up(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


class IgnoresNoSync(DistributedDataParallel):
    @contextmanager
    def no_sync(self):
        yield


class AveragesTheModulesOwnPasses(DistributedDataParallel):
    """Also a forward pass of the module inside, called directly, makes the next backward pass average."""

    def __init__(self, module, **options):
        super().__init__(module, **options)
        self.arm()

    def arm(self):
        self.handle = self.module.register_forward_hook(self.prepare)

    def prepare(self, module, args, output):
        if torch.is_grad_enabled() and DistributedDataParallel._active_ddp_module is None:
            self.reducer.prepare_for_backward(list(output) if isinstance(output, tuple) else [])

    def __getstate__(self):  # a hook that belongs to this wrapper cannot be copied with the module
        self.handle.remove()
        state = super().__getstate__()
        del state["handle"]
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self.arm()


class ZerosForNone(DistributedDataParallel):
    """A parameter without a gradient has zeros after backward."""

    def forward(self, *inputs, **kwargs):
        output = super().forward(*inputs, **kwargs)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            for parameter in self.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.register_post_accumulate_grad_hook(self.fill)
        return output

    def fill(self, _: nn.Parameter) -> None:
        for parameter in self.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class KeepsBuffersToItself(DistributedDataParallel):
    def will_sync_module_buffers(self):
        return False


class SharesBuffersOnlyInTraining(DistributedDataParallel):
    def will_sync_module_buffers(self):
        return self.training and super().will_sync_module_buffers()


class CopyIsAlone(DistributedDataParallel):
    """A deep copy averages no more."""

    def __deepcopy__(self, memo):
        copied = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied.require_backward_grad_sync = False
        return copied


BROKEN = (
    ForgetsDivision,
    IgnoresNoSync,
    AveragesTheModulesOwnPasses,
    ZerosForNone,
    KeepsBuffersToItself,
    SharesBuffersOnlyInTraining,
    CopyIsAlone,
)
