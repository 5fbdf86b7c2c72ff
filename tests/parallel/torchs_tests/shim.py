"""How can torch's own DDP tests run on CPU ranks, with our classes in the place of torch's?

The torch wheel carries the tests of its DistributedDataParallel. They ask for GPUs and name torch's classes, so while
one runs, every GPU is the CPU and the names mean what we put there. What a test does and asserts stays as torch wrote
it. torch's own DDP passes through the same shim: it is the control. torch's SyncBatchNorm refuses the CPU, so there the
control has ours too; those tests compare with a BatchNorm on the whole batch.

Left out on purpose: the private parts of torch's DDP (its reducer, its log); a test that asks for them is in
`catalogue.py` with this reason.
Read next: `on_ranks.py`, one test on one rank.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DistributedSampler

from ddp_course.data.sampler import ShardSampler
from ddp_course.parallel import BucketedDDP, SyncBatchNorm
from tests.parallel.torchs_tests.catalogue import MODULE

# --- The classes: torch's names for what is there, and no more --------------------------------------------


class Torchs(DistributedDataParallel):
    """The control: torch's DDP, told of no GPU."""

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        super().__init__(module, **options)


class Ours(BucketedDDP):
    """Ours, told of no GPU. An option that it does not have is a TypeError, and the test fails.

    The exception is `static_graph`, a promise that the graph stays the same. Ours needs none, but with the promise
    torch's DDP also allows unused parameters, so it is read as `find_unused_parameters`.
    """

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        if options.pop("static_graph", False):
            options["find_unused_parameters"] = True
        super().__init__(module, **{"gradient_as_bucket_view": False, **options})  # torch's default is False


class OurSyncBatchNorm(SyncBatchNorm):
    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        return cls.convert(module, process_group)


class OurSampler(ShardSampler):
    num_samples = property(len)
    total_size = property(lambda self: len(self) * self.world_size)


# --- GPUs -------------------------------------------------------------------------------------------------


class GpusAreCpu(TorchFunctionMode):
    """While entered, whatever is to be on a GPU is on the CPU. torch means GPU `n` when a device is the number n."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func in (torch.Tensor.to, torch._C._nn._parse_to):  # the latter reads the arguments of Module.to
            args = tuple("cpu" if _is_gpu(arg) else arg for arg in args)
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    if isinstance(device, str | torch.device):
        return str(device).startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


# --- torch's file -----------------------------------------------------------------------------------------


@functools.cache
def torchs_tests() -> types.ModuleType:
    """Import torch's file of tests; those for GPUs are not skipped, nor those that torch's own CI leaves out."""
    _provide_expecttest()
    from torch.testing._internal import common_distributed, common_utils  # noqa: F401  (not under the patches)

    def run_it_anyway(*_: Any, **__: Any) -> Callable:
        return lambda test: test

    # Read once, at import. With a file, tests that save a replica in the middle of training do so.
    environ = {"BACKEND": "gloo", "INIT_METHOD": "file://", "WORLD_SIZE": "3"}
    with (
        mock.patch.dict(os.environ, environ),
        mock.patch.multiple(unittest, skip=run_it_anyway, skipIf=run_it_anyway),
        mock.patch.multiple(common_distributed, skip_if_lt_x_gpu=run_it_anyway, skip_if_no_gpu=lambda test: test),
    ):
        return importlib.import_module(MODULE)


def _provide_expecttest() -> None:
    """torch's tests import this package for a base class; without its own assertions unittest's will do."""
    if importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase


@contextmanager
def in_place(ddp: type, rank: int) -> Iterator[None]:
    """Within the block `ddp` is DistributedDataParallel, SyncBatchNorm is ours, and GPUs are the CPU."""
    file = torchs_tests()
    its_own = issubclass(ddp, DistributedDataParallel)
    # One function for two names would not do: torch.compile keeps a table of those in torch.cuda.
    gpus = {"set_device": lambda _: None, "synchronize": lambda *_, **__: None, "current_device": lambda: rank}
    streams = {"Stream": lambda *_: nullcontext(), "stream": lambda stream: stream}
    in_file = {
        "DistributedDataParallel": ddp,
        "DistributedSampler": DistributedSampler if its_own else OurSampler,
        "init_multigpu_helper": lambda world_size, backend: {other: [other] for other in range(world_size)},
        "autocast": functools.partial(torch.amp.autocast, "cpu"),
        "GradScaler": functools.partial(torch.amp.GradScaler, "cpu"),
    }
    with (
        mock.patch.multiple(torch.cuda, **gpus, **streams),
        mock.patch.multiple(nn, SyncBatchNorm=OurSyncBatchNorm),
        mock.patch.multiple(nn.parallel, DistributedDataParallel=ddp),
        mock.patch.multiple(file, **in_file),
        GpusAreCpu(),
    ):
        yield
