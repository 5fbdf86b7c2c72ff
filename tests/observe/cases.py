"""The programs of `programs.txt`: each run as it is, by `ddp-course run`; and what its report may say.

`python -m tests.observe.cases [NAME ...]` runs all, or some, and prints what was said of each, in 8 minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ddp_course.launcher import codes

LIMIT_S = 4  # of a hang; torch's own is longer
HEAD = "import ctypes, faulthandler, os, queue, signal, subprocess, sys, threading, time"
TORCH = "from datetime import timedelta\nimport torch\nimport torch.distributed as dist"
OPEN = 'dist.init_process_group("gloo", timeout=timedelta(seconds={patience}))'
FACTS = "rank, size, x = dist.get_rank(), dist.get_world_size(), torch.ones(4)"
SPAWN = """
if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "STORE": os.path.abspath("store")}
    """
START = {
    "spawn": "torch.multiprocessing.spawn(main, nprocs=3)",
    "fork": "ranks = [torch.multiprocessing.get_context('fork').Process(target=main, args=(r,)) for r in range(3)]\n"
    "    [rank.start() for rank in ranks]\n    [rank.join() for rank in ranks]\n"
    "    sys.exit(max(abs(rank.exitcode) for rank in ranks))",
}


@dataclass(frozen=True)
class Case:
    """A program, and what may be said of it."""

    name: str
    hangs: bool
    program: str
    blamed: frozenset[int | None]  # None: nobody
    how: str  # it is started

    @property
    def lines(self) -> set[int]:
        return {number for number, line in enumerate(self.program.split("\n"), 1) if line.endswith("# here")}

    def command(self, path: Path) -> list[str]:
        if self.how in START:
            return [sys.executable, str(path)]
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(path)]


def read() -> dict[str, Case]:
    found = {}
    for text in Path(__file__).with_name("programs.txt").read_text().split("\n=== ")[1:]:
        head, _, body = text.partition("\n")
        kind, name, who, how = re.match(r"(\w+) (\w+): (\S+) ?(\w*)", head).groups()
        blamed = {None} if who == "nobody" else {int(who.strip("[]")), *([None] if who.startswith("[") else [])}
        found[name] = Case(name, kind == "hang", _program(body.strip("\n"), how), frozenset(blamed), how)
    return found


def _program(body: str, how: str) -> str:
    opened = OPEN.format(patience=2 if how == "patience" else 25)
    if how == "before":
        return "\n".join([HEAD, TORCH, body, FACTS, "dist.barrier()\n"])
    if how not in START:
        return "\n".join([HEAD, TORCH, opened, FACTS, body, "dist.destroy_process_group()\n"])
    store = '"gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=3, '
    inside = [opened.replace('"gloo", ', store), *FACTS.split("\n"), *body.split("\n")]
    main = "\n".join(["def main(rank):", *(f"    {line}" for line in inside)])
    return "\n".join([HEAD, TORCH, "", "", main, "", SPAWN + START[how] + "\n"])


def told_of(case: Case, folder: Path) -> tuple[int, dict, str]:
    """Run a program under observation; return the exit status, the report's facts, and all that was said."""
    path = folder / f"{case.name}.py"
    path.write_text(case.program)
    command = [sys.executable, "-m", "ddp_course.cli", "run", "--limit", str(LIMIT_S), "--", *case.command(path)]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as run:  # fmt: skip
        said = run.stdout.read()  # its standard input stays open: somebody may wait for it
    return run.returncode, codes.found_in(said), said


def judged(case: Case, facts: dict) -> str:
    """Say "right", "cannot tell", or what is wrong."""
    if not facts:
        return "SAYS NOTHING"
    if facts.get("rank") is None:
        return "right, cannot tell" if None in case.blamed else "cannot tell"
    if facts["rank"] not in case.blamed:
        return f"ACCUSES rank {facts['rank']}"
    at = facts.get("line", "").rpartition(":")[2]
    return "right" if not case.lines or at and int(at) in case.lines else f"right rank, line {at or 'unknown'}"


if __name__ == "__main__":
    cases = read()
    for each in sys.argv[1:] or cases:
        with tempfile.TemporaryDirectory() as name:
            status, told, said = told_of(cases[each], Path(name))
        print(f"{each}: {judged(cases[each], told)} (exit status {status})", flush=True)
        if len(sys.argv) > 1:
            print(said)
