"""How did the ranks end, as launchers tell it? torchrun, mp.spawn, srun, the kernel, Kubernetes.

torchrun calls the first failure that it saw the root cause. It looks at its processes one after the other, so an echo
may stand there: a rank that was killed goes before one that exited; one that torchrun has ended itself tells nothing.

Read next: `logs.py`, which looks for causes in words first.
"""

# ruff: noqa: E501  (words that are looked for stay whole)
from __future__ import annotations

import re
from dataclasses import dataclass

from ddp_course.diagnose.log_lines import Log, shortened

SIGNALS = {4: "crashed", 6: "aborted", 7: "bus-error", 8: "crashed", 9: "killed", 11: "crashed", 15: "terminated"}
_NAMED = {"SIGKILL": 9, "Killed": 9, "SIGSEGV": 11, "Segmentation fault": 11, "SIGABRT": 6, "Aborted": 6, "SIGBUS": 7,
          "Bus error": 7, "SIGTERM": 15, "Terminated": 15, "SIGFPE": 8, "SIGILL": 4, "Out Of Memory": 9}  # fmt: skip
_OWN = {"killed", "crashed", "bus-error"}  # of itself, or from outside: nothing that another rank's end brings about
_TABLE = re.compile(
    r"rank\s*: (?P<rank>\d+) \(local_rank: \d+\)\s*\n(?:\S*:)?\s*exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
_LINES = (
    re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)"),
    re.compile(
        r"task (?P<task>\d+): (?P<code>Killed|Exited with exit code \d+|Aborted|Segmentation fault|Bus error|Terminated|Out Of Memory)"
    ),
    re.compile(r"[Pp]rocess (?P<rank>\d+) terminated with (?:signal|exit code) (?P<code>\w+)"),
    re.compile(
        r"local[-_]rank=(?P<local>\d+).*?(?:died with <Signals\.(?P<signal>\w+)|non-zero exit status (?P<code>\d+))"
    ),
    re.compile(
        r"(?:line \d+:\s+\d+ |^)(?P<code>Killed|Segmentation fault|Bus error|Aborted)(?: +\(core dumped\))?(?:\s|$)"
    ),
    re.compile(r"(?:Fatal Python error|Signal): (?P<code>Segmentation fault|Bus error|Aborted)"),
    re.compile(r"died with <Signals\.(?P<signal>\w+)"),
    re.compile(r"[Ee]xit [Cc]ode:? +(?P<code>1(?:3[0-9]|43))\b"),
)
_KILLED_PID = re.compile(r"[Kk]illed process (\d+)|worker \(pid\(?s?\)? (\d+)\)")
_CURES = {
    "killed": "SIGKILL comes from the kernel's memory killer or from a person: dmesg on its host, and less memory a rank",
    "crashed": "a crash in compiled code: PYTHONFAULTHANDLER=1 shows its line; compare the versions of the packages",
    "bus-error": "shared memory (/dev/shm) too small, or a mapped file that was cut off: --shm-size=8g, fewer workers",
    "aborted": "compiled code gave up: its reason stands above, after 'terminate called' or 'what():'",
    "terminated": "SIGTERM from outside: a scheduler's limit, preemption, a person, or another node that failed first",
}


@dataclass(frozen=True)
class Exit:
    """One process that ended: whose, how, and where that is written."""

    rank: int | None
    code: int  # negative for a signal
    root: bool
    evidence: str
    place: str = ""

    @property
    def how(self) -> str:
        return SIGNALS.get(-self.code, f"exit status {self.code}" if self.code >= 0 else f"signal {-self.code}")

    @property
    def cure(self) -> str:
        told = "the rank said nothing of why: look at its standard error, and for sys.exit in the program"
        return self.place + _CURES.get(self.how, told)


def exits(logs: list[Log]) -> list[Exit]:
    """All ends that launchers tell of."""
    found = []
    for log in logs:
        text = log.text
        for each in _TABLE.finditer(text):
            root = text.rfind("Root Cause (first", 0, each.start()) > text.rfind("Failures:", 0, each.start())
            words = f"{log.name}: {shortened(' '.join(each[0].split()))}"
            found.append(Exit(int(each["rank"]), int(each["code"]), root, words))
    if found:  # the same ends stand in the launcher's lines, with less
        return found
    for log in logs:
        by_task = not any("distributed/elastic" in line or "distributed.elastic" in line for line in log.lines)
        for number, bare in enumerate(log.bare):
            each = next((each for pattern in _LINES if (each := pattern.search(bare))), None)
            if each is None:
                continue
            said = each.groupdict()
            rank = (
                said.get("rank")
                or (said.get("task") if by_task else None)
                or (said.get("local") if log.one_node else None)
            )
            rank = log.ranks[number] if rank is None and "Fatal Python" in each[0] else rank
            place = f"local rank {said['local']} of that node; " if said.get("local") and rank is None else ""
            code = _code(said.get("signal") or said["code"])
            found.append(Exit(None if rank is None else int(rank), code, False, log.place(number, each.start()), place))
    return found


def _code(word: str) -> int:
    if word in _NAMED:
        return -_NAMED[word]
    number = int(re.search(r"-?\d+", word)[0])
    return -(number - 128) if number > 128 else number  # as shells and Kubernetes tell a signal


def killed(found: list[Exit]) -> Exit | None:
    """The end that no other rank's end brings about: by SIGKILL or a crash; without a rank if several may be first."""
    own = [each for each in found if each.how in _OWN]
    return _first(own)


def ended(found: list[Exit]) -> Exit | None:
    """The end that a launcher saw first, of whatever kind; one by SIGTERM or SIGABRT, mostly an echo, goes last."""
    return _first([each for each in found if each.code > 0]) or _first(found)


def _first(found: list[Exit]) -> Exit | None:
    if not found:
        return None
    roots = [each for each in found if each.root]
    if len(roots) == 1 or len(found) == 1:
        return (roots or found)[0]
    first = (roots or found)[0]
    ranks = {each.rank for each in found}
    return first if len(ranks) == 1 else Exit(None, first.code, False, first.evidence)


def sole_failure(found: list[Exit]) -> int | None:
    """The one rank that failed, where torchrun's table has one and ended all others itself."""
    own = {each.rank for each in found if each.code != -15}
    return next(iter(own)) if len(own) == 1 else None


def rank_of_killed_pid(logs: list[Log]) -> int | None:
    """The rank whose process, or whose worker, the kernel has killed, if a launcher or the rank names its number."""
    pids = {pid for log in logs for found in _KILLED_PID.finditer(log.text) for pid in found.groups() if pid}
    ranks = {int(each["rank"]) for log in logs for each in _TABLE.finditer(log.text) if each["pid"] in pids}
    for log in logs:
        for rank, line in zip(log.ranks, log.lines, strict=True):
            if rank is not None and (found := _KILLED_PID.search(line)) and (found[1] or found[2]) in pids:
                ranks.add(rank)
    return next(iter(ranks)) if len(ranks) == 1 else None
