"""What is the course about, in one picture? The README shows it.

The picture is made from a real run: four ranks train the digits, and the losses shown are theirs.

    python -m ddp_course.draw.overview notebooks/images/overview.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_course.draw.charts import plain_axes
from ddp_course.draw.shapes import arrow, box, canvas, label
from ddp_course.draw.style import LABEL, SMALL, rank_colour
from ddp_course.draw.training import plot_losses

ROW = 0.6


def overview(by_rank: Sequence[Sequence[float]], mean: Sequence[float]) -> Figure:
    """A cell's function, its ranks, the collective between them, and the losses that came back.

    Args:
        by_rank, mean: losses after each epoch; the mean as the ranks reduced it.
    """
    world_size = len(by_rank)
    height = max(2.9, ROW * world_size + 0.5)
    figure, ax = canvas(height)
    low, high = (height - 0.4 - ROW * world_size) / 2, (height - 0.4 + ROW * world_size) / 2
    middle = (low + high) / 2
    for x, heading in ((0.85, "a notebook's cell"), (2.75, f"{world_size} processes"), (6.1, "what comes back")):
        label(ax, x, height - 0.22, heading, bold=True)
    box(ax, 0.1, middle - 0.5, 1.5, 1.0)
    code = f"def train(…):\n    …\n\nlaunch(train, {world_size})"
    label(ax, 0.85, middle, code, mono=True, size=SMALL - 1).set_multialignment("left")
    for rank in range(world_size):
        centre = high - ROW * (rank + 0.5)
        colour = rank_colour(rank)
        arrow(ax, (1.64, middle + (centre - middle) * 0.3), (2.16, centre), colour=colour)
        box(ax, 2.2, centre - 0.21, 1.1, 0.42, f"rank {rank}", colour=colour, bold=True)
        arrow(ax, (3.34, centre), (3.6, centre), colour=colour, both_ways=True)
    box(ax, 3.63, low + 0.06, 0.36, high - low - 0.12)
    label(ax, 3.81, middle, "all_reduce", mono=True, size=SMALL).set_rotation(90)
    chart = figure.add_axes((0.6, 0.19, 0.385, (height - 0.5) / height - 0.19))
    plain_axes(chart)
    plot_losses(chart, by_rank, mean, "epoch")
    chart.set_ylabel("training loss", fontsize=LABEL, labelpad=1)
    chart.legend(handles=chart.lines[-1:], frameon=False, fontsize=SMALL)  # the ranks' colours are on the left
    return figure


def train(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Return this rank's loss of each epoch, and the mean over all ranks."""
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)  # so small a network gains nothing from more
    pixels, labels = load_digits(return_X_y=True)
    images = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    sampler = DistributedSampler(images)
    torch.manual_seed(0)
    replica = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    own, mean = [], []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in DataLoader(images, 8, sampler=sampler):
            loss = nn.functional.cross_entropy(replica(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        total = torch.stack(losses).mean()
        own.append(total.item())
        dist.all_reduce(total)
        mean.append(total.item() / world_size)
    return own, mean


def main(path: str) -> None:
    from ddp_course import launch

    results = launch(train, 4)
    figure = overview([own for own, _ in results], results[0][1])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    print(f"{path}: 4 ranks, {len(results[0][1])} epochs")


if __name__ == "__main__":
    main(sys.argv[1])
