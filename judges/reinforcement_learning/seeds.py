"""19.1 `game_seeds(run, rank, world_size, num_envs)`: does every game of every run have a seed of its own?

Any numbers will do, so each check looks for a property. So many seeds are made that hashing into 32 bits collides too,
by the birthday paradox. Two processes make them, in opposite orders, so that a seed that hangs on the process, as
Python's salted hash of a text does, or on what was asked before, is seen.

Read next: `advantages.py`.
"""

from __future__ import annotations

import hashlib
import math
from itertools import product
from operator import itemgetter as noted
from random import Random
from typing import Any

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import short
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

RUNS, RANKS, GAMES = 1000, 512, 1024  # the limits that the text states
Study = tuple[int, list[int], list[int], int]  # world size, ranks, runs, games
Place = tuple[int, int, int]  # run, rank, game
LIST = "return a list with one whole number for each of this rank's games"
BITS = "some generators read the lowest 32 bits only; runs < 1000, ranks < 512 and games < 1024 have room in them"
CAUSES = {
    "game": "the games of one rank need different seeds too: let the game's number take part",
    "rank": "two ranks share a game: one of them is wasted. Let the rank take part, and let each rank have room for "
    "all its games: rank + game meets itself",
    "run": "two runs share a game, so they are not independent. Sums, such as run + rank, meet, and so do hashes: of "
    "256 000 random numbers of 32 bits, some are equal. Treat run, rank and game as digits of one number",
    "again": "a run that is started again must play the same games: no clock, no os.urandom, no process id, no hash() "
    "of a text, which Python salts again in each process",
}


def act(function, case: list[Study], rank: int, world_size: int) -> Note:
    """Make the seeds of all runs; note a digest, and by check the first fault."""
    note = Note(digest=[], **dict.fromkeys(("form", *CAUSES), ""))
    for world, ranks, runs, games in case:
        seats, found = list(product(runs, ranks)), {}
        for seat in reversed(seats) if rank else seats:  # in another order: a counter's numbers are then others
            seeds = function(*seat, world, games)
            if not isinstance(seeds, list | tuple) or len(seeds) != games or not all(map(_whole, seeds)):
                fault = Fault(f"a list of {games} whole numbers", short(plain(seeds)), cause=LIST)
                return Note(digest=[], **dict.fromkeys(note.keys() - {"digest"}, fault))
            found[seat] = list(map(int, seeds))
        table = {(*seat, game): seed for seat in seats for game, seed in enumerate(found[seat])}
        note["digest"].append(hashlib.sha256(repr(list(table.values())).encode()).hexdigest())
        _note_faults(note, table)
    return note


def _whole(seed: Any) -> bool:
    return hasattr(seed, "__index__") and not isinstance(seed, bool)


def _told(table: dict[Place, int], place: Place) -> str:
    return "seed {} for run {}, rank {}, game {}".format(table[place], *place)


def _note_faults(note: Note, table: dict[Place, int]) -> None:
    """Note the first seed out of range, and of each kind the first two that torch's generator could not tell apart."""
    if odd := next((place for place, seed in table.items() if not 0 <= seed < 2**32), None):
        note["form"] = note["form"] or Fault("0 <= seed < 2**32", _told(table, odd), cause=BITS)
    places, seeds = list(table), list(table.values())
    low, at = torch.tensor([seed % 2**32 for seed in seeds]).sort(stable=True)
    same = low[1:] == low[:-1]
    for first, second in zip(at[:-1][same].tolist(), at[1:][same].tolist(), strict=True):
        one, other = places[first], places[second]
        kind = "run" if one[0] != other[0] else "rank" if one[1] != other[1] else "game"
        if not note[kind]:
            low_alone = ", equal in the lowest 32 bits" * (seeds[first] != seeds[second])
            found = f"{_told(table, one)} and {_told(table, other)}{low_alone}"
            note[kind] = Fault("no seed twice", found, cause=CAUSES[kind])


def cases(rng: Random) -> list[Round]:
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


def again(seen: Seen) -> Fault | str:
    others = Fault("the same seeds in another process", "others", cause=CAUSES["again"])
    return seen["again"] or ("" if seen.of(0)["digest"] == seen.of(1)["digest"] else others)


MISTAKES = f"""
one number | all | {LIST}
    list(range(first, first + num_envs)) => first
the same seed for all games | game rank | {CAUSES["game"]}
    list(range(first, first + num_envs)) => [run] * num_envs
rank + game | rank | {CAUSES["rank"]}
    (run * world_size + rank) * num_envs => run * 4096 + rank
blocks of 1000 games | rank run | {CAUSES["rank"]}
    * num_envs => * 1000
factors swapped | rank run | {CAUSES["rank"]}
    run * world_size + rank) * num_envs => run * num_envs + rank) * world_size
run + rank | run | {CAUSES["run"]}
    run * world_size + rank => run + rank
the run is forgotten | run | {CAUSES["run"]}
    run * world_size + rank => rank
the run in the high bits | form run | equal in the lowest 32 bits
    (run * world_size + rank) * num_envs => run << 32 | rank << 10
twelve bits for the rank and for the game | form run | {BITS}
    (run * world_size + rank) * num_envs => run << 24 | rank << 12
by the process | again | {CAUSES["again"]}
    first = => first = __import__("os").getpid() % 1000 * 4096 +
numbered as they are asked for | again | {CAUSES["again"]}
    (run * world_size + rank) * num_envs => vars(game_seeds).get("first", 0)
    game_seeds.first = first + num_envs
an endless loop | all | in game_seeds: | hangs
    return => while True:
        pass
    return
random numbers | rank run | {CAUSES["run"]} | tests
    def game_seeds(run, rank, world_size, num_envs):
        chance = torch.Generator().manual_seed(run * 1000 + rank)
        return torch.randint(2**32, (num_envs,), generator=chance).tolist()
a number for each place, cut to 28 bits | run | {CAUSES["run"]} | tests
    def game_seeds(run, rank, world_size, num_envs):
        return [((run * 512 + rank) * 1024 + game) * 7919 % (2**28 - 57) for game in range(num_envs)]
"""

SEEDS = exercise(
    *("19.1", "Seeds that never collide", "game_seeds", 10),
    cases=cases,
    act=act,
    mistakes=MISTAKES,
    checks={
        "form": ("one whole number of 32 bits for each game", 1, "all", noted("form"), ""),
        "game": ("the games of a rank differ", 1, "all", noted("game"), ""),
        "rank": ("the ranks of a run differ", 1, "all", noted("rank"), ""),
        "run": ("the runs of a study differ", 1, "all", noted("run"), ""),
        "again": ("a run started again gets its seeds again", 1, "all", again, ""),
    },
)
