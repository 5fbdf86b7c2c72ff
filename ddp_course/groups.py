"""Who am I, who else is there, and over what do we talk?

A rank is one process of a job. It learns its place from the launcher (`Place`), meets the others
(`rendezvous.py`), and from then on talks to them directly, through a process group. Here are the choice of
backend and device, the opening of a group, its orderly end, and groups inside the group.

Left out on purpose: elastic membership, which belongs to torchrun.
Read next: `collectives.py`, what ranks do together; `launcher/`, which starts them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_course.rendezvous import meet, open_store, pin_interface, pin_loopback


@dataclass(frozen=True)
class Place:
    """Where one rank stands in its job, and which device and backend it uses."""

    rank: int  # 0 .. world_size - 1, over all hosts
    world_size: int
    local_rank: int  # 0 .. local_world_size - 1, on this host
    local_world_size: int
    backend: str  # "nccl" or "gloo"
    device: torch.device

    @property
    def one_host(self) -> bool:
        """Whether every rank of the job runs on this host."""
        return self.local_world_size == self.world_size


# --- Who am I? -------------------------------------------------------------------------------------


def read_place(environ: Mapping[str, str] | None = None, backend: str | None = None) -> Place:
    """Read this rank's place from the variables that torchrun and `launch` set.

    Args:
        environ: the variables; None means `os.environ`.
        backend: "nccl", "gloo", or None for the best that this host allows.
    Raises:
        ValueError: a variable is missing or wrong; names it, what was found, and the way out.
    """
    environ = os.environ if environ is None else environ
    world_size = _read_count(environ, "WORLD_SIZE", least=1)
    local_world_size = _read_count(environ, "LOCAL_WORLD_SIZE", least=1, below=("WORLD_SIZE", world_size + 1))
    rank = _read_count(environ, "RANK", least=0, below=("WORLD_SIZE", world_size))
    local_rank = _read_count(environ, "LOCAL_RANK", least=0, below=("LOCAL_WORLD_SIZE", local_world_size))
    backend = choose_backend(local_world_size, backend)
    return Place(rank, world_size, local_rank, local_world_size, backend, choose_device(local_rank, backend))


def _read_count(environ: Mapping[str, str], name: str, least: int, below: tuple[str, int] | None = None) -> int:
    cure = f"start the program with torchrun or ddp_course.launch, or export {name} for every rank"
    text = environ.get(name)
    if text is None:
        raise ValueError(f"{name} is not set: {cure}")
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number: {cure}") from None
    if value < least:
        raise ValueError(f"{name}={value} is below {least}: {cure}")
    if below and value >= below[1]:
        limit = f"ranks count from 0 to {below[0]} - 1" if "RANK" in name else f"it cannot exceed {below[0]}"
        shown = environ.get(below[0])
        raise ValueError(f"{name}={value} does not fit {below[0]}={shown}: {limit}; {cure}")
    return value


# --- Over what do we talk? -------------------------------------------------------------------------


def choose_backend(local_world_size: int, wanted: str | None = None) -> str:
    """Return "nccl" when every rank of this host has a GPU, else "gloo".

    Every host chooses for itself: on a job over unlike hosts, name the backend.

    Raises:
        ValueError: NCCL was asked for and there are too few GPUs, or the name is unknown.
    """
    gpus = torch.cuda.device_count()
    enough = dist.is_nccl_available() and (gpus >= local_world_size or (gpus > 0 and _nccl_shares_gpus()))
    if wanted is None:
        return "nccl" if enough else "gloo"
    if wanted not in ("nccl", "gloo"):
        raise ValueError(f"backend={wanted!r} is unknown: use 'nccl' (one GPU per rank), 'gloo' (CPU) or None")
    if wanted == "nccl" and not enough:
        raise ValueError(
            f"NCCL wants one GPU per rank: {local_world_size} ranks on this host, {gpus} GPUs found; "
            + ("use backend='gloo'" if not gpus else f"use backend='gloo' or at most {gpus} ranks")
        )
    return wanted


def _nccl_shares_gpus() -> bool:
    """NCCL 2.30 lets several ranks share a GPU when asked to; older ones stop at "Duplicate GPU"."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and torch.cuda.nccl.version() >= (2, 30)


def choose_device(local_rank: int, backend: str) -> torch.device:
    """Return a rank's device: under NCCL the GPU with its local rank's number, else the CPU."""
    if backend != "nccl":
        return torch.device("cpu")
    # Where NCCL lets ranks share a GPU there are more ranks than GPUs, and these are dealt round.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def my_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device whose tensors `group` sends: this process's GPU under NCCL, else the CPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def usable_cores() -> int:
    """Return how many cores this process may use, which in a container can be fewer than the host has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- Life and end of a group -----------------------------------------------------------------------


def join_group(place: Place, rendezvous: str = "env", address: str | None = None, timeout_s: float = 60.0) -> None:
    """Meet all ranks of the job and open the default process group.

    Args:
        place: who this rank is.
        rendezvous: "env" (MASTER_ADDR and MASTER_PORT, or torchrun's own store), "file" or "tcp".
        address: for "file" a path that all ranks see and no earlier run has used; for "tcp" "HOST:PORT".
        timeout_s: how long to wait for the others here, and later in any one collective.
    Raises:
        ValueError: the address or a variable is missing or wrong.
        TimeoutError: not all ranks came in time; names the missing ones.
        RuntimeError: ranks disagree about the world size, two claim one rank, or the port is taken.
    Collective: every rank of the job joins once; ends with one barrier.
    Source: torch/distributed/rendezvous.py, torch/distributed/distributed_c10d.py.
    """
    timeout = timedelta(seconds=timeout_s)
    if place.one_host:
        pin_loopback()
    elif host := {"env": os.environ.get("MASTER_ADDR"), "tcp": (address or "").rpartition(":")[0]}.get(rendezvous):
        pin_interface(host)
    if place.backend == "nccl":
        torch.cuda.set_device(place.device)  # before NCCL looks for the current GPU
    store = open_store(place.rank, place.world_size, rendezvous, address, timeout)
    meet(place.rank, place.world_size, store, timeout_s)
    device_id = place.device if place.backend == "nccl" else None  # NCCL then connects at once, on this GPU
    dist.init_process_group(
        place.backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout, device_id=device_id
    )
    dist.barrier()  # nobody leaves before everybody is connected


def leave_group() -> None:
    """Close the default group together. Call it only if nothing failed: after an error, just let the process end.

    Collective: one barrier, every rank. Without it a fast rank tears down while others still talk.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def process_group(
    rendezvous: str = "env",
    address: str | None = None,
    backend: str | None = None,
    timeout_s: float = 60.0,
) -> Iterator[Place]:
    """Join on entry and leave on a good exit: the frame of a program that torchrun starts.

    Collective: see `join_group` and `leave_group`. An exception leaves at once, without any
    collective: peers may be waiting elsewhere, and a barrier here would hide the real error.
    """
    place = read_place(backend=backend)
    join_group(place, rendezvous, address, timeout_s)
    yield place
    leave_group()


def subgroup_ranks(world_size: int, ranks_per_group: int) -> list[list[int]]:
    """Cut the ranks into groups of neighbours, such as the ranks of one host.

    Raises:
        ValueError: the groups would not be of equal size.
    """
    if ranks_per_group < 1 or world_size % ranks_per_group:
        raise ValueError(f"{world_size} ranks cannot be cut into groups of {ranks_per_group}: choose a divisor")
    return [list(range(start, start + ranks_per_group)) for start in range(0, world_size, ranks_per_group)]


def split_group(ranks_per_group: int, timeout_s: float = 60.0) -> dist.ProcessGroup:
    """Open a group for every `ranks_per_group` neighbours and return the one this rank is in.

    A group does not inherit the default group's time limit: without `timeout_s` it would wait for torch's, which is 30
    minutes under gloo and 10 under NCCL.

    Collective: one new_group per subgroup, in the same order on every rank of the default group, also for the
    groups a rank is not in.
    """
    mine = None
    for ranks in subgroup_ranks(dist.get_world_size(), ranks_per_group):
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
        if dist.get_rank() in ranks:
            mine = group
    return mine
