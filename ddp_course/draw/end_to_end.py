"""What does each part of a whole training program do: the rate, the changed images, the number format, the ranks?

Read next: `levers.py`, where the time goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddp_course.draw.charts import chart, legend, name_axes, page, plain_axes
from ddp_course.draw.shapes import box, canvas, finding, label
from ddp_course.draw.style import ALARM, INK, MUTED, SMALL, WIDTH, rank_colour

MARKS = "osD^v"
FORMATS = (("float32", 8, 23), ("bfloat16", 8, 7), ("float16", 5, 10))  # bits of the exponent, of the fraction


def learning_rates(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """The learning rate on its way through the run: by name, the places in epochs and the rate at each."""
    figure, ax = chart(2.6)
    for number, (name, (places, rates)) in enumerate(curves.items()):
        style = ("-", "--", ":")[number % 3]
        ax.plot(places, rates, color=rank_colour(number), linewidth=2.0, linestyle=style, label=name)
    name_axes(ax, "epoch", "learning rate")
    ax.set_ylim(bottom=0)
    legend(figure, loc="outside upper center", ncols=len(curves))
    return figure


def changed_images(rows: Mapping[str, Sequence[np.ndarray]], names: Sequence[str]) -> Figure:
    """The same images (height, width), changed differently in each row; `names` stand above the columns."""
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
            ax.add_patch(Rectangle((x - side / 2, base + 0.08), side, side, fill=False, edgecolor=MUTED, linewidth=0.6))
    ax.set(xlim=(0, WIDTH), ylim=(0, height))  # imshow moved them
    finding(ax, "Each epoch moves an image differently, or not at all; mirrored, a 3 is no 3")
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
    finding(ax, "bfloat16 has the range of float32, and a third of its digits")
    return figure


def distances(by_name: Mapping[str, Sequence[float]]) -> Figure:
    """How far the replicas' weights are from those of one process: by name, the largest difference after each step."""
    figure, ax = chart(3.2)
    for number, (name, values) in enumerate(by_name.items()):
        colour, steps = rank_colour(number), range(1, len(values) + 1)
        ax.plot(steps, values, color=colour, marker=MARKS[number % 5], markersize=4.5, linewidth=1.6, label=name)
    ax.set_yscale("log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    name_axes(ax, "step", "largest difference of a weight")
    legend(figure, loc="outside upper center", ncols=len(by_name))
    return figure


def learning_curves(runs: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Training loss and test accuracy (0 to 1) of several runs after each epoch, side by side."""
    figure = page(3.0)
    loss_ax, accuracy_ax = figure.subplots(1, 2)
    for each in (loss_ax, accuracy_ax):
        plain_axes(each)
        each.xaxis.get_major_locator().set_params(integer=True)
    for number, (name, (losses, accuracies)) in enumerate(runs.items()):
        look = {"color": rank_colour(number), "marker": MARKS[number % 5], "linestyle": ("-", "--", ":")[number % 3]}
        epochs = range(1, len(losses) + 1)
        loss_ax.plot(epochs, losses, markersize=4.5, label=name, **look)
        accuracy_ax.plot(epochs, [100 * share for share in accuracies], markersize=4.5, **look)
    name_axes(loss_ax, "epoch", "training loss")
    name_axes(accuracy_ax, "epoch", "right on test images, %")
    accuracy_ax.set_ylim(0, 102)
    legend(loss_ax)
    return figure


def class_accuracies(shares: Mapping[str, float], overall: float, one: str = "class") -> Figure:
    """How much of each class's test images is wrong, and of all; given are the shares (0 to 1) that are right.

    `one` is what a class is called.
    """
    figure, ax = chart(2.9)
    wrong = {name: 100 * (1 - share) for name, share in shares.items()}
    ax.bar(list(wrong), list(wrong.values()), color=rank_colour(0), width=0.65)
    level = 100 * (1 - overall)
    ax.axhline(level, color=INK, linewidth=1.4, linestyle="--")
    beside = label(ax, 1.01, level, f"all: {1 - overall:.1%}", size=SMALL, align="left")
    beside.set_transform(ax.get_yaxis_transform())
    ax.set_ylim(0, max(1.0, 1.15 * max(wrong.values())))
    name_axes(ax, one, "wrong test images, %")
    return figure
