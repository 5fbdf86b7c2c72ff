"""What does each strategy make of a rank's memory, and when is which one right?

Left out on purpose: the arithmetic itself, which is in `beyond/memory.py`.
Read next: lesson 17, notebooks/17_sharding.ipynb.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddp_course.draw.charts import page
from ddp_course.draw.shapes import canvas, finding, label
from ddp_course.draw.style import (
    ALARM,
    FAINT,
    HEADING,
    INK,
    LABEL,
    LINE,
    MUTED,
    PAPER,
    RANK_COLOURS,
    SMALL,
    rank_colour,
    tint,
)

# One colour for each part, in the order in which the bars stack them.
PARTS = dict(
    zip(("parameters", "gradients", "state", "activations", "buckets", "temporary"), RANK_COLOURS, strict=False)
)
SIZES = {"GB": 1e9, "MB": 1e6}
STRATEGIES = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP (ZeRO-3)", "tensor parallel", "pipeline")
COMPUTING = "parameters while the first layer computes"
PHASES = {"": "zero_grad", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}


def holdings(world_size: int = 4, strategies: Sequence[str] = STRATEGIES) -> Figure:
    """What rank 0 holds under each strategy, between two steps and while its first layer computes."""
    kinds = ("parameters", "gradients", "state", COMPUTING)
    figure, ax = canvas(4.0)
    width, row, layers = 6.48 / len(strategies) - 0.1, 0.64, 4
    for column, strategy in enumerate(strategies):
        left = 1.5 + column * (width + 0.1)
        label(ax, left + width / 2, 3.72, strategy.replace(" ", "\n"), bold=True, size=SMALL)
        for line, kind in enumerate(kinds):
            bottom = 2.75 - line * 0.82
            if not column:
                label(
                    ax,
                    0.1,
                    bottom + row / 2,
                    kind.replace("while ", "while\n").replace("layer ", "layer\n"),
                    align="left",
                    size=SMALL,
                )
            for layer in range(layers):
                for part in range(world_size):
                    # A layer is a bar; its parts are what a strategy can divide.
                    x, y = left + part * width / world_size, bottom + (layers - 1 - layer) * 0.17
                    face = _shade(strategy, kind, layer, part)
                    ax.add_patch(Rectangle((x, y), width / world_size, 0.14, facecolor=face, edgecolor=LINE, lw=0.6))
    key = f"rank 0 of {world_size}; a bar is a layer; light: gathered for a moment"
    label(ax, 0.1, 0.12, key, align="left", size=SMALL, ink=MUTED)
    if "tensor parallel" in strategies:
        finding(ax, "FSDP and tensor parallel keep the same share; FSDP makes a layer whole to compute")
    else:
        finding(ax, "Each stage of ZeRO divides one part more among the ranks")
    return figure


def _shade(strategy: str, kind: str, layer: int, part: int) -> tuple[float, float, float] | str:
    computing = kind == COMPUTING
    colour = PARTS["parameters" if computing else kind]
    if _held(strategy, "parameters" if computing else kind, layer, part):
        return tint(colour, 0.75)
    gathered = computing and strategy.startswith("FSDP") and layer == 0
    return tint(colour, 0.28) if gathered else PAPER


def _held(strategy: str, kind: str, layer: int, part: int) -> bool:
    """Whether rank 0 holds this part of this layer between two steps."""
    if strategy == "ZeRO-1":
        return kind != "state" or part == 0
    if strategy == "ZeRO-2":
        return kind == "parameters" or part == 0
    if strategy == "pipeline":
        return layer == 0
    return strategy == "DDP" or part == 0


def live_bytes(histories: Mapping[str, Sequence[tuple[str, int]]], parameters: int, title: str) -> Figure:
    """The bytes alive after each operation of one step, one panel for each strategy, with the phases named.

    Args:
        histories: for each name, phase and bytes after each operation, as `LiveBytes.history` has them.
        parameters: how many the model has; the axis has bytes for each of them.
        title: what is to be seen.
    """
    figure = page(2.85)
    panels = figure.subplots(1, len(histories), sharey=True, squeeze=False)[0]
    top = max(count for history in histories.values() for _, count in history) / parameters
    for ax, (name, history) in zip(panels, histories.items(), strict=True):
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(colors=MUTED, labelsize=SMALL)
        places, alive = range(len(history)), [count / parameters for _, count in history]
        ax.fill_between(places, alive, step="post", color=FAINT)
        ax.step(places, alive, where="post", color=INK, lw=1)
        _phases(ax, [phase for phase, _ in history], top)
        fullest = alive.index(max(alive))
        ax.plot(fullest, alive[fullest], "o", ms=4.5, color=ALARM)
        ax.text(
            fullest + 0.025 * len(alive), 1.02 * alive[fullest], f"{alive[fullest]:.0f}", fontsize=SMALL, color=ALARM
        )
        ax.set(xlim=(0, len(history)), ylim=(0, top * 1.22), xticks=[])
        ax.set_xlabel(f"operations of one step: {name}", fontsize=SMALL)
    panels[0].set_ylabel("bytes alive per parameter", fontsize=LABEL)
    figure.suptitle(title, x=0.01, ha="left", fontsize=HEADING, color=INK, weight="bold")
    return figure


def _phases(ax: Axes, phases: Sequence[str], top: float) -> None:
    start = 0
    for phase, group in groupby(phases):
        length = len(list(group))
        if length > 0.1 * len(phases):  # what is too narrow for its name goes without
            last = start + length == len(phases)  # its name would not fit if it stood in the middle
            x, align = (len(phases), "right") if last else (start + length / 2, "center")
            ax.text(x, top * 1.13, PHASES[phase], ha=align, fontsize=SMALL - 1, color=MUTED)
        if start:
            ax.axvline(start, ymax=0.88, color=LINE, lw=0.8, ls=":")  # below the names
        start += length


def pipeline_passes(tables: Mapping[str, Sequence[Sequence[tuple[str, int] | None]]]) -> Figure:
    """What each stage of a pipeline does in each tick; white is the bubble. A number is a micro-batch.

    Args:
        tables: for each name, one row per stage, with (kind, micro-batch) or None in each tick.
    """
    ticks = max(len(row) for table in tables.values() for row in table)
    stages = max(map(len, tables.values()))
    height = len(tables) * (0.32 * stages + 0.42) + 0.32
    figure, ax = canvas(height)
    cell = min(0.4, 6.7 / ticks)
    top = height - 0.2
    for name, table in tables.items():
        label(ax, 0.1, top, name, bold=True, align="left", size=SMALL)
        for stage, row in enumerate(table):
            y = top - 0.42 - 0.32 * stage
            label(ax, 0.1, y + 0.13, f"stage {stage}", align="left", size=SMALL)
            for tick, step in enumerate(row):
                _pass(ax, 0.95 + tick * cell, y, cell, stage, step)
        top -= 0.32 * len(table) + 0.42
    meaning = "time runs to the right; number: micro-batch; light: forward; dark: backward; white: the stage waits"
    label(ax, 0.1, 0.15, meaning, align="left", size=SMALL, ink=MUTED)
    finding(ax, _what_passes_show(tables))
    return figure


def _what_passes_show(tables: Mapping[str, Sequence[Sequence[tuple[str, int] | None]]]) -> str:
    waits, kept = [], []
    for table in tables.values():
        waits.append(f"{sum(step is None for row in table for step in row) / sum(map(len, table)):.0%}")
        passes = [1 if step[0] == "forward" else -1 for step in table[0] if step]
        kept.append(str(max(accumulate(passes))))
    names, shares = " and ".join(tables), " and ".join(dict.fromkeys(waits))
    return f"{names} wait {shares} of the time; stage 0 keeps {' and '.join(kept)} micro-batches"


def _pass(ax: Axes, x: float, y: float, cell: float, stage: int, step: tuple[str, int] | None) -> None:
    colour = rank_colour(stage)
    face, edge = PAPER, FAINT
    if step is not None:
        face, edge = tint(colour, 0.6 if step[0] == "backward" else 0.18), colour
        label(ax, x + cell * 0.47, y + 0.125, str(step[1]), size=SMALL - 1)
    ax.add_patch(Rectangle((x, y), cell * 0.94, 0.26, facecolor=face, edgecolor=edge, lw=0.8))
