"""What does each rank say when one of them makes a mistake? Real failures, as torch words them.

Some ranks run a few broken lines of a program called train.py, without the course's own report. What each rank
would write to its error output is collected: its traceback, or nothing. The ranks survive, so that one start of
processes is enough for several failures.

Left out on purpose: mistakes after which torch ends the process, such as unequal tensors without the checks of
`TORCH_DISTRIBUTED_DEBUG=DETAIL`.
Read next: `recognise.py`, which knows such texts.
"""

from __future__ import annotations

import linecache
import os
import tempfile
import textwrap
import traceback
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_course.launcher import launch

set_timeout = getattr(c10d, "set_timeout", c10d._set_pg_timeout)  # newer versions of torch have made it public
PATIENCE_S = 0.5  # of a rank that waits for one that never comes
LOST_S = 4.0  # of one that waits for a rank whose replica is gone: torch's DDP keeps the connections open
ENOUGH_S = 10.0  # for everything else

# The usual detail and the broken lines. `rank` is this rank and `bad` the one that makes the mistake; `detail` is what
# it does instead.
PROGRAMS = {
    "one-rank-raises": ("KeyError('label 17')", """
        gradient = torch.ones(1000)
        for step in range(3):
            if rank == bad and step == 1:
                raise {detail}
            dist.all_reduce(gradient)
    """),
    "skipped-collective": ("2", """
        gradient = torch.ones(1000)
        for step in range(3):
            if rank == bad and step == {detail}:
                break
            dist.all_reduce(gradient)
    """),
    "collective-order": ("1", """
        gradient, weights = torch.ones(1000), torch.ones(40)
        dist.all_reduce(gradient)
        calls = [lambda: dist.all_reduce(gradient), lambda: dist.broadcast(weights, src=0)]
        for call in calls[::{detail} if rank == bad else -{detail}]:
            call()
    """),
    "collective-shape": ("24", """
        gradient = torch.ones(50, 20 + {detail} * (rank == bad))
        dist.all_reduce(gradient)
    """),
    "unused-parameters": ("2", """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range({detail}))

            def forward(self, x):
                for layer in self.layers[: -1 if rank == bad else None]:
                    x = layer(x)
                return x

        replica = torch.nn.parallel.DistributedDataParallel(Net())
        for step in range(2):
            replica(torch.ones(2, 4)).sum().backward()
    """),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One failure: which, on which rank, and the detail that its program leaves open."""

    name: str
    bad: int
    detail: str


def last_words(name: str, rank: int = 1, world_size: int = 3) -> list[str]:
    """Provoke one failure on fresh ranks and return what each rank says; "" when it says nothing.

    Args:
        name: of the failure, such as "one-rank-raises".
        rank: the one that makes the mistake.
    Raises:
        ValueError: there is no such failure, or no such rank.
    """
    if name not in PROGRAMS:
        raise ValueError(f"no failure {name!r}; there are {', '.join(PROGRAMS)}")
    if not 0 <= rank < world_size or world_size < 3:
        raise ValueError(f"rank {rank} of {world_size}: give a rank below world_size, which is 3 or more")
    return provoke([Case(name, rank, PROGRAMS[name][0])], world_size)[0]


def provoke(cases: list[Case], world_size: int) -> list[list[str]]:
    """Provoke each failure in turn, and return for each what the ranks say, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        how = {"init": False, "backend": "gloo", "start_method": "forkserver", "limit_s": 60.0, "quiet": True}
        by_rank = launch(_all_words, world_size, args=(cases, folder), **how)
    return [list(said) for said in zip(*by_rank, strict=True)]


def _all_words(rank: int, world_size: int, cases: list[Case], folder: str) -> list[str]:
    return [_words(rank, world_size, case, f"{folder}/{number}") for number, case in enumerate(cases)]


def _words(rank: int, world_size: int, case: Case, path: str) -> str:
    """Run one broken program in a group of its own; return its traceback."""
    mismatch = case.name in ("collective-order", "collective-shape")
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" if mismatch else "OFF"
    dist.set_debug_level_from_env()
    meeting, done = dist.FileStore(f"{path}.group", world_size), dist.FileStore(f"{path}.done", world_size)
    limit = timedelta(seconds=LOST_S if case.name == "unused-parameters" else ENOUGH_S)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size, timeout=limit)
    if case.name == "skipped-collective":  # only now: to meet may take longer
        set_timeout(timedelta(seconds=PATIENCE_S))
    said = _run(rank, case)
    done.set(str(rank), "")
    if mismatch or case.name == "skipped-collective":  # else the others notice that this rank's group ends
        done.wait([str(other) for other in range(world_size)], timedelta(seconds=ENOUGH_S))
    dist.destroy_process_group()
    return said


def _run(rank: int, case: Case) -> str:
    lines = textwrap.dedent(PROGRAMS[case.name][1]).strip().format(detail=case.detail).splitlines(True)
    source = ["import torch\n", "import torch.distributed as dist\n", "\n", "def train(rank, bad):\n"]
    source += ["    " + line for line in lines]
    linecache.cache["train.py"] = (sum(map(len, source)), None, source, "train.py")
    program: dict = {}
    exec(compile("".join(source), "train.py", "exec"), program)
    try:
        program["train"](rank, case.bad)
    except Exception as error:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next)).rstrip()
    return ""
