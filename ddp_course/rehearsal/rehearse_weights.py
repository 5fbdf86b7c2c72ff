"""Questions to a run: do the ranks begin alike, stay alike, and learn from the mean of their gradients?

Read next: `two_runs.py`, on one rank and several, and on one that was killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddp_course.rehearsal.finding import LOOK, WRONG, Finding
from ddp_course.rehearsal.notes import RIGHT, Answer, Notes
from ddp_course.rehearsal.sketches import alike
from ddp_course.rehearsal.source import Source

CLOSE = 1e-3  # relative; gradients in bfloat16 have three digits
EQUAL = 1e-6  # relative; weights that were computed alike
SMALL_BATCH = 8  # rows of a rank that are too few for a mean and a variance of their own


def states(notes: Notes) -> list[list[dict]]:
    """Each rank's notes of weights, in order, those of its first optimizer."""
    return [[fact for fact in facts if fact["which"] == facts[0]["which"]] for facts in notes.of("weights") if facts]


def together(notes: Notes) -> list[tuple[dict, ...]]:
    """The ranks' notes of weights, side by side, of optimizers that hold the same parameters everywhere."""
    rows = zip(*notes.of("weights"), strict=False)
    return [row for row in rows if all(each.get("shapes") == row[0].get("shapes") for each in row)]


def same(row: Sequence[dict]) -> bool:
    """Whether the weights that the ranks have noted side by side are equal."""
    return all(alike(row[0]["sketch"], each["sketch"], EQUAL) for each in row)


def different_start(notes: Notes) -> Answer:
    first = [facts[0] for facts in states(notes)]
    if len(first) < 2 or any(each.get("shapes") != first[0].get("shapes") for each in first):
        return None
    if same(first):
        return RIGHT
    line = first[0]["line"]
    for (made, *one), *others in zip(*(fact.get("each", []) for fact in first), strict=False):
        if not all(alike(one, other[1:], EQUAL) for other in others):
            line = made or line
            break
    as_wrapped = _changed_since(notes)
    if as_wrapped:
        return Finding("changed-after-wrapping", as_wrapped[1],
                       f"{as_wrapped[0]} was equal when the model was wrapped, and differs before the first step",
                       cure="change it before wrapping, or broadcast it afterwards")  # fmt: skip
    met = [not_averaged(notes)] if notes.all("gradients") else []
    grade = WRONG if RIGHT in met or notes.all("wrapped") else LOOK  # ranks that never average may train other models
    return Finding("different-start", line, "before the first step the ranks' weights differ", grade)


def _changed_since(notes: Notes) -> tuple[str, int | None] | None:
    """The first parameter that was equal on all ranks when it was wrapped, and is not before the first step."""
    wrapped = [next((f["each"] for f in facts if f["what"] == "wrapped as"), []) for facts in notes.ranks]
    begins = [next((f["each"] for f in facts if f["what"] == "begins as"), []) for facts in notes.ranks]
    for then, now in zip(zip(*wrapped, strict=False), zip(*begins, strict=False), strict=False):
        (name, line, *one), *others = then
        if all(alike(one, other[2:], EQUAL) for other in others) and not all(
            alike(now[0], each, EQUAL) for each in now[1:]
        ):
            return name, line
    return None


def equal_at_the_end(notes: Notes) -> bool | None:
    """Whether all ranks end with the same weights; None if they did not come to an end, or hold different parts."""
    ends = [next((fact["final"] for fact in facts if fact["what"] == "end"), None) for facts in notes.ranks]
    if len(ends) < 2 or not all(ends) or any([s for s, _ in each] != [s for s, _ in ends[0]] for each in ends):
        return None
    return all(
        alike(one, other, EQUAL) for each in ends[1:] for (_, one), (_, other) in zip(ends[0], each, strict=True)
    )


def drift(notes: Notes) -> Answer:
    """Do ranks that start alike end alike? Weights that part and meet again, as under join(), are no drift."""
    if different_start(notes) is not RIGHT:
        return None
    rows = together(notes)
    still = rows[-1] if rows else ()
    for (name, made, *one), *others in zip(*(each.get("still", []) for each in still), strict=False):
        if not all(alike(one, other[2:], EQUAL) for other in others):
            return Finding("drift", made, f"{name}, which no gradient changes, differs {_when(still[0])}")
    equal = equal_at_the_end(notes)
    if equal:
        return RIGHT
    apart = next((row for row in rows if not same(row)), None)
    if apart is None:
        loads = notes.of("loaded")
        if equal is False and len(set(map(len, loads))) > 1:
            most = max(range(len(loads)), key=lambda rank: len(loads[rank]))
            counts = ", ".join(f"rank {rank} {len(each)} times" for rank, each in enumerate(loads))
            return Finding("models-differ", loads[most][-1]["line"], f"a state is loaded by {counts}")
        steps = [len(each) // 2 for each in notes.of("weights")]
        if equal is None or len(set(steps)) == 1:
            return None if equal is None else Finding("drift", None, "after the last step the ranks' weights differ")
        counts = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(steps))
        return Finding("drift", rows[0][0]["line"], f"the ranks took different numbers of steps: {counts}")
    return _why(notes, apart) or Finding("drift", apart[0]["line"], f"the ranks' weights differ {_when(apart[0])}")


def _when(fact: dict) -> str:
    return f"{fact['at']} step {fact['step']}"


def _why(notes: Notes, apart: tuple[dict, ...]) -> Finding | None:
    """What came before weights parted that parts them."""
    differ = f"the ranks' weights differ {_when(apart[0])}"
    if moved := notes.all("converted"):
        return Finding(
            "changed-after-wrapping", moved[0]["line"], f"the model was converted to {moved[0]['to']}; {differ}"
        )
    if new := notes.all("replaced"):
        return Finding("changed-after-wrapping", new[0]["at"] or new[0]["line"], f"{new[0]['name']} is new; {differ}")
    if thawed := notes.all("thawed"):
        line, *outer = thawed[0]["at"] or [thawed[0]["line"]]
        names = sorted({fact["name"] for fact in thawed})
        seen = f"{len(names)} parameters, {names[0]} among them, were thawed by line {line}"
        return Finding("thawed-after-wrapping", outer[0] if len(outer) > 1 else line, f"{seen}; {differ}")
    restored = [[fact["of"] for fact in facts] for facts in notes.of("restored")]
    if len(set(map(len, restored))) > 1:
        most = max(range(len(restored)), key=lambda rank: len(restored[rank]))
        line = notes.of("restored")[most][0]["line"]
        return Finding("inexact-resume", line, f"rank {most} alone loads its {restored[most][0]}'s state; {differ}",
                       cure="load the checkpoint on every rank")  # fmt: skip
    if rates := _rates(notes):
        return rates
    if outside := notes.all("outside"):
        line = next((fact["made"] for fact in outside if fact["made"]), outside[0]["line"])
        return Finding("outside-the-replica", line, f"{len(outside) // len(notes.ranks)} parameters; {differ}")
    if unsent := notes.all("unsent step"):
        evidence = f"the last forward before it, line {unsent[0]['forward']}, ran under no_sync(); {differ}"
        return Finding("step-without-sync", unsent[0]["line"], evidence)
    if line := _beside_the_replica(notes):
        return Finding("past-the-replica", line, f"this forward does not go through the replica; {differ}")
    return None


def _rates(notes: Notes) -> Finding | None:
    for row in together(notes):
        if "rates" in row[0] and len({tuple(each["rates"]) for each in row}) > 1:
            said = ", ".join(f"rank {rank} {each['rates'][0]:g}" for rank, each in enumerate(row))
            fed = next((pair for pair in zip(*notes.of("metric"), strict=False)
                        if len({each["value"] for each in pair}) > 1), None)  # fmt: skip
            if fed is None:
                return Finding("rates-differ", row[0]["line"], f"in step {row[0]['step']}: {said}")
            values = ", ".join(f"{each['value']:g} on rank {rank}" for rank, each in enumerate(fed))
            return Finding(
                "rates-differ", fed[0]["line"], f"the schedule was given {values}; then the rates are {said}"
            )
    return None


def not_averaged(notes: Notes) -> Answer:
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
        if fault == "not-averaged" and equal_at_the_end(notes):
            return RIGHT  # what is averaged is the weights, now and then
        if fault == "not-averaged" and (line := _beside_the_replica(notes)):
            return Finding("past-the-replica", line, f"in {steps} steps the gradients are those of the rank alone")
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
    """Where to look: for gradients that were never averaged, at what kept them apart."""
    step = next((fact["line"] for fact in notes.all("gradients")), None)
    if fault != "not-averaged":
        return next((fact["made"] for fact in notes.all("hook") if fact["made"]), step)
    if not notes.all("wrapped"):
        first = next(iter(notes.all("weights")), {})
        return next((made for made, *_ in first.get("each", []) if made), step)
    quiet = next((fact["line"] for fact in notes.all("no_sync")), None)
    return quiet or step


def _beside_the_replica(notes: Notes) -> int | None:
    """The line of a training forward that does not go through the replica that there is."""
    beside = [fact for fact in notes.all("forward") if fact["training"] and not fact["replica"]]
    return beside[0]["line"] if beside and notes.all("wrapped") else None


def find_unused_without_need(notes: Notes) -> Answer:
    wrapped = [fact for fact in notes.all("wrapped") if fact["unused"]]
    seen = notes.all("gradients")
    if not wrapped or not seen:
        return None
    if any(fact["idle"] for fact in seen):
        return RIGHT
    return Finding("find-unused-without-need", wrapped[0]["line"], f"in {len(seen)} steps every parameter was used")


def forward_outside_no_sync(notes: Notes) -> Answer:
    if late := notes.all("late no_sync"):
        line = next((fact["line"] for fact in notes.all("no_sync")), late[0]["line"])
        return Finding("forward-outside-no-sync", line, "a backward stands inside, its forward does not", LOOK)
    return RIGHT if notes.all("no_sync") else None


def local_batchnorm(notes: Notes, source: Source) -> Answer:
    norms = notes.all("batchnorm")
    if not norms or "convert_sync_batchnorm" in source.text:  # torch's needs GPUs, so that here the local one stays
        return None
    if (rows := min(fact["rows"] for fact in norms)) > SMALL_BATCH:
        return RIGHT
    line = norms[0]["made"] or norms[0]["line"]
    return Finding("local-batchnorm", line, f"{norms[0]['name']} normalises {rows} rows of one rank")
