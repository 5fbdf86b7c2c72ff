"""03.2 `join_and_sum(rank, world_size, path, value)`: do the ranks meet at the file, talk, and part?

The group is looked at while the answer talks in it, so any collective and any way to name the file will do.
Read next: `nodes.py`.
"""

from __future__ import annotations

import os
import tempfile
from random import Random

import torch.distributed as dist

from ddp_course.grading.answer import forbidden
from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise, value
from ddp_course.grading.vocabulary import observe
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

MOST_TIMEOUT_S = 60.0
LARGE = 10**8 + 1  # times a value: a whole number that float32 does not hold
SILENT = "no collective was called"

Case = tuple[list[int], str]  # each rank's value, and the file to meet at


def cases(rng: Random, folder: str) -> list[Round]:
    """Meet twice, with two world sizes; rank 0's value is the least, so a maximum shows. Then values are large."""
    chosen = []
    for name, world_size, times in zip(("one", "two"), rng.sample((2, 3, 4), 2), (1, LARGE), strict=True):
        values = sorted(times * value for value in rng.sample(range(1, 100), world_size))
        chosen.append(Round(world_size, [(name, (values, f"{folder}/{name}"))], init=False, fresh=True))
    return chosen


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Call the function where no launcher's variables help; note its group, its collectives and its end."""
    (values, path), met_at_file, backends = case, [], set()
    with forbidden.launcher_variables_hidden(), observe.Collectives() as seen:
        seen.on_call = lambda: (
            met_at_file.append(os.path.exists(path) and os.path.getsize(path) > 0),
            backends.add(dist.get_backend()),
        )
        found = plain(function(rank, world_size, path, values[rank]))
    return Note(value=found, file=any(met_at_file), open=dist.is_initialized(), gloo="gloo" in "".join(backends))


def group(seen: Seen) -> dict | str:
    """The largest collective is among all ranks, who used the file."""
    size = max((len(call.ranks) for call in seen["calls"]), default=0)
    found = {"ranks": size, "over": "gloo" if seen["gloo"] else "no backend that was named"}
    return {**found, "met at": "the file" if seen["file"] else "another place"} if size else SILENT


def timeout(seen: Seen) -> str:
    if not seen["calls"]:
        return SILENT
    found = seen["calls"][0].timeout_s
    return f"at most {MOST_TIMEOUT_S:g} s" if found <= MOST_TIMEOUT_S else f"{found:g} s"


def end(seen: Seen) -> str:
    return ("the group is open" if seen["open"] else "the group is ended") if seen["calls"] else SILENT


MISTAKES = """
what all_reduce returns | sum | all_reduce works in place and returns None; return the tensor
    dist.all_reduce(total) => total = dist.all_reduce(total)
mean | sum | this is the mean; the sum is asked for
    return total => return total / world_size
reduced to rank 0 | sum | reduce leaves the whole sum on one rank only: take all_reduce
    all_reduce(total) => reduce(total, dst=0)
in float32 | sum | right to five digits or more: is something computed in float32 here
    torch.tensor(value) => torch.tensor(float(value))
largest | sum | this is the largest value; the operation must be ReduceOp.SUM, which is the default
    all_reduce(total) => all_reduce(total, op=dist.ReduceOp.MAX)
another file | group | the file was not used: init_method=f"file://{path}", or store=dist.FileStore(path, world_size)
    {path} => {path}.rendezvous
no backend | group | without a backend torch chooses one by the hardware; give init_process_group "gloo"
    "gloo", =>
no timeout | timeout | torch waits 30 minutes unless told otherwise: give it timeout=timedelta(seconds=30)
    timeout=timedelta(seconds=30), =>
30 days | timeout | timedelta counts days unless told otherwise: timedelta(seconds=30)
    timedelta(seconds=30) => timedelta(30)
not ended | end | call dist.destroy_process_group() on every rank
    dist.destroy_process_group() => pass
ended on rank 0 only | end | call dist.destroy_process_group() on every rank, not on rank 0 only
    dist.destroy_process_group() => rank or dist.destroy_process_group()
no rank | all | give init_process_group rank=rank and world_size=world_size | tests
    rank=rank, =>
a relative path | all | wants the absolute path | tests
    {path} => {path.rpartition('/')[2]}
environment instead of the file | all | no launcher set the variables here | tests
    init_method=f"file://{path}", =>
    rank=rank, =>
    world_size=world_size, =>
a file for each rank | all | the same file | hangs
    {path} => {path}{rank}
the last rank skips the sum | all | one rank skips a collective | tests
    dist.all_reduce(total) => rank == world_size - 1 or dist.all_reduce(total)
os._exit on one rank | all | the function ends its process | tests
    total = torch.tensor(value) => total = torch.tensor(value)
    rank == 1 and __import__("os")._exit(0)
computed without a collective | all | no collective was called | tests
    def join_and_sum(rank, world_size, path, value):
        return value * world_size
the course's own | all | this exercise is to write | tests
    from ddp_course.groups import join_group

    def join_and_sum(rank, world_size, path, value):
        join_group(None, "file", path)
"""

JOIN = exercise(
    *("03.2", "Meet at a file", "join_and_sum", 15),
    cases=cases,
    act=act,
    within=tempfile.TemporaryDirectory,
    said=lambda seen: f"{' + '.join(map(str, seen.case[0]))}, on {seen.world_size} ranks:",
    mistakes=MISTAKES,
    tolerance=1e-12,
    checks={
        "sum": ("every rank has the sum", 2, "one two", value,
                "some ranks' values are missing, or counted twice; note that reduce leaves the whole sum on dst only"),
        "group": ("all ranks met at the file", 1, "one two", group,
                  'give init_process_group "gloo", the file, rank and world_size; then call a collective'),
        "timeout": ("the timeout is explicit", 1, "one two", timeout,
                    "give init_process_group a timeout of at most 60 s, and call a collective"),
        "end": ("the group is ended", 1, "one two", end, "open a group, use it, and end it on every rank"),
    },
    refused=("ddp_course.groups.join_group",),
    hints={
        r"rank parameter missing|world size parameter missing": "a file does not know who asks: give "
        "init_process_group rank=rank and world_size=world_size",
        r"path missing": "file:// wants the absolute path after it, so three strokes in all; path is one already",
        r"environment variable|env://": "no launcher set the variables here; meet at the file: "
        'init_method=f"file://{path}"',
        "limit: init_process_group": "the ranks wait for each other in init_process_group; every rank "
        "must give the same file (file:// and its absolute path), the same world size and its own rank",
        r"(?i)rank < size|rank.* out of range": "every rank must be below the world size; give both as the function "
        "was given them",
        r"(?i)timed? ?out.*(rank|client|store|key)": "not all ranks came to the meeting; same file, same world size, "
        "own rank?",
        # On a busy machine this may be seen before the error of a rank that does not fit the world.
        "absent|cut-off": "one rank skips a collective that the others wait in, or ends its group "
        "first, or the world has another size than the function was given: every rank must be below the world size",
    },
    right="""
FileStore, functions imported by name, all_gather
    from torch.distributed import FileStore, all_gather, barrier, destroy_process_group, init_process_group

    def join_and_sum(rank, world_size, path, value):
        store = FileStore(str(path), world_size)
        init_process_group(backend="gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=1))
        everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        all_gather(everyone, torch.tensor([value]))
        barrier()
        destroy_process_group()
        return sum(everyone)
""",
)  # fmt: skip
