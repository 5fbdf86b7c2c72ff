"""Which bugs of distributed training did real projects have, and how is such a program read and run?

Each file of programs/incidents/ is a plain program that fails, reduced from a thread that its docstring names. Its
comments `# cure: CODE` say what to write instead: in place of the line, or, where the line is nothing else, between its
neighbours. The broken program and the cured one are got from the file by this alone, and torchrun runs both.

Left out on purpose: a tool that finds these bugs. Each program ends with a check of its own, and says what it measured.
Read next: `fault.py`, which starts torchrun; `commands/drill.py`, whose level 11 asks for the wrong line.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

from ddp_course.diagnose.faults.fault import Diagnosis, Fault, started

ROOMS = (Path(__file__).parents[3], Path(__file__).parents[2] / "share")  # of a checkout, and of a wheel
KEYS = ("Seen", "Found", "Cure", "Met at", "Ranks")
MOST_CURES, MOST_LINES, WIDTH = 4, 40, 88  # of a program without its docstring

_LINE = re.compile(r"(\s*)(.*?)(?:\s*# cure:(?: ?(.*)))?")  # indent, code, and what the cure has in its place
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception): .*)", re.MULTILINE)
_AS_IT_SHOULD = re.compile(r"(?:Assertion|Runtime|Value)Error|torch\.distributed\.\w+")
_ECHO = re.compile(r"Connection (?:closed|reset) by peer")  # another rank has failed before


@dataclass(frozen=True)
class Incident:
    """A program of the museum.

    Attributes:
        name: a word for the terminal, such as "no-sync-a-step-off".
        title: what is wrong, in one line.
        seen, found, cure: what people saw, how it is found, and what to change.
        met_at: the thread's address.
        ranks: how many the program needs.
        broken, cured: both programs, without docstring and without the comments that say the cure.
        lines: the lines of `broken`, from 1, that the cure changes; for an insertion, those before and after it.
    """

    name: str
    title: str
    seen: str
    found: str
    cure: str
    met_at: str
    ranks: int
    broken: str
    cured: str
    lines: tuple[int, ...]


def read(path: Path) -> Incident:
    """Return the incident of a file.

    Raises:
        ValueError: the file does not follow the form; names the line, what was expected and what was found.
    """

    def need(fits: object, line: int, expected: str, found: object) -> None:
        if not fits:
            raise ValueError(f"{path}, line {line}: expected {expected}, found {found!r}")

    lines = path.read_text("utf-8").splitlines()
    need(lines and re.match('"""\\S', lines[0]), 1, "a docstring", lines[0] if lines else "")
    need('"""' in lines, len(lines), "a line that ends the docstring", lines[-1])
    said, key, end = {"title": ""}, "title", lines.index('"""') + 1
    for line in [lines[0][3:], *lines[1 : end - 1]]:
        word, _, rest = line.partition(": ")
        key, line = (word, rest) if word in KEYS else (key, line)
        said[key] = f"{said.get(key, '')} {line.strip()}".strip()
    wanted = ["title", *KEYS][: 6 if "Ranks" in said else 5]
    need(list(said) == wanted and all(said.values()), end, f"the entries {', '.join(wanted[1:])}", list(said)[1:])
    thread = re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", said["Met at"])
    need(thread, end, "Met at: owner/repository#number", said["Met at"])
    need((ranks := said.get("Ranks", "2")) in ("2", "3", "4"), end, "2, 3 or 4 ranks", ranks)

    while lines[end : end + 1] == [""]:
        end += 1
    broken, cured, touched, cures = [], [], set(), 0
    for number, line in enumerate(lines[end:], end + 1):
        need(len(line) <= WIDTH, number, f"at most {WIDTH} letters", len(line))
        indent, code, cure = _LINE.fullmatch(line).groups()
        need(code or cure != "", number, "code before or after `# cure:`", line)
        if cure is not None:
            cures += 1
            before = max((n for n, each in enumerate(broken, 1) if each), default=0)
            touched |= {len(broken) + 1} if code else {before, len(broken) + 1}
        broken += [indent + code] if code or cure is None else []
        cured += [indent + (code if cure is None else cure)] if cure != "" else []
    need(1 <= cures <= MOST_CURES, end, f"1 to {MOST_CURES} comments `# cure: CODE`", cures)
    need((count := sum(map(bool, broken))) <= MOST_LINES, end, f"at most {MOST_LINES} lines of code", count)
    try:
        compile("\n".join(cured), path.name, "exec")
    except SyntaxError as error:
        need(False, end, "comments `# cure:` that give a program", f"{error.msg}: {error.text}")
    name, address = path.stem.replace("_", "-"), f"https://github.com/{thread[1]}/issues/{thread[2]}"
    words = (name, said["title"].rstrip("."), said["Seen"], said["Found"], said["Cure"], address)
    beside = sorted(n for n in touched if 0 < n <= len(broken) and broken[n - 1])
    return Incident(*words, int(ranks), "\n".join([*broken, ""]), "\n".join([*cured, ""]), tuple(beside))


@dataclass(frozen=True)
class Started:
    """A program of an incident; calling it runs it under torchrun, and the diagnosis names the incident if it fails."""

    name: str
    ranks: int
    text: str

    def __call__(self) -> Diagnosis:
        """Collective: the program's own, on fresh ranks.

        Raises:
            RuntimeError: it failed by something else than its own check or torch's words.
            TimeoutError: it did not end.
        """
        begin = time.monotonic()
        status, said = started(self.text, self.ranks)
        seconds = time.monotonic() - begin
        if not status:
            return Diagnosis(None, None, next((text.strip() for text in said if text), ""), seconds)
        report = "\n".join(f"rank {rank}: {line}" for rank, text in enumerate(said) for line in text.splitlines()[-3:])
        errors = [(rank, found[-1]) for rank, text in enumerate(said) if (found := _ERROR.findall(text))]
        errors.sort(key=lambda error: bool(_ECHO.search(error[1])))
        if not (errors and _AS_IT_SHOULD.match(errors[0][1])):
            raise RuntimeError(f"{self.name} did not fail as it should:\n{report}")
        return Diagnosis(self.name, None, errors[0][1].removeprefix("AssertionError: "), seconds, report)


def fault_of(it: Incident) -> Fault:
    """Return the incident as the failure lab shows its faults."""
    provoke, fix = (Started(it.name, it.ranks, text) for text in (it.broken, it.cured))
    cause = f"{it.title}. How it is found: {it.found}"
    return Fault(it.name, it.title, it.seen, cause, it.cure, it.met_at, provoke, fix)


def exhibit(seed: int) -> Incident:
    """Return the incident of a seed, in an order of the museum's own: seeds in a row repeat none too soon."""
    names = random.Random(0).sample(sorted(ALL), len(ALL))
    return ALL[names[seed % len(names)]]


FILES = [path for room in ROOMS for path in sorted(room.glob("programs/incidents/*.py"))]
ALL = {each.name: each for each in map(read, FILES)}
INCIDENTS: dict[str, Fault] = {name: fault_of(each) for name, each in ALL.items()}
