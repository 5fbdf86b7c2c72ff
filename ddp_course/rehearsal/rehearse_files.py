"""Questions to a run: who prints, writes, saves and loads?

Read next: `watch_files.py`, where the notes come from.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from ddp_course.rehearsal.finding import Finding
from ddp_course.rehearsal.notes import RIGHT, Answer, Notes


def prints_by_every_rank(notes: Notes) -> Answer:
    said = []
    for facts in notes.of("prints"):
        lines = defaultdict(list)
        for fact in facts:
            if fact["line"] and fact["text"].strip():
                lines[fact["line"]].append(fact["text"])
        said.append(lines)
    both = sorted(set.intersection(*map(set, said))) if len(said) > 1 else []
    for line in both:
        forms = [{re.sub(r"[-+.\d]+(e[-+]?\d+)?", "#", text) for text in lines[line]} for lines in said]
        alike = set.intersection(*forms)
        if alike and not names_the_rank([lines[line] for lines in said]):
            return Finding("prints-by-every-rank", line, f"{len(said)} ranks print {min(alike).strip()[:50]!r}")
    return RIGHT if notes.all("prints") else None


def names_the_rank(texts: list[list[str]]) -> bool:
    """Whether one of the whole numbers in a printed line is the rank's own, on all ranks and each time."""
    numbers = [[re.findall(r"\d+", text) for text in of_rank] for of_rank in texts]
    places = min(len(each) for of_rank in numbers for each in of_rank)
    return any(
        all(each[place] == str(rank) for rank, of_rank in enumerate(numbers) for each in of_rank)
        for place in range(places)
    )


def file_by_every_rank(notes: Notes) -> Answer:
    return _by_every_rank(notes, "writes", "file-by-every-rank")


def unguarded_save(notes: Notes) -> Answer:
    return _by_every_rank(notes, "saving", "unguarded-save")


def _by_every_rank(notes: Notes, what: str, fault: str) -> Answer:
    paths = [{fact["path"]: fact["line"] for fact in facts} for facts in notes.of(what)]
    both = set.intersection(*map(set, paths)) if len(paths) > 1 else set()
    if both:
        path = sorted(both)[0]
        return Finding(fault, paths[0][path], f"{len(paths)} ranks write {Path(path).name}")
    return RIGHT if any(paths) else None


def early_load(notes: Notes) -> Answer:
    began = {fact["path"]: fact["clock"] for fact in reversed(notes.all("saving"))}
    ended: dict[str, float] = {}
    for fact in notes.all("saved"):
        ended.setdefault(fact["path"], fact["clock"])
    loads = notes.all("loading")
    for fact in loads:
        path = fact["path"]
        if path in began and (not fact["there"] or began[path] <= fact["clock"] < ended.get(path, float("inf"))):
            found = "is not there yet" if not fact["there"] else "is being written"
            return Finding("early-load", fact["line"], f"a rank opens {Path(path).name} while it {found}")
    return _early_look(notes, set(began) | {fact["path"] for fact in loads}) or (RIGHT if began and loads else None)


def _early_look(notes: Notes, kept: set[str]) -> Finding | None:
    """A rank that finds no file where another, at the same line, finds it, and never looks again."""
    looks = [defaultdict(list) for _ in notes.ranks]
    for of_rank, facts in zip(looks, notes.of("looked"), strict=True):
        for fact in facts:
            if fact["path"] in kept:
                of_rank[fact["path"], fact["line"]].append(fact["there"])
    for (path, line), there in looks[0].items():
        for rank, of_rank in enumerate(looks[1:], 1):
            other = of_rank.get((path, line), [])
            if len(other) == len(there) and there[-1] != other[-1]:
                found, lost = (0, rank) if there[-1] else (rank, 0)
                evidence = f"{Path(path).name} is there for rank {found}, and not for rank {lost}"
                return Finding("early-load", line, evidence)
    return None


def module_prefix(notes: Notes) -> Answer:
    loaded = notes.all("loaded")
    for fact in loaded:
        if fact["prefix"]:
            return Finding("module-prefix", fact["line"], f"{fact['lost']} names do not meet, {fact['of']} were saved")
    return RIGHT if loaded else None
