"""16.1 `TextStream(tokens, context, rank, world_size, seed)`: is every window of an epoch read once, by one rank?

The tokens are whole numbers without a repetition, so each one says where in the text it stands. All ranks are played in
one process, one after the other; reading a text needs no talk. Read next: `step.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import Expect, all_of, exercise, first_fault, nothing
from ddp_course.grading.vocabulary.play import Note, Round, Seen

MOST_NUMBERS = 10  # in a state
BATCHES = 4  # in an epoch
Part = tuple[int, int, int]  # ranks, rows of a batch on one rank, batches


def act(cls, case: dict, rank: int, world_size: int) -> Note:
    """Note each run, and what three fresh streams read; only the third finds torch's generator seeded otherwise."""
    orders, dice, whole = [], [], case["runs"]["whole"]
    ((ranks, rows, batches),) = whole["parts"]
    for torch_seed in (1, 1, 2):
        torch.manual_seed(torch_seed)
        tokens = torch.arange(1000, 1000 + whole["n_tokens"], dtype=torch.int32)
        orders.append(_read(cls(tokens, whole["context"], 0, ranks, whole["seed"]), rows, batches))
        dice.append(torch.get_rng_state().tolist())
    played = {name: _played(cls, **run) for name, run in case["runs"].items()}
    return Note(played, orders=orders, seeded=dice[0] == dice[2] and "another state")


def _played(
    cls: Callable,
    n_tokens: int,
    context: int,
    seed: int,
    parts: list[Part],
    before: int = 0,
    after: int = 0,
    shared: bool = False,
) -> dict:
    """Play the parts; a stream reads `before` batches before it loads, and `after` more once it has given its state.

    Args:
        shared: whether all ranks load one and the same object.
    """
    tokens = torch.arange(1000, 1000 + n_tokens, dtype=torch.int32)  # a tokenizer saves memory
    state, taken, agree, numbers = None, [], True, 0
    for number, (ranks, rows, batches) in enumerate(parts):
        taken.append([])
        states, loaded = [], state and json.loads(state)
        for rank in range(ranks):
            torch.manual_seed(3000 + 100 * number + rank)  # as in a process of its own
            stream = cls(tokens, context, rank, ranks, seed)
            if state is not None:
                _read(stream, rows, before)
                stream.load_state_dict(loaded if shared else json.loads(state))
            taken[-1].append(_read(stream, rows, batches))
            given = stream.state_dict()
            _read(stream, rows, after)
            states.append(json.dumps(given, sort_keys=True))
        agree = agree and len(set(states)) == 1
        state = states[0]
        numbers = max(numbers, _count(json.loads(state)))
    return {"taken": taken, "agree": agree, "numbers": numbers}


def _read(stream: object, rows: int, batches: int) -> list[dict]:
    return [_windows(stream.next_batch(rows)) for _ in range(batches)]


def _windows(batch: tuple) -> dict:
    """Return what a batch holds, as numbers."""
    inputs, targets = (torch.as_tensor(part) for part in batch)
    return {
        "inputs": (inputs - 1000).tolist(),
        "targets": (targets - 1000).tolist(),
        "kind": f"{inputs.dtype} {targets.dtype}",
    }


def _count(state: object) -> int:
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else None
    return 1 if parts is None else sum(map(_count, parts))


def rounds(rng: Random) -> list[Round]:
    """Two epochs at once; the same with stops, and other numbers of ranks; a seed and a text of its own."""
    ranks, rows, context = rng.choice((2, 3)), rng.choice((2, 3)), rng.choice((4, 5, 7))
    together = ranks * rows
    length = together * BATCHES + rng.randint(1, together - 1)
    whole = {"n_tokens": length * context + 1, "context": context, "seed": rng.randrange(100)}
    whole["parts"] = [(ranks, rows, 2 * BATCHES)]
    stopped = {**whole, "parts": [(ranks, rows, 3), (ranks, rows, 5)]}
    sizes = [(ranks, rows, 1), (ranks + 1, 1, 2), (1, 1, length - together - 2 * (ranks + 1))]
    runs = {
        "whole": whole,
        "stopped": stopped,
        "resized": {**whole, "parts": sizes},
        "rest": {**whole, "parts": [(ranks, rows, BATCHES), (1, 1, length - together * BATCHES)]},
        "other": {**whole, "seed": whole["seed"] + 1},
        "shorter": {**whole, "parts": [(1, 1, length)], "n_tokens": length * context},  # one token, one window less
        "read_on": {**stopped, "after": 1},
        "used": {**stopped, "before": 5},
        "shared": {**stopped, "shared": True},
        "later": {**stopped, "parts": [(ranks, rows, 5), (ranks, rows, 3)], "before": 1},
    }
    return [Round(1, [("text", {"runs": runs, "length": length, "together": together})], init=False)]


def _starts(note: dict, part: int = 0, batches: slice = slice(None)) -> list[list[int]]:
    """Return for each rank the first token of each window it read."""
    return [[row[0] for batch in mine[batches] for row in batch["inputs"] if row] for mine in note["taken"][part]]


def steady(expect: Expect) -> Expect:
    """Where an expectation fails, say first whether the order follows from more than the seed and the epoch."""

    def expected(seen: Seen) -> Fault | None:
        fault, (first, same, otherwise) = expect(seen), seen["orders"]
        cause = "the order is another one each time it is asked for: shuffle by seed and epoch alone"
        if first == same:
            cause = "the order comes from torch's default generator; give randperm a generator of its own, by seed and "
            cause += "epoch"
        return replace(fault, cause=cause) if fault and not first == same == otherwise else fault

    return expected


def windows(seen: Seen) -> Fault | None:
    """Inputs and targets are pieces of the text."""
    ((_, rows, _),), context = (seen.case["runs"]["whole"][key] for key in ("parts", "context"))
    by_rank = seen["whole"]["taken"][0]
    return first_fault(_batch_fault(rank, batch, context, rows) for rank, mine in enumerate(by_rank) for batch in mine)


def _batch_fault(rank: int, batch: dict, context: int, rows: int) -> Fault | None:
    inputs, targets = batch["inputs"], batch["targets"]
    shapes = [(len(part), len(part[0]) if part and isinstance(part[0], list) else None) for part in (inputs, targets)]
    if shapes != [(rows, context)] * 2:
        cause = "inputs and targets have `rows` rows of `context` tokens, on each rank"
        return Fault(f"two tensors of shape ({rows}, {context})", f"shapes {shapes[0]} and {shapes[1]}", rank, cause)
    if batch["kind"].split() != ["torch.int64"] * 2:
        return Fault(
            "tokens of dtype int64",
            batch["kind"],
            rank,
            "an embedding takes int64; the text may lie in memory as something smaller",
        )
    for row, target in zip(inputs, targets, strict=True):
        if row != list(range(row[0], row[0] + context)):
            return Fault("tokens that follow each other", f"places {row}", rank, "a window is one piece of the text")
        if target == row:
            cause = "the targets are the inputs themselves: each token is to predict the next one"
            return Fault(f"targets {[t + 1 for t in row]}", f"{target}", rank, cause)
        if target != [token + 1 for token in row]:
            cause = "the targets are the same piece, one token later; the last target is the next window's first token"
            return Fault(f"targets {[t + 1 for t in row]}", f"{target}", rank, cause)
        if row[0] % context:
            cause = f"window k begins at token k * context, here a multiple of {context}"
            return Fault("windows that meet without a gap", f"one that begins at token {row[0]}", rank, cause)
    return None


def length(seen: Seen) -> Fault | None:
    """One rank, one row at a time: the text that lacks one token has one window less, so an epoch is over earlier."""
    starts, right = _starts(seen["shorter"])[0], seen.case["length"] - 1
    once = next((n for n, start in enumerate(starts) if start in starts[:n]), len(starts))  # before one comes again
    if once == right:
        return None
    cause = "a rank that is alone reads, row by row, all (len(tokens) - 1) // context windows before one comes again"
    if once > right:
        cause = "the last window needs one more token, its last target: there are (len(tokens) - 1) // context windows"
    return Fault(f"{right} windows", f"{once} different ones", cause=cause)


def epoch(seen: Seen) -> Fault | None:
    """No window comes twice in an epoch."""
    whole, expected = seen.case["together"] * BATCHES, "{} of {} windows, each once, over all ranks"
    for number in (0, 1):
        by_rank = _starts(seen["whole"], 0, slice(number * BATCHES, (number + 1) * BATCHES))
        counts = Counter(start for mine in by_rank for start in mine)
        if len(counts) < whole or max(counts.values()) > 1:
            found = f"{len(counts)} different ones, {sum(n > 1 for n in counts.values())} of them repeated"
            words = f"epoch {number}: {expected.format(whole, seen.case['length'])}"
            return Fault(words, found, cause=_epoch_cause(by_rank, number))
    return None


def _epoch_cause(by_rank: list[list[int]], epoch: int) -> str:
    if len(by_rank) > 1 and by_rank[0] == by_rank[1]:
        return "all ranks read the same windows: of each batch, every rank takes its own part"
    if any(len(set(mine)) < len(mine) for mine in by_rank):
        if epoch:
            return "an epoch that cannot fill a batch on every rank is over; the next one begins at position 0"
        return "the order changes within the epoch, or the position does not move: shuffle by seed and epoch alone"
    return "the ranks' orders differ: shuffle by seed and epoch alone, and move by what all ranks take"


def order(seen: Seen) -> Fault | None:
    """The order is shuffled, by epoch and by seed."""
    first, second = (_starts(seen["whole"], 0, slice(start, start + BATCHES)) for start in (0, BATCHES))
    if any(mine == sorted(mine) for mine in first):
        return Fault("a shuffled order", "an ascending one", cause="shuffle the windows before the ranks take theirs")
    if first == second:
        return Fault("another order in the next epoch", "the same", cause="the shuffle must depend on the epoch, too")
    if first == _starts(seen["other"], 0, slice(0, BATCHES)):
        return Fault("another order for another seed", "the same", cause="the shuffle does not use the seed")
    return None


def goes_on(name: str, who: str = "", cause: str = "") -> Expect:
    """Return what is expected of a run that was stopped: the windows of the one that was not."""

    def expect(seen: Seen) -> Fault | None:
        straight, (begun, ended) = _starts(seen["whole"]), (_starts(seen[name], part) for part in (0, 1))
        rank = next((r for r, right in enumerate(straight) if begun[r] + ended[r] != right), None)
        if rank is None:
            return None
        expected = "the windows of a run that never stopped, batch by batch" + who
        why = cause or _stopped_cause(straight[rank], ended[rank])
        return Fault(expected, "others after the stop", rank, why)

    return expect


def _stopped_cause(straight: list[int], rest: list[int]) -> str:
    right, first = straight[-len(rest) :], len(rest) // 5
    if rest == straight[: len(rest)]:
        return "it starts from the beginning: load_state_dict must set what next_batch reads"
    if sorted(rest) == sorted(right):
        return "the right windows in another order within the batches"
    if rest[:first] == right[:first]:
        return "the first batch is right, and then not: the epoch belongs to the state, too"
    return "save the epoch and the position in it; with the seed they say everything"


def resized(seen: Seen) -> Fault | None:
    """An epoch goes on with other numbers of ranks."""
    length = seen.case["length"]
    counts = Counter(start for part in range(3) for mine in _starts(seen["resized"], part) for start in mine)
    rest = Counter(start for part in range(2) for mine in _starts(seen["rest"], part) for start in mine)
    if max(counts.values()) == 1 and max(rest.values()) > 1:
        words = f"{rest.total()} windows once each: a batch as long as there is one, then, on one rank, row by row"
        cause = "whether an epoch is over depends on the batch that is asked for next: ask when it is asked for"
        return Fault(words, f"{sum(n > 1 for n in rest.values())} repeated", cause=cause)
    repeated, missing = sum(n > 1 for n in counts.values()), length - len(counts)
    if not repeated and not missing:
        return None
    by_rank = _starts(seen["whole"])
    if all(mine and later and max(mine) < min(later) for mine, later in zip(by_rank, by_rank[1:], strict=False)):
        cause = "each rank has a fixed part of the text: shuffle one order for all ranks, from which they take turns"
    else:
        cause = (
            "the position must be counted in windows of all ranks together: each batch moves it by world_size * rows, "
            "so that it means the same for another number of ranks, and there must be one order for all ranks, from "
            "which they take turns"
        )
    return Fault(
        f"each of {length} windows once, in three runs together", f"{repeated} repeated, {missing} missing", cause=cause
    )


def state(seen: Seen) -> Fault | None:
    """The state is a few numbers, the same on all ranks."""
    for note in (seen["stopped"], seen["resized"]):
        if note["numbers"] > MOST_NUMBERS:
            cause = "a list grows with the text; the epoch and a position say the same"
            return Fault("a state of a few numbers", f"{note['numbers']} of them", cause=cause)
        if not note["agree"]:
            cause = "the state is saved by one rank and loaded by all, so nothing in it may depend on the rank"
            return Fault("the same state on all ranks", "different states", cause=cause)
    return None


KEPT = "load_state_dict must set all that next_batch reads, also an order that it has kept"
LIVE = "the state changes when its stream reads on: state_dict must return values of its own, a new dictionary"
TAKEN = "load_state_dict keeps the dictionary that it is given, and counts on in it; take the values out of it"
own_dice = nothing(
    *("seeded", "torch's default generator is left alone"),
    "to seed torch's default generator changes what dropout draws; give randperm a generator of its own",
)
pieces = all_of(windows, steady(length))
stopped = all_of(
    goes_on("stopped"),
    goes_on("used", ", from a state loaded by a stream that has read", KEPT),
    goes_on("later", ", from a state loaded by a stream that has read", KEPT),
    goes_on("shared", ", where all ranks load one dictionary", TAKEN),
    goes_on("read_on", ", from a state of a stream that reads on", LIVE),
)

STREAM = exercise(
    "16.1",
    "Deal a text to the ranks",
    "TextStream",
    25,
    act=act,
    rounds=rounds,
    checks={
        "windows": ("inputs and targets are pieces of the text, one token apart", 2, pieces, "text"),
        "epoch": ("no window comes twice in an epoch", 1, steady(epoch), "text"),
        "order": ("a new order for each epoch and each seed", 1, all_of(steady(order), own_dice), "text"),
        "stopped": ("a stream that was stopped goes on exactly", 2, steady(stopped), "text"),
        "resized": ("it goes on with other numbers of ranks", 1, steady(resized), "text"),
        "state": ("a small state, the same on all ranks", 1, state, "text"),
    },
    refused=("ddp_course.data.text.TokenStream", "ddp_course.data.sampler.ShardSampler"),
    hints={
        r"not JSON serializable": "the state is saved as plain data: whole numbers, text, lists and dictionaries",
        r"index \d+ is out of bounds": "there are (len(tokens) - 1) // context windows, counted from 0",
    },
)
