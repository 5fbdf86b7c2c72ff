"""Who cannot reach whom?

Each machine rings at every other's door: a plain TCP connection to a port that the system picked, as gloo and NCCL
will use, with a limit. Behind the door lies a token, so that a stranger at the same address is noticed; two machines
with the same address of a container's bridge are common. What each could not reach is put together into one sentence
that names the machine.

Standard library alone.
Read next: `meeting.py`, which brings the machines together.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

LIMIT_S = 3.0
TOKEN_BYTES = 16
CURE = (
    "open all TCP ports between the machines, not the rendezvous alone: gloo and NCCL listen on ports that the system "
    "picks (look at iptables -L, nft list ruleset, the cloud's security group, `ip route get ADDRESS`)"
)


@dataclass(frozen=True)
class Guest:
    """What a machine tells the others about itself."""

    host: str
    address: str
    port: int  # where its doorbell listens
    token: str  # what the doorbell answers
    interface: str
    torch: str

    @property
    def name(self) -> str:
        """The words for it in a sentence."""
        return f"({self.host}, {self.address})"


class Doorbell:
    """A port on one address that answers each caller with this machine's token."""

    def __init__(self, address: str, callers: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=max(callers, 16))
        self._server.settimeout(0.2)
        self.port: int = self._server.getsockname()[1]
        self.token = secrets.token_hex(TOKEN_BYTES)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> Doorbell:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(1.0)
        self._server.close()

    def _answer(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # a caller that has gone again, or nobody for a moment
                caller, _ = self._server.accept()
                with caller:
                    caller.sendall(self.token.encode())


def ring(guest: Guest, limit_s: float) -> str:
    """Return "" if `guest` answers with its own token, else what was in the way."""
    try:
        with socket.create_connection((guest.address, guest.port), timeout=limit_s) as connection:
            answer = b""
            while len(answer) < len(guest.token) and (part := connection.recv(64)):
                answer += part
    except OSError as error:
        return words_for(error, limit_s)
    return "" if answer.decode(errors="replace") == guest.token else "another machine answers at this address"


def words_for(error: OSError, limit_s: float | None = None) -> str:
    """Return what an error of connecting means."""
    if isinstance(error, TimeoutError):
        return "no answer" + (f" within {limit_s:g} s" if limit_s else "") + "; a firewall that drops, or no way there"
    if error.errno == errno.ECONNREFUSED:
        return "refused: nobody listens there, or a firewall rejects it"
    if error.errno == errno.EINVAL:  # what Linux says where a route leads into a black hole
        return "no way there: a route that drops"
    return (error.strerror or str(error)).lower()


def try_all(guests: list[Guest], rank: int, limit_s: float) -> dict[int, str]:
    """Ring at every other rank's door at once; return what was in the way, for each that did not answer."""
    others = [other for other in range(len(guests)) if other != rank]
    with ThreadPoolExecutor(max_workers=min(len(others), 64)) as threads:
        errors = threads.map(lambda other: ring(guests[other], limit_s), others)
        return {other: error for other, error in zip(others, errors, strict=True) if error}


def blame(guests: list[Guest], errors: dict[int, dict[int, str]]) -> str:
    """Return one sentence for each machine or pair that failed, or nothing.

    Args:
        errors: for each rank, the ranks it could not reach and why.

    A machine that nobody reached is named once, and so is one that reached nobody.
    """
    world = range(len(guests))
    failed = {(by, to): why for by in world for to, why in errors.get(by, {}).items()}
    sentences, cut_off = [], set()
    for rank in world if len(guests) > 2 else ():
        calls_to = [(by, rank) for by in world if by != rank]
        calls_by = [(rank, to) for to in world if to != rank]
        for calls, what in ((calls_to, "cannot be reached by any other"), (calls_by, "cannot reach any other")):
            if all(call in failed for call in calls):
                sentences.append(f"rank {rank} {guests[rank].name} {what}: {failed[calls[0]]}")
                cut_off.add(rank)
    for (by, to), why in sorted(failed.items()):
        if not {by, to} & cut_off:
            sentences.append(f"rank {to} {guests[to].name} cannot be reached from rank {by} {guests[by].name}: {why}")
    return "; ".join(sentences)
