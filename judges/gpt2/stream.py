"""16.1 `TextStream(tokens, context, rank, world_size, seed)`: is every window of an epoch read once, by one rank?

The tokens are whole numbers without a repetition, so each one says where in the text it stands. All ranks are played in
one process, one after the other; reading a text needs no talk. Any shuffle is right, so a view says in words what is
wrong with one, and no numbers of its own. Read next: `step.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import torch

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

MOST_NUMBERS = 10  # in a state
BATCHES = 4  # in an epoch


def cases(rng: Random) -> list[Round]:
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


def act(cls, case: dict, rank: int, world_size: int) -> Note:
    """Note each run, and what three fresh streams read; only the third finds torch's generator seeded otherwise."""
    orders, dice, whole = [], [], case["runs"]["whole"]
    ((ranks, rows, batches),) = whole["parts"]
    for torch_seed in (1, 1, 2):
        torch.manual_seed(torch_seed)
        tokens = torch.arange(1000, 1000 + whole["n_tokens"], dtype=torch.int32)
        orders.append(_read(cls(tokens, whole["context"], 0, ranks, whole["seed"]), rows, batches))
        dice.append(torch.get_rng_state().tolist())
    played = {name: _played(cls, run) for name, run in case["runs"].items()}
    return Note(played, orders=orders, seeded=dice[0] == dice[2])


def _played(cls: Callable, run: dict) -> dict:
    """Play the parts of a run: of each the ranks, the rows of a batch on one rank, and the batches.

    A stream reads so many batches "before" it loads, and "after" it has given its state. "shared": all ranks load one
    and the same object.
    """
    tokens = torch.arange(1000, 1000 + run["n_tokens"], dtype=torch.int32)  # a tokenizer saves memory
    state, taken, agree, numbers = "", [], True, 0
    for number, (ranks, rows, batches) in enumerate(run["parts"]):
        taken.append([])
        states, loaded = [], state and json.loads(state)
        for rank in range(ranks):
            torch.manual_seed(3000 + 100 * number + rank)  # as in a process of its own
            stream = cls(tokens, run["context"], rank, ranks, run["seed"])
            if state:
                _read(stream, rows, run.get("before", 0))
                stream.load_state_dict(loaded if "shared" in run else json.loads(state))
            taken[-1].append(_read(stream, rows, batches))
            given = stream.state_dict()
            _read(stream, rows, run.get("after", 0))
            states.append(json.dumps(given, sort_keys=True))
        agree, state = agree and len(set(states)) == 1, states[0]
        numbers = max(numbers, _count(json.loads(state)))
    return {"taken": taken, "agree": agree, "numbers": numbers}


def _read(stream: object, rows: int, batches: int) -> list[dict]:
    return [_windows(*stream.next_batch(rows)) for _ in range(batches)]


def _windows(*batch: object) -> dict:
    """Return what a batch holds, as numbers."""
    inputs, targets = (torch.as_tensor(part) for part in batch)
    kind = f"{inputs.dtype} {targets.dtype}"
    return {"inputs": (inputs - 1000).tolist(), "targets": (targets - 1000).tolist(), "kind": kind}


def _count(state: object) -> int:
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else None
    return 1 if parts is None else sum(map(_count, parts))


def _starts(note: dict, part: int = 0, batches: slice = slice(None)) -> list[list[int]]:
    """Return for each rank the first token of each window it read."""
    return [[row[0] for batch in mine[batches] for row in batch["inputs"] if row] for mine in note["taken"][part]]


def words(right: str, *faults: Callable[[Seen], Iterator[str]]) -> Callable[[Seen], str]:
    """Return a view: the first fault; but first, whether the order follows from more than the seed and the epoch."""

    def view(seen: Seen) -> str:
        found, (first, again, seeded) = next((each for fault in faults for each in fault(seen)), ""), seen["orders"]
        if found and first == again != seeded:
            return "an order from torch's default generator"
        return found and (found if first == again else "another order each time") or right

    return view


def windows(seen: Seen) -> Iterator[str]:
    ((_, rows, _),), context = (seen.case["runs"]["whole"][key] for key in ("parts", "context"))
    for batch in (batch for mine in seen["whole"]["taken"][0] for batch in mine):
        inputs, targets = batch["inputs"], batch["targets"]
        shapes = [(len(part), *{len(row) for row in part}) for part in (inputs, targets)]
        if shapes != [(rows, context)] * 2:
            yield f"shapes {shapes[0]} and {shapes[1]}, not {(rows, context)}"
        if batch["kind"].split() != ["torch.int64"] * 2:
            yield batch["kind"]
        if any(row != list(range(row[0], row[0] + context)) for row in inputs):
            yield "tokens that do not follow each other"
        if inputs == targets:
            yield "targets that are the inputs"
        if targets != [[token + 1 for token in row] for row in inputs]:
            yield "targets that are not the same piece, one token later"
        if any(row[0] % context for row in inputs):
            yield "windows that begin elsewhere than at k * context"


def length(seen: Seen) -> Iterator[str]:
    """One rank, one row at a time: the text that lacks one token has one window less, so an epoch is over earlier."""
    starts, right = _starts(seen["shorter"])[0], seen.case["length"] - 1
    once = next((n for n, start in enumerate(starts) if start in starts[:n]), len(starts))  # before one comes again
    if once != right:
        yield f"{once} windows, row by row on one rank, of a text that has {right}"


def epoch(seen: Seen) -> Iterator[str]:
    for number in (0, 1):
        by_rank = _starts(seen["whole"], 0, slice(number * BATCHES, (number + 1) * BATCHES))
        once = {start for mine in by_rank for start in mine}
        if by_rank[0] == by_rank[1]:
            yield "all ranks read the same windows"
        if any(len(set(mine)) < len(mine) for mine in by_rank):
            yield f"a rank reads windows twice in epoch {number}"
        if len(once) < seen.case["together"] * BATCHES:
            yield "two ranks read some of the same windows"


def order(seen: Seen) -> Iterator[str]:
    first, second = (_starts(seen["whole"], 0, slice(start, start + BATCHES)) for start in (0, BATCHES))
    if any(mine == sorted(mine) for mine in first):
        yield "an ascending order"
    if first == second:
        yield "the same order in the next epoch"
    if first == _starts(seen["other"], 0, slice(0, BATCHES)):
        yield "the same order for another seed"
    if seen["seeded"]:
        yield "torch's default generator in another state"


STOPS = {
    "stopped": "",
    "used": "other windows, where the stream that loads has read before",
    "later": "other windows, where the stream that loads has read before",
    "shared": "other windows, where all ranks load one dictionary",
    "read_on": "other windows, from a state of a stream that reads on",
}


def stopped(seen: Seen) -> Iterator[str]:
    straight = _starts(seen["whole"])
    for name, where in STOPS.items():
        for right, begun, ended in zip(straight, _starts(seen[name], 0), _starts(seen[name], 1), strict=True):
            if begun + ended != right:
                yield where or ("the first windows again" if ended == right[: len(ended)] else "other windows")


def resized(seen: Seen) -> Iterator[str]:
    counts, rest = (
        Counter(start for part in range(parts) for mine in _starts(seen[name], part) for start in mine)
        for name, parts in (("resized", 3), ("rest", 2))
    )
    by_rank = _starts(seen["whole"])
    wrong = len(counts) < seen.case["length"] or max(counts.values()) > 1
    if wrong and all(mine and max(mine) < min(later) for mine, later in zip(by_rank, by_rank[1:], strict=False)):
        yield "each rank has a part of the text of its own, so windows are lost"
    if wrong:
        yield "windows that come twice or never, with ranks and rows that change"
    if max(rest.values()) > 1:
        yield "windows that come twice, where one rank reads the rest of an epoch row by row"


def state(seen: Seen) -> str:
    if max(seen["stopped"]["numbers"], seen["resized"]["numbers"]) > MOST_NUMBERS:
        return "a state of more than ten numbers"
    agree = seen["stopped"]["agree"] and seen["resized"]["agree"]
    return "a few numbers, the same on all ranks" if agree else "different states on the ranks"


RANKS = "there must be one order for all ranks, from which they take turns"
PLACE = f"count the position in windows of all ranks together: each batch moves it by world_size * rows; {RANKS}"
COUNT = "read all (len(tokens) - 1) // context windows: an epoch ends when fewer than rows * world_size are left"
ORDER = "the order is another one each time it is asked for: shuffle by seed and epoch alone"
LOAD = "load_state_dict must set all that next_batch reads: epoch, position, and an order that it has kept"
LIVE = "the state changes when its stream reads on: state_dict must return values of its own, a new dictionary"

MISTAKES = f"""
the targets are the inputs | windows | the targets are the inputs themselves: each token is to predict the next one
    pieces[:, 1:] => pieces[:, :-1]
the tokens keep their dtype | windows | an embedding takes int64; the text may lie in memory as something smaller
    ].long() => ]
windows overlap | windows | window k begins at token k * context
    mine[:, None] * self.context => mine[:, None] * (self.context - 1)
the last target is forgotten in the count | all | there are (len(tokens) - 1) // context windows
    (len(self.tokens) - 1) => len(self.tokens)
an epoch ends too early | windows resized | {COUNT}
    self.position + together > length => self.position + together >= length
torch's default generator | windows epoch order stopped resized | give randperm a generator of its own
    (length, generator=generator) => (length)
nobody's random numbers | windows epoch stopped resized | {ORDER}
    torch.randperm(length, generator=generator) => torch.tensor(__import__("random").sample(range(length), length))
all ranks read the same | epoch resized | all ranks read the same windows: of each batch, every rank takes its own part
    self.rank, self.world_size = rank, world_size => self.rank, self.world_size = 0, 1
an order for each rank | epoch resized | {RANKS}
    1000 * self.seed + self.epoch => 1000 * self.seed + 100 * self.rank + self.epoch
no shuffle | order | shuffle the windows before the ranks take theirs
    torch.randperm(length, generator=generator) => torch.arange(length)
the epoch does not shuffle | order | the shuffle must depend on the epoch, too
    1000 * self.seed + self.epoch => self.seed
the seed is not used | order | the shuffle does not use the seed
    1000 * self.seed + self.epoch => self.epoch
torch's default generator is seeded | order | that changes what dropout draws; give randperm a generator of its own
    torch.Generator().manual_seed => torch.manual_seed
the state is ignored | stopped resized | it starts from the beginning: load_state_dict must set what next_batch reads
    self.epoch, self.position = state["epoch"], state["position"] => self.state = state
the epoch is not in the state | stopped | {LOAD}
    {{"epoch": self.epoch, "position" => {{"position"
    self.epoch, self.position = state["epoch"], state["position"] => self.position = state["position"]
the state is the stream's own | stopped | {LIVE}
    return {{"epoch": self.epoch, "position": self.position}} => return self.__dict__.setdefault("place", {{}})
    self.position += together => self.position += together
    self.state_dict().update(epoch=self.epoch, position=self.position)
it counts on in what is loaded | stopped | the dictionary that is given is kept, and counted on in; take the values out
    self.position += together => self.position += together
    self.__dict__.get("place", {{}}).update(epoch=self.epoch, position=self.position)
    self.epoch, self.position = state => self.place = state
    self.epoch, self.position = state
a part of the text for each rank | resized | {RANKS}
    order = torch.randperm(length, => count, begin = length // self.world_size, self.position // self.world_size
    order = self.rank * count + torch.randperm(count,
    order[self.position + self.rank : self.position + together : self.world_size] => order[begin : begin + rows]
this rank's windows are counted | resized | {PLACE}
    if self.position + together > length: => if (self.position + rows) * self.world_size > length:
    order[self.position + self.rank : self.position + together : self.world_size] => order[self.rank::self.world_size]
    mine = mine[self.position : self.position + rows]
    self.position += together => self.position += rows
the next epoch begins at once | resized | whether an epoch is over depends on the batch that is asked for next: ask then
    self.position += together => self.position += together
    if self.position + together > length:
        self.epoch, self.position = self.epoch + 1, 0
the state has the rank in it | state | the state is saved by one rank and loaded by all: nothing depends on the rank
    {{"epoch" => {{"rank": self.rank, "epoch"
the state holds the whole order | state | a list grows with the text; the epoch and a position say the same
    {{"epoch" => {{"order": list(range(len(self.tokens) // self.context)), "epoch"
an endless loop at the epoch's end | all | endless | hangs
    self.epoch, self.position = self.epoch + 1, 0 => while True: pass
written freely: a text without an end | windows order stopped resized state | nothing depends on the rank | tests
    class TextStream:
        def __init__(self, tokens, context, rank, world_size, seed):
            self.tokens, self.context, self.at, self.step = tokens.long(), context, rank, world_size

        def next_batch(self, rows):
            places = torch.arange(self.at, self.at + rows * self.step, self.step) % (len(self.tokens) // self.context)
            self.at += rows * self.step
            pieces = torch.stack([self.tokens[k * self.context :][: self.context + 1] for k in places.tolist()])
            return pieces[:, :-1], pieces[:, 1:]

        def state_dict(self):
            return {{"at": self.at}}

        def load_state_dict(self, state):
            self.at = state["at"]
written freely: ascending, int32 | windows order stopped | {LIVE} | tests
    class TextStream:
        def __init__(self, tokens, context, rank, world_size, seed):
            self.x, self.y = (part.unfold(0, context, context) for part in (tokens[:-1], tokens[1:]))
            self.rank, self.size, self.place = rank, world_size, {{"at": 0}}

        def next_batch(self, rows):
            at, end = self.place["at"], self.place["at"] + rows * self.size
            if end > len(self.x):
                at, end = 0, rows * self.size
            self.place["at"], mine = end, slice(at + self.rank, end, self.size)
            return self.x[mine], self.y[mine]

        def state_dict(self):
            return self.place

        def load_state_dict(self, state):
            self.place = dict(state)
"""

RIGHT = """
a block for each rank, Python's shuffle
    torch.randperm(length, generator=generator) => torch.arange(length).tolist()
    __import__("random").Random(f"{self.seed} {self.epoch}").shuffle(order)
    mine = order[self.position + self.rank : self.position + together : self.world_size] => begin = self.position
    mine = torch.tensor(order[begin + self.rank * rows :][:rows])
"""

STREAM = exercise(
    *("16.1", "Deal a text to the ranks", "TextStream", 25),
    cases=cases,
    act=act,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "windows": ("inputs and targets are pieces of the text, one token apart", 2, "text",
                    words("windows that meet, the targets one token later; int64", windows, length), COUNT),
        "epoch": ("no window comes twice in an epoch", 1, "text", words("each window once", epoch),
                  f"shuffle by seed and epoch alone; {PLACE}"),
        "order": ("a new order for each epoch and each seed", 1, "text", words("a shuffle of its own", order),
                  "shuffle by seed and epoch, with a generator that is not torch's default one"),
        "stopped": ("a stream that was stopped goes on exactly", 2, "text",
                    words("the windows of a run that never stopped", stopped), LOAD),
        "resized": ("it goes on with other numbers of ranks", 1, "text", words("each window once", resized), PLACE),
        "state": ("a small state, the same on all ranks", 1, "text", state, "the epoch and a position are enough"),
    },
    refused=("ddp_course.data.sampler.ShardSampler",),
    hints={
        r"not JSON serializable": "the state is saved as plain data: whole numbers, text, lists and dictionaries",
        r"index \d+ is out of bounds": "there are (len(tokens) - 1) // context windows, counted from 0",
    },
)  # fmt: skip
