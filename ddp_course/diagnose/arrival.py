"""How do machines find each other?

Each looks up HOST, and where it stands on the network that leads there. Whoever can listen at HOST:PORT opens the
meeting, on that one address. The others call until somebody answers, and make sure that it is a meeting and not
another program that has the port. Then each takes the next rank and leaves its name and address.

Read next: `board.py`, on which rank 0 tells the others how things stand.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
import threading
import time
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from ddp_course.diagnose import network, pairs
from ddp_course.diagnose.pairs import Guest
from ddp_course.diagnose.verdict import Problem

POLL_S = 0.05
PREFIX = "ddp_course/meeting"
NOT_A_MEETING_S = 5.0  # a store that answers and says nothing of a meeting for so long is another program's


class Clock:
    """The time limit of the whole meeting."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.started = limit_s, time.monotonic()

    def passed(self) -> float:
        return time.monotonic() - self.started

    def left(self) -> float:
        return max(0.0, self.limit_s - self.passed())


def find(rendezvous: str) -> tuple[str, int]:
    """Return the numeric address and the port that HOST:PORT stands for."""
    host, _, port = rendezvous.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        cure = "give an address and a port from 1 to 65535, such as 10.0.0.1:29500"
        raise Problem("rendezvous", f"{rendezvous!r} is not HOST:PORT", cure)
    addresses, error = network.resolve(host)
    if not addresses:
        cure = "give the numeric address, or add the name to DNS or /etc/hosts on every machine"
        raise Problem("rendezvous", f"{host} resolves to nothing here: {error}", cure)
    address = sorted(addresses, key=lambda each: ":" in each)[0]  # IPv4 first, as gloo takes it from an interface
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        cure = "give an address of one of the machines: this one would open the port to every network"
        raise Problem("rendezvous", f"{host} is no machine's address", cure)
    return address, int(port)


def own_place(address: str) -> tuple[str, str]:
    """Return the own address for the meeting, which gloo will announce, and its interface, "" if none is known.

    What the user told gloo goes first, as it would in training; else it is the way that leads to HOST.
    """
    there = network.interfaces()
    if names := network.gloo_names(os.environ):
        told = network.gloo_address(os.environ, there, ())
        if told is None:
            usable = ", ".join(each.name for each in there if each.addresses)
            found = f"GLOO_SOCKET_IFNAME={names[0]}, which has no address here; found {usable}"
            raise Problem("interface", found, "unset GLOO_SOCKET_IFNAME, or name one of those")
        return told, names[0]
    source = network.source_address(address)
    if source is None:
        cure = "see `ip route get` for this address; is the network up, and is the address right?"
        raise Problem("route", f"{socket.gethostname()} has no way to {address}", cure)
    interface = network.interface_of(source, there) or ""
    # Of several addresses on one interface gloo announces the first, whichever leads to HOST.
    announced = network.gloo_address({"GLOO_SOCKET_IFNAME": interface}, there, ()) if interface else source
    return announced or source, interface


def open_or_call(rendezvous: str, address: str, port: int, world_size: int, clock: Clock) -> tuple[dist.Store, bool]:
    """Open the store if the address is this machine's, else call the machine that has it.

    Returns:
        The store, and whether it was opened here. A port that is taken here may be a fellow's on this machine, so
        it is called too.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    taken = False
    try:
        listener = socket.create_server((address, port), family=family, backlog=128)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        if error.errno == errno.EACCES:
            cure = "choose a port from 1024 on"
            raise Problem("rendezvous", f"port {port} may be opened by root only", cure) from None
    else:
        limit = timedelta(seconds=clock.limit_s)
        # The socket that listens already is handed over: nothing else is opened, on no other address.
        store = dist.TCPStore(address, port, None, True, limit, False, master_listen_fd=listener.detach())
        store.set(f"{PREFIX}/open", str(world_size))
        return store, True
    knock(rendezvous, address, port, clock)
    store = call(address, port, clock)
    if store is None:
        knock(rendezvous, address, port, clock)  # is it still there, or did a meeting end meanwhile?
        where = "on this machine" if taken else f"at {address}"
        cure = f"give another port to all; who has it: ss -ltnp 'sport = :{port}'"
        raise Problem("rendezvous", f"port {port} {where} is taken by another program, not by a meeting", cure)
    if (found := int(store.get(f"{PREFIX}/open"))) != world_size:
        cure = "give --world-size the same number everywhere"
        note = f"{socket.gethostname()} came with --world-size {world_size}"
        store.set(f"{PREFIX}/turned away", json.dumps(note))
        raise Problem("world size", f"{world_size} here, {found} where the meeting was opened", cure)
    return store, False


def knock(rendezvous: str, address: str, port: int, clock: Clock) -> None:
    """Wait until something answers at the address; say what was in the way if nothing does."""
    last = "no answer"
    while (left := clock.left()) > 0:
        try:
            socket.create_connection((address, port), timeout=min(left, 3.0)).close()
            return
        except OSError as error:
            last = pairs.words_for(error)
        time.sleep(min(POLL_S * 4, clock.left()))
    there = ", ".join(map(" ".join, network.routable(network.interfaces())))
    cure = (
        f"run the same line on the machine that has {address}, and let its firewall open port {port}; this machine "
        f"({socket.gethostname()}) has {there or 'no address but loopback'}"
    )
    raise Problem("rendezvous", f"nobody opened the meeting at {rendezvous} in {clock.limit_s:g} s: {last}", cure)


def call(address: str, port: int, clock: Clock) -> dist.Store | None:
    """Return the meeting's store, or None if another program answers.

    torch waits without end for a program that accepts and stays silent, so it waits in a thread of its own.
    """
    answer: list[dist.Store] = []
    limit_s = min(NOT_A_MEETING_S, max(clock.left(), 0.1))

    def try_it() -> None:
        with contextlib.suppress(RuntimeError):
            limit = timedelta(seconds=clock.left() + 1)
            store = dist.TCPStore(address, port, None, False, limit, False)
            while not store.check([f"{PREFIX}/open"]):  # another job's store never has it
                time.sleep(POLL_S)
            answer.append(store)

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answer[0] if answer else None


def sign_in(store: dist.Store, mine: Guest, world_size: int, opened: bool) -> int:
    """Take the next rank and leave name and address at the store."""
    rank = 0 if opened else store.add(f"{PREFIX}/came", 1)
    if rank >= world_size:
        cure = "give --world-size the number of all that run this, everywhere; was one machine started twice?"
        raise Problem("arrival", f"this is number {rank + 1}, and {world_size} were expected", cure)
    store.set(f"{PREFIX}/guest/{rank}", json.dumps(asdict(mine)))
    return rank
