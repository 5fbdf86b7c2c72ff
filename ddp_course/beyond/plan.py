"""Which strategy fits this model into these GPUs, and why?

`plan` works out each strategy's memory with `memory.py`, and what a rank sends in a step. Of those that fit, it takes
the simplest. Where none fits, it tries changes one by one, and says which would help.

A GB is 10^9 bytes here. A tenth of the GPU's memory is left free, for what the arithmetic does not count.

Left out on purpose: time. Which of two strategies that fit is faster depends on the links: see `scaling/simulate.py`.
Read next: `commands/plan.py`, which asks from a terminal; lesson 17, notebooks/17_sharding.ipynb.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

from ddp_course.beyond.activations import Unit
from ddp_course.beyond.memory import PRECISIONS, Memory, Strategy
from ddp_course.beyond.options import FREE, Option, Question, options

__all__ = ["Plan", "in_torch", "plan", "to_bytes", "to_count"]

GB = 1e9
UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
COUNTS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
WIDEST = 98  # letters of a line of advice, so that a notebook does not cut it
TIMES = (2, 4, 8, 16, 32, 64)  # as many GPUs, when looking for how many would do


@dataclass(frozen=True)
class Plan:
    """The answer: all options, the one to take, the reasons, and what to change if nothing fits."""

    question: Question
    options: tuple[Option, ...]
    recommended: Option | None
    reasons: str
    changes: tuple[str, ...]

    def __getitem__(self, name: str) -> Option:
        for option in self.options:
            if option.name == name:
                return option
        raise KeyError(f"no strategy {name!r} in this plan; it has {', '.join(each.name for each in self.options)}")

    def __str__(self) -> str:
        return "\n".join([_heading(self.question), "", *_table(self), "", *_communication(self), "", *_advice(self)])


def plan(
    params: float | str | None = None,
    gpus: int = 1,
    gpu_memory: float | str = "80GB",
    *,
    units: Sequence[Unit] | None = None,
    **more: Any,
) -> Plan:
    """Say which strategies fit, and which to take.

    Args:
        params: parameters of a transformer, as 7e9 or "7B"; its shape is guessed without `layers` and `hidden`.
        gpus: GPUs in all.
        gpu_memory: of one GPU, in bytes or as "80GB".
        units: a model of yours as `counted` gives it, instead of a transformer.
        more: `layers`, `hidden`, `vocabulary`: the shape. `sequence`, `local_batch`: tokens in a row, and rows of one
            replica of the model (of one micro-batch in a pipeline). `precision`, `optimizer`, `loop`, `bucket_view`:
            as `memory_of` takes them. `checkpointing`: blocks compute their activations again in backward. `nodes`:
            machines the GPUs are in.
    Raises:
        ValueError: a figure makes no sense; the sentence says which, and what would.
    """
    count = to_count(params) if isinstance(params, str) else params
    size = to_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
    question = Question(count, gpus, size, given=None if units is None else tuple(units), **more)
    tried = tuple(options(question))
    best = _simplest(tried)
    changes = () if best else tuple(_changes(question))
    return Plan(question, tried, best, _reasons(tried, best, question), changes)


def to_bytes(text: str) -> float:
    """Read "80GB" or "40 GiB"; a bare number is refused, since nobody knows its unit."""
    found = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([a-zA-Z]+)\s*", text)
    if not found or found[2].upper() not in UNITS or not _is_number(found[1]):
        raise ValueError(f"{text!r} is no size of memory: write a number and its unit, as 80GB or 40GiB")
    return float(found[1]) * UNITS[found[2].upper()]


def to_count(text: str) -> float:
    """Read "7e9", "7B" or "124M"."""
    found = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kKmMbBtT]?)\s*", text)
    if not found or not _is_number(found[1]):
        raise ValueError(f"{text!r} is no number of parameters: write it as 7e9, 7B or 124M")
    return float(found[1]) * COUNTS[found[2].upper()]


def _is_number(text: str) -> bool:
    try:
        return float(text) < float("inf")
    except ValueError:
        return False


def _simplest(tried: Sequence[Option]) -> Option | None:
    # DataParallel is in the table for comparison. DDP is better in each respect, and is there wherever it is.
    return next((each for each in tried if each.fits and not each.strategy.replicas_in_one_process), None)


def _reasons(tried: Sequence[Option], best: Option | None, question: Question) -> str:
    if best is None:
        least = min(tried, key=lambda each: each.memory.total)
        need = f"{least.name} comes closest with {_gb(least.memory.total)}, of which {_largest(least.memory)}"
        return f"Nothing fits into {_gb(question.usable)}. {need}."
    said = f"Take {best.name}: {_gb(best.memory.total)} of the {_gb(question.usable)} that may be filled."
    ddp = next((each for each in tried if each.name == "DDP"), None)
    if ddp is best:
        return said + " The whole model fits on each GPU, so nothing more is needed."
    if ddp is None:
        return said
    return f"{said} DDP would need {_gb(ddp.memory.total)}, of which {_largest(ddp.memory)}."


def _largest(memory: Memory) -> str:
    name, size = max(memory.parts().items(), key=lambda part: part[1])
    return f"{_gb(size)} {'is' if name == 'state' else 'are'} {name if name != 'temporary' else 'temporary tensors'}"


def _changes(question: Question) -> Iterator[str]:
    """Yield sentences about one change each, after which something fits."""
    found = False
    for words, change in _tries(question):
        changed = replace(question, **change)
        other = _simplest(options(changed))
        if other is not None:
            found = True
            yield f"{words}: then {other.name} fits, with {_gb(other.memory.total)}."
    for times in TIMES:
        more = replace(question, gpus=question.gpus * times, nodes=question.nodes * times)
        other = _simplest(options(more))
        if other is not None:
            found = True
            yield f"Take {more.gpus} such GPUs, on {more.nodes} nodes: then {other.name} fits."
            break
    if not found:
        yield "No single change is enough. Take several: recompute activations, fewer tokens, more GPUs."


def _tries(question: Question) -> list[tuple[str, dict[str, Any]]]:
    tries: list[tuple[str, dict[str, Any]]] = []
    if question.given is None:
        rows, tokens = question.local_batch // 2, question.sequence // 2
        if not question.checkpointing:
            tries.append(("Recompute activations (--checkpointing)", {"checkpointing": True}))
        if rows:
            tries.append((f"Halve the rows (--local-batch {rows})", {"local_batch": rows}))
        if tokens:
            tries.append((f"Halve the rows' length (--sequence {tokens})", {"sequence": tokens}))
    if question.optimizer == "adamw":
        tries.append(("An optimizer with less state (--optimizer momentum)", {"optimizer": "momentum"}))
    if question.loop == "foreach":
        tries.append(("An optimizer that needs no room to work (--loop fused)", {"loop": "fused"}))
    return tries


# --- Text --------------------------------------------------------------------------------------------


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB" if size >= 0.05 * GB else f"{size / 1e6:.3g} MB"


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _heading(question: Question) -> str:
    count = _count(sum(unit.parameters for unit in question.units()))
    many = f"{question.gpus} GPU{'s' * (question.gpus > 1)} of {_gb(question.gpu_memory)}"
    where = f"{many} on {question.nodes} node{'s' * (question.nodes > 1)}"
    how = f"{question.precision} ({PRECISIONS[question.precision].says}), {question.optimizer}"
    if question.given is not None:
        return f"{count} parameters, as counted, on {where}\n{how}"
    layers, hidden = question.shape()
    guessed = "" if question.layers else ", a guess: --layers and --hidden set it"
    tokens = f"{question.local_batch} x {question.sequence} tokens for each replica"
    recomputed = ", activations recomputed" if question.checkpointing else ""
    shape = f"{layers} layers, {hidden} wide{guessed}"
    return f"{count} parameters ({shape})\non {where}, {tokens}{recomputed}\n{how}"


def _table(answer: Plan) -> list[str]:
    heads = ("param.", "grad.", "state", "activ.", "bucket", "temp.")
    width = max(len(option.name) for option in answer.options)
    unit, size = ("GB", GB) if answer.question.usable >= GB else ("MB", 1e6)
    lines = [f"{unit + ' a GPU':{width}} {' '.join(f'{head:>6}' for head in heads)} {'sum':>7}  fits  fullest in"]
    for option in answer.options:
        parts = " ".join(f"{part / size:6.1f}" for part in option.memory.parts().values())
        verdict = "yes" if option.fits else "no"
        total = option.memory.total / size
        lines.append(f"{option.name:{width}} {parts} {total:7.1f}  {verdict:4}  {option.memory.moment}")
    limit = answer.question.usable / size
    lines.append(f"At most {limit:.1f} {unit} may be filled; {FREE:.0%} stays free for what is not counted.")
    return lines


def _communication(answer: Plan) -> list[str]:
    width = max(len(option.name) for option in answer.options)
    lines = [f"{'a step':{width}} {'rows':>6}  a rank sends"]
    for option in answer.options:
        sent = ", ".join(f"{_gb(size)} {what}" for what, size in option.sends.items()) or "nothing"
        waits = f"; a stage waits {option.bubble:.0%}" if option.bubble else ""
        lines.append(f"{option.name:{width}} {option.rows:6}  {sent}{waits}")
    return lines


def _advice(answer: Plan) -> list[str]:
    best = answer.recommended
    made = [f"In torch: {in_torch(best.strategy)}."] if best else []
    said = [answer.reasons, *made, *(f"- {change}" for change in answer.changes)]
    return [line for each in said for line in wrap(each, WIDEST)]


def in_torch(strategy: Strategy) -> str:
    """Say with what a strategy is made in torch."""
    over_data = (
        "DistributedDataParallel",
        "DistributedDataParallel, with the optimizer in a ZeroRedundancyOptimizer (no longer maintained)",
        "fully_shard(..., reshard_after_forward=False)",
        "fully_shard on each block, then on the model",
    )
    ways = [over_data[strategy.divided]] if strategy.data > 1 else []
    ways += ["parallelize_module inside each node"] * (strategy.tensor > 1)
    ways += ["torch.distributed.pipelining with Schedule1F1B"] * (strategy.stages > 1)
    return ", ".join(ways) or "nothing but a training loop"
