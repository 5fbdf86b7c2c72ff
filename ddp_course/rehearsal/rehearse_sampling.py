"""Questions to a run: which rows do the ranks train and evaluate on?

Read next: `rehearse_weights.py`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import replace

from ddp_course.rehearsal.finding import LOOK, WRONG, Finding
from ddp_course.rehearsal.notes import RIGHT, Answer, Notes
from ddp_course.rehearsal.parsed import last_name
from ddp_course.rehearsal.source import Source

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
    if differs := _samplers(notes):
        return differs
    passes = first_passes(notes)
    if len(passes) < 2 or not all(passes):
        return None
    fewest = min(map(len, passes))
    made = notes.all("loader")
    line = next((fact["line"] for fact in made), None)
    shared = set(passes[0]).intersection(*passes[1:])
    same_order = all(rows[:fewest] == passes[0][:fewest] for rows in passes)
    if any(len(set(rows)) < 0.98 * len(rows) for rows in passes):  # the data holds equal samples: only the order tells
        if fewest < FEW or not same_order:
            return None
    elif len(shared) <= max(len(passes), fewest // 4):
        return RIGHT
    for facts in notes.ranks[:1]:
        kinds = [fact["what"] for fact in facts]
        if "loader" in kinds and "group" in kinds and kinds.index("loader") < kinds.index("group"):
            return Finding("same-rows", line, "the loader is made before init_process_group, when no rank has a number",
                           cure="open the process group first")  # fmt: skip
    draws = next((fact for fact in made if fact["sampler"] in RANDOM), None)
    evidence = f"{len(shared)} of the first {fewest} samples of each rank are the same"
    if draws and draws["sampler"] != "RandomSampler":
        return Finding("same-draws", draws["line"], f"{draws['sampler']}: {evidence}") if same_order else None
    return Finding("same-rows", line, evidence, WRONG if same_order or len(shared) < fewest else LOOK)


def asked_in_vain(found: Finding, notes: Notes, source: Source) -> Finding:
    """Of samples that are the same, whether a rank was asked for where there is no group: too soon, or in a worker."""
    asks = {"get_rank", "get_world_size", "is_initialized"}
    for fact in notes.all("no group")[:1]:
        helper = source.function_of(source.statements[fact["lines"][0]])
        if helper and len(fact["lines"]) > 1 and source.reaches(helper, frozenset({"get_rank", "get_world_size"})):
            evidence = f"the rank is asked for before init_process_group; {found.evidence}"
            return replace(found, line=fact["lines"][1], evidence=evidence, cure="open the process group first")
    reads = [each for each in source.all(ast.FunctionDef) if each.name in ("__iter__", "__getitem__")]
    call = next((c for each in reads if (c := source.reaches(each, frozenset(asks)))), None)
    if call is None or not any(fact["workers"] for fact in notes.all("loader")):
        return found
    evidence = f"{last_name(call)} is asked in a worker, where no process group exists; {found.evidence}"
    return replace(
        found, line=call.lineno, evidence=evidence, cure="ask in the main process, and give it to the data set"
    )


def unread_samples(one: Notes, many: Notes, source: Source) -> Answer:
    """Do several ranks together train on what one process trains on?"""
    both = [[set().union(*(_used(facts)[0] for facts in notes.ranks)) for notes in (one, many)],
            [set().union(*first_passes(notes)) for notes in (one, many)]]  # fmt: skip
    # Augmented samples come but once, and of draws with replacement the first passes differ.
    both = [(alone, some) for alone, some in both if len(alone) >= FEW and len(alone & some) >= 0.9 * len(some)]
    if not both:
        return None
    alone, together = min(both, key=lambda pair: len(pair[1]) / len(pair[0]))
    if len(together) > 0.75 * len(alone):
        return RIGHT
    loader = next(iter(many.all("loader")), {"draws": None, "line": None})
    function = next((each for each in source.all(ast.FunctionDef) if each.lineno == loader["draws"]), None)
    gives = [each.lineno for each in ast.walk(function) if isinstance(each, ast.Return | ast.Yield)] if function else []
    evidence = f"{len(many.ranks)} ranks train on {len(together)} of the {len(alone)} samples of one process"
    return Finding("unread-samples", max(gives, default=loader["line"]), evidence, LOOK)


RANDOM = {"RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler"}


def _samplers(notes: Notes) -> Finding | None:
    """DistributedSamplers that do not divide the data between them."""
    for row in zip(*notes.of("sampler"), strict=False):
        if row[0]["shuffle"] and len({fact["seed"] for fact in row}) > 1:
            seeds = ", ".join(str(fact["seed"]) for fact in row)
            return Finding("sampler-differs", row[0]["made"], f"the ranks' samplers have the seeds {seeds}")
        places = [(fact["rank"], fact["num_replicas"]) for fact in row]
        if places != [(rank, len(row)) for rank in range(len(row))] and len(set(places)) < len(row):
            said = ", ".join(f"rank {rank} takes share {own} of {of}" for rank, (own, of) in enumerate(places))
            return Finding("sampler-differs", row[0]["made"], said)
        if row[0]["shuffle"] and len({fact["epoch"] for fact in row}) > 1:
            epochs = ", ".join(str(fact["epoch"]) for fact in row)
            return Finding("sampler-differs", row[0]["line"], f"the ranks' samplers are in the epochs {epochs}",
                           cure="call set_epoch with the same number on every rank")  # fmt: skip
    return None


def split_leak(notes: Notes, source: Source) -> Answer:
    """Does a rank train on what another evaluates, while none trains on what it evaluates itself?"""
    trained, evaluated = zip(*map(_used, notes.ranks), strict=True)
    if len(trained) < 2 or not all(trained) or not all(evaluated):
        return None
    for rank, own in enumerate(trained):
        if len(own & evaluated[rank]) > 0.02 * len(evaluated[rank]):
            return None  # it evaluates what it trains on, and knows it
    for rank, own in enumerate(trained):
        for other, held in enumerate(evaluated):
            if len(own & held) > max(1, 0.05 * len(held)):
                calls = source.named(*SPLITS)
                line = calls[0].lineno if calls else None
                evidence = (
                    f"rank {rank} trains on {len(own & held)} of the {len(held)} samples that rank {other} evaluates"
                )
                return Finding("split-leak", line, evidence)
    return RIGHT


SPLITS = ("random_split", "train_test_split", "randperm", "permutation", "shuffle", "sample", "split")


def _used(facts: list[dict]) -> tuple[set[float], set[float]]:
    """The samples that a rank trains on and those that it evaluates, as they came from the loaders."""
    trained: set[float] = set()
    evaluated: set[float] = set()
    batch: list[float] = []
    for fact in facts:
        if fact["what"] == "batch":
            batch = fact["rows"]
        elif fact["what"] == "forward" and batch:
            (trained if fact["training"] else evaluated).update(batch)
            batch = []
    return trained, evaluated


def orders(notes: Notes) -> list[tuple[list[dict], list[list[float]]]]:
    """For each loader of rank 0: its passes, and the samples of each in their order."""
    passes: dict[int, list[dict]] = defaultdict(list)
    rows: dict[int, list[list[float]]] = defaultdict(list)
    for fact in notes.ranks[0] if notes.ranks else ():
        if fact["what"] == "pass":
            passes[fact["loader"]].append(fact)
            rows[fact["loader"]].append([])
        elif fact["what"] == "batch" and rows[fact["loader"]]:
            rows[fact["loader"]][-1] += fact["rows"]
    return [(passes[number], rows[number]) for number in passes]


def stale_workers(notes: Notes) -> Answer:
    """Workers that stay, and give the same order although the program counts on."""
    right = False
    for facts, rows in orders(notes):
        if len(facts) < 2 or not facts[0]["stay"] or len(rows[0]) < FEW or len(rows[0]) != len(rows[1]):
            continue
        moved = sorted(name for name, value in facts[1]["counts"].items() if facts[0]["counts"].get(name) != value)
        if moved and rows[0] == rows[1]:
            change = f"{moved[0]} goes from {facts[0]['counts'][moved[0]]} to {facts[1]['counts'][moved[0]]}"
            made = [
                fact for fact in notes.ranks[0] if fact["what"] == "loader" and fact["loader"] == facts[0]["loader"]
            ]
            line = made[0]["line"] if made else facts[0]["line"]
            return Finding("stale-workers", line, f"{change}, and both passes read the same samples in the same order")
        right |= bool(moved)
    return RIGHT if right else None


def missing_set_epoch(notes: Notes) -> Answer:
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
    for facts, rows in orders(notes):  # a sampler or data set of the program's own
        quiet = len(facts) > 1 and facts[0]["sets_epoch"] and facts[0]["counts"] == facts[1]["counts"]
        if quiet and len(rows[0]) >= FEW and rows[0] == rows[1] and sorted(rows[0]) != rows[0]:
            evidence = "it has a set_epoch, which never reaches it: both passes read the same samples in the same order"
            return Finding("missing-set-epoch", facts[0]["line"], evidence)
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


def padded_evaluation(notes: Notes, source: Source) -> Answer:
    facts = notes.ranks[0]
    looked = False
    for index, fact in enumerate(facts):
        if fact["what"] != "sampler":
            continue
        after = next((later for later in facts[index:] if later["what"] == "forward"), None)
        if after is None or after["training"]:
            continue
        looked = True
        cut_off_again = re.search(r"gather(.|\n)*\[\s*:\s*[a-z_]", source.text)
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
    waits, clocks = notes.of("batch")[0], [fact["clock"] for fact in notes.of("weights")[0] if "clock" in fact]
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
