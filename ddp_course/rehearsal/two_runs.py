"""Questions to two runs: one rank and several, and a run beside one that was killed and resumed.

Read next: `rehearse.py`, which makes the runs.
"""

from __future__ import annotations

from ddp_course.rehearsal.finding import Finding
from ddp_course.rehearsal.notes import RIGHT, Answer, Notes
from ddp_course.rehearsal.run_of_weights import CLOSE, EQUAL, different_start, states
from ddp_course.rehearsal.sketches import alike


def rate(one: Notes, many: Notes) -> Answer:
    """Does the learning rate know that the global batch has grown?"""
    rows = [next((len(f["rows"]) for f in notes.ranks[0] if f["what"] == "forward" and f["training"]), None)
            for notes in (one, many)]  # fmt: skip
    rates = [
        max((fact["rate"] for fact in notes.of("weights")[0] if "rate" in fact), default=None) for notes in (one, many)
    ]  # fmt: skip  (the highest: a warm-up has other first ones)
    if None in (*rows, *rates):
        return None
    size = len(many.ranks)
    if rows[1] * size <= rows[0] or abs(rates[1] - rates[0]) > 0.02 * rates[0]:
        return RIGHT
    line = next((fact["line"] for fact in many.all("weights")), None)
    evidence = (
        f"1 rank: {rows[0]} rows a step, lr {rates[0]:g}; {size} ranks: {rows[1] * size} rows a step, lr {rates[1]:g}"
    )
    return Finding("lr-not-scaled", line, evidence, note=True)


def same_step(one: Notes, many: Notes) -> Answer:
    """Are the first step's gradients those that one rank computes from the same rows and weights?"""
    size = len(many.ranks)
    if different_start(many) is not RIGHT or not states(one):
        return None
    starts = [states(notes)[0][0]["sketch"] for notes in (one, many)]
    rows = [sorted(row for facts in notes.ranks for row in _rows_of_first_step(facts)) for notes in (one, many)]
    found = [next((fact["found"] for fact in notes.ranks[0] if fact["what"] == "gradients"), None)
             for notes in (one, many)]  # fmt: skip
    if None in found or not rows[0] or rows[0] != rows[1] or not alike(*starts, EQUAL):
        return None
    for factor, fault in ((size, "averaged-twice"), (1 / size, "summed")):
        if alike(found[0], [factor * x for x in found[1]], CLOSE) and any(found[0]):
            line = next((fact["line"] for fact in many.all("gradients")), None)
            evidence = f"from the same rows, {size} ranks get {1 / factor:g} of the gradients that 1 rank gets"
            return Finding(fault, line, evidence)
    return RIGHT if alike(*found, CLOSE) else None


def _rows_of_first_step(facts: list[dict]) -> list[float]:
    rows: list[float] = []
    for fact in facts:
        if fact["what"] == "gradients":
            return rows
        rows += fact["rows"] if fact["what"] == "forward" and fact["training"] else []
    return []


def resumed(whole: Notes, killed: Notes, again: Notes) -> Answer:
    """Does a run that was killed and resumed go through the weights of one that was not?

    Returns:
        A finding; "right"; or nothing, if runs are not alike from the start, or the program begins again by itself.
    """
    all_states, before, after = ([fact["sketch"] for fact in states(notes)[0]] if states(notes) else []
                                 for notes in (whole, killed, again))  # fmt: skip
    if not after or not all(alike(a, b, EQUAL) for a, b in zip(all_states, before, strict=False)):
        return None
    start = next((k for k, state in enumerate(all_states) if k % 2 == 0 and alike(state, after[0], EQUAL)), None)
    if start == 0:
        return None
    if start is None:
        return _inexact(again, killed, "it starts from weights that the uninterrupted run never had")
    for index, (one, other) in enumerate(zip(all_states[start:], after, strict=False)):
        if not alike(one, other, 1e-5):
            return _inexact(again, killed, f"{(index + 1) // 2} steps after it resumed, the weights differ")
    return RIGHT


def _inexact(again: Notes, killed: Notes, evidence: str) -> Finding:
    restored = {fact["of"] for fact in again.all("restored")}
    made = {"optimizer"} | ({"schedule"} if again.all("schedule") else set())
    if missing := sorted(made - restored):
        evidence += f"; no load_state_dict of the {' and the '.join(missing)} was called"
    lines = [fact["line"] for fact in (*again.all("loaded"), *killed.all("saving"))]
    return Finding("inexact-resume", next(iter(lines), None), evidence)
