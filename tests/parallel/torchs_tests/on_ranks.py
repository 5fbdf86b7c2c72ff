"""What does one of torch's tests find on this rank?

torch starts processes for every test. Here the ranks stay, and each test gets a process group of its own on the first
two of them or on all, a private folder, and torch's own seed.

Read next: `test_torchs_tests.py`, which calls this on the ranks.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
import traceback
import unittest
from datetime import timedelta
from unittest import mock

import torch.distributed as dist

from tests.parallel.torchs_tests import shim

PASSED, SKIPPED, FAILED = "pass", "skip", "FAIL"
TIMEOUT_S = 20.0  # in one collective; a few tests open groups with limits of their own
SEED = 1234


def verdict(rank: int, _: int, name: str, world_size: int, ddp: type, folder: str) -> tuple[str, str]:
    """Run torch's test `name` with the class `ddp`, and return what it found, and what it said.

    Ranks from `world_size` on take no part and have passed.
    """
    if rank >= world_size:
        return PASSED, ""
    folder = f"{folder}/{world_size}-{ddp.__name__}"
    os.makedirs(folder, exist_ok=True)
    environ = {"WORLD_SIZE": str(world_size), "RANK": str(rank), "BACKEND": "gloo", "TEMP_DIR": folder}
    environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # torch.compile would leave it behind
    environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"  # a command that would not do so here
    with mock.patch.dict(os.environ, environ), mock.patch.object(tempfile, "tempdir", folder):
        try:
            _run(name, rank, world_size, ddp, folder)
            found = PASSED, ""
        except unittest.SkipTest as reason:
            found = SKIPPED, str(reason)
        except BaseException as error:  # SystemExit too: torch's decorators leave by it
            found = FAILED, "".join(traceback.format_exception(error))
    if dist.is_initialized():
        dist.destroy_process_group()  # no collective: peers that still wait for this rank fail at once
    dist.set_debug_level_from_env()  # some tests change it
    return found


def _run(name: str, rank: int, world_size: int, ddp: type, folder: str) -> None:
    file = shim.torchs_tests()
    if not hasattr(_case(), name):
        raise unittest.SkipTest("not in this torch")
    test = _case()(name)
    test.rank = rank
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", timedelta(seconds=TIMEOUT_S), world_size, rank)
    dist.barrier()
    importlib.import_module("torch.testing._internal.common_utils").set_rng_seed(SEED)
    with (
        shim.in_place(ddp, rank),
        importlib.import_module("torch._inductor.config").patch(compile_threads=1),  # no processes of its own
    ):
        try:
            getattr(test, name)()
        except SystemExit as left:
            reasons = {skip.exit_code: skip.message for skip in file.TEST_SKIPS.values()}
            raise unittest.SkipTest(reasons[left.code]) if left.code in reasons else left from None
    dist.barrier()  # nobody closes the group while a peer still talks


@functools.cache
def _case() -> type[unittest.TestCase]:
    """torch's tests as a test case of one rank, without what starts processes."""
    from torch.testing._internal.common_utils import TestCase

    class OnThisRank(shim.torchs_tests().DistributedTest._DistTestBase, TestCase):
        world_size = property(lambda self: os.environ["WORLD_SIZE"])  # a string, as torch has it

        def _barrier(self, *_: object, **__: object) -> None:
            dist.barrier()

    return OnThisRank
