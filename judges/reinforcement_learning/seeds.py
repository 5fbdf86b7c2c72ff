"""15.1 `game_seeds(run, rank, world_size, num_envs)`: does every game of every run have a seed of its own?

So many seeds are made that hashing into 32 bits collides too, by the birthday paradox. Two processes make them, so that
a seed that hangs on the process, as Python's salted hash of a text does, is seen.

Read next: `advantages.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from ddp_course.grading.compare import short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

RUNS, RANKS, GAMES = 1000, 512, 1024  # the limits that the text states
Place = tuple[int, int, int]  # run, rank, game


def seeds_driver(rank: int, world_size: int, function: Callable, cases: list[tuple[int, list[int], int]]) -> dict:
    """Make the seeds of all runs; note a digest, the first seed out of range, and the first ones that collide."""
    note: dict[str, Any] = {"form": None, "range": None, "digest": [], "game": None, "rank": None, "run": None}
    for world, runs, games in cases:
        places: dict[int, tuple[Place, int]] = {}
        digest = hashlib.sha256()
        for run in runs:
            for of_rank in range(world) if world < RANKS else (0, 1, world - 1):
                seeds = function(run, of_rank, world, games)
                if not _well_formed(seeds, games):
                    return note | {
                        "form": [games, plain(seeds) if isinstance(seeds, list | tuple) else repr(seeds)[:60]]
                    }
                for game, seed in enumerate(seeds):
                    if not 0 <= seed < 2**32 and not note["range"]:
                        note["range"] = [[run, of_rank, game], int(seed)]
                    _note_collision(note, places, int(seed), (run, of_rank, game))
                digest.update(repr([int(seed) for seed in seeds]).encode())
        note["digest"].append(digest.hexdigest())
    return note


def _well_formed(seeds: Any, games: int) -> bool:
    if not isinstance(seeds, list | tuple) or len(seeds) != games:
        return False
    return all(hasattr(seed, "__index__") and not isinstance(seed, bool) for seed in seeds)


def _note_collision(note: dict, places: dict[int, tuple[Place, int]], seed: int, place: Place) -> None:
    low = seed % 2**32  # all that torch's generator on the CPU would see of it
    other, its_seed = places.setdefault(low, (place, seed))
    if other != place:
        kind = "run" if other[0] != place[0] else "rank" if other[1] != place[1] else "game"
        note[kind] = note[kind] or [list(other), its_seed, list(place), seed]


def seeds_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """A small study, a study of all 1000 runs, and the largest numbers."""
    small = (rng.randint(3, 6), [0, 1, 2, 3], rng.randint(5, 9))
    edges = (RANKS, [0, 1, RUNS - 2, RUNS - 1], GAMES)
    notes = answer.run(seeds_driver, 2, [small, (8, list(range(RUNS)), 32), edges], init=False)
    note = notes[0]
    yield "form", _form_fault(note)
    missing = (
        Fault("seeds to compare", "none", cause="return a list of num_envs whole numbers") if note["form"] else None
    )
    for kind in ("game", "rank", "run"):
        yield kind, missing or _collision_fault(kind, note[kind])
    yield "again", missing or _again_fault(notes)


def _form_fault(note: dict) -> Fault | None:
    if note["form"]:
        games, found = note["form"]
        cause = "return a list with one whole number for each of this rank's games"
        return Fault(f"a list of {games} whole numbers", short(found), cause=cause)
    if note["range"]:
        (run, rank, game), seed = note["range"]
        cause = (
            "some generators read the lowest 32 bits only; runs < 1000, ranks < 512 and games < 1024 have room in them"
        )
        return Fault(f"0 <= seed < 2**32 for run {run}, rank {rank}, game {game}", str(seed), cause=cause)
    return None


_COLLIDES = {
    "game": "the games of one rank need different seeds too: let the game's number take part",
    "rank": "two ranks share a game: one of them is wasted. Let the rank take part, and let each rank have room for "
    "all its games: rank + game meets itself",
    "run": "two runs share a game, so they are not independent. Sums, such as run + rank, meet, and so do hashes: of "
    "256 000 random numbers of 32 bits, some are equal. Treat run, rank and game as digits of one number",
}


def _collision_fault(kind: str, found: list | None) -> Fault | None:
    if not found:
        return None
    one, its_seed, other, seed = found
    first, second = (f"run {run}, rank {rank}, game {game}" for run, rank, game in (one, other))
    said = f"seed {seed} for {first} and {second}"
    if its_seed != seed:
        said = f"seed {its_seed} for {first} and seed {seed} for {second}, equal in the lowest 32 bits"
    return Fault("no seed twice", said, cause=_COLLIDES[kind])


def _again_fault(notes: list[dict]) -> Fault | None:
    if notes[0]["digest"] == notes[1]["digest"]:
        return None
    cause = (
        "a run that is started again must play the same games: no clock, no os.urandom, no process id, no hash() of a "
        "text, which Python salts anew in each process"
    )
    return Fault("the same seeds in another process", "others", cause=cause)


SEEDS = Exercise(
    "15.1",
    "Seeds that never collide",
    "game_seeds",
    10,
    (
        Check("form", "one whole number of 32 bits for each game", 1),
        Check("game", "the games of a rank differ", 1),
        Check("rank", "the ranks of a run differ", 1),
        Check("run", "the runs of a study differ", 1),
        Check("again", "a run started again gets its seeds again", 1),
    ),
    seeds_judge,
    refused=("ddp_course.train.rollouts.stream_seed",),
)
