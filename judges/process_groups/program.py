"""03.4 `program()`: does a whole program do its work under torchrun, on any number of ranks?

`grading/vocabulary/programs.py` says how a program runs on ranks that stay. Read next: `grading/checking.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from random import Random

from ddp_course.grading.answer.limits import own_file
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import programs
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.checkpointing.files import file_events


def cases(rng: Random, folder: str) -> list[Round]:
    """Two and three ranks, which do not divide the numbers, and more ranks than numbers."""
    counts = {"two": 2 * rng.randint(2, 4) + 1, "three": 3 * rng.randint(1, 2) + 2, "few": 2}
    two, *three = [
        (name, (f"{folder}/{name}.txt", rng.sample(range(10**10, 10**12), count))) for name, count in counts.items()
    ]
    return [Round(2, [two]), Round(3, three)]


def act(function, case: tuple[str, list[int]], rank: int, world_size: int) -> Note:
    """Run the program in the file's folder; print what it printed, and note whether it wrote."""
    path, numbers = case
    with contextlib.chdir(os.path.dirname(path)), file_events(function, path) as events:
        note = programs.run(function(), ["total.py", path, *map(str, numbers)], rank, world_size)
    for line in note["lines"]:
        print(line)
    return Note(note, wrote=any(event[0] in ("write", "rename") for event in events))


def total(seen: Seen) -> int | str:
    """The number in the file, which the judge reads."""
    try:
        text = own_file(seen.case[0]).read_text(encoding="utf-8").strip()
    except OSError:
        return "no file, but a printed line" if any(note["lines"] for note in seen.everyone) else "no file"
    found = re.fullmatch(r"(-?\d+)(\.0*)?", text)
    return int(found[1]) if found else f"a file with the text {text[:40]!r}"


def shared(seen: Seen) -> str:
    everyone = any(len(call.ranks) == seen.world_size for call in seen["calls"])
    return "a collective of all ranks" if everyone else "no collective of all ranks, apart from barriers"


MISTAKES = """
two ranks, always | total | there are not always two ranks: dist.get_world_size(), or WORLD_SIZE
    dist.get_world_size() => 2
the rank on its node | total writer | LOCAL_RANK counts from 0 on each node: take dist.get_rank(), or RANK
    dist.get_rank() => int(__import__("os").environ["LOCAL_RANK"])
printed | total writer | nothing is written: open the path that the first argument gives
    with open(path, "w") as file: => if True:
    , file=file =>
the rank in the arguments | total writer
| torchrun gives all ranks the same arguments: the rank is dist.get_rank(), or the variable RANK
    dist.get_rank() => int(sys.argv[2])
all numbers on each rank | total | each number is counted on every rank: numbers[rank::world_size]
    [rank::world_size] =>
one rank's share | total shared | this is one rank's share: dist.all_reduce(total)
    dist.all_reduce(total) => pass
one rank's share times the ranks | total shared | the other ranks have other numbers: add up by dist.all_reduce(total)
    dist.all_reduce(total) => total *= world_size
each rank for itself | shared | the ranks share no work: each adds up all numbers alone
    [rank::world_size] =>
    dist.all_reduce(total) => pass
in float32 | total | float32 holds seven digits: keep whole numbers, or float64
    sum(numbers[rank::world_size]) => float(sum(numbers[rank::world_size]))
the text of a tensor | total | this is the text of a tensor: total.item() is the number
    total.item() => total
every rank writes | writer | all ranks write the same file: if rank == 0
    if rank == 0: => if True:
rank 1 writes | writer | a job may have one rank alone: let rank 0 write
    if rank == 0: => if rank == 1:
not ended | end | call dist.destroy_process_group() on every rank
    dist.destroy_process_group() => pass
ended on rank 0 only | end | call dist.destroy_process_group() on every rank, not on rank 0 only
    dist.destroy_process_group() => rank or dist.destroy_process_group()
one number for each rank | all | there may be more numbers than ranks, or fewer: numbers[rank::world_size]
    numbers[rank::world_size] => [numbers[rank]]
every process is rank 0 | all | waits for ranks that are not there
    "gloo" => "gloo", rank=0
a port of its own | all | waits for ranks that are not there
    "gloo" => "gloo", init_method="tcp://localhost:29500"
no group | all | call dist.init_process_group() before anything
    dist.init_process_group("gloo") => pass
the backend of GPUs | all | the backend is gloo
    "gloo" => "nccl"
a status that is the total | all | ends with status 0
    dist.destroy_process_group() => dist.destroy_process_group()
    sys.exit(total.item())
rank 0 alone adds up | all | every rank must call the same collectives | hangs
    dist.all_reduce(total) => rank or dist.all_reduce(total)
"""

RIGHT = '''
the variables of torchrun, a reduce to rank 0, a file that is renamed
    def program():
        return """
    import os, sys, torch
    from torch.distributed import barrier, destroy_process_group, init_process_group, reduce

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    init_process_group("gloo", "tcp://{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ), rank=rank, world_size=ranks)
    _, path, *numbers = sys.argv
    each = -(-len(numbers) // ranks)
    total = torch.tensor([float(text) for text in numbers[rank * each :][:each]], dtype=torch.float64).sum()
    reduce(total, dst=0)
    if rank == 0:
        with open(path + ".part", "w") as file:
            file.write(f"{total:.0f}")
        os.replace(path + ".part", path)
    barrier()
    destroy_process_group()
    """
'''

PROGRAM = exercise(
    *("03.4", "Run a program by torchrun", "program", 15),
    cases=cases,
    act=act,
    within=tempfile.TemporaryDirectory,
    said=lambda seen: f"{len(seen.case[1])} numbers on {seen.world_size} ranks:",
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "total": ("the file has the total", 2, "two three few", total,
                  "each number belongs to one rank; a collective adds up the shares, and rank 0 writes the digits"),
        "shared": ("the ranks add up their shares by a collective", 1, "two three few", shared,
                   "dist.all_reduce(total) on every rank"),
        "writer": ("rank 0 alone writes", 1, "two three few",
                   lambda seen: "writes a file" if seen["wrote"] else "no file",
                   "if rank == 0, with the rank of the whole job"),
        "end": ("each rank ends its group", 1, "two three",
                lambda seen: "the group is ended" if seen["ended"] else "the group is open",
                "dist.destroy_process_group(), on every rank"),
    },
    hints={
        **programs.HINTS,
        r"list index out of range": "there may be more numbers than ranks, or fewer: numbers[rank::world_size]",
        r"backend is gloo": "the backend is gloo, since no rank has a GPU here",
    },
)  # fmt: skip
