"""Several machines on one, and how one of them dies.

A `Node` stands for one machine of a job: a torchrun agent with its ranks. The agents meet at a store (torch's c10d
rendezvous), agree on who takes part, and start their ranks; when a rank or a machine is gone, they do so again, and
the ranks continue from the last checkpoint. Two nodes on 127.0.0.1 behave like two machines, except that they share a
network and a disk; with a `prefix` such as `ip netns exec host1` each has a network of its own.

torchrun gives each rank a session of its own, so a killed agent leaves its ranks behind. Whatever a node started
carries the node's mark in its environment, and is found by it in /proc: by `kill`, at the end of the `with` block, and
by the janitor, should this process be killed.

Source: torch/distributed/elastic/agent/server/api.py, what the agent does.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_course.launcher import janitor
from ddp_course.rendezvous import LOOPBACK, agent_store

POLL_S = 0.05
TOLD = 60  # lines of a node's last words in an error
# What a launcher tells its ranks. A node that is started by a rank does not inherit it: it is a job of its own.
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "GLOO_", "NCCL_SOCKET")
# Seconds. torch's own are 600, 30, 30, 60, 5 and 5: made for large jobs, where a second attempt is expensive.
PATIENCE = {
    "join_timeout": 60,  # for the others to come
    "last_call_timeout": 3,  # for more nodes, once there are enough
    "close_timeout": 5,
    "read_timeout": 10,  # for one answer of the store
    "heartbeat_timeout": 5,
    "keep_alive_interval": 1,  # after three missed signs of life a node counts as dead
}


@dataclass(frozen=True)
class NodeSettings:
    """What a node is told. All nodes of one job have the same `nnodes` and meeting point."""

    nproc: int = 2  # ranks on this node
    nnodes: str = "1"  # nodes in the job, as "2", or "1:2" for a job that continues with fewer
    # "HOST:PORT" of the store at which the nodes meet. With port 0 this process opens one on a free port of the
    # loopback interface; `Node.endpoint` then says where. It outlives every node's death, as long as its `Node` lives.
    endpoint: str = f"{LOOPBACK}:0"
    address: str = LOOPBACK  # of this node, under which the others reach its ranks
    # Whether this node's agent opens the store, as in a real job, where it dies with that node. It then listens on
    # every interface: torch offers no choice.
    hosts_store: bool = False
    max_restarts: int = 0  # how often the ranks may be started again after a failure; a node that joins is none
    patience: Mapping[str, int] = field(default_factory=dict)  # changes to `PATIENCE`, in seconds
    prefix: Sequence[str] = ()  # a command that runs the agent elsewhere, such as ["ip", "netns", "exec", "host1"]
    environ: Mapping[str, str] = field(default_factory=dict)  # more variables for the agent and its ranks

    def command(self, program: Sequence[str], endpoint: str, folder: Path) -> list[str]:
        """Return the agent's command line."""
        conf = {"is_host": int(self.hosts_store), **PATIENCE, **self.patience}
        return [
            *self.prefix, sys.executable, "-m", "torch.distributed.run",
            f"--nproc-per-node={self.nproc}", f"--nnodes={self.nnodes}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=course",
            "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in conf.items()),
            f"--local-addr={self.address}", f"--max-restarts={self.max_restarts}", "--monitor-interval=0.1",
            f"--log-dir={folder}", *program,
        ]  # fmt: skip

    def variables(self, mark: str) -> dict[str, str]:
        """Return the environment of the agent and its ranks."""
        name, _, value = mark.partition("=")
        ours = {
            name: value,
            "PYTHONUNBUFFERED": "1",  # the last words of a rank that is killed are there to be read
            # Rank 0 opens the ranks' store again in each round, on its own address only. Shared with the agents', it
            # would be of the first round, also after its host is gone.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(PLACE)}
        return {"OMP_NUM_THREADS": "1", **inherited, **ours, **self.environ}


class Node(AbstractContextManager):
    """One torchrun agent with its ranks, which starts at once.

        program = ["train.py"]
        with Node(program, nnodes="2") as first, Node(program, nnodes="2", endpoint=first.endpoint) as second:
            first.wait(60), second.wait(60)           # (0, 0): two machines with two ranks each

    Everything of it is gone when the `with` block ends.
    """

    def __init__(self, program: Sequence[str], **settings: Any) -> None:
        """Start the agent; it waits for the other nodes, then starts its ranks.

        Args:
            program: what torchrun is to run: a script or "-m" and a module, then its arguments.
            settings: those of `NodeSettings`.
        Raises:
            RuntimeError: there is no /proc here.
        """
        if not Path("/proc/self/environ").exists():
            raise RuntimeError("Node finds its ranks in /proc, which only Linux has; use torchrun itself")
        told = NodeSettings(**settings)
        self.store, self.endpoint = None, told.endpoint
        if told.endpoint == f"{LOOPBACK}:0":
            # An agent that opens its own listens on every interface, on a port that may be taken before it starts.
            self.store, place = agent_store(1)
            self.endpoint = "{MASTER_ADDR}:{MASTER_PORT}".format(**place)
        self._mark = f"DDP_COURSE_NODE={secrets.token_hex(8)}"
        self._folder = Path(tempfile.mkdtemp(prefix="ddp-course-node-"))
        self._texts: dict[str, str] = {}
        self._janitor = janitor.start(str(self._folder), self._mark)
        try:
            with open(self._folder / "stdout", "wb") as out, open(self._folder / "stderr", "wb") as err:
                self._agent = subprocess.Popen(
                    told.command(program, self.endpoint, self._folder),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=told.variables(self._mark),
                    start_new_session=True,  # Ctrl-C, and a kernel's signals to its group, are not for the agent
                )
        except BaseException:
            self._janitor.communicate()
            raise

    @property
    def output(self) -> str:
        """What the ranks have printed so far, of all rounds, in the order of its arrival."""
        return self._read("stdout")

    @property
    def errors(self) -> str:
        """What the ranks and the agent have written to their standard error so far."""
        return self._read("stderr")

    def _read(self, name: str) -> str:
        return self._texts.get(name) or (self._folder / name).read_text(errors="replace")

    @property
    def status(self) -> int | None:
        """The agent's exit status, negative if a signal ended it; None while it runs."""
        return self._agent.poll()

    def rank_pids(self) -> dict[int, int]:
        """Return the process number of each rank that lives, by its local rank; empty between two rounds."""
        found = {}
        for pid in janitor.marked(self._mark):
            variables = janitor.environment(pid)
            local_rank = variables.get("LOCAL_RANK")
            # Its children inherit RANK; the rank itself is the one whose parent has none.
            if local_rank is not None and "RANK" not in janitor.environment(janitor.parent(pid)):
                found[int(local_rank)] = pid
        return dict(sorted(found.items()))

    def wait_until(self, condition: Callable[[], object], limit_s: float, what: str = "it") -> None:
        """Wait until `condition()` is true.

        Raises:
            RuntimeError: the node has ended, and it still is not.
            TimeoutError: it was not within `limit_s` seconds.
        """
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.status is not None and not condition():
                raise RuntimeError(f"the node ended with status {self.status} before {what}\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {limit_s:g} s for {what}\n{self._last_words()}")
            time.sleep(POLL_S)

    def wait(self, limit_s: float) -> int:
        """Wait until the agent has ended, and return its exit status: 0, 1 if a rank failed for good.

        Raises:
            TimeoutError: it still runs after `limit_s` seconds.
        """
        try:
            return self._agent.wait(limit_s)
        except subprocess.TimeoutExpired:
            ranks = ", ".join(map(str, self.rank_pids())) or "none"
            raise TimeoutError(
                f"the node still runs after {limit_s:g} s; local ranks alive: {ranks}\n{self._last_words()}"
            ) from None

    def _last_words(self) -> str:
        return "\n".join((self.output + self.errors).splitlines()[-TOLD:])

    def kill_rank(self, local_rank: int) -> int:
        """End one rank with SIGKILL, as the kernel does when memory runs out; return its process number.

        Raises:
            RuntimeError: there is no such rank now.
        """
        ranks = self.rank_pids()
        if local_rank not in ranks:
            raise RuntimeError(f"local rank {local_rank} is not running; these are: {list(ranks) or 'none'}")
        os.kill(ranks[local_rank], signal.SIGKILL)
        return ranks[local_rank]

    def kill(self) -> None:
        """End the agent and all its ranks at once with SIGKILL.

        The system closes their connections, so others notice. When a machine loses its power, no one closes them.
        """
        self._agent.kill()  # first: it must not see its ranks die
        janitor.kill_marked(self._mark)
        self._agent.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the agent, as a cluster does before it takes the machine away; torchrun passes it on."""
        self._agent.terminate()

    def close(self) -> None:
        """End whatever is left, keep the texts, remove the folder and the meeting point. May be called twice."""
        if self._texts:
            return
        self.kill()
        self._texts = {name: self._read(name) or "\n" for name in ("stdout", "stderr")}
        shutil.rmtree(self._folder, ignore_errors=True)
        self._janitor.kill()
        self._janitor.stdin.close()
        self._janitor.wait()
        self.store = None

    def __exit__(self, *error: object) -> None:
        self.close()
