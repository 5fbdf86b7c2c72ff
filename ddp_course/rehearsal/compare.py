"""What do the notes of all ranks say together?

Each question below is one function over the ranks' notes. It answers with a finding, with "right", or with nothing
when the program gave it nothing to see. So a report can say three things, and never takes silence for health.

Read next: `watch.py`, which wrote the notes; `rehearse.py`, which asks.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddp_course.rehearsal.finding import Finding

CLOSE = 1e-3  # relative; gradients in bfloat16 have three digits
EQUAL = 1e-6  # relative; weights that were computed alike
SMALL_BATCH = 8  # rows of a rank that are too few for a mean and a variance of their own
WAITING, WAIT_S = 0.5, 10e-3  # share of the time, and seconds a batch, spent waiting for rows

RIGHT = "right"
Answer = Finding | str | None


@dataclass
class Notes:
    """What the ranks of one run have noted, by rank."""

    ranks: list[list[dict]]
    draws: list[dict]

    @classmethod
    def read(cls, folder: Path, world_size: int) -> Notes:
        paths = [folder / f"rank{rank}.jsonl" for rank in range(world_size)]
        draws = [fact for path in sorted(folder.glob("*.draws")) for fact in _facts(path)]
        return cls([_facts(path) if path.exists() else [] for path in paths], draws)

    def of(self, what: str) -> list[list[dict]]:
        return [[fact for fact in facts if fact["what"] == what] for facts in self.ranks]

    def all(self, what: str) -> list[dict]:
        return [fact for facts in self.of(what) for fact in facts]


def _facts(path: Path) -> list[dict]:
    facts = []
    for line in path.read_text().splitlines():
        try:
            facts.append(json.loads(line))
        except ValueError:  # the rank was ended while it wrote
            break
    return facts


def close(one: list[float], other: list[float], tolerance: float) -> bool:
    size = max(map(abs, [*one, *other, 1e-30]))
    return all(abs(a - b) <= tolerance * size for a, b in zip(one, other, strict=True))


# --- Rows ------------------------------------------------------------------------------------------


def first_passes(notes: Notes) -> list[list[float]]:
    """The training rows of each rank, up to the first that comes again."""
    found = []
    for facts in notes.of("forward"):
        rows: dict[float, None] = {}
        for row in (row for fact in facts if fact["training"] for row in fact["rows"]):
            if row in rows:
                break
            rows[row] = None
        found.append(list(rows))
    return found


def same_rows(notes: Notes) -> Answer:
    passes = first_passes(notes)
    if len(passes) < 2 or not all(passes):
        return None
    shared = set(passes[0]).intersection(*passes[1:])
    fewest = min(map(len, passes))
    if len(shared) <= max(len(passes), fewest // 4):
        return RIGHT
    line = next((fact["line"] for fact in notes.all("loader")), None)
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
            return Finding("no-set-epoch", facts[0]["line"], f"{len(facts)} passes, in the order of epochs {epochs}")
    return RIGHT if again else None


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
        if fact["padded"] and not re.search(
            r"gather(.|\n)*\[\s*:\s*[a-z_]", text
        ):  # cut off again, after they were gathered
            return Finding("padded-evaluation", fact["line"], f"{fact['padded']} rows are evaluated twice")
    return RIGHT if looked else None


def same_augmentation(notes: Notes) -> Answer:
    """Whether two processes that read rows drew from a generator in the same state."""
    places: dict[tuple[str, str], set] = defaultdict(set)
    line = None
    for fact in notes.draws:
        for name, state in fact["drawn"].items():
            places[name, state].add((fact["rank"], fact["worker"]))
            line = fact["line"] or line
    for (name, _), where in places.items():
        if len(where) > 1:
            who = " and ".join(
                f"rank {rank}" + ("" if worker is None else f", worker {worker}")
                for rank, worker in sorted(where, key=str)[:2]
            )
            return Finding("same-augmentation", line, f"{who} drew the same numbers from {name}'s generator")
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


# --- Weights and gradients -------------------------------------------------------------------------


def states(notes: Notes) -> list[list[dict]]:
    """Each rank's notes of weights, in order, those of its first optimizer."""
    return [[fact for fact in facts if fact["which"] == facts[0]["which"]] for facts in notes.of("weights") if facts]


def different_start(notes: Notes) -> Answer:
    first = [facts[0] for facts in states(notes)]
    if len(first) < 2:
        return None
    if all(close(first[0]["sketch"], each["sketch"], EQUAL) for each in first):
        return RIGHT
    return Finding("different-start", first[0]["line"], "before the first step the ranks' weights differ")


def drift(notes: Notes) -> Answer:
    if different_start(notes) is not RIGHT:
        return None
    for together in zip(*notes.of("weights"), strict=False):
        if not all(close(together[0]["sketch"], each["sketch"], EQUAL) for each in together):
            step = together[0]["step"]
            return Finding("drift", together[0]["line"], f"the ranks' weights differ {together[0]['at']} step {step}")
    return RIGHT


def gradients(notes: Notes) -> Answer:
    """Are the gradients of each step the mean of those that the ranks computed?"""
    world_size, said, right = len(notes.ranks), Counter(), 0
    for together in zip(*notes.of("gradients"), strict=False):
        if world_size < 2 or len({fact["count"] for fact in together}) > 1 or not together[0]["count"]:
            continue
        found = [fact["found"] for fact in together]
        local = [fact["local"] for fact in together]
        mean = [sum(each) / world_size for each in zip(*local, strict=True)]
        if all(
            close(each, local[0], CLOSE) for each in local[1:]
        ):  # equal rows, or clipped means: a mean shows nothing
            said["averaged-twice"] += all(close([world_size * x for x in each], mean, CLOSE) for each in found)
        elif all(close(each, mean, CLOSE) for each in found):
            right += 1
        elif all(close(f, own, CLOSE) for f, own in zip(found, local, strict=True)):
            said["not-averaged"] += 1
        elif all(close([world_size * x for x in each], mean, CLOSE) for each in found):
            said["averaged-twice"] += 1
        elif all(close([x / world_size for x in each], mean, CLOSE) for each in found):
            said["summed"] += 1
    if any(said.values()) and said.most_common(1)[0][1] >= right:  # a clipped step is looked at twice
        fault, steps = said.most_common(1)[0]
        line = next((fact["line"] for fact in notes.all("gradients")), None)
        ratio = {"not-averaged": "those of the rank alone", "averaged-twice": f"1/{world_size} of the mean"}
        evidence = f"in {steps} steps the gradients are {ratio.get(fault, f'{world_size} times the mean')}"
        return Finding(fault, line, evidence)
    return RIGHT if right else None


def find_unused(notes: Notes) -> Answer:
    wrapped = [fact for fact in notes.all("wrapped") if fact["unused"]]
    seen = notes.all("gradients")
    if not wrapped or not seen:
        return None
    if any(fact["idle"] for fact in seen):
        return RIGHT
    return Finding("find-unused-without-need", wrapped[0]["line"], f"in {len(seen)} steps every parameter was used")


def local_batchnorm(notes: Notes, text: str) -> Answer:
    norms = notes.all("batchnorm")
    if not norms or "convert_sync_batchnorm" in text:  # torch's needs GPUs, so that here the local one stays
        return None
    if (rows := min(fact["rows"] for fact in norms)) > SMALL_BATCH:
        return RIGHT
    return Finding("local-batchnorm", norms[0]["line"], f"{norms[0]['name']} normalises {rows} rows of one rank")


# --- Prints and files ------------------------------------------------------------------------------


def prints(notes: Notes) -> Answer:
    said = [
        {(fact["line"], re.sub(r"[-+.\d]+(e[-+]?\d+)?", "#", fact["text"])) for fact in facts
         if fact["line"] and not re.search(r"\brank|\bproc|\bworker|\bgpu|\d/\d", fact["text"], re.I)}
        for facts in notes.of("prints")
    ]  # fmt: skip
    if both := sorted(set.intersection(*said)) if len(said) > 1 else []:
        return Finding("prints-by-every-rank", both[0][0], f"{len(said)} ranks print {both[0][1].strip()[:50]!r}")
    return RIGHT if notes.all("prints") else None


def files(notes: Notes) -> Answer:
    return _by_every_rank(notes, "writes", "file-by-every-rank")


def saves(notes: Notes) -> Answer:
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
    return RIGHT if began and loads else None


def module_prefix(notes: Notes) -> Answer:
    loaded = notes.all("loaded")
    for fact in loaded:
        if fact["prefix"]:
            return Finding("module-prefix", fact["line"], f"{fact['lost']} names do not meet, {fact['of']} were saved")
    return RIGHT if loaded else None


# --- Two runs --------------------------------------------------------------------------------------


def rate(one: Notes, many: Notes) -> Answer:
    """Does the learning rate know that the global batch has grown?"""
    alone, together = ([_first_batch(notes), _first_rate(notes)] for notes in (one, many))
    if None in (*alone, *together):
        return None
    if together[0] * len(many.ranks) <= alone[0] or together[1] != alone[1]:
        return RIGHT
    line = next((fact["line"] for fact in many.all("weights")), None)
    evidence = (
        f"1 rank: {alone[0]} rows a step, lr {alone[1]:g}; {len(many.ranks)} ranks: "
        f"{together[0] * len(many.ranks)} rows a step, lr {together[1]:g}"
    )
    return Finding("lr-not-scaled", line, evidence, note=True)


def _first_batch(notes: Notes) -> int | None:
    return next((len(fact["rows"]) for fact in notes.ranks[0] if fact["what"] == "forward" and fact["training"]), None)


def _first_rate(notes: Notes) -> float | None:
    return next((fact["rate"] for fact in notes.ranks[0] if fact["what"] == "weights" and fact["at"] == "before"), None)


def resumed(whole: Notes, killed: Notes, again: Notes) -> Answer:
    """Does a run that was killed and resumed go through the weights of one that was not?

    Returns:
        A finding; "right"; or nothing, if runs are not alike from the start, or the program begins again by itself.
    """
    all_states, before, after = ([fact["sketch"] for fact in states(notes)[0]] if states(notes) else []
                                 for notes in (whole, killed, again))  # fmt: skip
    if not after or not all(close(a, b, EQUAL) for a, b in zip(all_states, before, strict=False)):
        return None
    start = next((k for k, state in enumerate(all_states) if k % 2 == 0 and close(state, after[0], EQUAL)), None)
    if start == 0:
        return None
    line = next((fact["line"] for fact in killed.all("saving")), None)
    if start is None:
        return Finding("inexact-resume", line, "it starts from weights that the uninterrupted run never had")
    for index, (one, other) in enumerate(zip(all_states[start:], after, strict=False)):
        if not close(one, other, 1e-5):
            return Finding("inexact-resume", line, f"{(index + 1) // 2} steps after it resumed, the weights differ")
    return RIGHT


QUESTIONS: dict[str, Callable[..., Answer]] = {
    "same-rows": same_rows,
    "no-set-epoch": no_set_epoch,
    "same-augmentation": same_augmentation,
    "slow-loading": slow_loading,
    "different-start": different_start,
    "drift": drift,
    "averaged-twice": gradients,
    "find-unused-without-need": find_unused,
    "prints-by-every-rank": prints,
    "file-by-every-rank": files,
    "unguarded-save": saves,
    "early-load": early_load,
    "module-prefix": module_prefix,
    "padded-evaluation": padded_evaluation,
    "local-batchnorm": local_batchnorm,
}
OF_TEXT_TOO = {"padded-evaluation", "local-batchnorm"}  # these read the program as well
