"""What does each strategy make of a rank's memory, and when is which one right?

Left out on purpose: the arithmetic itself, which is in `beyond/memory.py`.
Read next: lesson 17, notebooks/17_beyond_ddp.ipynb.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ddp_course.draw.charts import chart, legend, page
from ddp_course.draw.shapes import arrow, box, canvas, label
from ddp_course.draw.style import ALARM, FAINT, INK, LABEL, LINE, MUTED, PAPER, RANK_COLOURS, SMALL, rank_colour, tint

# One colour for each part, in the order in which the bars stack them.
PARTS = dict(
    zip(("parameters", "gradients", "state", "activations", "buckets", "temporary"), RANK_COLOURS, strict=False)
)
SIZES = {"GB": 1e9, "MB": 1e6}
PHASES = {"": "zero_grad", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}


def holdings(world_size: int = 4) -> Figure:
    """For each strategy, which parts of the model a rank holds between two steps: filled is held, white is not."""
    strategies = ("DDP", "ZeRO-1", "ZeRO-3 (FSDP)", "tensor parallel", "pipeline")
    kinds = ("parameters", "gradients", "state")
    figure, ax = canvas(3.05)
    width, row, layers = 1.24, 0.42, 4
    for column, strategy in enumerate(strategies):
        left = 1.28 + column * (width + 0.1)
        label(ax, left + width / 2, 2.85, strategy, bold=True, size=SMALL)
        for line, kind in enumerate(kinds):
            bottom = 1.95 - line * 0.82
            if not column:
                label(ax, 0.1, bottom + row / 2 + 0.12, kind, align="left", size=SMALL)
            for layer in range(layers):
                for part in range(world_size):
                    held = _held(strategy, kind, layer, part)
                    # A layer is a bar; its parts are what a strategy can deal out.
                    x, y = left + part * width / world_size, bottom + (layers - 1 - layer) * 0.17
                    face = tint(PARTS[kind], 0.75) if held else PAPER
                    ax.add_patch(Rectangle((x, y), width / world_size, 0.14, facecolor=face, edgecolor=LINE, lw=0.6))
    label(ax, 0.1, 0.13, f"rank 0 of {world_size}; four bars are four layers", align="left", size=SMALL, ink=MUTED)
    return figure


def _held(strategy: str, kind: str, layer: int, part: int) -> bool:
    """Whether rank 0 holds this part of this layer between two steps."""
    if strategy == "ZeRO-1":
        return kind != "state" or layer == 0  # whole parameters are dealt out
    if strategy == "pipeline":
        return layer == 0
    return strategy == "DDP" or part == 0


def memory_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    limit: float | None = None,
    measured: Sequence[float] | None = None,
    *,
    unit: str = "GB",
) -> Figure:
    """One stacked bar for each strategy, against what a GPU holds, with the measured peaks if there are any.

    Args:
        rows: name and bytes of each part, the first on top.
        limit: bytes that may be filled; drawn as a line.
        measured: measured bytes for each row; drawn as a mark.
        unit: "GB" or "MB", powers of ten.
    """
    size = SIZES[unit]
    figure, ax = chart(1.15 + 0.36 * len(rows))
    _stack(ax, [parts for _, parts in rows], size)
    totals = [sum(parts.values()) / size for _, parts in rows]
    longest = max(totals)
    handles = [Patch(color=tint(colour, 0.8), label=name) for name, colour in PARTS.items()]
    if limit is not None:
        handles.append(ax.axvline(limit / size, color=ALARM, lw=1.6, ls="--", label="may be filled"))
        # One strategy that needs twenty times the memory would squeeze all others to nothing.
        longest = min(longest, 3 * limit / size)
        _name_cut_bars(ax, totals, longest, unit)
    if measured is not None:
        peaks = [each / size for each in measured]
        handles += ax.plot(peaks, range(len(rows)), "|", ms=17, mew=2.4, color=INK, label="measured peak")
        longest = max(longest, *peaks)
    ax.set(xlim=(0, longest * 1.04), yticks=range(len(rows)), yticklabels=[name for name, _ in rows])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"{unit} on one rank", fontsize=LABEL)
    legend(figure, handles=handles, loc="outside upper center", ncols=4)
    return figure


def _stack(ax: Axes, bars: Sequence[Mapping[str, float]], size: float) -> None:
    for line, parts in enumerate(bars):
        left = 0.0
        for name, colour in PARTS.items():
            ax.barh(line, parts[name] / size, left=left, height=0.62, color=tint(colour, 0.8), edgecolor=PAPER, lw=0.6)
            left += parts[name] / size


def _name_cut_bars(ax: Axes, totals: Sequence[float], longest: float, unit: str) -> None:
    """Write the length of each bar that ends beyond the picture."""
    for line, total in enumerate(totals):
        if total > longest * 1.02:
            words = f"{total:.0f} {unit} →"
            ax.text(longest * 0.99, line, words, ha="right", va="center", fontsize=SMALL, color=INK)


def live_bytes(histories: Mapping[str, Sequence[tuple[str, int]]]) -> Figure:
    """The bytes alive after each operation of one step, one panel for each strategy, with the phases named.

    Args:
        histories: for each name, phase and bytes after each operation, as `measured_peak` returns them.
    """
    size = SIZES["MB"]
    figure = page(2.6)
    panels = figure.subplots(1, len(histories), sharey=True, squeeze=False)[0]
    top = max(count for history in histories.values() for _, count in history) / size
    for ax, (name, history) in zip(panels, histories.items(), strict=True):
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(colors=MUTED, labelsize=SMALL)
        places, alive = range(len(history)), [count / size for _, count in history]
        ax.fill_between(places, alive, step="post", color=FAINT)
        ax.step(places, alive, where="post", color=INK, lw=1)
        _phases(ax, [phase for phase, _ in history], top)
        ax.set(xlim=(0, len(history)), ylim=(0, top * 1.22), xticks=[])
        ax.set_xlabel(f"operations of one step: {name}", fontsize=SMALL)
    panels[0].set_ylabel("MB alive", fontsize=LABEL)
    return figure


def _phases(ax: Axes, phases: Sequence[str], top: float) -> None:
    start = 0
    for phase, group in groupby(phases):
        length = len(list(group))
        if length > 0.1 * len(phases):  # what is too narrow for its name goes without
            ax.text(start + length / 2, top * 1.13, PHASES[phase], ha="center", fontsize=SMALL - 1, color=MUTED)
        if start:
            ax.axvline(start, color=LINE, lw=0.8, ls=":")
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
    meaning = "light: forward   dark: backward   white: the stage waits"
    label(ax, 0.1, 0.15, meaning, align="left", size=SMALL, ink=MUTED)
    return figure


def _pass(ax: Axes, x: float, y: float, cell: float, stage: int, step: tuple[str, int] | None) -> None:
    colour = rank_colour(stage)
    face, edge = PAPER, FAINT
    if step is not None:
        face, edge = tint(colour, 0.6 if step[0] == "backward" else 0.18), colour
        label(ax, x + cell * 0.47, y + 0.125, str(step[1]), size=SMALL - 1)
    ax.add_patch(Rectangle((x, y), cell * 0.94, 0.26, facecolor=face, edgecolor=edge, lw=0.8))


def decision() -> Figure:
    """The questions that lead from a model to a strategy, the cheapest answer first."""
    figure, ax = canvas(4.3)
    steps = (
        ("Do model, state and activations fit on one GPU?", "DDP"),
        ("Do they fit with recomputed activations?", "DDP + checkpointing"),
        ("Do they fit with the state divided?", "ZeRO-1"),
        ("Do they fit with all divided, one block whole?", "FSDP"),
        ("Is one block, or its activations, too large?", "+ tensor parallel, in a node"),
        ("Are links between nodes too slow to gather?", "+ pipeline between nodes"),
    )
    for line, (question, answer) in enumerate(steps):
        y = 3.68 - line * 0.68
        box(ax, 0.1, y, 4.25, 0.46, question, size=SMALL)
        arrow(ax, (4.4, y + 0.23), (5.1, y + 0.23))
        label(ax, 4.72, y + 0.34, "yes", size=SMALL - 1, ink=MUTED)
        box(ax, 5.15, y, 2.7, 0.46, answer, colour=rank_colour(0 if line < 2 else 2), bold=True, size=SMALL)
        if line < len(steps) - 1:
            arrow(ax, (2.2, y - 0.02), (2.2, y - 0.2))
            label(ax, 2.45, y - 0.11, "no" if line < 3 else "then", size=SMALL - 1, ink=MUTED)
    return figure
