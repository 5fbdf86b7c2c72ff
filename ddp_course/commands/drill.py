"""The command `ddp-course drill`: an incident to solve from what a job leaves.

ddp-course drill --level 3 --seed 7                     # runs the incident, and says where its logs are
ddp-course drill --level 3 --seed 7 --hint              # a hint
ddp-course drill --level 3 --seed 7 --answer drift:1    # a fault and its rank; one --answer for each fault
ddp-course drill --level 11 --seed 7 --answer 19        # a program of the museum: the number of a wrong line
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ddp_course.diagnose.drill import BLAMED, CHANNELS, HINTS, LEGEND, LEVELS, RANKS, Faults, drawn
from ddp_course.diagnose.drill_job import happen
from ddp_course.diagnose.faults.catalogue import FAULTS
from ddp_course.diagnose.faults.fault import started
from ddp_course.diagnose.faults.incidents import exhibit

MUSEUM, OF_MUSEUM = 11, "a program that failed in a real project: a line is wrong, or something is missing beside it"
POINTS = 5  # for each fault; a hint costs one
TITLES = {name: FAULTS[name].title for name in BLAMED if name in FAULTS} | {  # and what the failure lab does not have
    "killed": "One rank is killed from outside",
    "same-rows": "All ranks read the same rows",
    "drift": "One rank's weights part from those of the others, though it makes all its calls",
    "not-averaged": "Collectives are called, but no gradient is averaged: each rank trains alone",
}


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="ddp-course drill",
        description=f"Solve an incident of a job of {RANKS} ranks from the logs that it leaves.",
        epilog=f"""\
Levels, and what is new in each:
{levels()}

Answers:
{answers()}
  {"LINE":23}  At level {MUSEUM}: the number of a line that is wrong, or beside which something is missing

Points: {POINTS} for each fault that you name on its rank, less {POINTS} for each named fault that is not there, but
never below 0. Each hint costs 1: nothing is stored, so you say yourself how many you have read, by as many
--hint beside your answer.

Exit status: 0 the incident or a hint is shown, or all faults are named and no other; 1 an answer is wrong or not whole;
2 an argument is wrong, or this machine is too busy for an incident: try again.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--level", type=int, default=1, choices=[*LEVELS, MUSEUM], help="see below (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="another incident of that level (default: 0)")
    parser.add_argument("--into", type=Path, help="a new or empty folder for the logs (default: a temporary one)")
    parser.add_argument("--hint", action="count", default=0, help="a hint; beside --answer: one for each you have read")
    parser.add_argument("--answer", action="append", metavar="FAULT[:RANK]", help="what you found; once for each fault")
    options = parser.parse_args(argv)
    try:
        if options.level == MUSEUM:
            return museum(options)
        true = drawn(options.level, options.seed).faults
        call = f"ddp-course drill --level {options.level} --seed {options.seed} --answer FAULT[:RANK]"
        if options.answer:
            return judged(understood(options.answer), true, options.hint)
        if options.hint:
            print(*hints(true)[: options.hint], sep="\n")
            print(f"Each costs a point: answer with {call}{' --hint' * min(options.hint, len(true))}")
            return 0
        folder = emptied(options.into)
        happen(options.level, options.seed, folder)
    except (ValueError, FileExistsError, TimeoutError, RuntimeError) as error:
        parser.error(str(error))
    print(f"A job of {RANKS} ranks left its logs in {folder}, and README.txt there says again what follows.\n")
    print(told := asked(options.level, counted(true), call))
    (folder / "README.txt").write_text(told + "\n")
    return 0


def museum(options: argparse.Namespace) -> int:
    """Run a program of the museum and ask for its wrong line, or give its hint, or judge an answer.

    Raises:
        ValueError: the answer is not one line of the program.
    """
    incident = exhibit(options.seed)
    program = incident.broken.splitlines()
    call = f"ddp-course drill --level {MUSEUM} --seed {options.seed} --answer LINE"
    if options.answer:
        if len(options.answer) > 1 or options.answer[0] not in map(str, range(1, len(program) + 1)):
            raise ValueError(f"name one line by its number, from 1 to {len(program)}")
        if int(options.answer[0]) not in incident.lines:
            print(f"✗ line {options.answer[0]}\nnot yet: 0 of {POINTS} points; --hint says how it was found")
            return 1
        print(f"✓ line {options.answer[0]}\nsolved: {POINTS - min(options.hint, 1)} of {POINTS} points")
        print(f"cause: {incident.title}.\ncure: {incident.cure}\nmet at: {incident.met_at}")
        return 0
    if options.hint:
        print(f"{incident.found}\nIt costs a point: answer with {call} --hint")
        return 0
    folder = emptied(options.into)
    _, said = started(incident.broken, incident.ranks)
    (folder / "train.py").write_text(incident.broken, "utf-8")
    for rank, text in enumerate(said):
        (folder / f"rank{rank}.log").write_text(text, "utf-8")
    numbered = "\n".join(f"{number:3}  {line}".rstrip() for number, line in enumerate(program, 1))
    words = "\n".join(f"--- rank {rank} ---\n{text or '(nothing)'}" for rank, text in enumerate(said))
    told = f"""Level {MUSEUM}: {OF_MUSEUM}.

{numbered}

What the {incident.ranks} ranks print:
{words}
What people saw: {incident.seen}

Which line is wrong, or beside which is something missing? Answer with
  {call}
Instead of it, --hint says how it was found."""
    print(
        f"train.py and the logs of its ranks are in {folder}, and README.txt there says again what follows.\n\n{told}"
    )
    (folder / "README.txt").write_text(told + "\n", "utf-8")
    return 0


def asked(level: int, count: str, call: str) -> str:
    """What is to be found, and how: for the terminal, and for the folder of logs."""
    return f"""Level {level}: {LEVELS[level][2]}.

{LEGEND}

The job had {count}. Which, and on which rank, if one is to blame? Answers are:
{answers()}

Answer with
  {call}
and one more --answer for each further fault. Instead of it, --hint gives a hint."""


def levels() -> str:
    """One line a level."""
    new = {level: words for level, (_, _, words) in LEVELS.items()} | {MUSEUM: OF_MUSEUM}
    return "\n".join(f"  {level:2}  {words}" for level, words in new.items())


def answers() -> str:
    """One line a fault, as it is written in an answer."""
    forms = {name: f"{name}:RANK" if whose else name for name, whose in BLAMED.items()}
    return "\n".join(f"  {form:23}  {TITLES[name]}" for name, form in forms.items())


def counted(true: Faults) -> str:
    return f"{len(true)} fault{'s' * (len(true) > 1)}"


def emptied(into: Path | None) -> Path:
    """Return a folder without files: this one, made if it is not there, or by default a temporary one.

    Raises:
        OSError: it cannot be made, or something is in it.
    """
    folder = into or Path(tempfile.mkdtemp(prefix="ddp_course_drill_"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"--into {folder}: there is a file or a full folder already; name a new or an empty one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def understood(words: list[str]) -> Faults:
    """Return the faults of an answer, each with its rank.

    Raises:
        ValueError: there is no such fault, it comes twice, or its rank is missing or surplus; says which.
    """
    said: Faults = {}
    for word in words:
        fault, _, rank = word.partition(":")
        if fault not in BLAMED:
            raise ValueError(f"no fault is called {fault!r}; there are {', '.join(BLAMED)}")
        if fault in said:
            raise ValueError(f"{fault} comes twice: name each fault once, on one rank")
        if BLAMED[fault] and rank not in map(str, range(RANKS)):
            raise ValueError(f"write {fault}:RANK, with a rank from 0 to {RANKS - 1}")
        if not BLAMED[fault] and rank:
            raise ValueError(f"write {fault} alone; no rank is to blame")
        said[fault] = int(rank) if rank else None
    return said


def judged(said: Faults, true: Faults, used: int) -> int:
    """Print what of an answer is right, and its points; return the exit status."""
    for fault, rank in said.items():
        cause = verdict(fault, rank, true)
        print(f"{'✗' if cause else '✓'} {fault}" + ("" if rank is None else f", rank {rank}") + cause)
    got = f"{points(said, true, used)} of {POINTS * len(true)} points"
    print(f"{'solved' if said == true else 'not yet'}: {got}", end="")
    print("" if said == true else f"; the incident has {counted(true)}, and --hint gives a hint")
    return 0 if said == true else 1


def points(said: Faults, true: Faults, used: int) -> int:
    """Return what an answer earns: a fault that is not there costs as much as one that is missing."""
    missing = true.keys() - said.keys()
    wrong = said.items() - true.items()
    return max(0, POINTS * (len(true) - len(missing) - len(wrong)) - min(used, len(true)))


def verdict(fault: str, rank: int | None, true: Faults) -> str:
    """Say whether fault or rank is wrong; nothing if neither is."""
    if fault in true:
        return "" if true[fault] == rank else ": the fault is right, the rank is not"
    if rank is None:
        return ": not in this incident"
    return f": {'the rank is right, the fault is not' if rank in true.values() else 'neither fault nor rank is right'}"


def hints(true: Faults) -> list[str]:
    """One for each fault, in the order of the channels."""
    return [HINTS[channel] for channel, faults in CHANNELS.items() if true.keys() & faults]
