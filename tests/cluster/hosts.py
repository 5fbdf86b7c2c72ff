"""How does one machine hold several hosts?

Linux can give a process a network of its own: a namespace, with its own interfaces, addresses and ports. Each host
here is one, joined to a bridge by a cable (a veth pair), and reaches the others only through it. Pulling the cable is
taking the host's end of it down. Processor, memory and disk are shared, as the disk of a cluster would be.

Left out on purpose: separate disks and users, slow or lossy cables (`tc netem` adds those).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NETWORK = "198.18.77."  # of the range for tests between networks: nobody's addresses

# How often the kernel sends a packet again before it gives a connection up: 5 times are 13 s. Its own choice, 15 times,
# are 15 minutes, and so long torchrun's agent may wait for a store that it cannot reach: its client asks the store to
# call the waiting off, and waits for the answer without a limit.
RETRIES = 5
NAME = re.compile(r"ddp-(\d+)-\d+")


class Hosts:
    """`count` hosts that reach each other, as 198.18.77.1, .2, ...; all is gone at the end of the `with` block."""

    def __init__(self, count: int) -> None:
        """Build them.

        Raises:
            subprocess.CalledProcessError: it is not allowed; nothing is left of the attempt.
        """
        tag = f"ddp-{os.getpid()}"  # another test run may build its own meanwhile
        self.names = [f"{tag}-{number}" for number in range(1, count + 1)]
        self.cables = [f"cable{number}" for number in range(1, count + 1)]
        self.switch = f"{tag}-0"
        self.addresses = [f"{NETWORK}{number}" for number in range(1, count + 1)]
        remove_those_of_the_dead()
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        # The switch has a namespace too: nothing of it can be reached from this machine's own network.
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", cable, "netns", self.switch)
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", self.switch, "link", "set", cable, "master", "bridge", "up")
            for interface in ("lo", "eth0"):
                ip("-n", name, "link", "set", interface, "up")
            command = f"echo {RETRIES} > /proc/sys/net/ipv4/tcp_retries2"
            ip("netns", "exec", name, "sh", "-c", command)

    def prefix(self, host: int) -> list[str]:
        """Return the words that make a command run on this host; hosts count from 0."""
        return ["ip", "netns", "exec", self.names[host]]

    @contextmanager
    def cut(self, host: int) -> Iterator[None]:
        """Pull this host's cable, until the `with` block ends: packets are lost, and no side is told."""
        ip("-n", self.switch, "link", "set", self.cables[host], "down")
        try:
            yield
        finally:
            ip("-n", self.switch, "link", "set", self.cables[host], "up")

    def close(self) -> None:
        """End whatever still runs on the hosts, and remove them. May be called twice."""
        for name in (*self.names, self.switch):
            remove(name)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def remove(name: str) -> None:
    with suppress(subprocess.CalledProcessError):  # there is none of this name
        for pid in ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        ip("netns", "delete", name)  # the cables go with it


def remove_those_of_the_dead() -> None:
    """A test run that was killed has left its hosts behind."""
    for line in ip("netns", "list").splitlines():
        if (found := NAME.match(line)) and not os.path.exists(f"/proc/{found[1]}"):
            remove(found[0])


def ip(*words: str) -> str:
    """Run the command `ip`, and return what it prints."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20).stdout


def why_not() -> str | None:
    """Return why hosts cannot be built here, or None if they can."""
    if not shutil.which("ip"):
        return "network namespaces need the command `ip` (iproute2)"
    try:
        with Hosts(1):
            return None
    except subprocess.CalledProcessError as error:
        cure = "" if os.geteuid() == 0 else "; they need root: sudo, or a container with --privileged"
        return f"network namespaces are not allowed here ({error.stderr.strip()}){cure}"
