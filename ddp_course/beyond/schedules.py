"""In which order does a stage of a pipeline work, and how long does it wait?

A stage does a forward and a backward pass for each micro-batch. The order of these passes is all that tells the
schedules apart. GPipe does all forward passes first. 1F1B turns back as soon as it can: stages wait as long, but keep
fewer activations. Here the passes are laid out in ticks, and the waiting is counted.

Left out on purpose: times. A backward pass takes about twice a forward's, and a message takes time too.
Read next: `programs/train_parallel.py`, which runs such an order on ranks.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Pass(NamedTuple):
    """One pass of one micro-batch through a stage."""

    kind: str  # "forward" or "backward"
    micro: int  # which micro-batch


def gpipe_order(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """All forward passes, then all backward passes. A stage keeps the activations of all micro-batches.

    Source: Huang et al. 2019 (arXiv 1811.06965).
    """
    return [Pass(kind, micro) for kind in ("forward", "backward") for micro in range(micro_batches)]


def one_f_one_b_order(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Forward until the pipeline is full, then one backward for each forward. A stage keeps at most stages - stage.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
    """
    ahead = min(stages - stage - 1, micro_batches)
    forward = deque(Pass("forward", micro) for micro in range(micro_batches))
    backward = deque(Pass("backward", micro) for micro in range(micro_batches))
    order = [forward.popleft() for _ in range(ahead)]
    while backward:
        order += [forward.popleft()] if forward else []
        order.append(backward.popleft())
    return order


ORDERS = {"gpipe": gpipe_order, "1f1b": one_f_one_b_order}


def timetable(schedule: str, stages: int, micro_batches: int) -> list[list[Pass | None]]:
    """Return for each stage what it does in each tick, None where it waits; each pass takes one tick.

    A pass starts when its stage is free and what it needs was computed in an earlier tick: a forward by the stage
    before, a backward by the stage after.
    """
    todo = [deque(ORDERS[schedule](stage, stages, micro_batches)) for stage in range(stages)]
    done: set[tuple[int, Pass]] = set()
    table: list[list[Pass | None]] = [[] for _ in range(stages)]
    while any(todo):
        ready = [bool(todo[stage]) and _needs(stage, todo[stage][0], stages) <= done for stage in range(stages)]
        for stage in range(stages):
            table[stage].append(todo[stage].popleft() if ready[stage] else None)
        done |= {(stage, row[-1]) for stage, row in enumerate(table) if row[-1]}
    return table


def _needs(stage: int, step: Pass, stages: int) -> set[tuple[int, Pass]]:
    neighbour = stage - 1 if step.kind == "forward" else stage + 1
    return {(neighbour, step)} if 0 <= neighbour < stages else set()


def bubble(schedule: str, stages: int, micro_batches: int) -> float:
    """Return the share of the ticks in which a stage waits, counted in the timetable: (S-1) / (M+S-1)."""
    table = timetable(schedule, stages, micro_batches)
    return sum(step is None for row in table for step in row) / sum(map(len, table))
