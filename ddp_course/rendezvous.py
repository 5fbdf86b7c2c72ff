"""How do ranks that know nothing of each other meet?

At a key-value store that all of them can reach: a file, a process that listens at an address, or the launcher's
own store. Each rank signs in there with its rank and its world size and waits for the others. So a rank that
never comes, one that is started twice, and ranks that disagree are named before any connection is opened.

Nothing here listens on more than the one address it was given: loopback, unless the user says otherwise.
Read next: `groups.py`, which opens the process group once all have met.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def pin_loopback() -> None:
    """Keep gloo's and NCCL's sockets on the loopback interface, unless the user chose another."""
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if name is None:
        raise RuntimeError("this host has no loopback interface; bring it up with: ip link set lo up")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def open_store(rank: int, world_size: int, rendezvous: str, address: str | None, timeout: timedelta) -> dist.Store:
    """Open the key-value store at which the ranks meet; see `groups.join_group` for the arguments."""
    if rendezvous == "file":
        if not address:
            raise ValueError("a file rendezvous needs a path that every rank can reach: address='/path/to/file'")
        return dist.FileStore(str(address), world_size)
    if rendezvous == "tcp":
        return _tcp_store(rank, world_size, *_split_address(address), timeout)
    if rendezvous != "env":
        raise ValueError(f"rendezvous={rendezvous!r} is unknown: use 'env', 'file' or 'tcp'")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the launcher hosts the store; we only call on it
        return next(dist.rendezvous("env://", rank, world_size, timeout=timeout))[0]
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"{name} is not set: start with torchrun, or export rank 0's address and port")
    return _tcp_store(
        rank, world_size, *_split_address(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"), timeout
    )


def _split_address(address: str | None) -> tuple[str, int]:
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"address {address!r} is not HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:29500")
    return host, int(port)


def _tcp_store(rank: int, world_size: int, host: str, port: int, timeout: timedelta) -> dist.Store:
    """Rank 0 hosts the store on the one address named; torch alone would listen on every interface."""
    listener = listen_on(host, port).detach() if rank == 0 else None
    try:
        return dist.TCPStore(
            host, port, world_size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener
        )
    except dist.DistError as error:
        raise TimeoutError(
            f"rank {rank}: no store answered at {host}:{port} within {timeout.total_seconds():g} s; "
            f"is rank 0 running, and is this its address? ({str(error).splitlines()[0]})"
        ) from None


def listen_on(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Open a listening socket on one address; port 0 takes a free port.

    Raises:
        RuntimeError: the port is taken, or the address is not this host's.
    """
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise RuntimeError(
            f"rank 0: cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}); "
            "give another port, or meet at a file (rendezvous='file')"
        ) from None


def free_port() -> int:
    """Return a loopback port that is free now."""
    with listen_on() as listener:
        return listener.getsockname()[1]


def agent_store(world_size: int) -> tuple[dist.TCPStore, dict[str, str]]:
    """Host a store for ranks as torchrun's agent does, and return it with the variables that lead there.

    The store lives as long as the returned object, listens on loopback only, and takes a free port.
    """
    listener = listen_on()
    port = listener.getsockname()[1]
    store = dist.TCPStore(LOOPBACK, port, world_size, True, wait_for_workers=False, master_listen_fd=listener.detach())
    variables = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    return store, variables | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def meet(rank: int, world_size: int, store: dist.Store, timeout_s: float) -> None:
    """Say who we are, wait for all ranks, and refuse a job whose ranks disagree.

    Raises:
        TimeoutError: not all came in time; names the missing ones.
        RuntimeError: ranks disagree about the world size, or two claim one rank.
    Collective: every rank signs in once, at the store.
    """
    keys = [f"ddp_course/here/{other}" for other in range(world_size)]
    if store.add(f"ddp_course/claims/{rank}", 1) > 1:
        raise RuntimeError(
            f"rank {rank} was claimed twice: two processes have RANK={rank}, or the rendezvous was used "
            "by an earlier run; give each process its own rank and each run its own file or port"
        )
    store.set(keys[rank], str(world_size))
    with suppress(RuntimeError):  # out of patience; who is missing is seen below, by name
        store.wait(keys, timedelta(seconds=timeout_s))
    here = [other for other, key in enumerate(keys) if store.check([key])]
    for other in here:
        if (found := int(store.get(keys[other]))) != world_size:
            raise RuntimeError(
                f"rank {rank}: expected world size {world_size}, rank {other} has {found}; "
                "start every rank with the same WORLD_SIZE"
            )
    if missing := sorted(set(range(world_size)) - set(here)):
        raise TimeoutError(
            f"rank {rank}: waited {timeout_s:g} s for {world_size} ranks; missing: "
            f"{', '.join(map(str, missing))}; were all {world_size} started, with the same WORLD_SIZE and "
            "the same rendezvous?"
        )
