"""03.2 `join_and_sum(rank, world_size, path, value)`: do the ranks meet at the file, talk, and part?

The group is looked at while the answer talks in it, so any collective and any way to name the file will do.
Read next: `nodes.py`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch.distributed as dist

from ddp_course.grading.answer import fences
from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import observe
from ddp_course.grading.vocabulary.expect import NEVER_TALKED, equals, exercise, first_mistake
from ddp_course.grading.vocabulary.play import Note, Round, Seen

MOST_TIMEOUT_S = 60.0
LARGE = 10**8 + 1  # times a value: a whole number that float32 does not hold


@dataclass(frozen=True)
class Case:
    """The value of each rank, how many ranks a group has, and a file: to meet at, or for the grader's own store."""

    values: list[int]
    per_group: int
    path: str

    def group(self, rank: int) -> list[int]:
        """Return the ranks of its group."""
        start = rank // self.per_group * self.per_group
        return list(range(start, start + self.per_group))

    def members(self, rank: int) -> list[int]:
        """Return the values of the ranks of its group."""
        return [self.values[other] for other in self.group(rank)]

    def __str__(self) -> str:
        return f", with {len(self.values)} ranks, {self.per_group} per node" * (self.per_group < len(self.values))


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Call the function where no launcher's variables help; note its group, its collectives and its end."""
    met_at_file, backends = [], set()
    with fences.launcher_variables_hidden(), observe.Collectives() as seen:
        seen.on_call = lambda: (
            met_at_file.append(os.path.exists(case.path) and os.path.getsize(case.path) > 0),
            backends.add(dist.get_backend()),
        )
        value = plain(function(rank, world_size, case.path, case.values[rank]))
    return Note(value=value, file=any(met_at_file), open=dist.is_initialized(), backend="".join(backends))


def rounds(rng: Random, folder: str) -> list[Round]:
    """Meet twice, with two world sizes; rank 0's value is the least, so a maximum shows. Then values are large."""
    chosen = []
    for name, world_size, times in zip(("one", "two"), rng.sample((2, 3, 4), 2), (1, LARGE), strict=True):
        values = sorted(times * value for value in rng.sample(range(1, 100), world_size))
        case = Case(values, world_size, f"{folder}/{name}")
        chosen.append(Round(world_size, [(name, case)], init=False, fresh=True))
    return chosen


def number(found: Any) -> str:
    """Say what is wrong with a result that is no number."""
    if found is None:
        return "the collective changes the tensor in place and returns None; return the tensor"
    return "" if type(found) in (int, float) else "return one number: the value, or the sum"


def _slips(seen: Seen) -> Iterator[tuple[str, float]]:
    values, members = seen.case.values, seen.case.members(seen.rank)
    own = "this is the rank's own value: no sum reached it. Either it was not in the group of the collective (keep the "
    own += "group that it is in, not the last one made), or there is one receiver, as in reduce: take all_reduce"
    yield own, values[seen.rank]
    if 1 < len(members) < len(values):
        dealt = values[seen.rank % (len(values) // len(members)) :: len(values) // len(members)]
        yield "the groups hold every other rank; a node's ranks are neighbours: 0 and 1, then 2 and 3", sum(dealt)
    yield "this is the mean; the sum is asked for", sum(members) / len(members)
    yield "this is the largest value; the operation must be ReduceOp.SUM, which is the default", max(members)
    yield "this is the sum over all ranks; give the collective your group: group=...", sum(values)


the_sum = equals(
    lambda seen, right: f"{' + '.join(map(str, seen.case.members(seen.rank)))} = {right}{seen.case}",
    lambda seen: sum(seen.case.members(seen.rank)),
    _slips,
    "some ranks' values are missing, or counted twice; note that reduce leaves the whole sum on dst only",
    form=number,
    tolerance=1e-12,
)


def group(seen: Seen) -> Fault | None:
    """The largest collective is among all ranks, who used the file."""
    size = max((len(call.ranks) for call in seen["calls"]), default=0)
    mistakes = {
        f"{NEVER_TALKED}; initialise a group and call all_reduce": not size and "no collective",
        "give init_process_group the world size it was called with":
            size != seen.world_size and f"a group of {size}",
        'without a backend torch chooses one by the hardware; give init_process_group "gloo"':
            "gloo" not in seen["backend"] and "no backend",
        'init_method=f"file://{path}", or store=dist.FileStore(path, world_size)':
            not seen["file"] and "the file was never used",
    }  # fmt: skip
    return first_mistake(f"a collective among {seen.world_size} ranks that met at the file", mistakes, seen.rank)


def timeout(seen: Seen) -> Fault | None:
    """The group's timeout is no default."""
    found = seen["calls"] and seen["calls"][0].timeout_s
    mistakes = {
        NEVER_TALKED: not seen["calls"] and "no collective",
        "torch waits 30 minutes unless told otherwise; give init_process_group timeout=timedelta(seconds=30)":
            found and found > MOST_TIMEOUT_S and f"{found:g} s",
    }  # fmt: skip
    return first_mistake(f"a group with a timeout of at most {MOST_TIMEOUT_S:g} s", mistakes, seen.rank)


def end(seen: Seen) -> Fault | None:
    """The group was used, and is ended."""
    mistakes = {
        NEVER_TALKED: not seen["calls"] and "no group in use",
        "call dist.destroy_process_group() on every rank": seen["open"] and "the group is still open",
    }
    return first_mistake("a group that was used, then ended", mistakes, seen.rank)


JOIN = exercise(
    "03.2",
    "Meet at a file",
    "join_and_sum",
    15,
    act=act,
    rounds=rounds,
    within=tempfile.TemporaryDirectory,
    checks={
        "sum": ("every rank has the sum", 2, the_sum, "one two"),
        "group": ("all ranks met at the file", 1, group, "one two"),
        "timeout": ("the timeout is explicit", 1, timeout, "one two"),
        "end": ("the group is ended", 1, end, "one two"),
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
)
