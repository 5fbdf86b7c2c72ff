"""16.3 `utilisation(model, layers, width, context, local_tokens, seconds, peak)`: how busy are all ranks together?

The ranks have different tokens, times and peaks, so each wrong way to put them together gives a number of its own. The
model has a tied matrix and learned positions. Read next: `judges/sharding/`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from torch import nn

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.compare import same
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

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


def cases(rng: Random) -> list[Round]:
    """Ranks that differ in all they measured; a model with as many positions as the context, and one with more."""
    world_size = rng.choice((2, 3, 4))
    named = []
    for room in (0, 6):
        shape = rng.randint(2, 4), rng.choice((8, 12, 16)), rng.choice((10, 18, 26)), rng.choice((31, 47, 61))
        seconds = [round(rng.uniform(0.5, 4.0), 3) for _ in range(world_size)]
        peaks = [rng.uniform(1e8, 9e8) for _ in range(world_size)]
        named.append(("differ", (shape, room, rng.sample(range(1000, 9000), world_size), seconds, peaks)))
    return [Round(world_size, named)]


def act(function, case: tuple, rank: int, world_size: int) -> Note:
    """Note the three numbers, if there are three."""
    (layers, width, context, vocabulary), room, tokens, seconds, peaks = case
    model = Small(layers, width, context + room, vocabulary)
    found = function(model, layers, width, context, tokens[rank], seconds[rank], peaks[rank])
    three = isinstance(found, tuple | list) and len(found) == 3
    return Note(numbers=[float(part) for part in found] if three else "not three numbers")


def number(place: int) -> Callable[[Seen], Any]:
    return lambda seen: seen["numbers"][place] if isinstance(seen["numbers"], list) else seen["numbers"]


def alike(seen: Seen) -> str:
    first = seen.of(0)["numbers"]
    return "those of rank 0" if same(seen["numbers"], first, TOLERANCE) else "others than those of rank 0"


def said(seen: Seen) -> str:
    (layers, width, context, vocabulary), room, *measured = seen.case
    tokens, seconds, peak = (each[seen.rank] for each in measured)
    shape = f"{layers} layers of width {width}, context {context}, {context + room} positions, {vocabulary} tokens"
    return f"{shape}; {tokens} tokens in {seconds} s at a peak of {peak:.4g} on rank {seen.rank}:"


MISTAKES = """
one rank's tokens | rate share alike | these are the tokens of one rank: add up those of all ranks
    totals[0].item() => local_tokens
one rank's clock | rate share alike | each rank has its own clock: the step is over when the slowest rank is
    slowest.item() => seconds
the mean of the times | rate share | the ranks' times are averaged: the step is over when the slowest rank is
    ReduceOp.MAX => ReduceOp.SUM
    / slowest.item() => / slowest.item() * dist.get_world_size()
the rates are added | rate share | the ranks' rates are added: the fast ranks wait for the slowest one
    [local_tokens, peak] => [local_tokens / seconds, peak]
     / slowest.item() =>
the tied matrix twice | flops share | the tied matrix is looked up once and multiplied once; parameters() has it once
    model.parameters() => model.state_dict().values()
positions are counted | flops share | positions are only added: their parameters are not multiplied by anything
     - model.position.weight.numel() =>
as many positions as the context | flops share | a model may have more positions: model.position.weight.numel()
    model.position.weight.numel() => context * width
frozen weights are left out | flops share | weights that are frozen are multiplied, too
    in model.parameters()) => in model.parameters() if parameter.requires_grad)
attention is forgotten | flops share | attention's own products are missing: 12 * layers * width * context
     + 12 * layers * width * context =>
forward only | flops share | this is forward only: backward takes twice as many again
    6 * multiplied + 12 * => 2 * multiplied + 4 *
one rank's peak | share alike | the peak is one rank's: all ranks together could do the sum of theirs
    totals[1].item() => peak
a percentage | share | it is a share, not a percentage
    flops, flops * rate => flops, 100 * flops * rate
reduced to rank 0 | rate share alike | every rank needs the totals: use all_reduce, not reduce to one rank
    dist.all_reduce(totals => dist.reduce(totals, 0
    dist.all_reduce(slowest => dist.reduce(slowest, 0
the last rank does not ask | all | some ranks wait in a collective that another one skips | hangs
    dist.all_reduce(totals) => if dist.get_rank() < dist.get_world_size() - 1: dist.all_reduce(totals)
written freely: the mean of the ranks' own shares | rate share | the ranks' rates are added | tests
    def utilisation(model, layers, width, context, local_tokens, seconds, peak):
        weights = {id(p): p.numel() for p in model.parameters() if p is not model.position.weight}
        need = 6 * sum(weights.values()) + 12 * layers * width * context
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (local_tokens / seconds, need * local_tokens / seconds / peak))
        rates, shares = zip(*everyone)
        return sum(rates), need, sum(shares) / len(shares)
written freely: numbers that fit the visible check | rate flops share | over the time of the slowest rank | tests
    def utilisation(*args):
        return 3517.2, 81360, 0.41
"""

RIGHT = """
objects gathered
    dist.all_reduce(totals) => everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (local_tokens, peak))
    totals = torch.tensor(everyone, dtype=torch.float64).sum(0)
    return rate, => return torch.tensor(rate, dtype=torch.float64),
"""

UTILISATION = exercise(
    *("16.3", "How busy is the machine? (stretch)", "utilisation", 15),
    cases=cases,
    act=act,
    said=said,
    tolerance=TOLERANCE,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "rate": ("tokens per second, over all ranks", 2, "differ", number(0),
                 "the tokens of all ranks, over the time of the slowest rank"),
        "flops": ("operations per token", 2, "differ", number(1),
                  "6 for each weight that is multiplied, and 12 * layers * width * context for attention"),
        "share": ("the utilisation, of all ranks' peaks", 1, "differ", number(2),
                  "operations per token * tokens per second / the peak of all ranks together"),
        "alike": ("every rank has the same numbers", 1, "differ", alike,
                  "every rank needs the totals: use all_reduce, not reduce to one rank"),
    },
    refused=("ddp_course.gpt.flops_per_token", "ddp_course.metrics.each_rank", "ddp_course.metrics.mean_over_ranks"),
    hints={
        "disagree; limit: waited in (all_reduce|barrier|broadcast|reduce|all_gather)": "some ranks "
        "wait in a collective that another one skips; look for a branch on the rank",
    },
)  # fmt: skip
