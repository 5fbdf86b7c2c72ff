"""The command `ddp-course drill`: an incident to solve from what a job leaves.

ddp-course drill --level 3 --seed 7                     # runs the incident, and says where its logs are
ddp-course drill --level 3 --seed 7 --hint              # a hint; each costs a point
ddp-course drill --level 3 --seed 7 --answer drift:1    # a fault and its rank; one --answer for each fault
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ddp_course.diagnose.drill import BLAMED, CHANNELS, HINTS, LEVELS, RANKS, Faults, drawn, happen

POINTS = 5  # for each fault; a hint costs one


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="ddp-course drill",
        description=f"Solve an incident of a job of {RANKS} ranks from the logs that it leaves.",
        epilog="Exit status: 0 all faults are named and no other, 1 not yet, 2 there is no such level or fault.",
    )
    parser.add_argument("--level", type=int, default=1, choices=LEVELS, help="1 to 10: which faults, and how many (1)")
    parser.add_argument("--seed", type=int, default=0, help="another incident of that level (0)")
    parser.add_argument("--into", type=Path, help="the folder for the logs (a new one)")
    parser.add_argument("--hint", action="count", default=0, help="a hint; twice for two")
    parser.add_argument("--answer", action="append", metavar="FAULT[:RANK]", help="what you found")
    options = parser.parse_args(argv)
    if options.answer:
        try:
            said = dict(map(understood, options.answer))
        except ValueError as error:
            parser.error(str(error))
        return judged(said, drawn(options.level, options.seed), options.hint)
    if options.hint:
        print("\n".join(hints(drawn(options.level, options.seed))[: options.hint]))
        return 1
    folder = options.into or Path(tempfile.mkdtemp(prefix="ddp_course_drill_"))
    folder.mkdir(parents=True, exist_ok=True)
    happen(options.level, options.seed, folder)
    count = LEVELS[options.level][0]
    print(f"A job of {RANKS} ranks left its logs in {folder}.")
    print(
        f"It had {count} fault{'s' * (count > 1)}. Which, and on which rank if one is to blame? The faults there are:"
    )
    print("  " + ", ".join(f"{name}:RANK" if whose else name for name, whose in sorted(BLAMED.items())))
    return 1


def understood(word: str) -> tuple[str, int | None]:
    """Return fault and rank of one answer.

    Raises:
        ValueError: there is no such fault, or its rank is missing or surplus; says which.
    """
    fault, _, rank = word.partition(":")
    if fault not in BLAMED:
        raise ValueError(f"no fault is called {fault!r}; there are {', '.join(sorted(BLAMED))}")
    if BLAMED[fault] != bool(rank) or (rank and rank not in map(str, range(RANKS))):
        form = (
            f"{fault}:RANK, with a rank from 0 to {RANKS - 1}"
            if BLAMED[fault]
            else f"{fault} alone; no rank is to blame"
        )
        raise ValueError(f"write {form}")
    return fault, int(rank) if rank else None


def judged(said: Faults, true: Faults, used: int) -> int:
    """Print what of an answer is right, and the points if it is whole."""
    for fault, rank in said.items():
        known = fault in true and true[fault] == rank
        print(f"{'✓' if known else '✗'} {fault}" + ("" if rank is None else f", rank {rank}"))
    if said == true:
        print(f"solved: {max(1, POINTS * len(true) - used)} of {POINTS * len(true)} points")
        return 0
    print(f"not yet: the incident has {len(true)} fault{'s' * (len(true) > 1)}; --hint helps")
    return 1


def hints(true: Faults) -> list[str]:
    """One for each fault, in the order of the channels."""
    return [HINTS[channel] for channel, faults in CHANNELS.items() if true.keys() & faults]
