"""12.1 `diagnose(said)`: from what all ranks say, which failure is it, and which rank is to look at?

The texts are torch's own, from failures provoked a moment ago: on other ranks, with other exceptions and shapes.

Read next: `validation.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

from ddp_course.diagnose.error_texts import PROGRAMS, Case, provoke
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round, Seen

RUNTIME = "RuntimeError('sample {} has no label')"  # the type of most that torch raises
INSIDE = "dist.all_reduce('sample {}')"  # raised by torch, whose lines are in the traceback, but no echo
# A program's own exception may sound like torch's.
ALIKE = ("TimeoutError('no batch within {} s')", "ConnectionError('the data server closed connection {}')")
MOST_SHOWN = 110  # letters of a rank's last line


@lru_cache(maxsize=2)  # the answer, the solution and the mistakes read the same texts
def provoked(cases: tuple[Case, ...], world_size: int) -> list[list[str]]:
    return provoke(list(cases), world_size)


def cases(rng: Random) -> list[Round]:
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
    for check, exception in [*(("one-rank-raises", own) for own in (INSIDE, RUNTIME)), *(("alike", e) for e in ALIKE)]:
        named.append((check, Case("one-rank-raises", rng.randrange(1, world_size), exception.format(number))))
    named = rng.sample(named, len(named))
    texts = provoked(tuple(case for _, case in named), world_size)
    told = [(name, said) for (name, _), said in zip(named, texts, strict=True)]
    return [Round(1, told, raises=(Exception,), init=False)]


def act(function, case: list[str], rank: int, world_size: int) -> Any:
    return function(case)


def said(seen: Seen) -> str:
    lines = (f"rank {n} says: {_in_short(text)}" for n, text in enumerate(seen.case))
    return "\n".join(["of these", *lines, "the answer"])


def _in_short(text: str) -> str:
    lines = text.splitlines() or ["nothing"]
    last = next((line for line in reversed(lines) if "Error" in line), lines[-1])
    words = last[last.find("gloo/transport") - 1 :] if "gloo/transport" in last else last
    return words if len(words) <= MOST_SHOWN else words[:MOST_SHOWN] + "..."


def diagnosis(seen: Seen) -> Any:
    return f"{seen['error']}: {seen['message']}" if seen["error"] else seen["value"]


def why(cause: str) -> Callable[[Seen], str]:
    """Return what is told of an answer that no mistake has."""

    def told(seen: Seen) -> str:
        found = seen["value"]
        if seen["error"]:
            return "this failure made the function raise; print what the ranks say, and read it again"
        if not isinstance(found, list) or len(found) != 2:
            return "return two things: the name of the failure, and the number of the rank"
        if found[0] not in list(PROGRAMS):
            return f"the names are those of the table: {', '.join(PROGRAMS)}"
        return cause

    return told


ODD = "every rank tells what it runs itself, and what one other runs: look at the one that runs what no other does"
ASPECTS = "the text says in which aspects the collectives differ: the op type, or else the tensor shapes"
MISTAKES = rf"""
whom the odd one names | collective-order collective-shape | {ODD}
    min(range(len(own)), key=lambda rank: own.count(own[rank])) => int(
        re.search(r"but Rank (\d+)", said[own.index(min(own, key=own.count))])[1])
the first rank that speaks | one-rank-raises alike
| this rank only lost the connection to a peer; the rank to look at has another reason
    "gloo/transport" not in text => text
known by the words connection and timeout | alike
| an exception of the program's own may speak of a time limit or of a connection, too; torch's come from gloo
    next(rank for rank, text in enumerate(said) if "gloo/transport" not in text) => next(
        (r for r, text in enumerate(said) if not re.search("(?i)connection|timeout|timed out", text)), 0)
any timeout is a rank that never came | alike
| an exception of the program's own may speak of a time limit, too; what torch says of its patience comes from gloo
    if "" in said: => if any("TimeoutError" in text for text in said):
        return "skipped-collective", 0
    if "" in said:
its own has no line of torch | one-rank-raises
| an exception of the program's own may be raised inside torch; what torch says of a lost peer comes from gloo
    next(rank for rank, text in enumerate(said) if "gloo/transport" not in text) => next(
        (rank for rank, text in enumerate(said) if "torch/distributed" not in text), 0)
every mismatch is one of the order | collective-shape | {ASPECTS}
    len(set(ops)) > 1 => True
the shapes are looked at first | collective-order | {ASPECTS}
    len(set(ops)) > 1 => len(set(shapes)) == 1
the odd one is the one that is no all_reduce | collective-order | {ODD}
    ops = [ => said_ops = ops = [
    return name, min => odd = [rank for rank, op in enumerate(said_ops) if op != "ALLREDUCE"]
    return name, odd[0] if odd else min
unused parameters are not looked for | unused-parameters
| one rank names parameters that got no gradient; the others only lost it
    did not receive grad => did not receive a gradient
a silent rank is not foreseen | skipped-collective
| nobody raised anything of its own: the ranks that speak gave up waiting, and one says nothing
    if "" in said: => if False:
the last line of a text that has none | skipped-collective | this failure made the function raise
    if "did => if text.splitlines()[-1] and "did
an endless loop | all | an endless loop | hangs
    if "" in said: => while True:
        pass
    if "" in said:
names of its own | all | the names are those of the table | tests
    def diagnose(said):
        return ["crash"], [1]
only the name | all | return two things: the name of the failure | tests
    def diagnose(said):
        return "one-rank-raises"
"""

RIGHT = r"""
by whom the others name
    def diagnose(said):
        everything = " ".join(said)
        if "CollectiveFingerPrint" in everything:
            named = Counter(int(n) for text in said for n in re.findall(r"but Rank (\d+) is", text))
            return [f"collective-{'order' if 'Op type' in everything else 'shape'}", named.most_common(1)[0][0]]
        if match := re.search(r"did not receive grad for rank (\d+)", everything):
            return ["unused-parameters", torch.tensor(int(match[1]))]
        if "" in said:
            return ["skipped-collective", said.index("")]
        return ["one-rank-raises", [bool(re.search(r"\[/.*gloo.*\]", text)) for text in said].index(False)]
"""

READING = exercise(
    *("12.1", "Read what the ranks say", "diagnose", 20),
    cases=cases,
    act=act,
    said=said,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        key: (words, 1, key, diagnosis, why(cause))
        for key, (words, cause) in {
            "one-rank-raises": ("one rank raises, the others lose it",
                                "one rank has an exception of its own; the others only lost the connection to it"),
            "alike": ("its exception sounds like one of torch's",
                      "an exception of the program's own may speak of a time limit or of a connection, too; what torch "
                      "says of a lost peer or of patience comes from gloo, and names it"),
            "skipped-collective": ("one rank never comes",
                                   "nobody raised anything of its own: the ranks that speak gave up waiting; the rank "
                                   "to look at is the one that says nothing"),
            "collective-order": ("one rank calls something else", f"{ASPECTS}; {ODD}"),
            "collective-shape": ("one rank brings another shape", f"{ASPECTS}; {ODD}"),
            "unused-parameters": ("on one rank, parameters get no gradient",
                                  "one rank names parameters that got no gradient; the others only lost it"),
        }.items()
    },
)  # fmt: skip
