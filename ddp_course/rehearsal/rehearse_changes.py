"""Questions to a run: is something computed from one rank's samples, or changed on one rank, that all should share?

Each looks for one thing that no collective keeps equal: a loss's weights, a buffer, a model that only evaluates, a
schedule, a running sum.
Read next: `watch_changes.py`, where the notes come from.
"""

from __future__ import annotations

import ast
from collections import defaultdict

from ddp_course.rehearsal.finding import LOOK, Finding
from ddp_course.rehearsal.notes import RIGHT, Answer, Notes
from ddp_course.rehearsal.parsed import last_name
from ddp_course.rehearsal.rehearse_weights import EQUAL, equal_at_the_end, same, states
from ddp_course.rehearsal.sketches import alike
from ddp_course.rehearsal.source import Source


def losses_differ(notes: Notes, source: Source) -> Answer:
    names = {last_name(each.value) for call in source.all(ast.Call) for each in call.keywords
             if each.arg in ("weight", "pos_weight")}  # fmt: skip
    made = [node.lineno for name in names for node in source.given[name]]
    seen = False
    for row in zip(*notes.of("loss weights"), strict=False):
        if len({tuple(fact["sizes"]) for fact in row}) > 1:
            return None
        seen = True
        if not same(row):
            evidence = "the weights of classes in the loss differ between the ranks"
            return Finding("losses-differ", made[-1] if made else row[0]["line"], evidence)
    return RIGHT if seen else None


def local_buffers(notes: Notes, source: Source) -> Answer:
    """Buffers that ranks change by their own samples before rank 0's are sent."""
    seen = False
    for row in zip(*notes.of("buffers"), strict=False):
        for (name, *one), *others in zip(*(fact["each"] for fact in row), strict=False):
            seen = True
            if not all(alike(one, other[1:], EQUAL) for other in others):
                short = name.rpartition(".")[2]
                written = source.writes(short)
                line = written[0] if written else row[0]["line"]
                return Finding("local-buffers", line, f"{name} differs between the ranks before rank 0's is sent", LOOK)
    return RIGHT if seen else None


def models_differ(notes: Notes) -> Answer:
    """Weights that differ where nothing is learned, although what is trained is equal."""
    rows = list(zip(*notes.of("evaluates"), strict=False))
    for row in rows:
        if len({fact["line"] for fact in row}) > 1 or any(fact["shapes"] != row[0]["shapes"] for fact in row):
            return None
        if not same(row):
            if equal_at_the_end(notes) is not True:
                return None  # what is trained differs, which is told as such
            seen = f"the weights that line {row[0]['line']} uses differ between the ranks"
            for pair in zip(*notes.of("copied"), strict=False):
                if not same(pair):
                    return Finding("models-differ", pair[0]["line"], f"{seen}, as they did when they were copied here")
            return Finding("models-differ", row[0]["line"], seen)
    return RIGHT if rows else None


def reseeded(notes: Notes) -> Answer:
    """The same seed, set twice or more after the first step, and not to make a model."""
    times: dict[tuple, int] = defaultdict(int)
    trained = False
    for fact in notes.ranks[0] if notes.ranks else ():
        trained |= fact["what"] == "weights"
        if fact["what"] == "wrapped":
            times.clear()
        if fact["what"] == "seeded" and trained:
            times[fact["line"], fact["seed"]] += 1
    again = [where for where, count in times.items() if count > 1]
    if again:
        line, seed = again[0]
        return Finding("reseeded", line, f"torch.manual_seed({seed}) ran {times[again[0]]} times during training", LOOK)
    return RIGHT if times else None


def reduced_again(notes: Notes) -> Answer:
    """Sums that are reduced in place, added to and reduced again; sums in half precision."""
    lines: dict[int, list[dict]] = defaultdict(list)
    for fact in notes.of("again")[0] if notes.ranks else ():
        lines[fact["line"]].append(fact)
    for line, facts in lines.items():
        grows = [fact for fact in facts if fact["grows"]]
        if len(grows) > 1 and not any(fact["shrinks"] for fact in facts):
            return Finding(
                "reduced-again", line, f"it only grew between {len(grows) + 1} reduces of the same tensor", LOOK
            )
    return RIGHT if lines else None


def low_precision_counts(notes: Notes) -> Answer:
    half = [fact for fact in notes.all("half") if fact["line"]]
    hooks = {fact["made"] for fact in notes.all("hook")}
    if half and not hooks:
        return Finding(
            "low-precision-counts", half[0]["line"], f"{half[0]['size']} numbers of {half[0]['dtype']}", LOOK
        )
    return None


def empty_group(notes: Notes) -> Answer:
    for fact in notes.all("empty group"):
        return Finding("empty-group", fact.get("at", fact["line"]), fact.get("seen", ""), LOOK)
    return None


def clipped_before_sync(notes: Notes) -> Answer:
    clipped = notes.all("clipped")
    if clipped:
        return Finding("clipped-before-sync", clipped[0]["line"], f"{len(clipped)} times, under no_sync()")
    return RIGHT if notes.all("no_sync") and notes.all("gradients") else None


def schedule_length(one: Notes, many: Notes, source: Source) -> Answer:
    """Does the learning rate come as far on several ranks as on one?"""
    rates = [[fact["rates"][0] for fact in states(notes)[0] if "rates" in fact] if states(notes) else []
             for notes in (one, many)]  # fmt: skip
    if not all(len(each) > 4 for each in rates) or len(rates[0]) < 1.5 * len(rates[1]):
        return None
    highest = max(map(max, rates))
    if highest == 0 or len(set(rates[1])) < 3:
        return None
    ends = [each[-1] / highest for each in rates]
    if ends[1] - ends[0] < 0.2:
        return RIGHT
    lines = next((fact["lines"] for fact in many.ranks[0] if fact["what"] == "schedule"), [])
    line = next((each for each in lines if not isinstance(source.statements.get(each), ast.Return)), None)
    evidence = (
        f"the last learning rate is {ends[0]:.0%} of the highest after {len(rates[0])} steps of one process, and "
        f"{ends[1]:.0%} after {len(rates[1])} steps of {len(many.ranks)} ranks"
    )
    return Finding("schedule-length", line, evidence, LOOK)
