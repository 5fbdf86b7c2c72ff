"""16.3 `utilisation(model, layers, width, context, local_tokens, seconds, peak)`: how busy are all ranks together?

The ranks have different tokens, times and peaks, so each wrong way to put them together gives a number of its own. The
model has a tied matrix and learned positions. Read next: `judges/beyond_ddp/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import nn

from ddp_course.grading.compare import close, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer

FEEDS = 6  # operations for each weight that is multiplied: 2 forward, 4 backward


class Small(nn.Module):
    """What a GPT's parameters look like; its forward pass is not asked for."""

    def __init__(self, layers: int, width: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(nn.Linear(width, 12 * width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight  # tied: one parameter under two names


def utilisation_driver(rank: int, world_size: int, function: Callable, cases: list[dict]) -> list:
    """Call the function with each case's numbers of this rank."""
    return [_asked(rank, function, **case) for case in cases]


def _asked(rank: int, function: Callable, shape: tuple, tokens: list, seconds: list, peaks: list) -> object:
    layers, width, context, vocabulary = shape
    torch.manual_seed(0)
    model = Small(layers, width, context, vocabulary)
    found = function(model, layers, width, context, tokens[rank], seconds[rank], peaks[rank])
    if not isinstance(found, tuple | list) or len(found) != 3:
        return type(found).__name__
    return [float(part) for part in found]


def numbers(shape: tuple, tokens: list, seconds: list, peaks: list) -> dict:
    """Return the right numbers of a case, and those of the known mistakes."""
    layers, width, context, vocabulary = shape
    tied, positions, rest = vocabulary * width, context * width, layers * (12 * width**2 + 12 * width)
    attention, slowest, ranks = 12 * layers * width * context, max(seconds), len(tokens)
    flops, rate = FEEDS * (tied + rest) + attention, sum(tokens) / slowest
    return {
        "rate": rate,
        "rates": {
            "these are the tokens of one rank: add up those of all ranks": [own / slowest for own in tokens],
            "these are one rank's tokens in its own time": [own / s for own, s in zip(tokens, seconds, strict=True)],
            "each rank has its own clock: the step is over when the slowest rank is; take the largest time": [
                sum(tokens) / s for s in seconds
            ],
            "the ranks' times are averaged: the step is over when the slowest rank is": [
                sum(tokens) / (sum(seconds) / ranks)
            ],
            "the ranks' rates are added: the fast ranks wait for the slowest one": [
                sum(own / s for own, s in zip(tokens, seconds, strict=True))
            ],
            "the tokens are averaged over the ranks: add them up": [rate / ranks],
            "the times of the ranks are added: they run side by side; take the largest": [sum(tokens) / sum(seconds)],
        },
        "flops": flops,
        "flops_wrong": {
            "the tied matrix is counted twice: it is looked up once and multiplied once; model.parameters() has it "
            "once": [flops + FEEDS * tied],
            "the tied matrix is missing: as the output it is multiplied": [flops - FEEDS * tied],
            "positions are only added: their parameters are not multiplied by anything": [flops + FEEDS * positions],
            "positions are only added, and the tied matrix is multiplied once": [
                flops + FEEDS * (tied + positions),
                FEEDS * (rest + positions) + attention,
            ],
            "attention's own products are missing: 12 * layers * width * context": [flops - attention],
            "this is forward only: backward takes twice as many again": [flops / 3, 2 * (tied + rest) + attention],
            "attention counts 12 * layers * width * context for each token: forward 4, backward 8": [
                flops - attention + attention // 3,
                flops - attention + attention // 2,
                flops - attention + attention // width,
                flops - attention + attention * context,
            ],
        },
        "share": flops * rate / sum(peaks),
        "shares": {
            "the peak is one rank's: all ranks together could do the sum of theirs": [
                flops * rate / peak for peak in peaks
            ],
            "the peaks are averaged over the ranks; add them up": [flops * rate * ranks / sum(peaks)],
            "it is a share, not a percentage": [100 * flops * rate / sum(peaks)],
        },
    }


def utilisation_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Ranks that differ in all they measured, and a rank alone."""
    world_size = rng.choice((2, 3, 4))
    cases = [_case(rng, world_size) for _ in range(2)]
    notes = answer.run(utilisation_driver, world_size, cases, init=True)
    yield "rate", _first(cases, notes, 0, "rate", "rates", "tokens per second")
    yield "flops", _first(cases, notes, 1, "flops", "flops_wrong", "operations per token")
    yield "share", _first(cases, notes, 2, "share", "shares", "utilisation")
    yield "alike", _alike_fault(notes)


def _case(rng: Random, world_size: int) -> dict:
    shape = (rng.randint(2, 4), rng.choice((8, 12, 16)), rng.choice((10, 18, 26)), rng.choice((31, 47, 61)))
    tokens = rng.sample(range(1000, 9000), world_size)
    seconds = [round(rng.uniform(0.5, 4.0), 3) for _ in range(world_size)]
    peaks = [rng.uniform(1e8, 9e8) for _ in range(world_size)]
    return {"shape": shape, "tokens": tokens, "seconds": seconds, "peaks": peaks}


def _first(cases: list[dict], notes: list, part: int, name: str, wrong: str, says: str) -> Fault | None:
    for number, case in enumerate(cases):
        right = numbers(**case)
        for rank, note in enumerate(notes):
            found = note[number]
            if isinstance(found, str):
                cause = "return three numbers: tokens per second, operations per token, utilisation"
                return Fault("a tuple of three numbers", f"a {found}", rank, cause)
            if not close(found[part], right[name], 1e-5):
                known = (why for why, values in right[wrong].items() if _among(found[part], values))
                cause = next(known, _follows(found, part, right))
                return Fault(f"{says}: {short(float(right[name]))}", short(found[part]), rank, cause)
    return None


def _among(found: float, values: list) -> bool:
    return any(close(found, value, 1e-5) for value in values)


def _follows(found: list, part: int, right: dict) -> str:
    if part == 2 and not (close(found[0], right["rate"], 1e-5) and close(found[1], right["flops"], 1e-5)):
        return "it follows from the other two numbers, and one of them is not right yet"
    return {
        0: "the tokens of all ranks, over the time of the slowest rank",
        1: "6 for each weight that is multiplied, and 12 * layers * width * context for attention",
        2: "operations per token * tokens per second / the peak of all ranks together",
    }[part]


def _alike_fault(notes: list) -> Fault | None:
    for rank, note in enumerate(notes):
        if note != notes[0]:
            cause = "every rank needs the totals: use all_reduce, not reduce to one rank"
            return Fault(f"what rank 0 has, {short(notes[0][0])}", short(note[0]), rank, cause)
        if any(isinstance(found, str) for found in note):
            return Fault("a tuple of three numbers", f"a {note[0]}", rank, "return three numbers on every rank")
    return None


UTILISATION = Exercise(
    "16.3",
    "How busy is the machine? (stretch)",
    "utilisation",
    15,
    (
        Check("rate", "tokens per second, over all ranks", 2),
        Check("flops", "operations per token", 2),
        Check("share", "the utilisation, of all ranks' peaks", 1),
        Check("alike", "every rank has the same numbers", 1),
    ),
    utilisation_judge,
    refused=("ddp_course.gpt.flops_per_token", "ddp_course.metrics.each_rank", "ddp_course.metrics.mean_over_ranks"),
    hints=(
        (
            r"(?s)disagree about|no result after.*waited in (all_reduce|barrier|broadcast|reduce|all_gather)",
            "some ranks wait in a collective that another one skips; look for a branch on the rank",
        ),
    ),
)
