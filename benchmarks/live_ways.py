"""The ways whose ranks stay between calls: this course's pool, and ipyparallel as a peer.

Each opens its ranks with a gloo group up, gives a callable per kind of call, and leaves nothing behind.
"""

from __future__ import annotations

import io
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from benchmarks.on_ranks import one_all_reduce, threads_per_rank
from ddp_course import RankPool

ROOT = str(Path(__file__).parents[1])
FUNCTION = "from benchmarks.on_ranks import join, one_all_reduce"
CELL = "one_all_reduce(rank, world_size)"
Calls = dict[str, Callable[[], list[float] | None]]  # one call on all ranks -> what each returned


@dataclass(frozen=True)
class LiveWay:
    package: str  # that must be installed
    labels: dict[str, str]  # key and name of each of its rows; the first is its start
    open: Callable[[int], AbstractContextManager[Calls]]


def check(found: list[float] | None, world_size: int) -> None:
    """Raise when the ranks' answers are wrong; None is the answer of a call that returns nothing."""
    expected = [world_size * (world_size + 1) / 2] * world_size
    if found is not None and found != expected:
        raise RuntimeError(f"expected {expected} from {world_size} ranks, found {found}")


@contextmanager
def rank_pool(world_size: int) -> Iterator[Calls]:
    """A pool, called by `run`."""
    with RankPool(world_size, backend="gloo", quiet=True) as ranks:
        yield {"rank_pool_call": lambda: ranks.run(one_all_reduce)}


@contextmanager
def ipyparallel(world_size: int) -> Iterator[Calls]:
    """A cluster on loopback, its group opened by a file store as in plain mp.spawn."""
    import ipyparallel as ipp

    with tempfile.TemporaryDirectory() as folder:
        others = set(psutil.Process().children(recursive=True))
        cluster = ipp.Cluster(n=world_size, profile_dir=folder, load_profile=False, log_level=logging.ERROR)
        client: Any = None
        try:
            cluster.start_cluster_sync()
            client = cluster.connect_client_sync()
            client.wait_for_engines(world_size, timeout=60, interactive=False)
            view = client[:]
            view.block = True
            view.execute(f"import sys; sys.path.insert(0, {ROOT!r}); {FUNCTION}; world_size = {world_size}")
            view.scatter("rank", range(world_size), flatten=True)
            view.execute(f"join(rank, world_size, {folder + '/store'!r}, {threads_per_rank(world_size)})")
            view.activate()
            function, arguments = ipp.Reference("one_all_reduce"), (ipp.Reference("rank"), world_size)
            yield {
                "px_call": lambda: by_cell("px", CELL),
                "apply_sync_call": lambda: view.apply_sync(function, *arguments),
                "execute_call": lambda: nothing(view.execute(CELL)),
            }
        finally:
            started = set(psutil.Process().children(recursive=True)) - others
            try:
                if client:
                    client.close()
                cluster.stop_cluster_sync()
            finally:
                end(started)


def end(processes: set[psutil.Process]) -> None:
    """Kill whichever of these processes still live."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(processes), timeout=10)


def nothing(_: object) -> None:
    return None


@cache
def shell() -> Any:
    """An IPython shell of this process, to type cells into."""
    from IPython.core.interactiveshell import InteractiveShell

    return InteractiveShell.instance()


def by_cell(magic: str, cell: str) -> list[float]:
    """Run a cell as if typed below `%%magic`, and read the numbers that end the lines it shows."""
    with redirect_stdout(io.StringIO()) as shown:
        shell().run_cell_magic(magic, "", cell)
    return [float(number) for number in re.findall(r"(\d+\.\d+)$", shown.getvalue(), flags=re.MULTILINE)]


LIVE_WAYS = {
    "rank_pool": LiveWay(
        "torch",
        {"rank_pool_start": "RankPool start", "rank_pool_call": "RankPool.run"},
        rank_pool,
    ),
    "ipyparallel": LiveWay(
        "ipyparallel",
        {
            "ipyparallel_start": "ipyparallel start",
            "px_call": "ipyparallel %%px cell",
            "apply_sync_call": "ipyparallel apply_sync",
            "execute_call": "ipyparallel execute",
        },
        ipyparallel,
    ),
}
