"""09.2 `write_log(rank, world_size, steps, every, path)`: one writer, the loss of all rows, and talk only when due.

The steps come from a generator of the grader's. Each time the answer takes one, it notes how many collectives there
were, and how long the file is. Python's audit events tell who opens a file, in whatever way.
Read `shards.py` first. Read next: `evaluate.py`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest import mock

import torch

from ddp_course.grading import observe
from ddp_course.grading.compare import short
from ddp_course.grading.exercise import Fault
from ddp_course.grading.expect import equals, exercise, once
from ddp_course.grading.play import Note, Round, Seen
from judges.logging.shards import SAME, SKIPPED

Step = tuple[float, int]  # the mean loss of a rank's rows, and their number
MOST_TALKS = 2  # for one line
READ = (
    "item(), float(), tolist() and torch.tensor([loss, ...]) make Python wait for the device; add tensors up, as in "
    "total += loss * rows or with torch.stack, and read when a line is due"
)
ELSEWHERE = "the lines stand at other steps, or nowhere; fix that first"
READS = {"item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "__format__"}


@dataclass(frozen=True)
class Case:
    """The steps of each rank; a line is due after every `every`-th."""

    steps: list[list[Step]]
    every: int
    path: str

    @property
    def due(self) -> list[int]:
        """The steps, counted from 1, after which a line is due."""
        return list(range(self.every, len(self.steps[0]) + 1, self.every))

    def text(self) -> str:
        """Return what stands in the file."""
        return Path(self.path).read_text() if os.path.exists(self.path) else ""

    def lines(self) -> list[dict] | None:
        """Return the file's lines; None when one of them is none."""
        try:
            lines = [json.loads(line) for line in self.text().splitlines()]
        except ValueError:
            return None
        return lines if all(isinstance(line, dict) and {"step", "loss"} <= line.keys() for line in lines) else None


class Watched(torch.Tensor):
    """A loss that tells when it, or what is computed from it, becomes a number of Python."""

    on_read: Callable = staticmethod(lambda: None)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in READS:
            cls.on_read()
        return super().__torch_function__(func, types, args, kwargs or {})


@contextmanager
def tensor_watched() -> Iterator[None]:
    """Within the block, `torch.tensor` of data that holds a loss counts as a read, which torch itself tells nobody."""
    make = torch.tensor

    def watched(data, *args, **kwargs):
        if isinstance(data, Watched) or (isinstance(data, list | tuple) and any(isinstance(d, Watched) for d in data)):
            Watched.on_read()
        return make(data, *args, **kwargs)

    with mock.patch.object(torch, "tensor", watched):
        yield


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Let the function take this rank's steps; note the moments of talks, reads and lines, and the files it opens."""
    opened: set[str] = set()
    reads: list[int] = []
    marks: list[tuple[int, int]] = []  # when step 1, 2, ... is taken: collectives so far, length of the file

    def watch(event: str, args: tuple) -> None:
        if event == "open" and os.path.dirname(str(args[0])) == os.path.dirname(case.path):
            opened.add(os.path.basename(str(args[0])))

    def mark() -> None:
        marks.append((len(seen.talks), os.path.getsize(case.path) if os.path.exists(case.path) else 0))

    def taken() -> Iterator[tuple[torch.Tensor, int]]:
        for loss, rows in case.steps[rank]:
            mark()
            yield torch.as_tensor(loss).as_subclass(Watched), rows
        mark()

    Watched.on_read = staticmethod(lambda: reads.append(len(marks)))
    with observe.Collectives() as seen, tensor_watched(), observe.audited(watch):
        function(rank, world_size, taken(), case.every, case.path)
    return Note(opened=sorted(opened), reads=reads, marks=marks)


def rounds(rng: Random, folder: str) -> list[Round]:
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


# --- What is expected ------------------------------------------------------------------------------


def lines(seen: Seen) -> Fault | None:
    """The file has a line for every k-th step."""
    text, found, due = seen.case.text(), seen.case.lines(), seen.case.due
    steps = [line["step"] for line in found or []]
    if steps == due:
        return None
    if not text:
        cause = "rank 0 writes the lines to `path`"
    elif not found:
        cause = 'each line is a JSON object of its own, such as {"step": 10, "loss": 0.25}; json.dumps makes it'
        cause = "a line ends with a newline, and json.dump writes none" if "}{" in text else cause
    elif steps == due[-1:]:
        cause = 'mode "w" empties the file each time it is opened; open it once, or with "a"'
    elif len(steps) > len(due) and sorted(set(steps)) == due:
        cause = "lines are there more than once: every rank writes; let rank 0 write alone"
    elif steps in ([step - 1 for step in due], [step - step % due[0] for step in due]) or steps[:1] == [0]:
        cause = "steps count from 1 here; the first line is due after step `every`"
    elif set(due) < set(steps):
        cause = f"only every {due[0]}th step has a line; the steps after the last one have none"
    else:
        cause = f"after the steps {due[0]}, {due[1]}, ... a line is due, and at no other"
    first = text.splitlines()[0][:60] if text else "no file, or an empty one"
    return Fault(
        f"lines for the steps {due}", f"lines for the steps {short(steps, 8)}" if found else first, cause=cause
    )


def there(seen: Seen) -> dict[int, float]:
    """Return the losses of the lines that stand where one is due."""
    return {line["step"]: line["loss"] for line in seen.case.lines() or [] if line["step"] in seen.case.due}


def each_line(loss_of: Callable[[list, list], float]) -> Callable[[Seen], list[float]]:
    """Return what gives the loss of each line, from every rank's steps since the line before, and all so far."""

    def losses(seen: Seen) -> list[float]:
        every, steps = seen.case.every, seen.case.steps
        due = there(seen) or seen.case.due
        return [loss_of([rank[at - every : at] for rank in steps], [rank[:at] for rank in steps]) for at in due]

    return losses


def weighted(*parts: list[Step]) -> float:
    """Return the loss over all rows of these steps."""
    steps = sum(parts, [])
    return sum(loss * rows for loss, rows in steps) / sum(rows for _, rows in steps)


def mean(values: Iterable[float]) -> float:
    """Return the plain mean."""
    values = list(values)
    return sum(values) / len(values)


WEIGH = "steps and ranks have different numbers of rows; weigh each loss by its rows"
SLIPS = {
    "this is the loss of rank 0's rows alone; reduce sums and counts over all ranks": lambda new, _: weighted(new[0]),
    f"this is the mean of the ranks' means; {WEIGH}": lambda new, _: mean(map(weighted, new)),
    f"this is the plain mean of the losses; {WEIGH}": lambda new, _: mean(loss for part in new for loss, _ in part),
    "this is the last step alone; the line is about all steps since the line before": lambda new, _: weighted(
        *(part[-1:] for part in new)
    ),
    "this is the last step alone, and without weights": lambda new, _: mean(part[-1][0] for part in new),
    "this is rank 0's loss in the last step alone": lambda new, _: new[0][-1][0],
    "steps before the last line are counted again; start from zero after each line": lambda _, old: weighted(*old),
    "a loss is a mean already; multiply it by its rows before adding": lambda new, _: (
        sum(loss for part in new for loss, _ in part) / sum(rows for part in new for _, rows in part)
    ),
    "the sum of all ranks is divided by rank 0's count; reduce the counts too": lambda new, _: (
        sum(loss * rows for part in new for loss, rows in part) / sum(rows for _, rows in new[0])
    ),
}
OTHERWISE = "divide the sum of loss * rows by the sum of rows, over all ranks, since the line before"
loss = equals(
    "the losses of the lines",
    each_line(lambda new, _: weighted(*new)),
    lambda seen: ((cause, each_line(slip)(seen)) for cause, slip in SLIPS.items()),
    lambda seen, found: OTHERWISE if found else ELSEWHERE,
    of=lambda seen: list(there(seen).values()),
    tolerance=SAME,
)


def writer(seen: Seen) -> Fault | None:
    """Rank 0 opens the file, and no other rank opens any."""
    name = os.path.basename(seen.case.path)
    if name in seen["opened"] if seen.rank == 0 else not seen["opened"]:
        return None
    cause = "one writer: rank 0 alone opens the file; ranks that share a file write over each other"
    expected = "no file opened by this rank" if seen.rank else "rank 0 opens `path`"
    found = f"it opens {', '.join(seen['opened']) or 'no file'}"
    return Fault(expected, found, seen.rank, cause if seen.rank else "rank 0 writes the lines")


def quiet(seen: Seen) -> Fault | None:
    """Between two lines there is neither talk nor read; for a line, a little."""
    due, marks = seen.case.due, seen["marks"]
    talks = [after[0] - before[0] for before, after in zip(marks, marks[1:], strict=False)]
    if not any(talks):
        return Fault("talk when a line is due", "no collective", seen.rank, "the ranks never talked; reduce the sums")
    for step, count in enumerate(talks, start=1):
        if count and step not in due:
            cause = "reduce on all ranks, in every `every`-th step only; between two lines, add up on each rank"
            return Fault(f"collectives in the steps {due} only", f"{count} in step {step}", seen.rank, cause)
        if count > MOST_TALKS:
            cause = "put sum and count into one tensor"
            return Fault(f"at most {MOST_TALKS} collectives for a line", f"{count} in step {step}", seen.rank, cause)
    early = next((step for step in seen["reads"] if step % seen.case.every), None)
    return early and Fault(f"losses are read in the steps {due} only", f"one is read in step {early}", seen.rank, READ)


def at_once(seen: Seen) -> Fault | None:
    """Each line is in the file before the next step is taken."""
    marks, steps = seen["marks"], [line["step"] for line in seen.case.lines() or []]
    late = (step for step in seen.case.due if len(marks) <= step or marks[step][1] <= marks[step - 1][1])
    if (step := next(late, None)) is None:
        return None
    cause = "a job that dies keeps what it has written: write when the line is due, and flush() or close the file"
    found = f"{marks[step][1] if len(marks) > step else 0} bytes, as before it"
    expected = f"a longer file after step {step}, before the next step is taken"
    return Fault(expected, found, 0, cause if step in steps or not steps else ELSEWHERE)


WRITER = exercise(
    "09.2",
    "One writer",
    "write_log",
    20,
    act=act,
    rounds=rounds,
    within=tempfile.TemporaryDirectory,
    checks={
        "lines": ("the file has one JSON line for every k-th step", 1, once(lines), "one two"),
        "loss": ("the loss is that of all rows since the line before", 2, once(loss), "one two"),
        "writer": ("rank 0 alone opens the file", 1, writer, "one two"),
        "quiet": ("the ranks talk, and read a loss, only when a line is due", 1, quiet, "one two"),
        "at_once": ("each line is in the file before the next step", 1, once(at_once), "one two"),
    },
    hints={
        r"not JSON serializable": "JSON knows numbers, not tensors; make a float of the loss with .item()",
        r"raised TypeError.*(subscriptable|len\(\))|has no len": "`steps` comes while training goes on, and has no "
        "length; go through it with a for loop",
        **SKIPPED,
    },
)
