"""12.1 `diagnose(said)`: from what all ranks say, which failure is it, and which rank is to look at?

The texts are torch's own, from failures provoked a second ago: on other ranks, with other exceptions and shapes.

Read next: `validation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from judges.failure_lab.last_words import PROGRAMS, Case, provoke

PLAIN = ("KeyError('label {}')", "ValueError('expected {} classes')", "IndexError('row {} of 10')")
# A program's own exception may sound like torch's.
ALIKE = ("TimeoutError('no batch within {} s')", "ConnectionError('the data server closed connection {}')")
MOST_SHOWN = 110  # letters of a rank's last line


def cases_of(world_size: int, rng: Random) -> list[Case]:
    """Choose the rank and the detail of each failure; rank 0 is the bad one in one of the first four."""
    number = rng.randint(11, 99)
    details = {
        "skipped-collective": str(rng.randint(0, 2)),
        "collective-order": rng.choice(("1", "-1")),
        "collective-shape": str(rng.randint(1, 50)),
        "unused-parameters": str(rng.randint(2, 4)),
    }
    details = [(name, details[name]) for name in PROGRAMS if name in details]
    bad = [rng.randrange(1, world_size) for _ in details]
    bad[rng.randrange(len(bad))] = 0
    cases = [Case(name, rank, detail) for (name, detail), rank in zip(details, bad, strict=True)]
    # Never rank 0: to look at it first would be right by chance.
    for exception in (rng.choice(PLAIN), *ALIKE):
        cases.append(Case("one-rank-raises", rng.randrange(1, world_size), exception.format(number)))
    return rng.sample(cases, len(cases))


def reading_driver(rank: int, world_size: int, function: Callable, texts: list[list[str]]) -> list[Any]:
    """Have each failure read; what the function raises costs that failure only."""
    return [_outcome(function, list(said)) for said in texts]


def _outcome(function: Callable, said: list[str]) -> Any:
    try:
        found = function(said)
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [plain(part) for part in found] if isinstance(found, tuple | list) else plain(found)


def reading_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Provoke the failures, then have all of them read."""
    world_size = rng.choice((3, 4))
    cases = cases_of(world_size, rng)
    texts = provoke(cases, world_size)
    (found,) = answer.run(reading_driver, 1, texts)
    for check in READING.checks:
        of_check = [i for i, case in enumerate(cases) if _check_of(case) == check.key]
        yield check.key, next(filter(None, (_fault(cases[i], texts[i], found[i]) for i in of_check)), None)


def _check_of(case: Case) -> str:
    if case.name != "one-rank-raises":
        return case.name
    return "alike" if case.detail.startswith(("TimeoutError", "ConnectionError")) else case.name


def _fault(case: Case, said: list[str], found: Any) -> Fault | None:
    if found == [case.name, case.bad]:
        return None
    report = "\n".join(f"rank {rank} says: {_in_short(text)}" for rank, text in enumerate(said))
    return Fault(f"{(case.name, case.bad)}", _shown(found), cause=_cause(case, said, found), report=report)


def _in_short(text: str) -> str:
    if not text:
        return "nothing"
    last = next((line for line in reversed(text.splitlines()) if "Error" in line), text.splitlines()[-1])
    words = last[last.find("gloo/transport") - 1 :] if "gloo/transport" in last else last
    return words if len(words) <= MOST_SHOWN else words[:MOST_SHOWN] + "..."


def _shown(found: Any) -> str:
    return f"{tuple(found)}" if isinstance(found, list) else repr(found)


def _cause(case: Case, said: list[str], found: Any) -> str:
    if isinstance(found, str):
        return "this failure made the function raise; print what the ranks say, and read it again"
    if not isinstance(found, list) or len(found) != 2:
        return "return two things: the name of the failure, and the number of the rank"
    name, rank = found
    if name == case.name:
        return _rank_cause(case, rank)
    if name not in PROGRAMS:
        return f"the names are those of the table: {', '.join(PROGRAMS)}"
    if case.name == "one-rank-raises" and _check_of(case) == "alike":
        return (
            "an exception of the program's own may speak of a time limit or of a connection, too; what torch says of "
            "a lost peer or of patience comes from gloo, and names it"
        )
    if case.name == "one-rank-raises":
        return "one rank has an exception of its own; the others only lost the connection to it"
    if case.name == "skipped-collective":
        return "nobody raised anything of its own: the ranks that speak gave up waiting, and one says nothing"
    if case.name == "unused-parameters":
        return "one rank names parameters that got no gradient; the others only lost the connection to it"
    return "the text says in which aspects the collectives differ: the op type, or the tensor shapes"


def _rank_cause(case: Case, rank: Any) -> str:
    if case.name in ("collective-order", "collective-shape"):
        return (
            "every rank tells what it runs itself, and what one other rank runs; the rank to look at is the one that "
            "runs something else than all the others"
        )
    if case.name == "skipped-collective":
        return "the ranks that speak have waited; the rank to look at is the one that says nothing"
    if not isinstance(rank, int):
        return "the rank is a whole number: its place in the list"
    return "this rank only lost the connection to a peer; the rank to look at has another reason"


READING = Exercise(
    "12.1",
    "Read what the ranks say",
    "diagnose",
    20,
    (
        Check("one-rank-raises", "one rank raises, the others lose it", 1),
        Check("alike", "its exception sounds like one of torch's", 1),
        Check("skipped-collective", "one rank never comes", 1),
        Check("collective-order", "one rank calls something else", 1),
        Check("collective-shape", "one rank brings another shape", 1),
        Check("unused-parameters", "on one rank, parameters get no gradient", 1),
    ),
    reading_judge,
)
