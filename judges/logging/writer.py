"""09.2 `write_log(rank, world_size, steps, every, path)`: one writer, the loss of all rows, and talk only when due.

The steps come from a generator of the grader's. Each time the answer takes one, it notes how many collectives there
were, and how long the file is. Python's audit events tell who opens a file, in whatever way.
Read `shards.py` first. Read next: `evaluate.py`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest import mock

import torch

from ddp_course.grading import observe
from ddp_course.grading.compare import close, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.logging.shards import SAME, SKIPPED, Guess, guessed

Step = tuple[float, int]  # the mean loss of a rank's rows, and their number
MOST_TALKS = 2  # for one line
TALK = "reduce on all ranks, in every `every`-th step only; between two lines, add up on each rank"
READ = (
    "item(), float(), tolist() and torch.tensor([loss, ...]) make Python wait for the device; add tensors up, as in "
    "total += loss * rows or with torch.stack, and read when a line is due"
)
ELSEWHERE = "the lines stand at other steps; mend that first"
READS = {"item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "__format__"}


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


def write_driver(
    rank: int, world_size: int, function: Callable, steps: list[list[Step]], every: int, path: str
) -> dict:
    """Let the function take this rank's steps; note the moments of talks, reads and lines, and the files it opens."""
    opened: list[str] = []
    reads: list[int] = []
    marks: list[tuple[int, int]] = []  # when step 1, 2, ... is taken: collectives so far, length of the file

    def watch(event: str, args: tuple) -> None:
        if (
            event == "open"
            and isinstance(args[0], str | os.PathLike)
            and str(args[0]).startswith(str(Path(path).parent))
        ):
            opened.append(Path(args[0]).name)

    def taken() -> Iterator[tuple[torch.Tensor, int]]:
        for loss, rows in steps[rank]:
            marks.append((_talks(seen), os.path.getsize(path) if os.path.exists(path) else 0))
            yield torch.as_tensor(loss).as_subclass(Watched), rows
        marks.append((_talks(seen), os.path.getsize(path) if os.path.exists(path) else 0))

    sys.addaudithook(watch)
    Watched.on_read = staticmethod(lambda: reads.append(len(marks)))
    with observe.Collectives() as seen, tensor_watched():
        function(rank, world_size, taken(), every, path)
    return {"opened": sorted(set(opened)), "reads": reads, "marks": marks}


def _talks(seen: observe.Collectives) -> int:
    return sum(call.op != "barrier" for call in seen.calls)


def write_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Train twice, with two world sizes; look at the file, and at what each rank did meanwhile."""
    found: dict[str, list[Fault | None]] = {key: [] for key in ("lines", "loss", "writer", "quiet", "at_once")}
    for world_size in rng.sample((2, 3, 4), 2):
        every = rng.randint(3, 5)
        length = 3 * every + rng.randint(1, every - 1)  # the last steps fill no line
        steps = [_steps(rng, rank, length) for rank in range(world_size)]
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/log/train.jsonl"
            os.mkdir(f"{folder}/log")
            notes = answer.run(write_driver, world_size, steps, every, path, init=True)
            text = Path(path).read_text() if os.path.exists(path) else ""
        due = list(range(every, length + 1, every))
        lines = _read(text)
        found["lines"].append(_lines_fault(text, lines, due, world_size))
        found["loss"].append(_loss_fault(lines, steps, every, due))
        found["writer"].append(_writer_fault(notes, "train.jsonl"))
        found["quiet"].append(next(filter(None, (_quiet_fault(r, n, every, due) for r, n in enumerate(notes))), None))
        found["at_once"].append(_at_once_fault(notes[0]["marks"], lines, due))
    for key, faults in found.items():
        yield key, next(filter(None, faults), None)


def _steps(rng: Random, rank: int, length: int) -> list[Step]:
    """Each rank has rows and losses of its own size, so that ranks and steps weigh differently."""
    return [(rng.randrange(64, 640) * (rank + 1) / 256, rng.choice((2, 4, 8, 16, 32))) for _ in range(length)]


def _read(text: str) -> list[dict] | None:
    try:
        lines = [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return None
    return lines if all(isinstance(line, dict) and {"step", "loss"} <= line.keys() for line in lines) else None


def _lines_fault(text: str, lines: list[dict] | None, due: list[int], world_size: int) -> Fault | None:
    expected = f"lines for the steps {due}"
    if not text:
        return Fault(expected, "no file, or an empty one", cause="rank 0 writes the lines to `path`")
    if lines is None:
        first = text.splitlines()[0][:60]
        if "}{" in text:
            return Fault(expected, first, cause="a line ends with a newline, and json.dump writes none")
        cause = 'each line is a JSON object of its own, such as {"step": 10, "loss": 0.25}; json.dumps makes it'
        return Fault(expected, first, cause=cause)
    steps = [line["step"] for line in lines]
    if steps == due:
        return None
    if steps == due[-1:]:
        cause = 'mode "w" empties the file each time it is opened; open it once, or with "a"'
    elif len(steps) > len(due) and sorted(set(steps)) == due:
        cause = "lines are there more than once: every rank writes; let rank 0 write alone"
    elif steps == [step - 1 for step in due] or steps == [step - step % due[0] for step in due] or steps[:1] == [0]:
        cause = "steps count from 1 here; the first line is due after step `every`"
    elif set(due) < set(steps):
        cause = f"only every {due[0]}th step has a line; the steps after the last one have none"
    else:
        cause = f"after the steps {due[0]}, {due[1]}, ... a line is due, and at no other"
    return Fault(expected, f"lines for the steps {short(steps, 8)}", cause=cause)


def _loss_fault(lines: list[dict] | None, steps: list[list[Step]], every: int, due: list[int]) -> Fault | None:
    """Compare each line that is there with the rows since the line before."""
    at = {line["step"]: line["loss"] for line in lines or []}
    there = [step for step in due if step in at]
    if not there:
        return Fault(f"the loss after step {due[0]}", "no such line", cause=ELSEWHERE if at else "nothing to compare")
    for step in there:
        parts = [rank[step - every : step] for rank in steps]
        right = _weighted(sum(parts, []))
        if not close(at[step], right, SAME) or isinstance(at[step], list):
            otherwise = "divide the sum of loss * rows by the sum of rows, over all ranks, since the line before"
            if step != there[0]:  # the first line was right
                otherwise = "steps before the last line are counted again; begin anew after each line"
            if set(at) != set(due) and not set(due) < set(at):
                otherwise = ELSEWHERE
            cause = guessed(at[step], _loss_guesses(parts, [rank[:step] for rank in steps]), otherwise)
            return Fault(f"a loss of {right:.4f} in the line of step {step}", short(at[step]), 0, cause)
    return None


def _weighted(part: list[Step]) -> float:
    return sum(loss * rows for loss, rows in part) / sum(rows for _, rows in part)


def _loss_guesses(parts: list[list[Step]], so_far: list[list[Step]]) -> list[Guess]:
    last, everything = [part[-1] for part in parts], sum(parts, [])
    rows = sum(count for _, count in everything)
    weigh = "steps and ranks have different numbers of rows; weigh each loss by its rows"
    return [
        (_weighted(parts[0]), "this is the loss of rank 0's rows alone; reduce sums and counts over all ranks"),
        (sum(map(_weighted, parts)) / len(parts), f"this is the mean of the ranks' means; {weigh}"),
        (sum(loss for loss, _ in everything) / len(everything), f"this is the plain mean of the losses; {weigh}"),
        (_weighted(last), "this is the last step alone; the line is about all steps since the line before"),
        (sum(loss for loss, _ in last) / len(last), "this is the last step alone, and without weights"),
        (last[0][0], "this is rank 0's loss in the last step alone"),
        (_weighted(sum(so_far, [])), "steps before the last line are counted again; begin anew after each line"),
        (sum(loss for loss, _ in everything) / rows, "a loss is a mean already; multiply it by its rows before adding"),
        (
            sum(loss * count for loss, count in everything) / sum(count for _, count in parts[0]),
            "the sum of all ranks is divided by rank 0's count; reduce the counts too",
        ),
    ]


def _writer_fault(notes: list[dict], name: str) -> Fault | None:
    for rank, note in enumerate(notes):
        if rank and note["opened"]:
            cause = "one writer: rank 0 alone opens the file; ranks that share a file write over each other"
            return Fault("no file opened by this rank", f"it opens {', '.join(note['opened'])}", rank, cause)
    if name in notes[0]["opened"]:
        return None
    return Fault("rank 0 opens `path`", f"it opens {notes[0]['opened'] or 'no file'}", 0, "rank 0 writes the lines")


def _quiet_fault(rank: int, note: dict, every: int, due: list[int]) -> Fault | None:
    """Between two lines there is neither talk nor read; for a line, a little."""
    talks = [after[0] - before[0] for before, after in zip(note["marks"], note["marks"][1:], strict=False)]
    if not any(talks):
        return Fault("talk when a line is due", "no collective", rank, "the ranks never talked; reduce the sums")
    for step, count in enumerate(talks, start=1):
        if count and step not in due:
            return Fault(f"collectives in the steps {due} only", f"{count} in step {step}", rank, TALK)
        if count > MOST_TALKS:
            cause = "put sum and count into one tensor"
            return Fault(f"at most {MOST_TALKS} collectives for a line", f"{count} in step {step}", rank, cause)
    early = next((step for step in note["reads"] if step % every), None)
    return early and Fault(f"losses are read in the steps {due} only", f"one is read in step {early}", rank, READ)


def _at_once_fault(marks: list[tuple[int, int]], lines: list[dict] | None, due: list[int]) -> Fault | None:
    steps = [line["step"] for line in lines or []]
    for step in due:
        if len(marks) <= step or marks[step][1] <= marks[step - 1][1]:
            cause = (
                "a job that dies keeps what it has written: write when the line is due, and flush() or close the file"
            )
            cause = cause if step in steps or not steps else ELSEWHERE
            found = f"{marks[step][1] if len(marks) > step else 0} bytes, as before it"
            return Fault(f"a longer file after step {step}, before the next step is taken", found, 0, cause)
    return None


WRITER = Exercise(
    "09.2",
    "One writer",
    "write_log",
    20,
    (
        Check("lines", "the file has one JSON line for every k-th step", 1),
        Check("loss", "the loss is that of all rows since the line before", 2),
        Check("writer", "rank 0 alone opens the file", 1),
        Check("quiet", "the ranks talk, and read a loss, only when a line is due", 1),
        Check("at_once", "each line is in the file before the next step", 1),
    ),
    write_judge,
    hints=(
        (r"not JSON serializable", "JSON knows numbers, not tensors; make a float of the loss with .item()"),
        (
            r"raised TypeError.*(subscriptable|len\(\))|has no len",
            "`steps` comes while training goes on, and has no length; go through it with a for loop",
        ),
        SKIPPED,
    ),
)
