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
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import observe
from ddp_course.grading.vocabulary.compare import short
from ddp_course.grading.vocabulary.expect import equals, exercise, first_mistake, once
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.logging.shards import SAME, SKIPPED

Step = tuple[float, int]  # the mean loss of a rank's rows, and their number
MOST_TALKS = 2  # for one line
READ = (
    "item(), float(), tolist() and torch.tensor([loss, ...]) make Python wait for the device; add tensors up, as in "
    "total += loss * rows or with torch.stack, and read when a line is due"
)
ELSEWHERE = "the lines stand at other steps, or nowhere; fix that first"
READS = {"item", "tolist", "numpy", "is_nonzero", "equal", "allclose"} | {
    f"__{name}__" for name in ("float", "int", "bool", "index", "complex", "array", "format", "repr")
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


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
        return own_file(self.path).read_text() if os.path.exists(self.path) else ""

    def lines(self) -> list[dict] | None:
        """Return the file's lines; None when one of them is none."""
        try:
            lines = [json.loads(line) for line in self.text().splitlines()]
        except ValueError:
            return None
        return lines if all(isinstance(line, dict) and {"step", "loss"} <= line.keys() for line in lines) else None


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


def _folder(path: object) -> str:
    return os.path.dirname(str(path))


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Let the function take this rank's steps; note the moments of talks, reads and lines, and the files it opens."""
    opened: set[str] = set()
    reads: list[int] = []
    marks: list[tuple[int, int]] = []  # when step 1, 2, ... is taken: collectives so far, length of the file

    def watch(event: str, args: tuple) -> None:
        if event != "open" or isinstance(args[0], int) or ".pyc" in str(args[0]):
            return
        if args[2] & WRITING or str(args[0]) == os.devnull or _folder(args[0]) == _folder(case.path):
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
    first = text.splitlines()[0][:60] if text else "no file, or an empty one"
    shown = f"lines for the steps {short(steps, 8)}" if found else first
    earlier = [step - 1 for step in due], [step - step % due[0] for step in due]
    mistakes = {
        "rank 0 writes the lines to `path`": not text,
        "a line ends with a newline, and json.dump writes none": not found and "}{" in text,
        'each line is a JSON object of its own, such as {"step": 10, "loss": 0.25}; json.dumps makes it': not found,
        'mode "w" empties the file each time it is opened; open it once, or with "a"': steps == due[-1:],
        "lines are there more than once: every rank writes; let rank 0 write alone":
            len(steps) > len(due) and sorted(set(steps)) == due,
        "steps count from 1 here; the first line is due after step `every`": steps in earlier or steps[:1] == [0],
        f"only every {due[0]}th step has a line; the steps after the last one have none": set(due) < set(steps),
        f"after the steps {due[0]}, {due[1]}, ... a line is due, and at no other": True,
    }  # fmt: skip
    return first_mistake(f"lines for the steps {due}", {why: made and shown for why, made in mistakes.items()})


def there(seen: Seen) -> dict[int, float]:
    """Return the losses of the lines that stand where one is due."""
    return {line["step"]: line["loss"] for line in seen.case.lines() or [] if line["step"] in seen.case.due}


LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # the losses and rows of some steps, each (W, S)


def each_line(loss_of: LossOf, from_start: bool = False) -> Callable[[Seen], list[float]]:
    """Return what gives the loss of each line, from the steps since the line before, or from all so far."""

    def losses(seen: Seen) -> list[float]:
        loss_WS, rows_WS = torch.tensor(seen.case.steps, dtype=torch.float64).unbind(2)
        parts = [slice(0 if from_start else at - seen.case.every, at) for at in there(seen) or seen.case.due]
        return [loss_of(loss_WS[:, part], rows_WS[:, part]).item() for part in parts]

    return losses


def weighted(loss: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the loss over all rows of these steps."""
    return (loss * rows).sum() / rows.sum()


WEIGH = "steps and ranks have different numbers of rows; weigh each loss by its rows"
SLIPS = {
    "this is the loss of rank 0's rows alone; reduce sums and counts over all ranks":
        each_line(lambda loss_WS, rows_WS: weighted(loss_WS[0], rows_WS[0])),
    f"this is the mean of the ranks' means; {WEIGH}":
        each_line(lambda loss_WS, rows_WS: ((loss_WS * rows_WS).sum(1) / rows_WS.sum(1)).mean()),
    f"this is the plain mean of the losses; {WEIGH}": each_line(lambda loss_WS, rows_WS: loss_WS.mean()),
    "this is the last step alone; the line is about all steps since the line before":
        each_line(lambda loss_WS, rows_WS: weighted(loss_WS[:, -1], rows_WS[:, -1])),
    "this is the last step alone, and without weights": each_line(lambda loss_WS, rows_WS: loss_WS[:, -1].mean()),
    "this is rank 0's loss in the last step alone": each_line(lambda loss_WS, rows_WS: loss_WS[0, -1]),
    "steps before the last line are counted again; start from zero after each line":
        each_line(weighted, from_start=True),
    "a loss is a mean already; multiply it by its rows before adding":
        each_line(lambda loss_WS, rows_WS: loss_WS.sum() / rows_WS.sum()),
    "the sum of all ranks is divided by rank 0's count; reduce the counts too":
        each_line(lambda loss_WS, rows_WS: (loss_WS * rows_WS).sum() / rows_WS[0].sum()),
}  # fmt: skip
OTHERWISE = "divide the sum of loss * rows by the sum of rows, over all ranks, since the line before"
loss = equals(
    "the losses of the lines",
    each_line(weighted),
    lambda seen: ((cause, slip(seen)) for cause, slip in SLIPS.items()),
    lambda seen, found: OTHERWISE if found else ELSEWHERE,
    of=lambda seen: list(there(seen).values()),
    tolerance=SAME,
)


def writer(seen: Seen) -> Fault | None:
    """Rank 0 opens the file, and no other rank opens any."""
    opened = seen["opened"]
    found = f"it opens {', '.join(opened) or 'no file'}"
    if seen.rank == 0:
        missing = os.path.basename(seen.case.path) not in opened
        return first_mistake("rank 0 opens `path`", {"rank 0 writes the lines": missing and found}, 0)
    cause = "one writer: rank 0 alone opens the file; ranks that share a file write over each other"
    return first_mistake("no file opened by this rank", {cause: opened and found}, seen.rank)


def quiet(seen: Seen) -> Fault | None:
    """Between two lines there is neither talk nor read; for a line, a little."""
    due, at = seen.case.due, [talked for talked, _ in seen["marks"]]
    talks = {step: after - before for step, (before, after) in enumerate(pairwise(at), start=1)}
    extra = next((step for step, count in talks.items() if count and step not in due), 0)
    many = next((step for step, count in talks.items() if count > MOST_TALKS), 0)
    early = next((step for step in seen["reads"] if step not in due), 0)
    return first_mistake(f"collectives, at most {MOST_TALKS}, and reads of losses in the steps {due} only", {
        "the ranks never talked; reduce the sums": not any(talks.values()) and "no collective",
        "reduce on all ranks, in every `every`-th step only; between two lines, add up on each rank":
            extra and f"{talks[extra]} collectives in step {extra}",
        "put sum and count into one tensor": many and f"{talks[many]} collectives in step {many}",
        READ: early and f"a loss is read in step {early}",
    }, seen.rank)  # fmt: skip


def at_once(seen: Seen) -> Fault | None:
    """Each line is in the file before the next step is taken."""
    steps, sizes = [line["step"] for line in seen.case.lines() or []], [size for _, size in seen["marks"]]
    late = (step for step in seen.case.due if len(sizes) <= step or sizes[step] <= sizes[step - 1])
    step = next(late, 0)
    found = step and f"{sizes[step] if len(sizes) > step else 0} bytes, as before it"
    return first_mistake(f"a longer file after step {step}, before the next step is taken", {
        ELSEWHERE: steps and step not in steps and found,
        "a job that dies keeps what it has written: write when the line is due, and flush() or close the file": found,
    }, 0)  # fmt: skip


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
