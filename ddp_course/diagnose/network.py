"""Over which address would this machine talk to others?

gloo and NCCL each choose an interface by rules of their own, and announce its address to the other ranks. What they
would choose is worked out here from the interfaces, the host name and two environment variables, before anything
hangs. The addresses are read from the system's own list, by `getifaddrs`.

Standard library alone: the doctor runs where torch is broken.
Left out on purpose: InfiniBand, which NCCL prefers to any of this and which these rules do not decide.
Source: torch's ProcessGroupGloo::createDefaultDevice; NCCL's user guide, NCCL_SOCKET_IFNAME.
Read next: `machine_checks.py`, which judges the choice, and `reachability.py`, which tries it.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LOOPBACK, UP = 0x8, 0x1 | 0x40  # IFF_LOOPBACK; IFF_UP and IFF_RUNNING: the same numbers on Linux and macOS


@dataclass(frozen=True)
class Interface:
    """A network interface of this machine."""

    name: str
    addresses: tuple[str, ...] = ()  # numeric, IPv4 and IPv6
    up: bool = True  # and connected, which is what NCCL asks for
    loopback: bool = False


class _Entry(ctypes.Structure):
    """The head of C's struct ifaddrs."""


_Entry._fields_ = (
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
)


def interfaces() -> tuple[Interface, ...]:
    """Return the interfaces of this machine with their addresses, in the system's order; empty if it has no list."""
    found: dict[str, tuple[int, list[str]]] = {}
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no such call, or no libc, on this system
        libc, first = ctypes.CDLL(None), ctypes.POINTER(_Entry)()
        if libc.getifaddrs(ctypes.byref(first)) == 0:
            entry = first
            while entry:
                addresses = found.setdefault(entry.contents.name.decode(), (entry.contents.flags, []))[1]
                addresses += _numeric(entry.contents.address)
                entry = entry.contents.next
            libc.freeifaddrs(first)
    return tuple(Interface(name, tuple(a), f & UP == UP, bool(f & LOOPBACK)) for name, (f, a) in found.items())


def _numeric(sockaddr: int | None) -> list[str]:
    """Read an IPv4 or IPv6 address from C's struct sockaddr; other families have none."""
    head = ctypes.string_at(sockaddr, 2) if sockaddr else b"\0\0"
    # Linux has the family in both bytes, macOS a length and then the family.
    for family, offset, size in ((socket.AF_INET, 4, 4), (socket.AF_INET6, 8, 16)):
        if family in (int.from_bytes(head, "little"), head[1]):
            return [socket.inet_ntop(family, ctypes.string_at(sockaddr + offset, size))]
    return []


def resolve(name: str) -> tuple[tuple[str, ...], str]:
    """Return the numeric addresses of a host name and "", or nothing and why it has none."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (), getattr(error, "strerror", None) or str(error)
    return tuple(dict.fromkeys(answer[4][0] for answer in answers)), ""


def is_loopback(address: str) -> bool:
    """Say whether `address` leads back to the same machine, such as 127.0.1.1 or ::1."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_routable(address: str) -> bool:
    """Say whether other machines can be told this address: not loopback, not valid on one link only."""
    return not is_loopback(address) and not ipaddress.ip_address(address.partition("%")[0]).is_link_local


def routable(among: Iterable[Interface]) -> list[tuple[str, str]]:
    """Return name and address of each interface that other machines can be told."""
    return [(each.name, address) for each in among if each.up for address in each.addresses if is_routable(address)]


def with_address(among: Iterable[Interface]) -> list[str]:
    """Return the names of the interfaces that have an address."""
    return [each.name for each in among if each.addresses]


def interface_of(address: str, among: Iterable[Interface]) -> str | None:
    """Return the name of the interface that has `address`. All of 127.0.0.0/8 is the loopback interface's."""
    has = (each.name for each in among if address in each.addresses or (each.loopback and is_loopback(address)))
    return next(has, None)


def source_address(address: str) -> str | None:
    """Return the own address from which packets to `address` leave, or None if there is no way there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # a datagram socket sends nothing here; it only looks up the route
        return probe.getsockname()[0]
    return None


def listen(address: str, port: int) -> socket.socket:
    """Open a listening socket on one address; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


# --- What gloo and NCCL would choose, pure ---------------------------------------------------------


def gloo_names(environ: Mapping[str, str]) -> list[str]:
    """Return the interfaces that GLOO_SOCKET_IFNAME names: whole names between commas, no prefix, no exclusion."""
    return [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def gloo_address(environ: Mapping[str, str], among: Iterable[Interface], host_addresses: Iterable[str]) -> str | None:
    """Return the address that gloo would announce here, or None if it would refuse to start.

    It takes the interface that it was told; without one, the first address of the own host name that this machine
    has; without such a one, loopback.
    """
    if names := gloo_names(environ):
        return next((each.addresses[0] for each in among if each.name == names[0] and each.addresses), None)
    return next((address for address in host_addresses if interface_of(address, among)), "127.0.0.1")


def nccl_interfaces(environ: Mapping[str, str], usable: Sequence[str]) -> list[str]:
    """Return those of the `usable` interfaces over which NCCL's sockets would go, none if it would refuse to start.

    NCCL_SOCKET_IFNAME holds prefixes: "eth,ib". "=" asks for whole names, "^" turns the choice around. Without it,
    ib* comes first, then all but containers' and virtual machines' bridges and loopback, then those.
    """
    if told := environ.get("NCCL_SOCKET_IFNAME"):
        excluding, told = told.startswith("^"), told.removeprefix("^")
        whole, told = told.startswith("="), told.removeprefix("=")
        patterns = [pattern for pattern in told.split(",") if pattern]
        fits = {name: any(name == p if whole else name.startswith(p) for p in patterns) for name in usable}
        return [name for name, fit in fits.items() if fit is not excluding]
    bridges, loopback = ("docker", "virbr"), ("lo",)
    others = [name for name in usable if not name.startswith(bridges + loopback)]
    groups = [[name for name in usable if name.startswith(prefix)] for prefix in ("ib", bridges, loopback)]
    return next(filter(None, (groups[0], others, *groups[1:])), [])
