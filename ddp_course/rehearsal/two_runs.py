"""Questions to two runs: one rank and several, and a run beside one that was killed and resumed.

Read next: `rehearse.py`, which makes the runs.
"""

from __future__ import annotations

import numpy as np

from ddp_course.rehearsal.finding import LOOK, NOTE, WRONG, Finding
from ddp_course.rehearsal.notes import RIGHT, Answer, Notes
from ddp_course.rehearsal.rehearse_weights import CLOSE, EQUAL, different_start, equal_at_the_end, states
from ddp_course.rehearsal.sketches import alike

APART = 0.02  # relative; less may come from sums in another order
FIT = 2e-5  # relative; what is told as a sum of the ranks' gradients is one to the precision of float32


def lr_not_scaled(one: Notes, many: Notes) -> Answer:
    """Does the learning rate know that the global batch has grown?"""
    rows = [next((len(f["rows"]) for f in notes.ranks[0] if f["what"] == "batch"), None) or
            next((len(f["rows"]) for f in notes.ranks[0] if f["what"] == "forward" and f["training"]), None)
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
        f"1 rank: {rows[0]} samples a step, lr {rates[0]:g}; {size} ranks: {rows[1] * size} samples, lr {rates[1]:g}"
    )
    return Finding("lr-not-scaled", line, evidence)


def same_batch(one: Notes, many: Notes) -> Answer:
    """Is the first step's gradient the one that one rank computes from the same samples, joined in one batch?

    If it is a mean of the ranks' gradients with other weights than equal ones, each rank has divided by its own count.
    """
    if not any(fact["whole"] for fact in one.all("replayed")) or different_start(many) is not RIGHT or not states(one):
        return None
    starts = [states(notes)[0][0]["sketch"] for notes in (one, many)]
    alone = next((fact for fact in one.ranks[0] if fact["what"] == "gradients"), None)
    ranks = [next((fact for fact in facts if fact["what"] == "gradients"), None) for facts in many.ranks]
    if alone is None or None in ranks or not alike(*starts, EQUAL):
        return None
    if any(len(fact["each"]) != len(alone["each"]) for fact in ranks) or not alone["each"]:
        return None
    wanted = np.array([found for found, _ in alone["each"]]).ravel()
    local = np.array([[own for _, own in fact["each"]] for fact in ranks]).reshape(len(ranks), -1).T
    found = np.array([each for each, _ in ranks[0]["each"]]).ravel()
    size = np.abs(wanted).max()
    if not size or np.abs(found - wanted).max() <= CLOSE * size:
        return RIGHT if size else None
    shares, *_ = np.linalg.lstsq(local, wanted, rcond=None)
    line = next((fact["line"] for fact in many.ranks[0] if fact["what"] == "call" and fact["op"] == "backward"), None)
    if len(wanted) > len(shares) and np.abs(local @ shares - wanted).max() <= FIT * size:
        if (
            abs(shares.sum() - 1) > 0.01
            or np.abs(shares - 1 / len(shares)).max() < 0.02
            or np.abs(found - local.mean(axis=1)).max() > CLOSE * size
        ):
            return None
        told = " + ".join(f"{share:.2f} × rank {rank}'s" for rank, share in enumerate(shares))
        evidence = f"on the same samples, one process has the gradient {told}; each counts {1 / len(shares):.2f} here"
        rows = [sum(len(f["rows"]) for f in facts[: facts.index(g)] if f["what"] == "batch")
                for facts, g in zip(many.ranks, ranks, strict=True)]  # fmt: skip
        uneven = np.allclose(shares, np.array(rows) / max(1, sum(rows)), atol=0.01)
        return Finding("loss-of-unequal-counts", line, evidence, LOOK if uneven and len(set(rows)) > 1 else WRONG)
    apart = np.abs(found - wanted).max() / size
    if apart < APART or _noisy(many):
        return None
    norms = " (a BatchNorm does)" if many.all("batchnorm") else ""
    evidence = f"on the same samples, one process has a gradient that differs by {apart:.0%}{norms}"
    return Finding("loss-of-whole-batch", line, evidence, NOTE if norms else LOOK)


def _noisy(notes: Notes) -> bool:
    """Whether chance takes part in a step: dropout, or numbers drawn in the loop, which no batch can repeat."""
    return any(fact.get("random") for fact in notes.all("forward")) or bool(notes.draws) or any(
        batch["rows"] != forward["rows"]
        for facts in notes.ranks
        for batch, forward in zip(*(
            [f for f in facts if f["what"] == what and (what == "batch" or f["training"])][:1]
            for what in ("batch", "forward")), strict=False)
    )  # fmt: skip


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
    if equal_at_the_end(whole) and equal_at_the_end(again) is False and again.all("restored"):
        of_ranks = [{fact["of"] for fact in facts} for facts in again.of("restored")]
        fewer = [rank for rank, found in enumerate(of_ranks) if found < set().union(*of_ranks)]
        line = again.all("restored")[0]["line"]
        seen = f"; rank {fewer[0]} restored less than the others" if fewer else ""
        return Finding("inexact-resume", line, f"after it resumed, the ranks' weights part{seen}",
                       cure="load the checkpoint on every rank")  # fmt: skip
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
            if epochs := _other_epoch(whole, again, start):
                return epochs
            return _inexact(again, killed, f"{(index + 1) // 2} steps after it resumed, the weights differ")
    return RIGHT


def _other_epoch(whole: Notes, again: Notes, start: int) -> Finding | None:
    """Whether the sampler of a resumed run begins in another epoch than the uninterrupted run was in."""
    passes = [fact for fact in again.ranks[0] if fact["what"] == "sampler" and fact["shuffle"]]
    seen = states(whole)[0][start:]
    at = whole.ranks[0].index(seen[0])
    epochs = [fact["epoch"] for fact in whole.ranks[0][:at] if fact["what"] == "sampler" and fact["shuffle"]]
    later = [fact["epoch"] for fact in whole.ranks[0][at:] if fact["what"] == "sampler" and fact["shuffle"]]
    due = {*epochs[-1:], *later[:1]}
    if not passes or not due or passes[0]["epoch"] in due:
        return None
    evidence = f"the sampler begins with epoch {passes[0]['epoch']} again, where the uninterrupted run had {max(due)}"
    return Finding("inexact-resume", passes[0]["set"] or passes[0]["line"], evidence,
                   cure="give set_epoch the number of epochs that are done, also those before the resume")  # fmt: skip


def _inexact(again: Notes, killed: Notes, evidence: str) -> Finding:
    restored = {fact["of"] for fact in again.all("restored")}
    made = {"optimizer"} | ({"schedule"} if again.all("schedule") else set())
    if missing := sorted(made - restored):
        evidence += f"; no load_state_dict of the {' and the '.join(missing)} was called"
    lines = [fact["line"] for fact in (*again.all("loaded"), *killed.all("saving"))]
    return Finding("inexact-resume", next(iter(lines), None), evidence)
