"""Questions to a run: do the ranks begin alike, stay alike, and learn from the mean of their gradients?

Read next: `two_runs.py`, on one rank and several, and on one that was killed.
"""

from __future__ import annotations

from collections import Counter

from ddp_course.rehearsal.finding import Finding
from ddp_course.rehearsal.notes import RIGHT, Answer, Notes
from ddp_course.rehearsal.sketches import alike

CLOSE = 1e-3  # relative; gradients in bfloat16 have three digits
EQUAL = 1e-6  # relative; weights that were computed alike
SMALL_BATCH = 8  # rows of a rank that are too few for a mean and a variance of their own


def states(notes: Notes) -> list[list[dict]]:
    """Each rank's notes of weights, in order, those of its first optimizer."""
    return [[fact for fact in facts if fact["which"] == facts[0]["which"]] for facts in notes.of("weights") if facts]


def different_start(notes: Notes) -> Answer:
    first = [facts[0] for facts in states(notes)]
    if len(first) < 2:
        return None
    if all(alike(first[0]["sketch"], each["sketch"], EQUAL) for each in first):
        return RIGHT
    line = first[0]["line"]
    for (made, *one), *others in zip(*(fact.get("each", []) for fact in first), strict=False):
        if not all(alike(one, other[1:], EQUAL) for other in others):
            line = made or line
            break
    return Finding("different-start", line, "before the first step the ranks' weights differ")


def drift(notes: Notes) -> Answer:
    if different_start(notes) is not RIGHT:
        return None
    for together in zip(*notes.of("weights"), strict=False):
        step, when = together[0]["step"], together[0]["at"]
        if not all(alike(together[0]["sketch"], each["sketch"], EQUAL) for each in together):
            line = _beside_the_replica(notes) or together[0]["line"]
            return Finding("drift", line, f"the ranks' weights differ {when} step {step}")
        for (name, made, *one), *others in zip(*(each.get("still", []) for each in together), strict=False):
            if not all(alike(one, other[2:], EQUAL) for other in others):
                return Finding("drift", made, f"{name}, which no gradient changes, differs {when} step {step}")
    return RIGHT


def gradients(notes: Notes) -> Answer:
    """Are the gradients of each step the mean of those that the ranks computed?"""
    world_size, said, right = len(notes.ranks), Counter(), 0
    for together in zip(*notes.of("gradients"), strict=False):
        if world_size < 2 or len({fact["count"] for fact in together}) > 1 or not together[0]["count"]:
            continue
        found, local = [fact["found"] for fact in together], [fact["local"] for fact in together]
        verdict = _verdict(found, local)
        right += verdict == RIGHT
        said[verdict] += verdict not in (RIGHT, None)
    if any(said.values()) and said.most_common(1)[0][1] >= right:  # a clipped step is looked at twice
        fault, steps = said.most_common(1)[0]
        ratio = {"not-averaged": "those of the rank alone", "averaged-twice": f"1/{world_size} of the mean"}
        evidence = f"in {steps} steps the gradients are {ratio.get(fault, f'{world_size} times the mean')}"
        return Finding(fault, _line_of(fault, notes), evidence)
    if again := notes.all("reduced again"):
        return Finding("averaged-twice", again[0]["line"], "an all_reduce of gradients that are means already")
    return RIGHT if right else None


def _verdict(found: list[list[float]], local: list[list[float]]) -> str | None:
    """What the gradients of one step are, beside the mean of what the ranks computed."""
    world_size = len(found)
    mean = [sum(each) / world_size for each in zip(*local, strict=True)]
    halved = all(alike([world_size * x for x in each], mean, CLOSE) for each in found)
    if all(alike(each, local[0], CLOSE) for each in local[1:]):  # equal rows, or clipped means: a mean shows nothing
        return "averaged-twice" if halved else None
    if all(alike(each, mean, CLOSE) for each in found):
        return RIGHT
    if all(alike(f, own, CLOSE) for f, own in zip(found, local, strict=True)):
        return "not-averaged"
    if halved:
        return "averaged-twice"
    return "summed" if all(alike([x / world_size for x in each], mean, CLOSE) for each in found) else None


def _line_of(fault: str, notes: Notes) -> int | None:
    """Where to look: for gradients that never met, at what kept them apart."""
    step = next((fact["line"] for fact in notes.all("gradients")), None)
    if fault != "not-averaged":
        return step
    if not notes.all("wrapped"):
        first = next(iter(notes.all("weights")), {})
        return next((made for made, *_ in first.get("each", []) if made), step)
    quiet = next((fact["line"] for fact in notes.all("no_sync")), None)
    return _beside_the_replica(notes) or quiet or step


def _beside_the_replica(notes: Notes) -> int | None:
    """The line of a training forward that does not go through the replica that there is."""
    beside = [fact for fact in notes.all("forward") if fact["training"] and not fact["replica"]]
    return beside[0]["line"] if beside and notes.all("wrapped") else None


def find_unused(notes: Notes) -> Answer:
    wrapped = [fact for fact in notes.all("wrapped") if fact["unused"]]
    seen = notes.all("gradients")
    if not wrapped or not seen:
        return None
    if any(fact["idle"] for fact in seen):
        return RIGHT
    return Finding("find-unused-without-need", wrapped[0]["line"], f"in {len(seen)} steps every parameter was used")


def no_sync(notes: Notes) -> Answer:
    if late := notes.all("late no_sync"):
        line = next((fact["line"] for fact in notes.all("no_sync")), late[0]["line"])
        return Finding("forward-outside-no-sync", line, "a backward stands inside, its forward does not")
    return RIGHT if notes.all("no_sync") else None


def local_batchnorm(notes: Notes, text: str) -> Answer:
    norms = notes.all("batchnorm")
    if not norms or "convert_sync_batchnorm" in text:  # torch's needs GPUs, so that here the local one stays
        return None
    if (rows := min(fact["rows"] for fact in norms)) > SMALL_BATCH:
        return RIGHT
    line = norms[0]["made"] or norms[0]["line"]
    return Finding("local-batchnorm", line, f"{norms[0]['name']} normalises {rows} rows of one rank")
