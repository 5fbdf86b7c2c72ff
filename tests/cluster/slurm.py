"""How does one machine hold a SLURM cluster?

A controller and two nodes, each in a network of its own (`hosts.py`), with process numbers of its own: whatever runs on
a node ends with the node's first process, as when a machine is switched off. They share one folder, with a munge key, a
configuration and logs of their own: SLURM and munge have to be installed, but none of their services is used.

Left out on purpose: cgroups, accounting, and users other than root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_course.launcher import janitor
from tests.cluster import hosts
from tests.waiting import wait_for

INSTALL = "apt-get install --no-install-recommends slurm-wlm munge"

# cred_expire is also how long a requeued job waits. ReturnToService: a lost node is back when its slurmd is.
CONFIG = """
ClusterName=test
SlurmctldHost=n0({addresses[0]})
NodeName=n1 NodeAddr={addresses[1]} CPUs=4
NodeName=n2 NodeAddr={addresses[2]} CPUs=4
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes=n1,n2 PriorityTier=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SchedulerParameters=sched_interval=1
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/n0.pid
SlurmdPidFile={folder}/%n.pid
SlurmUser=root
SelectType=select/linear
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
"""
MUNGED = "munged --foreground --socket={0}/munge --key-file={0}/key --pid-file={0}/pid --seed-file={0}/seed"

# Process 1 has to reap orphans, so it is this shell and not the daemon.
INIT = 'hostname "$0" && mount --bind "$HOSTS" /etc/hosts && "$@"; exit'


class Slurm:
    """A controller, n0, and the nodes n1 and n2."""

    def __init__(self, folder: Path, networks: hosts.Hosts) -> None:
        """Write what they share."""
        self.folder, self.networks = folder, networks
        self.machines: dict[int, subprocess.Popen] = {}
        ours = {"SLURM_CONF": f"{folder}/slurm.conf", "HOSTS": f"{folder}/hosts"}
        self.variables, self.mark = os.environ | ours, f"SLURM_CONF={folder}/slurm.conf"
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, addresses=networks.addresses))
        (folder / "hosts").write_text("".join(f"{address} n{n}\n" for n, address in enumerate(networks.addresses)))
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_bytes(os.urandom(128))

    def start(self) -> None:
        """Return once both nodes wait for work."""
        self.boot(0, "sh", "-c", f"{MUNGED.format(self.folder)} & exec slurmctld -D")
        for number in (1, 2):
            self.boot(number, "slurmd", "-D", "-N", f"n{number}")
        wait_for(lambda: self.ask("sinfo", "-h", "-o", "%D %t", "-p", "low") == "2 idle", self.up, "two idle nodes")

    def up(self) -> bool:
        return all(machine.poll() is None for machine in self.machines.values())

    def boot(self, number: int, *command: str) -> None:
        """Start a machine. It ends with this process, however that ends."""
        words = ["setpriv", "--pdeathsig=KILL", "nsenter", f"--net=/run/netns/{self.networks.names[number]}"]
        words += ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words += ["sh", "-c", INIT, f"n{number}", *command]
        with open(self.folder / f"n{number}.log", "a") as log:
            self.machines[number] = subprocess.Popen(words, env=self.variables, stdout=log, stderr=log)

    def switch_off(self, number: int) -> None:
        """End a machine, and return when nothing runs on it any more."""
        machine, network = self.machines.pop(number), self.networks.names[number]
        machine.kill()
        machine.wait()
        wait_for(lambda: not hosts.ip("netns", "pids", network), lambda: True, f"the end of n{number}")

    def ask(self, *command: str, **other) -> str:
        """Run a command of SLURM's on the controller, and return what it prints."""
        words = [*self.networks.prefix(0), *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.run(words, env=self.variables, timeout=60, **pipes, **other).stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """Return all that SLURM knows of a job, such as its JobState."""
        return dict(word.partition("=")[::2] for word in self.ask("scontrol", "show", "job", "-o", job).split())

    def ranks(self) -> list[int]:
        """Return the process numbers of all ranks on the nodes."""
        found = [pid for pid in janitor.marked(self.mark) if "RANK" in janitor.environment(pid)]
        return [pid for pid in found if janitor.parent(pid) not in found]

    @contextmanager
    def held(self) -> Iterator[list[int]]:
        """Let the ranks stand still during the `with` block: what befalls them meets them in mid-training."""
        ranks = self.ranks()
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        try:
            yield ranks
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGCONT)


@contextmanager
def slurm() -> Iterator[Slurm]:
    """Yield a cluster that waits for jobs. At the end of the `with` block nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, hosts.Hosts(3) as networks:
        os.chmod(folder, 0o755)  # munge wants a socket that everybody can reach
        cluster = Slurm(Path(folder), networks)
        try:
            cluster.start()
            yield cluster
        except BaseException as error:
            error.add_note("\n".join(log.read_text() for log in sorted(Path(folder).glob("*.log"))))
            raise
        finally:
            for number in list(cluster.machines):
                cluster.switch_off(number)


def why_not() -> str | None:
    """Return why there can be no cluster here, or None if there can."""
    if not all(map(shutil.which, ("munged", "sbatch", "slurmctld", "slurmd"))):
        return f"needs the programs of SLURM and munge: {INSTALL}"
    return hosts.why_not()
