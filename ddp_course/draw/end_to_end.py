"""What does each part of a whole training program do: the rate, the changed images, the number format, the ranks?

Each function takes the data it shows and returns a matplotlib `Figure`.

Read next: `levers.py`, where the time goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddp_course.draw.style import (
    ALARM,
    INK,
    LABEL,
    MUTED,
    SMALL,
    WIDTH,
    box,
    canvas,
    chart,
    label,
    plain_axes,
    rank_colour,
)

MARKS = "osD^v"
FORMATS = (("float32", 8, 23), ("bfloat16", 8, 7), ("float16", 5, 10))  # bits of the exponent, of the fraction


def learning_rates(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """The learning rate on its way through the run.

    Args:
        curves: by name, the places in epochs and the rate at each.
    """
    figure, ax = chart(2.6)
    for number, (name, (places, rates)) in enumerate(curves.items()):
        style = ("-", "--", ":")[number % 3]
        ax.plot(places, rates, color=rank_colour(number), linewidth=2.0, linestyle=style, label=name)
    _axis_names(ax, "epoch", "learning rate")
    ax.set_ylim(bottom=0)
    figure.legend(frameon=False, fontsize=SMALL, loc="outside upper center", ncols=len(curves))
    return figure


def changed_images(rows: Mapping[str, Sequence[np.ndarray]], names: Sequence[str]) -> Figure:
    """The same images, changed otherwise in each row of the picture.

    Args:
        rows: by what was done, the images (height, width).
        names: what stands above each column.
    """
    height, left, side = 0.95 * len(rows) + 0.35, 1.6, 0.78
    figure, ax = canvas(height)
    column = (WIDTH - left - 0.1) / len(names)
    for place, name in enumerate(names):
        label(ax, left + column * (place + 0.5), height - 0.17, name, size=SMALL, ink=MUTED)
    for number, (said, images) in enumerate(rows.items()):
        base = height - 0.35 - 0.95 * (number + 1)
        label(ax, 0.12, base + 0.47, said, align="left", bold=True)
        for place, image in enumerate(images):
            x = left + column * (place + 0.5)
            extent = (x - side / 2, x + side / 2, base + 0.08, base + 0.08 + side)
            ax.imshow(image, cmap="gray_r", extent=extent, aspect="auto", interpolation="nearest", vmin=0, vmax=1)
            ax.add_patch(_frame(*extent))
    ax.set(xlim=(0, WIDTH), ylim=(0, height))  # imshow moved them
    return figure


def number_formats() -> Figure:
    """How many bits of a number stand for its size, and how many for its digits, in three formats."""
    figure, ax = canvas(1.95)
    left, bit = 1.15, (WIDTH - 1.3) / 32
    for number, (name, exponent, fraction) in enumerate(FORMATS):
        y, x = 1.25 - 0.55 * number, left
        label(ax, 0.12, y + 0.2, name, align="left", bold=True)
        for said, bits, colour in (("±", 1, INK), ("size", exponent, rank_colour(0)), ("digits", fraction, ALARM)):
            text = said if bits == 1 else f"{said}: {bits} bits"
            box(ax, x, y, bit * bits - 0.02, 0.4, text, colour=colour, size=SMALL)
            x += bit * bits
    label(ax, left, 1.82, "bits for the size decide how large a number may be; for the digits, how exact it is",
          size=SMALL, ink=MUTED, align="left")  # fmt: skip
    return figure


def distances(by_name: Mapping[str, Sequence[float]]) -> Figure:
    """How far the replicas' weights are from those of one process, after each step, on a logarithmic scale.

    Args:
        by_name: by what was compared, the largest difference of any weight after each step.
    """
    figure, ax = chart(3.2)
    for number, (name, values) in enumerate(by_name.items()):
        colour, steps = rank_colour(number), range(1, len(values) + 1)
        ax.plot(steps, values, color=colour, marker=MARKS[number % 5], markersize=4.5, linewidth=1.6, label=name)
    ax.set_yscale("log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    _axis_names(ax, "step", "largest difference of a weight")
    figure.legend(frameon=False, fontsize=SMALL, loc="outside upper center", ncols=len(by_name))
    return figure


def learning_curves(runs: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Training loss and test accuracy of several runs, side by side.

    Args:
        runs: by name, the losses and the accuracies (0 to 1), one of each for an epoch.
    """
    figure, ax = chart(3.0)
    ax.remove()
    loss_ax, accuracy_ax = figure.subplots(1, 2)
    for each in (loss_ax, accuracy_ax):
        plain_axes(each)
        each.xaxis.get_major_locator().set_params(integer=True)
    for number, (name, (losses, accuracies)) in enumerate(runs.items()):
        look = {"color": rank_colour(number), "marker": MARKS[number % 5], "linestyle": ("-", "--", ":")[number % 3]}
        epochs = range(1, len(losses) + 1)
        loss_ax.plot(epochs, losses, markersize=4.5, label=name, **look)
        accuracy_ax.plot(epochs, [100 * share for share in accuracies], markersize=4.5, **look)
    _axis_names(loss_ax, "epoch", "training loss")
    _axis_names(accuracy_ax, "epoch", "right on test images, %")
    accuracy_ax.set_ylim(0, 102)
    loss_ax.legend(frameon=False, fontsize=SMALL)
    return figure


def class_accuracies(shares: Mapping[str, float], overall: float) -> Figure:
    """The share of each class's test images that is right, and the share of all.

    Args:
        shares: by class, 0 to 1.
    """
    figure, ax = chart(2.8)
    ax.bar(list(shares), [100 * share for share in shares.values()], color=rank_colour(0), width=0.65)
    ax.axhline(100 * overall, color=INK, linewidth=1.4, linestyle="--", label=f"all classes: {overall:.1%}")
    lowest = min(shares.values())
    ax.set_ylim(max(0, 100 * lowest - 10), 102)
    _axis_names(ax, "class", "right, %")
    figure.legend(frameon=False, fontsize=SMALL, loc="outside upper right")
    return figure


def _axis_names(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x, color=MUTED, fontsize=LABEL)
    ax.set_ylabel(y, color=MUTED, fontsize=LABEL)


def _frame(x0: float, x1: float, y0: float, y1: float) -> Rectangle:
    return Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=MUTED, linewidth=0.6)
