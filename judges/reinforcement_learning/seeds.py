"""19.1 `game_seeds(run, rank, world_size, num_envs)`: does every game of every run have a seed of its own?

So many seeds are made that hashing into 32 bits collides too, by the birthday paradox. Two processes make them, in
opposite orders, so that a seed that hangs on the process, as Python's salted hash of a text does, or on what was
asked before, is seen.

Read next: `advantages.py`.
"""

from __future__ import annotations

import hashlib
import math
from itertools import product
from random import Random
from typing import Any

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import short
from ddp_course.grading.vocabulary.expect import Expect, exercise, once
from ddp_course.grading.vocabulary.play import Note, Round, Seen

RUNS, RANKS, GAMES = 1000, 512, 1024  # the limits that the text states
Study = tuple[int, list[int], list[int], int]  # world size, ranks, runs, games


def act(function, case: list[Study], rank: int, world_size: int) -> Note:
    """Make the seeds of all runs; note a digest, the first seed out of range, and the first ones that collide."""
    note = Note(form=None, range=None, digest=[], game=None, rank=None, run=None)
    for world, ranks, runs, games in case:
        seats = list(product(runs, ranks))
        found = {}
        for seat in reversed(seats) if rank else seats:  # in another order: a counter's numbers are then others
            seeds = function(*seat, world, games)
            if not _well_formed(seeds, games):
                form = plain(seeds) if isinstance(seeds, list | tuple) else repr(seeds)[:60]
                return Note(note | {"form": [games, form]})
            if not note["range"] and not 0 <= min(seeds) <= max(seeds) < 2**32:
                game = next(game for game, seed in enumerate(seeds) if not 0 <= seed < 2**32)
                note["range"] = [[*seat, game], int(seeds[game])]
            found[seat] = list(map(int, seeds))
        places = [(*seat, game) for seat in seats for game in range(games)]
        table = [seed for seat in seats for seed in found[seat]]
        note["digest"].append(hashlib.sha256(repr(table).encode()).hexdigest())
        _note_collisions(note, places, table)
    return note


def rounds(rng: Random) -> list[Round]:
    """A small study, one of all 1000 runs, one with every distance of runs and of ranks, and the most games."""
    some = rng.randint(3, 6)
    small = (some, list(range(some)), [0, 1, 2, 3], rng.randint(5, 9))
    long = (8, list(range(8)), list(range(RUNS)), 32)
    distant = (RANKS, _spread(RANKS), _spread(RUNS), 32)
    wide = (RANKS, _spread(RANKS), [0, 1], GAMES)
    # Runs near powers of two: numbers that are cut to fewer bits than all games need come again there.
    runs = sorted({0, 1, RUNS - 1, *(2**k + d for k in range(4, 10) for d in (-1, 0, 1))})
    edges = (RANKS, [0, 1, RANKS - 1], runs, GAMES)
    return [Round(2, [("all", [small, long, distant, wide, edges])], init=False)]


def _spread(count: int) -> list[int]:
    """Return few numbers below `count`, among them two of every distance."""
    step = math.isqrt(count - 1) + 1
    return sorted({*range(step), *range(0, count, step), count - 1})


def _well_formed(seeds: Any, games: int) -> bool:
    if not isinstance(seeds, list | tuple) or len(seeds) != games:
        return False
    return all(hasattr(seed, "__index__") and not isinstance(seed, bool) for seed in seeds)


def _note_collisions(note: dict, places: list[tuple[int, int, int]], seeds: list[int]) -> None:
    """Of each kind note the first two games whose seeds are equal in the bits that torch's generator would see."""
    low, at = torch.tensor([seed % 2**32 for seed in seeds]).sort(stable=True)
    same = low[1:] == low[:-1]
    for first, second in zip(at[:-1][same].tolist(), at[1:][same].tolist(), strict=True):
        one, other = places[first], places[second]
        kind = "run" if one[0] != other[0] else "rank" if one[1] != other[1] else "game"
        note[kind] = note[kind] or [one, seeds[first], other, seeds[second]]


# --- What is expected ------------------------------------------------------------------------------


def _form(seen: Seen) -> Fault | None:
    if seen["form"]:
        games, found = seen["form"]
        cause = "return a list with one whole number for each of this rank's games"
        return Fault(f"a list of {games} whole numbers", short(found), cause=cause)
    if seen["range"]:
        (run, rank, game), seed = seen["range"]
        cause = (
            "some generators read the lowest 32 bits only; runs < 1000, ranks < 512 and games < 1024 have room in them"
        )
        return Fault(f"0 <= seed < 2**32 for run {run}, rank {rank}, game {game}", str(seed), cause=cause)
    return None


def listed(expect: Expect) -> Expect:
    """An expectation of seeds, where there are any."""
    missing = Fault("seeds to compare", "none", cause="return a list of num_envs whole numbers")
    return once(lambda seen: missing if seen["form"] else expect(seen))


COLLIDES = {
    "game": "the games of one rank need different seeds too: let the game's number take part",
    "rank": "two ranks share a game: one of them is wasted. Let the rank take part, and let each rank have room for "
    "all its games: rank + game meets itself",
    "run": "two runs share a game, so they are not independent. Sums, such as run + rank, meet, and so do hashes: of "
    "256 000 random numbers of 32 bits, some are equal. Treat run, rank and game as digits of one number",
}


def differs(kind: str) -> Expect:
    """Expect that no two games of this kind have the same seed."""

    def expect(seen: Seen) -> Fault | None:
        if not seen[kind]:
            return None
        one, its_seed, other, seed = seen[kind]
        first, second = ("run {}, rank {}, game {}".format(*place) for place in (one, other))
        said = f"seed {seed} for {first} and {second}"
        if its_seed != seed:
            said = f"seed {its_seed} for {first} and seed {seed} for {second}, equal in the lowest 32 bits"
        return Fault("no seed twice", said, cause=COLLIDES[kind])

    return listed(expect)


def again(seen: Seen) -> Fault | None:
    """Another process makes the same seeds."""
    cause = (
        "a run that is started again must play the same games: no clock, no os.urandom, no process id, no hash() of a "
        "text, which Python salts again in each process"
    )
    same = seen["digest"] == seen.of(1)["digest"]
    return None if same else Fault("the same seeds in another process", "others", cause=cause)


SEEDS = exercise(
    "19.1",
    "Seeds that never collide",
    "game_seeds",
    10,
    act=act,
    rounds=rounds,
    checks={
        "form": ("one whole number of 32 bits for each game", 1, once(_form), "all"),
        "game": ("the games of a rank differ", 1, differs("game"), "all"),
        "rank": ("the ranks of a run differ", 1, differs("rank"), "all"),
        "run": ("the runs of a study differ", 1, differs("run"), "all"),
        "again": ("a run started again gets its seeds again", 1, listed(again), "all"),
    },
    refused=("ddp_course.train.rollouts.stream_seed",),
)
