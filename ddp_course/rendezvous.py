"""How do ranks that know nothing of each other meet?

A job is so many processes, its world size, and each has a number, its rank. They meet at a key-value store that all of
them can reach: a file, a process that listens at an address, or the store of torchrun's agent, which starts the ranks
of a host. Each rank signs in there with its rank and its world size and waits for the others. So a rank that never
comes, one that is started twice, and ranks that disagree are named before gloo (CPUs) or NCCL (GPUs) connects them.

`Collective:` in a docstring says that the ranks named there must all call the function, in the same order as their
other collectives. If one does not, the rest wait for it until the time limit.

Nothing here listens on more than the one address it was given: loopback, unless the user says otherwise.
Read next: `groups.py`, which opens the process group once all have met.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost", "::1")
POLL_S = 0.01
ROUND = "ddp_course/round"  # the key under which a store has the name of the round, which is one start of all ranks


def pin_loopback() -> None:
    """Keep gloo's and NCCL's sockets on the loopback interface, unless the user chose another."""
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if name is None:
        raise RuntimeError("this host has no loopback interface; bring it up with: ip link set lo up")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def pin_interface(host: str) -> None:
    """Have gloo use the interface that leads to `host`, where rank 0 is, unless the user chose another.

    Left alone, gloo takes the address that this host's own name stands for, which is often 127.0.1.1 or belongs to
    another network; then the ranks of two hosts wait for each other in vain. NCCL looks for itself.

    Raises:
        ValueError: `host` is this host's name for its own loopback, so the others would look for rank 0 at home.
    """
    if host in LOOPBACK_NAMES:  # the ranks of all "hosts" are on this one
        return pin_loopback()
    local_address = _address_towards(host)
    if local_address and local_address.startswith("127."):
        raise ValueError(
            f"MASTER_ADDR={host} stands for {local_address} on this host, where no other host can reach it; give the "
            "address in the network that they share (torchrun --local-addr ADDRESS)"
        )
    if name := _interface_of(local_address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _address_towards(host: str) -> str | None:
    """Return this host's IPv4 address on the way to `host`. Nothing is sent: a datagram socket only looks it up."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
    return None


def _interface_of(address: str | None) -> str | None:
    """Return the name of the interface that has this IPv4 address; None if unknown (no Linux, an IPv6 address)."""
    if address is None or not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def open_store(rank: int, world_size: int, rendezvous: str, address: str | None, timeout: timedelta) -> dist.Store:
    """Open the key-value store at which the ranks meet.

    Args:
        rendezvous: "env" (MASTER_ADDR and MASTER_PORT, or the agent's store), "file" or "tcp".
        address: for "file" a path that all ranks see and no earlier run has used; for "tcp" "HOST:PORT".
    """
    if rendezvous == "file":
        if not address:
            raise ValueError("a file rendezvous needs a path that every rank can reach: address='/path/to/file'")
        return dist.FileStore(str(address), world_size)
    if rendezvous == "tcp":
        return _tcp_store(rank, world_size, *_split_address(address), timeout)
    if rendezvous != "env":
        raise ValueError(f"rendezvous={rendezvous!r} is unknown: use 'env', 'file' or 'tcp'")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the launcher hosts the store; we only call on it
        store = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))[0]
        # torchrun keeps its store when it starts the ranks again, and what the dead ones wrote is still in it.
        # `agent_store` below makes a new one for each start, and sets no run id.
        return enter_round(rank, world_size, store, timeout) if "TORCHELASTIC_RUN_ID" in os.environ else store
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"{name} is not set: start with torchrun, or export rank 0's address and port")
    return _tcp_store(
        rank, world_size, *_split_address(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"), timeout
    )


def enter_round(rank: int, world_size: int, store: dist.Store, timeout: timedelta) -> dist.Store:
    """Return the part of `store` that belongs to the ranks which run now, and to no earlier ones.

    Rank 0 makes up the name of the round. Each of the others signs in with a token of its own at the round that it
    finds; if that is an old one, nobody answers the token, and rank 0's new one will be found next. Restarts cannot
    be counted instead: an agent counts its own, and one that joined later has seen fewer.

    Raises:
        TimeoutError: rank 0 did not answer, or it waited for others in vain; names the missing.
    Collective: every rank, once, at the store.
    """
    timeout_s, key = timeout.total_seconds(), ROUND
    deadline = time.monotonic() + timeout_s
    token = secrets.token_hex(8)
    if rank == 0:
        store.set(key, token)
        waiting = {other: f"{key}/{token}/{other}" for other in range(1, world_size)}
        while waiting and time.monotonic() < deadline:
            for other in [other for other, signed_in in waiting.items() if store.check([signed_in])]:
                store.set(f"{key}/{token}/{store.get(waiting.pop(other)).decode()}", "welcome")
            time.sleep(POLL_S)
        if waiting:
            raise _missing(rank, world_size, list(waiting), timeout_s)
        return dist.PrefixStore(f"{key}/{token}", store)
    current = None
    while time.monotonic() < deadline:
        found = store.get(key).decode() if store.check([key]) else None
        if found != current:
            current = found
            store.set(f"{key}/{current}/{rank}", token)
        if current and store.check([f"{key}/{current}/{token}"]):
            return dist.PrefixStore(f"{key}/{current}", store)
        time.sleep(POLL_S)
    raise _missing(rank, world_size, [0], timeout_s)


def _missing(rank: int, world_size: int, missing: list[int], timeout_s: float) -> TimeoutError:
    absent = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return TimeoutError(
        f"rank {rank}: waited {timeout_s:g} s for {world_size} ranks; missing: {absent}; were all {world_size} "
        "started, with the same WORLD_SIZE and the same rendezvous?"
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
        raise _missing(rank, world_size, missing, timeout_s)
