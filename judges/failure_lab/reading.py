"""12.1 `diagnose(said)`: from what all ranks say, which failure is it, and which rank is to look at?

The texts are torch's own, from failures provoked a second ago: on other ranks, with other exceptions and shapes.

Read next: `validation.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any

from ddp_course.diagnose.last_words import PROGRAMS, Case, provoke
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import exercise
from ddp_course.grading.vocabulary.play import Round, Seen

RUNTIME = "RuntimeError('sample {} has no label')"  # the type of most that torch raises
INSIDE = "dist.all_reduce('sample {}')"  # raised by torch, whose lines are in the traceback, but no echo
# A program's own exception may sound like torch's.
ALIKE = ("TimeoutError('no batch within {} s')", "ConnectionError('the data server closed connection {}')")
MOST_SHOWN = 110  # letters of a rank's last line


def act(function, case: tuple[Case, list[str]], rank: int, world_size: int):
    """A case has a failure, and what the ranks say."""
    return function(case[1])


def rounds(rng: Random) -> list[Round]:
    """Provoke all failures in turn; rank 0 is the bad one in one of the first four, and once in a mismatch."""
    world_size, number = rng.choice((3, 4)), rng.randint(11, 99)
    details = {
        "skipped-collective": str(rng.randint(0, 2)),
        "collective-order": rng.choice(("1", "-1")),
        "collective-shape": str(rng.randint(1, 50)),
        "unused-parameters": str(rng.randint(2, 4)),
    }
    bad = [rng.randrange(1, world_size) for _ in details]
    bad[rng.choice((0, 1, 3))] = 0  # not that of the shape: who sees no difference blames rank 0
    named = [(name, Case(name, rank, detail)) for (name, detail), rank in zip(details.items(), bad, strict=True)]
    other_way = "-1" if details["collective-order"] == "1" else "1"  # the odd one calls what the others called before
    odd = rng.randrange(world_size) if bad[1] == 0 else 0
    named.append(("collective-order", Case("collective-order", odd, other_way)))
    # Never rank 0: to look at it first would be right by chance.
    own = [
        ("one-rank-raises", INSIDE),
        ("one-rank-raises", RUNTIME),
        ("alike", ALIKE[0]),
        ("alike", ALIKE[1]),
    ]
    for check, exception in own:
        named.append((check, Case("one-rank-raises", rng.randrange(1, world_size), exception.format(number))))
    named = rng.sample(named, len(named))
    texts = provoke([case for _, case in named], world_size)
    said = [(name, (case, words)) for (name, case), words in zip(named, texts, strict=True)]
    return [Round(1, said, raises=(Exception,), init=False)]


def diagnosis(seen: Seen) -> Fault | None:
    """The name of the failure, and the rank."""
    (case, said), found = seen.case, seen["value"]
    if found == [case.name, case.bad]:
        return None
    shown = f"{seen['error']}: {seen['message']}" if seen["error"] else repr(found).replace("[", "(").replace("]", ")")
    report = "\n".join(f"rank {rank} says: {_in_short(text)}" for rank, text in enumerate(said))
    return Fault(f"{(case.name, case.bad)}", shown, cause=_cause(seen, case, found), report=report)


def _in_short(text: str) -> str:
    lines = text.splitlines() or ["nothing"]
    last = next((line for line in reversed(lines) if "Error" in line), lines[-1])
    words = last[last.find("gloo/transport") - 1 :] if "gloo/transport" in last else last
    return words if len(words) <= MOST_SHOWN else words[:MOST_SHOWN] + "..."


def _cause(seen: Seen, case: Case, found: Any) -> str:
    if seen["error"]:
        return "this failure made the function raise; print what the ranks say, and read it again"
    if not isinstance(found, list) or len(found) != 2:
        return "return two things: the name of the failure, and the number of the rank"
    if found[0] == case.name:
        return _rank_cause(case, found[1])
    if not isinstance(found[0], str) or found[0] not in PROGRAMS:
        return f"the names are those of the table: {', '.join(PROGRAMS)}"
    if case.detail.startswith(("TimeoutError", "ConnectionError")):
        torchs = "what torch says of a lost peer or of patience comes from gloo, and names it"
        return f"an exception of the program's own may speak of a time limit or of a connection, too; {torchs}"
    return {
        "one-rank-raises": "one rank has an exception of its own; the others only lost the connection to it",
        "skipped-collective": "nobody raised anything of its own: the ranks that speak gave up waiting, and one says "
        "nothing",
        "unused-parameters": "one rank names parameters that got no gradient; the others only lost it",
    }.get(case.name, "the text says in which aspects the collectives differ: the op type, or else the tensor shapes")


def _rank_cause(case: Case, rank: Any) -> str:
    if case.name in ("collective-order", "collective-shape"):
        odd = "the rank to look at is the one that runs something else than all the others"
        return f"every rank tells what it runs itself, and what one other rank runs; {odd}"
    if case.name == "skipped-collective":
        return "the ranks that speak have waited; the rank to look at is the one that says nothing"
    if not isinstance(rank, int):
        return "the rank is a whole number: its place in the list"
    return "this rank only lost the connection to a peer; the rank to look at has another reason"


READING = exercise(
    "12.1",
    "Read what the ranks say",
    "diagnose",
    20,
    act=act,
    rounds=rounds,
    checks={
        "one-rank-raises": ("one rank raises, the others lose it", 1, diagnosis, "one-rank-raises"),
        "alike": ("its exception sounds like one of torch's", 1, diagnosis, "alike"),
        "skipped-collective": ("one rank never comes", 1, diagnosis, "skipped-collective"),
        "collective-order": ("one rank calls something else", 1, diagnosis, "collective-order"),
        "collective-shape": ("one rank brings another shape", 1, diagnosis, "collective-shape"),
        "unused-parameters": ("on one rank, parameters get no gradient", 1, diagnosis, "unused-parameters"),
    },
)
