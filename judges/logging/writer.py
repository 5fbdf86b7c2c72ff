"""09.2 `write_log(rank, world_size, steps, every, path)`: one writer, the loss of all rows, and talk only when due.

The steps come from a generator of the grader's. Each time the answer takes one, it notes how many collectives there
were, and how long the file is. Python's audit events tell who opens a file, in whatever way.
Read `shards.py` first. Read next: `evaluate.py`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from torch.overrides import TorchFunctionMode

from ddp_course.grading.answer.limits import own_file
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import observe
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.logging.shards import SAME, SKIPPED

MOST_TALKS = 2  # for one line
READS = {"item", "tolist", "numpy", "is_nonzero", "equal", "allclose"} | {
    f"__{name}__" for name in ("float", "int", "bool", "index", "complex", "array", "format", "repr")
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Case:
    """The steps of each rank, a mean loss and a number of rows; a line is due after every `every`-th."""

    steps: list[list[tuple[float, int]]]
    every: int
    path: str

    @property
    def due(self) -> list[int]:
        """The steps, counted from 1, after which a line is due."""
        return list(range(self.every, len(self.steps[0]) + 1, self.every))

    def lines(self) -> list[dict] | str:
        """Return the file's lines, or in words what is there instead."""
        text = own_file(self.path).read_text() if os.path.exists(self.path) else ""
        try:
            lines = [json.loads(line) for line in text.splitlines()]
            assert all({"step", "loss"} <= line.keys() for line in lines)
        except (ValueError, AttributeError, AssertionError):
            return f"{text.count(chr(10))} ends of lines, and no JSON object on each: {text[:40]}"
        return lines or "no file, or an empty one"


class Reads(TorchFunctionMode):
    """Within the block, call `on_read` when a tensor of floats, or what was asked of one, becomes a Python number."""

    def __init__(self, on_read: Callable[[], None]):
        super().__init__()
        self.on_read = on_read

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, given = getattr(func, "__name__", ""), args[0] if args else None
        copied = isinstance(given, list | tuple) and name in ("tensor", "as_tensor")
        read = _tensors(given) if copied or name in READS else []
        if any(tensor.is_floating_point() or tensor.dtype == torch.bool for tensor in read):
            self.on_read()
        return func(*args, **(kwargs or {}))


def _tensors(given: object) -> list[torch.Tensor]:
    if isinstance(given, list | tuple):
        return [found for part in given for found in _tensors(part)]
    return [given] if isinstance(given, torch.Tensor) else []


def cases(rng: Random, folder: str) -> list[Round]:
    """Train twice, with two world sizes; ranks and steps differ in rows and losses, and the last steps fill no line."""
    chosen = []
    for name, world_size in zip(("one", "two"), rng.sample((2, 3, 4), 2), strict=True):
        every = rng.randint(3, 5)
        length = 3 * every + rng.randint(1, every - 1)
        steps = [
            [(rng.randrange(64, 640) * (rank + 1) / 256, rng.choice((2, 4, 8, 16, 32))) for _ in range(length)]
            for rank in range(world_size)
        ]
        os.mkdir(f"{folder}/{name}")
        chosen.append(Round(world_size, [(name, Case(steps, every, f"{folder}/{name}/train.jsonl"))]))
    return chosen


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Let the function take this rank's steps; note the moments of talks, reads and lines, and the files it opens."""
    opened: set[str] = set()
    reads: list[int] = []
    marks: list[tuple[int, int]] = []  # when step 1, 2, ... is taken: collectives so far, length of the file
    folder, name = os.path.split(case.path)

    def watch(event: str, args: tuple) -> None:
        if event != "open" or isinstance(args[0], int) or ".pyc" in str(args[0]):
            return
        if args[2] & WRITING or str(args[0]) == os.devnull or os.path.dirname(str(args[0])) == folder:
            opened.add(os.path.basename(str(args[0])))

    def mark() -> None:
        marks.append((len(seen.talks), os.path.getsize(case.path) if os.path.exists(case.path) else 0))

    def taken() -> Iterator[tuple[torch.Tensor, int]]:
        for loss, rows in case.steps[rank]:
            mark()
            yield torch.tensor(loss), rows
        mark()

    with observe.Collectives() as seen, Reads(lambda: reads.append(len(marks))), observe.audited(watch):
        function(rank, world_size, taken(), case.every, case.path)
        mark()
    return Note(opened=sorted(opened), written=name in opened, reads=reads, marks=marks)


def lines(seen: Seen) -> list[int] | str:
    found = seen.case.lines()
    return found if isinstance(found, str) else [line["step"] for line in found]


def losses(seen: Seen) -> dict:
    """The losses of the lines that stand where one is due; missing lines are told by another check."""
    found, due, steps_WS2 = seen.case.lines(), seen.case.due, torch.tensor(seen.case.steps, dtype=torch.float64)
    found = [] if isinstance(found, str) else [line for line in found if line["step"] in due]
    since = {step: steps_WS2[:, step - seen.case.every : step] for step in due if found}
    missing = {step: (part.prod(2).sum() / part[..., 1].sum()).item() for step, part in since.items()}
    return {"step": {**missing, **{line["step"]: line["loss"] for line in found}}}


def writer(seen: Seen) -> str | list[str]:
    if seen.rank:
        return seen["opened"]
    return "rank 0 opens the file" if seen["written"] else "rank 0 does not open the file"


def quiet(seen: Seen) -> dict:
    due, at = seen.case.due, [talked for talked, _ in seen["marks"]]
    talks = {step: after - before for step, (before, after) in enumerate(pairwise(at), start=1)}
    return {
        "collectives in the steps": [step for step, count in talks.items() if count],
        f"more than {MOST_TALKS} of them in": [step for step, count in talks.items() if count > MOST_TALKS],
        "between lines a loss is read in the steps": sorted({step for step in seen["reads"] if step not in due}),
    }


def at_once(seen: Seen) -> dict | str:
    if seen.rank:
        return ""
    sizes = [size for _, size in seen["marks"]]
    longer = [n for n, (before, after) in enumerate(pairwise(sizes), start=1) if after > before and n in seen.case.due]
    return {"the file is longer, before the next step is taken, after the steps": longer}


def not_lines(seen: Seen) -> str:
    """Why the lines are not those that are due, where no mistake fits."""
    found, (first, second, *_) = seen.case.lines(), seen.case.due
    if isinstance(found, list):
        return f"after the steps {first}, {second}, ... a line is due, and at no other"
    if found.startswith("no file"):
        return "rank 0 writes the lines to `path`"
    if "}{" in found or found.startswith("0 ends"):
        return "a line ends with a newline, and json.dump writes none"
    return 'each line is a JSON object of its own, such as {"step": 10, "loss": 0.25}; json.dumps makes it'


MISTAKES = r"""
every rank writes | lines writer | lines are there more than once: every rank writes; let rank 0 write alone
    if rank == 0 => if True
every rank opens, one writes | writer | one writer: rank 0 alone opens the file
    sum_and_count = torch => open(path, "a").close()
    sum_and_count = torch
the other ranks open os.devnull, to have the same code | writer | one writer: rank 0 alone opens the file
    if rank == 0: => if True:
    path, "a" => path if rank == 0 else "/dev/null", "a"
rank 0's loss | loss quiet | this is the loss of rank 0's rows alone; reduce sums and counts over all ranks
    dist.all_reduce(sum_and_count) => dist.barrier()
mean of means | loss
| this is the mean of the ranks' means; ranks have different numbers of rows: weigh each loss by its rows
    dist.all_reduce( => sum_and_count /= sum_and_count[1].clone()
    dist.all_reduce(
steps weigh the same | loss
| this is the plain mean of the losses; steps and ranks have different numbers of rows: weigh each loss by its rows
    loss * rows => loss
    [1] += rows => [1] += 1
a mean is added, and rows are counted | loss | a loss is a mean already; multiply it by its rows before adding
    loss * rows => loss
never begins again | loss | steps before the last line are counted again; start from zero after each line
    dist.all_reduce( => mine = sum_and_count
    sum_and_count = mine.clone()
    dist.all_reduce(
    sum_and_count.zero_() => sum_and_count = mine
only the last step | loss | this is the last step alone; the line is about all steps since the line before
    [0] += => [0] =
    [1] += => [1] =
a line for every step | lines loss quiet | has a line; the steps after the last one have none
    if step % every: => if False:
steps from 0 | lines loss quiet at_once | steps count from 1 here; the first line is due after step `every`
    start=1 => start=0
item in every step | quiet
| item(), float(), tolist() and torch.tensor([loss, ...]) make Python wait for the device; add tensors up
    loss * rows => loss.item() * rows
a reduction in every step | quiet
| reduce on all ranks, in every `every`-th step only; between two lines, add up on each rank
    if step % every: => dist.all_reduce(torch.zeros(2))
    if step % every:
three collectives for a line | quiet | put sum and count into one tensor
    dist.all_reduce(sum_and_count) => for number in (*sum_and_count.split(1), torch.ones(1)):
        dist.all_reduce(number)
mode "w" | lines at_once | mode "w" empties the file each time it is opened; open it once, or with "a"
    "a" => "w"
kept in a buffer | at_once
| a job that dies keeps what it has written: write when the line is due, and flush() or close the file
    sum_and_count = torch => file = open(path, "w") if rank == 0 else None
    sum_and_count = torch
    with open(path, "a") as file: => if file:
text, not JSON | lines loss | json.dumps makes it
    json.dumps({"step": step, "loss": total / count}) => f"step {step} loss {total / count}"
a tensor is no JSON | all | JSON knows numbers, not tensors
    sum_and_count.tolist() => sum_and_count.clone()
all lines at the end | at_once | write when the line is due, and flush() or close the file | tests
    def write_log(rank, world_size, steps, every, path):
        lines, both = [], torch.zeros(2)
        for step, (loss, rows) in enumerate(steps, start=1):
            both += torch.stack([loss * rows, torch.tensor(float(rows))])
            if step % every == 0:
                dist.all_reduce(both)
                lines.append({"step": step, "loss": (both[0] / both[1]).item()})
                both.zero_()
        if rank == 0:
            with open(path, "w") as file:
                file.writelines(json.dumps(line) + chr(10) for line in lines)
swallows every error | all | rank 0 writes the lines | tests
    def write_log(rank, world_size, steps, every, path):
        try:
            for step in range(len(steps)):
                loss, rows = steps[step]
        except Exception:
            pass
reduce below if rank == 0 | all | no collective below `if rank == 0` | hangs
    dist.all_reduce(sum_and_count) => if rank == 0:
        dist.all_reduce(sum_and_count)
"""

WRITER = exercise(
    *("09.2", "One writer", "write_log", 20),
    cases=cases,
    act=act,
    tolerance=SAME,
    within=tempfile.TemporaryDirectory,
    mistakes=MISTAKES,
    checks={
        "lines": ("the file has one JSON line for every k-th step", 1, "one two", lines, not_lines),
        "loss": ("the loss is that of all rows since the line before", 2, "one two", losses,
                 "divide the sum of loss * rows by the sum of rows, over all ranks, since the line before; lines at "
                 "other steps, or nowhere, are to be fixed first"),
        "writer": ("rank 0 alone opens the file", 1, "one two", writer,
                   "one writer: rank 0 alone opens the file; ranks that share a file write over each other"),
        "quiet": ("the ranks communicate, and read a loss, only when a line is due", 1, "one two", quiet,
                  "reduce on all ranks, in every `every`-th step only, at most twice; between two lines, add tensors "
                  "up on each rank: item(), float(), print() and torch.tensor([loss, ...]) make Python wait for the "
                  "device"),
        "at_once": ("each line is in the file before the next step", 1, "one two", at_once,
                    "a job that dies keeps what it has written: write when the line is due, and flush() or close the "
                    "file"),
    },
    hints={
        r"not JSON serializable": "JSON knows numbers, not tensors; make a float of the loss with .item()",
        r"raised TypeError.*(subscriptable|len\(\))|has no len": "`steps` comes while training goes on, and has no "
        "length; go through it with a for loop",
        **SKIPPED,
    },
)  # fmt: skip
