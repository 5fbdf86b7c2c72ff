"""16.3 `utilisation(model, layers, width, context, local_tokens, seconds, peak)`: how busy are all ranks together?

The ranks have different tokens, times and peaks, so each wrong way to put them together gives a number of its own. The
model has a tied matrix and learned positions. Read next: `judges/sharding/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from torch import nn

from ddp_course.grading.vocabulary.compare import close
from ddp_course.grading.vocabulary.expect import Expect, Slips, alike, equals, exercise
from ddp_course.grading.vocabulary.play import Note, Round, Seen

FEEDS = 6  # operations for each weight that is multiplied: 2 forward, 4 backward
TOLERANCE = 1e-5


class Small(nn.Module):
    """What a GPT's parameters look like; its forward pass is not asked for."""

    def __init__(self, layers: int, width: int, positions: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(nn.Linear(width, 12 * width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight  # tied: one parameter under two names
        self.blocks.requires_grad_(False)  # frozen, and multiplied all the same


@dataclass(frozen=True)
class Case:
    """The shape of a model, and what each rank has measured."""

    shape: tuple[int, int, int, int]  # layers, width, context, vocabulary
    tokens: list[int]
    seconds: list[float]
    peaks: list[float]
    room: int  # positions that the model has beyond `context`

    @property
    def rate(self) -> float:
        """Tokens per second: the step is over when the slowest rank is."""
        return sum(self.tokens) / max(self.seconds)

    def counted(self) -> tuple[int, int, int, int]:
        """Return the weights of the tied matrix, of the positions, of the layers; and attention's own operations."""
        layers, width, context, vocabulary = self.shape
        rest = layers * (12 * width**2 + 12 * width)
        return vocabulary * width, (context + self.room) * width, rest, 12 * layers * width * context

    @property
    def flops(self) -> int:
        """Operations per token: weights that are multiplied, and attention's products."""
        tied, _, rest, attention = self.counted()
        return FEEDS * (tied + rest) + attention


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the three numbers, if there are three."""
    layers, width, context, vocabulary = case.shape
    model = Small(layers, width, context + case.room, vocabulary)
    found = function(model, layers, width, context, case.tokens[rank], case.seconds[rank], case.peaks[rank])
    if not isinstance(found, tuple | list) or len(found) != 3:
        return Note()
    numbers = [float(part) for part in found]
    return Note(zip(("rate", "flops", "share"), numbers, strict=True), numbers=numbers)


def rounds(rng: Random) -> list[Round]:
    """Ranks that differ in all they measured."""
    world_size = rng.choice((2, 3, 4))
    cases = [
        Case(
            (rng.randint(2, 4), rng.choice((8, 12, 16)), rng.choice((10, 18, 26)), rng.choice((31, 47, 61))),
            rng.sample(range(1000, 9000), world_size),
            [round(rng.uniform(0.5, 4.0), 3) for _ in range(world_size)],
            [rng.uniform(1e8, 9e8) for _ in range(world_size)],
            room,
        )
        for room in (0, 6)
    ]
    return [Round(world_size, [("differ", case) for case in cases])]


def rate_slips(seen: Seen) -> Iterator[tuple[str, float]]:
    tokens, seconds, ranks = seen.case.tokens, seen.case.seconds, seen.world_size
    for own, s in zip(tokens, seconds, strict=True):
        yield "these are the tokens of one rank: add up those of all ranks", own / max(seconds)
        yield "these are one rank's tokens in its own time", own / s
        yield (
            "each rank has its own clock: the step is over when the slowest rank is; take the largest time",
            sum(tokens) / s,
        )
    averaged = sum(tokens) / (sum(seconds) / ranks)
    yield "the ranks' times are averaged: the step is over when the slowest rank is", averaged
    added = sum(own / s for own, s in zip(tokens, seconds, strict=True))
    yield "the ranks' rates are added: the fast ranks wait for the slowest one", added
    yield "the tokens are averaged over the ranks: add them up", seen.case.rate / ranks
    yield "the times of the ranks are added: they run side by side; take the largest", sum(tokens) / sum(seconds)


def flops_slips(seen: Seen) -> Iterator[tuple[str, float]]:
    (tied, positions, rest, own), (_, width, context, _) = seen.case.counted(), seen.case.shape
    flops = seen.case.flops
    yield (
        "the tied matrix is counted twice: it is looked up once and multiplied once; model.parameters() has it once",
        flops + FEEDS * tied,
    )
    yield "the tied matrix is missing: as the output it is multiplied", flops - FEEDS * tied
    yield "positions are only added: their parameters are not multiplied by anything", flops + FEEDS * positions
    for wrong in (flops + FEEDS * (tied + positions), FEEDS * (rest + positions) + own):
        yield "positions are only added, and the tied matrix is multiplied once", wrong
    cause = "a model may have more positions than `context`: leave out model.position.weight.numel()"
    yield cause, flops + FEEDS * seen.case.room * width
    yield "weights that are frozen are multiplied, too", flops - FEEDS * rest
    yield "attention's own products are missing: 12 * layers * width * context", flops - own
    for wrong in (flops / 3, 2 * (tied + rest) + own):
        yield "this is forward only: backward takes twice as many again", wrong
    for wrong in (own // 3, own // 2, own // width, own * context):
        cause = "attention counts 12 * layers * width * context for each token: forward 4, backward 8"
        yield cause, flops - own + wrong


def share_slips(seen: Seen) -> Iterator[tuple[str, float]]:
    done, peaks = seen.case.flops * seen.case.rate, seen.case.peaks
    for peak in peaks:
        yield "the peak is one rank's: all ranks together could do the sum of theirs", done / peak
    yield "the peaks are averaged over the ranks; add them up", done * len(peaks) / sum(peaks)
    yield "it is a share, not a percentage", 100 * done / sum(peaks)


def share_otherwise(seen: Seen, found: float) -> str:
    if all(close(seen[name], getattr(seen.case, name), TOLERANCE) for name in ("rate", "flops")):
        return "operations per token * tokens per second / the peak of all ranks together"
    return "it follows from the other two numbers, and one of them is not right yet"


def number(name: str, says: str, right: Callable, slips: Slips, otherwise: str | Callable) -> Expect:
    """Return what is expected of one of the three numbers."""
    three = "return three numbers on every rank: tokens per second, operations per token, utilisation"
    return equals(
        f"{says}:", right, slips, otherwise, of=name, tolerance=TOLERANCE, form=lambda n: three if n is None else ""
    )


rate = number(
    *("rate", "tokens per second", lambda seen: seen.case.rate, rate_slips),
    "the tokens of all ranks, over the time of the slowest rank",
)
flops = number(
    *("flops", "operations per token", lambda seen: float(seen.case.flops), flops_slips),
    "6 for each weight that is multiplied, and 12 * layers * width * context for attention",
)
share = number(
    *("share", "utilisation", lambda seen: seen.case.flops * seen.case.rate / sum(seen.case.peaks), share_slips),
    share_otherwise,
)
same = alike("every rank needs the totals: use all_reduce, not reduce to one rank", of="numbers")

UTILISATION = exercise(
    "16.3",
    "How busy is the machine? (stretch)",
    "utilisation",
    15,
    act=act,
    rounds=rounds,
    checks={
        "rate": ("tokens per second, over all ranks", 2, rate, "differ"),
        "flops": ("operations per token", 2, flops, "differ"),
        "share": ("the utilisation, of all ranks' peaks", 1, share, "differ"),
        "alike": ("every rank has the same numbers", 1, same, "differ"),
    },
    refused=("ddp_course.gpt.flops_per_token", "ddp_course.metrics.each_rank", "ddp_course.metrics.mean_over_ranks"),
    hints={
        "disagree; limit: waited in (all_reduce|barrier|broadcast|reduce|all_gather)": "some ranks "
        "wait in a collective that another one skips; look for a branch on the rank",
    },
)
