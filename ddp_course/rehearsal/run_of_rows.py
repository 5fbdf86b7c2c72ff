"""Questions to a run: which rows do the ranks train and evaluate on?

Read next: `run_of_weights.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict

from ddp_course.rehearsal.finding import Finding
from ddp_course.rehearsal.notes import RIGHT, Answer, Notes

WAITING, WAIT_S = 0.5, 10e-3  # share of the time, and seconds a batch, spent waiting for rows
FEW = 8  # rows in the same order that may agree by chance, where a data set holds equal rows


def first_passes(notes: Notes) -> list[list[float]]:
    """The training rows of each rank in its first pass; without a DataLoader, up to the first that comes again."""
    found = []
    for facts in notes.ranks:
        rows: list[float] = []
        seen: set[float] = set()
        loads = any(fact["what"] == "pass" for fact in facts)
        for fact in facts:
            if fact["what"] == "pass" and rows:
                break
            new = fact["rows"] if fact["what"] == "forward" and fact["training"] else []
            if not loads and (again := next((k for k, row in enumerate(new) if row in seen), None)) is not None:
                rows += new[:again]
                break
            rows += new
            seen |= set(new)
        found.append(rows)
    return found


def same_rows(notes: Notes) -> Answer:
    passes = first_passes(notes)
    if len(passes) < 2 or not all(passes):
        return None
    fewest = min(map(len, passes))
    line = next((fact["line"] for fact in notes.all("loader")), None)
    shared = set(passes[0]).intersection(*passes[1:])
    if any(len(set(rows)) < 0.98 * len(rows) for rows in passes):  # the data holds equal rows: only the order tells
        if fewest < FEW or any(rows[:fewest] != passes[0][:fewest] for rows in passes):
            return None
    elif len(shared) <= max(len(passes), fewest // 4):
        return RIGHT
    return Finding("same-rows", line, f"{len(shared)} of the first {fewest} rows of each rank are the same")


def no_set_epoch(notes: Notes) -> Answer:
    passes: dict[int, list[dict]] = defaultdict(list)
    for fact in notes.of("sampler")[0]:
        if fact["shuffle"]:
            passes[fact["id"]].append(fact)
    again = [facts for facts in passes.values() if len(facts) > 1]
    for facts in again:
        if len({fact["epoch"] for fact in facts}) < len(facts):
            epochs = ", ".join(str(fact["epoch"]) for fact in facts[:4])
            return Finding(
                "missing-set-epoch", facts[0]["line"], f"{len(facts)} passes, in the order of epochs {epochs}"
            )
    return RIGHT if again else None


def mean_of_means(notes: Notes) -> Answer:
    """Right if all batches of each pass are of one size; what happens to uneven ones, the text decides."""
    passes: list[list[list[int]]] = []
    for facts in notes.ranks:
        passes.append([])
        for fact in facts:
            if fact["what"] == "pass":
                passes[-1].append([])
            elif fact["what"] == "forward" and passes[-1]:
                passes[-1][-1].append(len(fact["rows"]))
    sizes = [{size for rank in together for size in rank} for together in zip(*passes, strict=False)]
    return RIGHT if sizes and all(len(each) <= 1 for each in sizes) else None


def padded_evaluation(notes: Notes, text: str) -> Answer:
    facts = notes.ranks[0]
    looked = False
    for index, fact in enumerate(facts):
        if fact["what"] != "sampler":
            continue
        after = next((later for later in facts[index:] if later["what"] == "forward"), None)
        if after is None or after["training"]:
            continue
        looked = True
        cut_off_again = re.search(r"gather(.|\n)*\[\s*:\s*[a-z_]", text)
        if fact["padded"] and not cut_off_again:
            return Finding("padded-evaluation", fact["made"], f"{fact['padded']} rows are evaluated twice")
    return RIGHT if looked else None


def same_augmentation(notes: Notes) -> Answer:
    """Whether two processes that read rows drew from generators in the same states, more than once."""
    places: dict[tuple[str, str], set] = defaultdict(set)
    line = None
    for fact in notes.draws:
        for name, state in fact["drawn"].items():
            places[name, state].add((fact["rank"], fact["worker"]))
            line = fact["line"] or line
    shared: dict[tuple, int] = defaultdict(int)
    for (name, _), where in places.items():
        if len(where) > 1:
            shared[name, tuple(sorted(where, key=str)[:2])] += 1
    for (name, where), times in shared.items():
        most = min(sum(1 for (n, _), w in places.items() if n == name and one in w) for one in where)
        if times > 1 or most == 1:  # once: each row may have a seed of its own, set after the first look
            who = " and ".join(f"rank {r}" + ("" if worker is None else f", worker {worker}") for r, worker in where)
            return Finding("same-augmentation", line, f"{who} drew the same numbers from {name}")
    return RIGHT if notes.draws else None


def slow_loading(notes: Notes) -> Answer:
    waits, clocks = notes.of("waited")[0], [fact["clock"] for fact in notes.of("weights")[0] if "clock" in fact]
    if len(waits) < 4 or len(clocks) < 4:
        return None
    # The first batch starts workers, and the first step compiles; neither is a habit.
    inside = sorted(fact["seconds"] for fact in waits if clocks[0] <= fact["since"] <= clocks[-1])
    if not inside:
        return None
    typical, share = inside[len(inside) // 2], sum(inside) / (clocks[-1] - clocks[0])
    if share <= WAITING or typical < WAIT_S:
        return RIGHT
    line = next((fact["line"] for fact in notes.all("loader")), None)
    return Finding("slow-loading", line, f"{share:.0%} of the time goes by waiting, {typical * 1e3:.0f} ms a batch")
