"""03.2 `join_and_sum(rank, world_size, path, value)`: do the ranks meet at the file, talk, and part?

The group is looked at while the answer talks in it, so any collective and any way to name the file will do.
Read next: `nodes.py`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch.distributed as dist

from ddp_course.grading import fences, observe
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

MOST_TIMEOUT_S = 60.0


def join_driver(rank: int, world_size: int, function: Callable, path: str, values: list[int]) -> dict:
    """Call the function where no launcher's variables help; note its group, its collectives and its end."""
    met_at_file = []
    with fences.launcher_variables_hidden(), observe.Collectives() as seen:
        seen.on_call = lambda: met_at_file.append(os.path.exists(path) and os.path.getsize(path) > 0)
        result = plain(function(rank, world_size, path, values[rank]))
    talks = [call for call in seen.calls if call.op != "barrier"]
    group = max((call.ranks for call in talks), key=len, default=())
    timeout_s = talks[0].timeout_s if talks else None
    return {
        "result": result,
        "size": len(group),
        "file": any(met_at_file),
        "timeout_s": timeout_s,
        "open": dist.is_initialized(),
    }


def join_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Meet twice, with two world sizes, and look at the sum, the group, its timeout and its end."""
    notes: list[tuple[list[int], list[dict]]] = []
    for world_size in rng.sample((2, 3, 4), 2):
        values = sorted(rng.sample(range(1, 100), world_size))  # rank 0's is the least: a maximum shows
        with tempfile.TemporaryDirectory() as folder:
            notes.append((values, answer.run(join_driver, world_size, f"{folder}/meet", values, fresh=True)))
    for key, fault_of in (
        ("sum", _sum_fault),
        ("group", _group_fault),
        ("timeout", _timeout_fault),
        ("end", _end_fault),
    ):
        faults = (fault_of(values, rank, note) for values, ranks in notes for rank, note in enumerate(ranks))
        yield key, next(filter(None, faults), None)


def _sum_fault(values: list[int], rank: int, note: dict) -> Fault | None:
    return sum_fault(values, rank, note["result"], values)


def sum_fault(members: list[int], rank: int, found: Any, everyone: list[int]) -> Fault | None:
    """Compare one rank's result with the sum over its group, and guess how it went wrong."""
    total = sum(members)
    if not isinstance(found, bool | str) and found == total:
        return None
    if found is None:
        cause = "all_reduce changes the tensor in place and returns None; return the tensor"
    elif isinstance(found, bool | str | list):
        cause = "return one number: the sum"
    elif found == everyone[rank]:
        cause = (
            "this is the rank's own value: no sum reached it. Either it was not in the group of the collective "
            "(keep the group that it is in, not the last one made), or there is one receiver, as in reduce: take "
            "all_reduce"
        )
    elif len(members) > 1 and found * len(members) == total:
        cause = "this is the mean; the sum is asked for"
    elif found == max(members):
        cause = "this is the largest value; the operation must be ReduceOp.SUM, which is the default"
    elif found == sum(everyone):
        cause = "this is the sum over all ranks; give the collective your group: group=..."
    else:
        cause = "some ranks' values are missing, or counted twice; note that reduce leaves the whole sum on dst only"
    return Fault(f"{' + '.join(map(str, members))} = {total}", repr(found), rank, cause)


def _group_fault(values: list[int], rank: int, note: dict) -> Fault | None:
    expected = f"a collective among {len(values)} ranks that met at the file"
    if not note["size"]:
        return Fault(expected, "no collective", rank, "the ranks never talked; initialise a group and call all_reduce")
    if note["size"] != len(values):
        return Fault(
            expected, f"a group of {note['size']}", rank, "give init_process_group the world size it was called with"
        )
    if not note["file"]:
        return Fault(
            expected,
            "the file was never used",
            rank,
            'init_method=f"file://{path}", or store=dist.FileStore(path, world_size)',
        )
    return None


def _timeout_fault(values: list[int], rank: int, note: dict) -> Fault | None:
    expected = f"a group with a timeout of at most {MOST_TIMEOUT_S:g} s"
    if note["timeout_s"] is None:
        return Fault(expected, "no collective", rank, "the ranks never talked")
    if note["timeout_s"] <= MOST_TIMEOUT_S:
        return None
    cause = "torch waits 30 minutes unless told otherwise; give init_process_group timeout=timedelta(seconds=30)"
    return Fault(expected, f"{note['timeout_s']:g} s", rank, cause)


def _end_fault(values: list[int], rank: int, note: dict) -> Fault | None:
    if not note["size"]:
        return Fault("a group that was used, then ended", "no group in use", rank, "the ranks never talked")
    if note["open"]:
        return Fault(
            "no group at the end", "the group is still open", rank, "call dist.destroy_process_group() on every rank"
        )
    return None


JOIN = Exercise(
    "03.2",
    "Meet at a file",
    "join_and_sum",
    15,
    (
        Check("sum", "every rank has the sum", 2),
        Check("group", "all ranks met at the file", 1),
        Check("timeout", "the timeout is explicit", 1),
        Check("end", "the group is ended", 1),
    ),
    join_judge,
    refused=("ddp_course.groups.join_group",),
    hints=(
        (
            r"rank parameter missing|world size parameter missing",
            "a file does not know who asks: give init_process_group rank=rank and world_size=world_size",
        ),
        (
            r"path missing",
            "file:// wants the absolute path after it, so three strokes in all; path is one already",
        ),
        (
            r"environment variable|env://",
            'no launcher set the variables here; meet at the file: init_method=f"file://{path}"',
        ),
        (
            r"(?s)no result after.*init_process_group",
            "the ranks wait for each other in init_process_group; every rank must give the same file "
            "(file:// and its absolute path), the same world size and its own rank",
        ),
        (
            r"(?i)rank < size|rank.* out of range",
            "every rank must be below the world size; give both as the function was given them",
        ),
        (
            r"(?i)timed? ?out.*(rank|client|store|key)",
            "not all ranks came to the meeting; same file, same world size, own rank?",
        ),
        (
            # On a busy machine this may be seen before the error of a rank that does not fit the world.
            r"never entered|lost the connection",
            "one rank skips a collective that the others wait in, or ends its group first, or the world has another "
            "size than the function was given: every rank must be below the world size",
        ),
    ),
)
