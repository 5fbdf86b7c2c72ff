"""Who is to blame for each fault, as its author knows it, whatever the launcher says today?

A program of `faults_on_ranks` or `faults_talking_on_ranks` carries its truth in `@fault`, and its bug in its
docstring. A rank outside `culprits` is innocent: naming it is worse than naming none. Naming none is right only where
several ranks share the blame or an honest report cannot tell. Three programs have no bug and must return their values.
`judge` compares a fault with what the launcher did.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddp_course import RankError

UNSURE = "The calls alone do not tell who is wrong"  # an honest report's words


@dataclass(frozen=True)
class Fault:
    """One program and the truth about it.

    Attributes:
        run: what every rank runs.
        culprits: the ranks that can fairly be named; empty when no rank can.
        operation: a regular expression that a good report contains; for a rank that fails by itself, its error.
        cannot_tell: an honest report may name no rank.
        code: the error's, where it is certain.
        says: sentences of the report, word for word.
        returns: the values by rank, for a program without a bug.
        timeout_s: the longest that a rank may wait in a collective.
    """

    run: Callable
    world_size: int
    culprits: set[int]
    operation: str = ""
    cannot_tell: bool = False
    code: str = ""
    says: tuple[str, ...] = ()
    returns: list | None = None
    timeout_s: float = 2.0

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def may_name_none(self) -> bool:
        return self.cannot_tell or len(self.culprits) != 1

    @property
    def lines(self) -> list[tuple[str, int]]:
        """File names and numbers of the lines of which a good report shows one; none where no report can know it."""
        path = Path(inspect.getsourcefile(self.run))
        numbered = enumerate(path.read_text().splitlines(), 1)
        return [(path.name, number) for number, line in numbered if line.endswith(f"# fault: {self.name}")]

    def shows_line(self, report: str) -> bool:
        """Whether the report quotes one of the lines, or names its file and number."""
        if not self.lines or f"# fault: {self.name}\n" in report + "\n":
            return True
        named = (rf"{re.escape(file)}\W{{1,3}}(line )?{number}\b" for file, number in self.lines)
        return any(re.search(line, report) for line in named)


def judge(fault: Fault, error: RankError | None, values: list | None) -> tuple[str, str]:
    """Compare what the launcher did with the truth.

    Args:
        error: what `launch` raised; None when it returned `values`.
    Returns:
        "ok", "cannot tell", "wrong accusation", "vague" or "missed", the worst that holds; and what is wrong.
    """
    if fault.returns is not None:
        if error is not None:
            return "wrong accusation", "nothing is wrong with this program"
        return ("ok", "") if values == fault.returns else ("missed", f"expected {fault.returns}, got {values}")
    if error is None:
        return "missed", f"returned {values}"
    if error.rank is not None and error.rank not in fault.culprits:
        return "wrong accusation", f"named rank {error.rank}, not {sorted(fault.culprits) or 'none'}"
    lacks = []
    unsure = UNSURE in error.report and all(f"rank {rank} " in error.report for rank in fault.culprits)
    if error.rank is None and not fault.may_name_none and not unsure:
        lacks.append(f"rank {min(fault.culprits)}")
    # The program's own name must not pass for the operation. Long lines of a report are folded.
    text = " ".join(error.report.replace(fault.name, "").split())
    if not re.search(fault.operation, text):
        lacks.append(f"/{fault.operation}/")
    lacks += [sentence for sentence in fault.says if sentence not in text]
    if fault.code not in ("", error.code):
        lacks.append(f"the code {fault.code}, found {error.code}")
    if not fault.shows_line(error.report):
        lacks.append(" or ".join(f"{file}:{number}" for file, number in fault.lines))
    if lacks:
        return "vague", "lacks " + ", ".join(lacks)
    return ("cannot tell", "names both") if error.rank is None and not fault.may_name_none else ("ok", "")


FAULTS: list[Fault] = []


def fault(world_size: int, culprits: set[int], *operation: str, **truth: object) -> Callable[[Callable], Callable]:
    """Note the truth about the program below; the program itself stays a plain function."""

    def note(program: Callable) -> Callable:
        FAULTS.append(Fault(program, world_size, culprits, *operation, **truth))
        return program

    return note
