"""Question to a run: do the ranks make the same calls, and if not, at which line did they part?

The ranks' calls are laid side by side. At the first that differ, the paths that led to them are compared from their
ends: the last statement that both came to and left in different directions has decided. What kind of statement it is
says what went wrong: a loop that ended on one rank, a test that only one passed, an exception that one caught.

Left out on purpose: who is right. Two ranks that differ do not tell.
Read next: `watch_calls.py`, where paths come from.
"""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections import Counter

from ddp_course.rehearsal.finding import Finding
from ddp_course.rehearsal.notes import RIGHT, Answer, Notes
from ddp_course.rehearsal.source import Source
from ddp_course.rehearsal.watch_calls import DEEP

# Collectives for which every rank must give a tensor of the same size.
SAME_SIZE = {"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "new_group"}
IMPLIED = {"forward", "backward", "step", "end"}  # calls of DDP's, and the end of the program
RETURNS = -1


def calls(notes: Notes, text: str, failed: bool) -> Answer:
    """Compare the calls of ranks 0 and each other, and name the line at which they part."""
    return _laid_side_by_side(notes, text, failed, steps=False)


def steps(notes: Notes, text: str) -> Finding | None:
    """The same with optimizer steps among the calls: the line at which one rank steps and another does not."""
    found = _laid_side_by_side(notes, text, failed=False, steps=True)
    return found if isinstance(found, Finding) and found.fault == "decided-by-one-rank" else None


def _laid_side_by_side(notes: Notes, text: str, failed: bool, steps: bool) -> Answer:
    together = [_joined(facts, steps) for facts in notes.ranks]
    if len(together) < 2 or not all(together):
        return None
    source = Source(text)
    answers = [_compared(source, notes, (0, rank), together[0], together[rank], failed)
               for rank in range(1, len(together))]  # fmt: skip
    found = next((each for each in answers if isinstance(each, Finding)), None)
    return found or (None if failed or None in answers else RIGHT)


def _joined(facts: list[dict], steps: bool) -> list[dict]:
    """A rank's calls; where steps do not count as calls, what led to a step leads to the call after it."""
    found, before = [], []
    for fact in facts:
        if fact["what"] not in ("call", "end"):
            continue
        if not steps and fact.get("op") == "step":
            before += fact["path"]
            continue
        found.append({**fact, "path": before + fact["path"]} if before else fact)
        before = []
    return found


def _compared(source: Source, notes: Notes, who: tuple[int, int], one: list, other: list, failed: bool) -> Answer:
    if found := _inside_join(who, one, other):
        return found
    one, other = ([fact for fact in facts if not fact.get("joined")] for facts in (one, other))
    for a, b in zip(one, other, strict=False):
        if "end" in (a["what"], b["what"]) and a.get("raised", b.get("raised")):
            return None  # an exception of the program's own, which is told as such
        if _kind(a) != _kind(b):
            return _parted(source, notes, who, a, b) or _unlike(who, a, b)
        if a["what"] == "call" and a["op"] in SAME_SIZE and (a["size"], a["dtype"]) != (b["size"], b["dtype"]):
            return _parted(source, notes, who, a, b) if a["line"] != b["line"] else _unlike(who, a, b)
    return _other_order(who, one, other) or (None if failed or len(one) != len(other) else RIGHT)


def _kind(fact: dict) -> str:
    return fact["op"] if fact["what"] == "call" else "end"


def _told(fact: dict) -> str:
    """Say what a rank does at its call."""
    if fact["what"] == "end":
        return "is at the end of the program"
    if fact["op"] in IMPLIED:
        what = {"backward": "runs backward", "step": "steps"}.get(fact["op"], "runs the forward of the replica")
        return f"{what}, line {fact['line']}"
    size = f" of {fact['size']} {fact['dtype']}" if fact.get("size") is not None else ""
    return f"calls {fact['op']}{size}, line {fact['line']}"


def _both(who: tuple[int, int], a: dict, b: dict) -> str:
    return f"rank {who[0]} {_told(a)}; rank {who[1]} {_told(b)}"


def _unlike(who: tuple[int, int], a: dict, b: dict) -> Finding:
    line = next((fact["line"] for fact in (a, b) if fact["what"] == "call"), None)
    return Finding("collective-order", line, _both(who, a, b))


def _inside_join(who: tuple[int, int], one: list, other: list) -> Finding | None:
    """Collectives of the program's own under join(), unequally many."""
    own = [[fact for fact in facts if fact.get("joined") and fact.get("own")] for facts in (one, other)]
    if len(own[0]) == len(own[1]):
        return None
    line = max(own, key=len)[0]["line"]
    counts = " and ".join(f"rank {rank} made {len(facts)}" for rank, facts in zip(who, own, strict=True))
    return Finding("collective-under-join", line, f"of its own calls inside join(), {counts}")


def _other_order(who: tuple[int, int], one: list, other: list) -> Finding | None:
    """The same names in another order: values of different meanings are reduced with each other."""
    named = [(a, b) for a, b in zip(one, other, strict=False) if a.get("names") and b.get("names")]
    differ = [(a, b) for a, b in named if a["names"] != b["names"] and a["line"] == b["line"]]
    if not differ:
        return None
    a, b = differ[0]
    if a["names"][-1].startswith("the gradient"):
        evidence = f"rank {who[0]} reduces {a['names'][-1]} where rank {who[1]} reduces {b['names'][-1]}"
        return Finding("collective-order", a["line"], evidence,
                       cure="reduce every parameter on every rank, with zeros where there is no gradient")  # fmt: skip
    at_line = [Counter(fact["names"][-1] for fact in pair if fact["line"] == a["line"])
               for pair in zip(*named, strict=True)]  # fmt: skip
    if at_line[0] != at_line[1]:
        return None
    evidence = f"rank {who[0]} gives {a['names'][-1]!r} to {a['op']} where rank {who[1]} gives {b['names'][-1]!r}"
    return Finding("set-order", a["line"], evidence,
                   cure="loop in one order on every rank: over sorted(…), or a fixed list")  # fmt: skip


# --- Where the paths part ---------------------------------------------------------------------------


def _parted(source: Source, notes: Notes, who: tuple[int, int], a: dict, b: dict) -> Finding | None:
    places = source.statements
    if not (a["whole"] and b["whole"]):
        return None
    found = parting(*([_at_statement(step, places) for step in fact["path"]] for fact in (a, b)))
    if found is None:
        return None
    line, nexts = found
    statement = places.get(line)
    if isinstance(statement, ast.For | ast.AsyncFor):
        return _loop(source, notes, who, (a, b), statement, nexts)
    if isinstance(statement, ast.If | ast.While):
        inside = {step for step in _lines(statement.body)}
        true = [rank for rank, step in zip(who, nexts, strict=True) if step in inside]
        if len(true) != 1:
            return None
        return _test(source, who, (a, b), statement, true[0])
    if isinstance(statement, ast.With | ast.Assign | ast.Expr | ast.Return | ast.AugAssign):
        handler = next((step for step in nexts if isinstance(source.handlers.get(step), ast.ExceptHandler)), None)
        if handler is not None:
            rank = who[nexts.index(handler)]
            evidence = f"rank {rank} caught an exception in line {line} and went on; {_both(who, a, b)}"
            return Finding("decided-by-one-rank", handler, evidence, cure=CAUGHT)
        if None in nexts:  # the call of one rank is made inside this statement, which the other has behind it
            return _inside(source, notes, who, (a, b), line, nexts)
    return None


def _inside(source: Source, notes: Notes, who: tuple[int, int], facts: tuple[dict, dict], line: int,
            nexts: tuple) -> Finding | None:  # fmt: skip
    paths = [fact["path"] for fact in facts]
    depth = min(step // DEEP for path in paths for step in path if step % DEEP == line)
    cut = [path[len(path) - path[::-1].index(depth * DEEP + line) :] for path in paths]
    inner = [list(itertools.takewhile(lambda step: step // DEEP > depth, path)) for path in cut]
    if found := _parted(source, notes, who, *({**f, "path": p} for f, p in zip(facts, inner, strict=True))):
        return found
    caller = nexts.index(None)
    if facts[caller]["what"] == "end" or facts[caller]["op"] in IMPLIED:
        return None
    evidence = f"what this line starts calls {facts[caller]['op']} on rank {who[caller]} alone; {_both(who, *facts)}"
    return Finding("collective-under-rank-0", line, evidence)


CAUGHT = "let the exception end the job, or tell the others: all_reduce a flag after the try, and skip together"


def _at_statement(step: int, places: dict[int, ast.stmt]) -> int:
    depth, line = divmod(step, DEEP)
    statement = places.get(line)
    return depth * DEEP + (statement.lineno if statement else line)


def _lines(body: list[ast.stmt]) -> set[int]:
    return {node.lineno for part in body for node in ast.walk(part) if isinstance(node, ast.stmt)}


def parting(one: list[int], other: list[int]) -> tuple[int, tuple[int | None, int | None]] | None:
    """Return the line at which two paths part, and the next line of each: None at its end, RETURNS out of the function.

    Calls inside are stepped over: of the depths at which paths part, the outermost has decided.
    """
    for depth in sorted({step // DEEP for step in one} & {step // DEEP for step in other}):
        last = [{step: index for index, step in enumerate(path) if step // DEEP == depth} for path in (one, other)]
        for step in sorted(last[0], key=last[0].get, reverse=True):
            if step in last[1]:
                nexts = (_next(one, last[0][step]), _next(other, last[1][step]))
                if nexts[0] != nexts[1]:
                    return step % DEEP, nexts
    return None


def _next(path: list[int], index: int) -> int | None:
    depth = path[index] // DEEP
    for step in path[index + 1 :]:
        if step // DEEP == depth and step != path[index]:
            return step % DEEP
        if step // DEEP < depth:
            return RETURNS
    return None


def _loop(source: Source, notes: Notes, who: tuple[int, int], facts: tuple[dict, dict], loop: ast.For,
          nexts: tuple) -> Finding | None:  # fmt: skip
    inside = _lines(loop.body)
    ended = [rank for rank, step in zip(who, nexts, strict=True) if step not in inside]
    if len(ended) != 1:
        return None
    goes_on = next(rank for rank in who if rank != ended[0])
    reached = [dict(fact["turns"]) for fact in facts]
    early = who.index(ended[0])
    for turn in (line for line in inside if isinstance(source.statements.get(line), ast.Continue)):
        if reached[early].get(turn, 0) > reached[1 - early].get(turn, 0):
            times = (
                f"{reached[early].get(turn, 0)} times on rank {ended[0]}, {reached[1 - early].get(turn, 0)} on rank "
            )
            test = source.test_above(turn)
            return Finding("decided-by-one-rank", test or turn, f"`continue` was reached {times}{goes_on}",
                           cure="skip on every rank or on none: all_reduce the flag before the test")  # fmt: skip
    batches = [sum(1 for fact in facts if fact["what"] == "batch" and fact["line"] == loop.lineno)
               for facts in (notes.ranks[rank] for rank in (ended[0], goes_on))]  # fmt: skip
    if all(batches) or source.loads(loop.iter):
        counts = f": {batches[0]} batches in all, rank {goes_on} {batches[1]} so far" if all(batches) else ""
        return Finding("uneven-inputs", loop.lineno, f"the loop ended on rank {ended[0]}{counts}; {_both(who, *facts)}")
    evidence = f"the loop ended on rank {ended[0]} and continued on rank {goes_on}; {_both(who, *facts)}"
    return Finding("decided-by-one-rank", loop.lineno, evidence,
                   cure="loop over the same things on every rank, in the same order")  # fmt: skip


def _test(source: Source, who: tuple[int, int], facts: tuple[dict, dict], statement: ast.If | ast.While,
          true: int) -> Finding:  # fmt: skip
    false = next(rank for rank in who if rank != true)
    evidence = f"the test is true on rank {true} and false on rank {false}; {_both(who, *facts)}"
    if not source.is_rank_test(statement.test) and not source.of_rank(statement.test):
        return Finding("decided-by-one-rank", statement.lineno, evidence)
    inner = facts[who.index(true)]
    if inner["what"] == "call" and inner["op"] == "forward":
        return Finding("forward-on-one-rank", inner["line"], evidence)
    guarded = inner["what"] == "call" and inner["op"] != "backward"
    return Finding("collective-under-rank-0", inner["line"] if guarded else statement.lineno, evidence)


def crash(notes: Notes, one: Notes, causes: tuple) -> Answer:
    """An exception of the program's own on several ranks, where one rank ends well, or one that DDP raises."""
    ends = [next((fact for fact in facts if fact["what"] == "end"), {}) for facts in notes.ranks]
    raised = [(rank, fact) for rank, fact in enumerate(ends) if fact.get("raised") and not fact.get("talking")]
    alone = next((fact for fact in one.ranks[0] if fact["what"] == "end"), {})
    if not raised:
        return None
    rank, fact = raised[0]
    cause = next((each for each in causes if each.match(fact["raised"])), None)
    if cause is None and (not alone or alone.get("raised")):
        return None
    who = "all ranks" if len(raised) == len(ends) else f"rank {rank}"
    words = " ".join(fact["raised"].split())
    evidence = f"{who}: {textwrap.shorten(words, 200, placeholder=' …')}"
    return Finding("crash", fact["raised_at"], evidence, cure=cause.cure if cause else "")


def hang(notes: Notes, failure: str) -> Finding | None:
    """Ranks that waited in vain, where their calls do not tell why: messages, or groups of some ranks only."""
    waits = [facts[-1] for facts in notes.ranks if facts and facts[-1]["what"] == "end" and facts[-1].get("talking")]
    if not waits and not any(facts and facts[-1]["what"] != "end" for facts in notes.ranks):
        return None
    stuck = [facts[-1]["line"] for facts in notes.ranks if facts and facts[-1]["what"] != "end"]
    line = next((line for line in (*(fact["raised_at"] for fact in waits), *stuck) if line), None)
    return Finding("hang", line, textwrap.shorten(failure, 300, placeholder=" …"))
