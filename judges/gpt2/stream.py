"""16.1 `TextStream(tokens, context, rank, world_size, seed)`: is every window of an epoch read once, by one rank?

The tokens are whole numbers without a repetition, so each one says where in the text it stands. All ranks are played in
one process, one after the other; reading a text needs no talk. Read next: `step.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer

MOST_NUMBERS = 10  # in a state
Part = tuple[int, int, int]  # ranks, rows of a batch on one rank, batches


def stream_driver(rank: int, world_size: int, cls: type, cases: list[dict]) -> list[dict]:
    """Play each case: several runs after each other, each going on from the state of the last."""
    return [_played(cls, **case) for case in cases]


def _played(
    cls: Callable, n_tokens: int, context: int, seed: int, parts: list[Part], before: int = 0, after: int = 0
) -> dict:
    """Play the parts; a stream reads `before` batches before it loads, and `after` more once it has given its state."""
    tokens = torch.arange(1000, 1000 + n_tokens)
    state, taken, agree, numbers = None, [], True, 0
    for number, (ranks, rows, batches) in enumerate(parts):
        taken.append([])
        states = []
        for rank in range(ranks):
            torch.manual_seed(3000 + 100 * number + rank)  # as in a process of its own
            stream = cls(tokens, context, rank, ranks, seed)
            if state is not None:
                _read(stream, rows, before)
                stream.load_state_dict(json.loads(state))
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


def orders_driver(rank: int, world_size: int, cls: type, case: dict) -> list[list]:
    """Return what three fresh streams read; only the third one finds torch's default generator seeded otherwise."""
    ((ranks, rows, batches),) = case["parts"]
    found = []
    for torch_seed in (1, 1, 2):
        torch.manual_seed(torch_seed)
        tokens = torch.arange(1000, 1000 + case["n_tokens"])
        found.append(_read(cls(tokens, case["context"], 0, ranks, case["seed"]), rows, batches))
    return found


def _windows(batch: tuple) -> dict:
    """Return what a batch holds, as numbers."""
    inputs, targets = (torch.as_tensor(part) for part in batch)
    return {"inputs": (inputs - 1000).tolist(), "targets": (targets - 1000).tolist(), "kind": str(inputs.dtype)}


def _count(state: object) -> int:
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else None
    return 1 if parts is None else sum(map(_count, parts))


def stream_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Two epochs at once; the same with stops, and other numbers of ranks; a seed and a text of its own."""
    ranks, rows, context = rng.choice((2, 3)), rng.choice((2, 3)), rng.choice((4, 5, 7))
    together = ranks * rows
    length = together * 4 + rng.randint(1, together - 1)
    case = {"n_tokens": length * context + 1, "context": context, "seed": rng.randrange(100)}
    cases = [
        {**case, "parts": [(ranks, rows, 8)]},
        {**case, "parts": [(ranks, rows, 3), (ranks, rows, 5)]},
        {**case, "parts": [(ranks, rows, 1), (ranks + 1, 1, 2), (1, 1, length - together - 2 * (ranks + 1))]},
        {**case, "parts": [(ranks, rows, 8)], "seed": case["seed"] + 1},
        {**case, "parts": [(1, 1, length)], "n_tokens": length * context},  # one token less: one window less
    ]
    again = [  # an epoch has 4 batches
        {**cases[1], "after": 1},
        {**cases[1], "before": 5},
        {**case, "parts": [(ranks, rows, 5), (ranks, rows, 3)], "before": 1},
    ]
    whole, stopped, resized, other, shorter, *again = answer.run(stream_driver, 1, [*cases, *again])[0]
    fickle = _fickle_cause(*answer.run(orders_driver, 1, cases[0])[0])

    def named(fault: Fault | None) -> Fault | None:
        return replace(fault, cause=fickle) if fault and fickle else fault

    yield "windows", _window_fault(whole, context, rows) or named(_length_fault(shorter, length - 1))
    yield "epoch", named(_epoch_fault(whole, length, 4, together))
    yield "order", named(_order_fault(whole, other))
    yield "stopped", named(_stopped_fault(whole, stopped) or _again_fault(whole, *again))
    yield "resized", named(_resized_fault(resized, length, whole))
    yield "state", next(filter(None, map(_state_fault, (stopped, resized))), None)


def _starts(note: dict, part: int = 0, batches: slice = slice(None)) -> list[list[int]]:
    """Return for each rank the first token of each window it read."""
    return [[row[0] for batch in mine[batches] for row in batch["inputs"] if row] for mine in note["taken"][part]]


def _fickle_cause(first: list, same: list, otherwise: list) -> str:
    """Say where an order comes from that follows from more than the seed and the epoch, else nothing."""
    if first != same:
        return "the order is another one each time it is asked for: shuffle by seed and epoch alone"
    if first != otherwise:
        return "the order comes from torch's default generator; give randperm a generator of its own, by seed and epoch"
    return ""


def _window_fault(note: dict, context: int, rows: int) -> Fault | None:
    for rank, mine in enumerate(note["taken"][0]):
        for batch in mine:
            if fault := _batch_fault(batch, context, rows):
                return Fault(fault.expected, fault.found, rank, fault.cause)
    return None


def _batch_fault(batch: dict, context: int, rows: int) -> Fault | None:
    inputs, targets = batch["inputs"], batch["targets"]
    shapes = [(len(part), len(part[0]) if part and isinstance(part[0], list) else None) for part in (inputs, targets)]
    if shapes != [(rows, context)] * 2:
        cause = "inputs and targets have `rows` rows of `context` tokens, on each rank"
        return Fault(f"two tensors of shape ({rows}, {context})", f"shapes {shapes[0]} and {shapes[1]}", cause=cause)
    if "int64" not in batch["kind"]:
        return Fault("tokens of dtype int64", batch["kind"], cause="an embedding takes whole numbers")
    for row, target in zip(inputs, targets, strict=True):
        if row != list(range(row[0], row[0] + context)):
            return Fault("tokens that follow each other", f"places {row}", cause="a window is one piece of the text")
        if target == row:
            cause = "the targets are the inputs themselves: each token is to foretell the next one"
            return Fault(f"targets {[t + 1 for t in row]}", f"{target}", cause=cause)
        if target != [token + 1 for token in row]:
            cause = "the targets are the same piece, one token later; the last target is the next window's first token"
            return Fault(f"targets {[t + 1 for t in row]}", f"{target}", cause=cause)
        if row[0] % context:
            cause = f"window k begins at token k * context, here a multiple of {context}"
            return Fault("windows that meet without a gap", f"one that begins at token {row[0]}", cause=cause)
    return None


def _length_fault(note: dict, length: int) -> Fault | None:
    """One rank, one row at a time: the text that lacks one token has one window less, so an epoch is over earlier."""
    starts = _starts(note)[0]
    once = next((n for n, start in enumerate(starts) if start in starts[:n]), len(starts))  # before one comes again
    if once == length:
        return None
    cause = "a rank that is alone reads, row by row, all (len(tokens) - 1) // context windows before one comes again"
    if once > length:
        cause = "the last window needs one more token, its last target: there are (len(tokens) - 1) // context windows"
    return Fault(f"{length} windows", f"{once} different ones", cause=cause)


def _epoch_fault(note: dict, length: int, batches: int, together: int) -> Fault | None:
    for epoch in (0, 1):
        by_rank = _starts(note, 0, slice(epoch * batches, (epoch + 1) * batches))
        counts = Counter(start for mine in by_rank for start in mine)
        if len(counts) == batches * together and max(counts.values()) == 1:
            continue
        expected = f"epoch {epoch}: {batches * together} of {length} windows, each once, over all ranks"
        found = f"{len(counts)} different ones, {sum(n > 1 for n in counts.values())} of them repeated"
        return Fault(expected, found, cause=_epoch_cause(by_rank, epoch))
    return None


def _epoch_cause(by_rank: list[list[int]], epoch: int) -> str:
    if len(by_rank) > 1 and by_rank[0] == by_rank[1]:
        return "all ranks read the same windows: of each batch, every rank takes its own part"
    if any(len(set(mine)) < len(mine) for mine in by_rank):
        if epoch:
            return "an epoch that cannot fill a batch on every rank is over; the next one begins at position 0"
        return "the order changes within the epoch, or the position does not move: shuffle by seed and epoch alone"
    return "the ranks' orders differ: shuffle by seed and epoch alone, and move by what all ranks take"


def _order_fault(whole: dict, other: dict) -> Fault | None:
    first, second = (_starts(whole, 0, slice(start, start + 4)) for start in (0, 4))
    if any(mine == sorted(mine) for mine in first):
        return Fault("a shuffled order", "an ascending one", cause="shuffle the windows before the ranks take theirs")
    if first == second:
        return Fault("another order in the next epoch", "the same", cause="the shuffle must depend on the epoch, too")
    if first == _starts(other, 0, slice(0, 4)):
        return Fault("another order for another seed", "the same", cause="the shuffle does not use the seed")
    return None


def _stopped_fault(whole: dict, stopped: dict) -> Fault | None:
    straight = _starts(whole)
    joined = [a + b for a, b in zip(_starts(stopped, 0), _starts(stopped, 1), strict=True)]
    if joined == straight:
        return None
    rank = next(rank for rank in range(len(joined)) if joined[rank] != straight[rank])
    rest, again = _starts(stopped, 1)[rank], straight[rank][: len(_starts(stopped, 1)[rank])]
    if rest == again:
        cause = "it begins anew: load_state_dict must set what next_batch reads"
    elif sorted(rest) == sorted(straight[rank][-len(rest) :]):
        cause = "the right windows in another order within the batches"
    elif rest[: len(rest) // 5] == straight[rank][len(straight[rank]) - len(rest) :][: len(rest) // 5]:
        cause = "the first batch is right, and then not: the epoch belongs to the state, too"
    else:
        cause = "save the epoch and the position in it; with the seed they say everything"
    return Fault("the windows of a run that never stopped, batch by batch", "others after the stop", rank, cause)


def _again_fault(whole: dict, read_on: dict, used: dict, later: dict) -> Fault | None:
    """The same stop with streams in use: one reads on after it gave its state, one has read before it loads."""
    kept = "load_state_dict must set all that next_batch reads, also an order that it has kept"
    live = "the state changes when its stream reads on: state_dict must return values of its own, a new dictionary"
    for note, who, cause in (
        (used, "loaded by a stream that has read", kept),
        (later, "loaded by a stream that has read", kept),
        (read_on, "of a stream that reads on", live),
    ):
        if fault := _stopped_fault(whole, note):
            return Fault(f"{fault.expected}, from a state {who}", fault.found, fault.rank, cause)
    return None


def _resized_fault(note: dict, length: int, whole: dict) -> Fault | None:
    counts = Counter(start for part in range(3) for mine in _starts(note, part) for start in mine)
    repeated, missing = sum(n > 1 for n in counts.values()), length - len(counts)
    if not repeated and not missing:
        return None
    by_rank = _starts(whole)
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


def _state_fault(note: dict) -> Fault | None:
    if note["numbers"] > MOST_NUMBERS:
        cause = "a list grows with the text; the epoch and a position say the same"
        return Fault("a state of a few numbers", f"{note['numbers']} of them", cause=cause)
    if note["agree"]:
        return None
    cause = "the state is saved by one rank and loaded by all, so nothing in it may depend on the rank"
    return Fault("the same state on all ranks", "different states", cause=cause)


STREAM = Exercise(
    "16.1",
    "Deal a text to the ranks",
    "TextStream",
    25,
    (
        Check("windows", "inputs and targets are pieces of the text, one token apart", 2),
        Check("epoch", "no window comes twice in an epoch", 1),
        Check("order", "a new order for each epoch and each seed", 1),
        Check("stopped", "a stream that was stopped goes on exactly", 2),
        Check("resized", "it goes on with other numbers of ranks", 1),
        Check("state", "a small state, the same on all ranks", 1),
    ),
    stream_judge,
    hints=(
        (r"not JSON serializable", "the state is saved as plain data: whole numbers, text, lists and dictionaries"),
        (r"index \d+ is out of bounds", "there are (len(tokens) - 1) // context windows, counted from 0"),
    ),
    refused=("ddp_course.data.text.TokenStream", "ddp_course.data.sampler.ShardSampler"),
)
