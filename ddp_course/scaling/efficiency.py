"""What did more ranks bring, and where did the rest go?

A round measures every number of ranks once, so a busy moment of the machine hits all alike. From the rounds come the
throughput (rows in a second), the efficiency (throughput of each rank against that of a rank in the smallest run) and
their intervals. The five parts of a step add up to the step. So what is missing to 100 % can be divided among the
parts without a remainder: each part's share is the time by which it is longer than it should be.

Left out on purpose: measuring, which is `measure.py`'s part.
Read next: `measure.py`.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from ddp_course.scaling.intervals import Interval, ratio_interval

DATA, FORWARD, BACKWARD, EXPOSED, OPTIMIZER = "data", "forward", "backward", "exposed communication", "optimizer"
PARTS = (DATA, FORWARD, BACKWARD, EXPOSED, OPTIMIZER)
MODES = ("weak", "strong")
WIDTH = 100  # letters of a line


@dataclass(frozen=True)
class Sample:
    """One run of one round: means over its steps and ranks, without the warm-up."""

    rows: int  # in one step, over all ranks
    seconds: dict[str, float]  # of each of PARTS in one step
    waiting_s: float = 0.0  # of the exposed communication: until the slowest rank had its gradients

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Scaling:
    """All rounds of a measurement. What belongs to one number of ranks is asked for by that number."""

    mode: str  # "weak": each rank has the same rows at any world size; "strong": all ranks together have
    samples: dict[int, tuple[Sample, ...]]  # by world size; the i-th of each are of one round
    title: str = ""  # what was trained
    notes: tuple[str, ...] = field(default=())  # about cores, and whatever else the figures depend on

    @property
    def world_sizes(self) -> list[int]:
        return sorted(self.samples)

    @property
    def base(self) -> int:
        """The smallest world size, which the others are compared with."""
        return min(self.samples)

    def step_s(self, world_size: int) -> float:
        """Mean over the rounds."""
        return _mean([sample.step_s for sample in self.samples[world_size]])

    def split(self, world_size: int) -> dict[str, float]:
        """Seconds of each part of a step, mean over the rounds."""
        return {part: _mean([s.seconds[part] for s in self.samples[world_size]]) for part in PARTS}

    def waiting_s(self, world_size: int) -> float:
        """Of the exposed communication, how long a rank waits for a slower one to have its gradients."""
        return _mean([sample.waiting_s for sample in self.samples[world_size]])

    def throughput(self, world_size: int) -> Interval:
        """Rows in a second, over all ranks: all rows by all seconds, not the mean of rates."""
        rows = [float(sample.rows) for sample in self.samples[world_size]]
        return _no_less_than_nothing(ratio_interval(rows, [s.step_s for s in self.samples[world_size]]))

    def efficiency(self, world_size: int) -> Interval:
        """Throughput of a rank against that of a rank in the smallest run; 1 is all that can be had."""
        here, alone = self.samples[world_size], self.samples[self.base]
        fair = self._fair(world_size)
        ratio = ratio_interval([fair * sample.step_s for sample in alone], [sample.step_s for sample in here])
        return _no_less_than_nothing(ratio)

    def missing(self, world_size: int) -> dict[str, Interval]:
        """What each part of the step takes of the efficiency; together they are what is missing to 1.

        A negative share is a part that has become shorter than in proportion.
        """
        here, alone = self.samples[world_size], self.samples[self.base]
        steps, fair = [sample.step_s for sample in here], self._fair(world_size)
        return {
            part: ratio_interval(
                [h.seconds[part] - fair * a.seconds[part] for h, a in zip(here, alone, strict=True)], steps
            )
            for part in PARTS
        }

    def _fair(self, world_size: int) -> float:
        """The part of the smallest run's step that a step here takes, if nothing is lost."""
        rows, base_rows = self.samples[world_size][0].rows, self.samples[self.base][0].rows
        return rows * self.base / (base_rows * world_size)

    def table(self) -> str:
        """One line for each number of ranks."""
        head = ["ranks", "rows/s (95 %)", "efficiency (95 %)", "step", *(part.split()[0] for part in PARTS)]
        lines = [head]
        for world_size in self.world_sizes:
            rate, part = self.throughput(world_size), self.efficiency(world_size)
            bounds = "1 by definition" if world_size == self.base else f"{_percent(part)}"
            split = [f"{1e3 * seconds:.2f}" for seconds in self.split(world_size).values()]
            rates = f"{rate.value:,.0f} ± {100 * (rate.high / rate.value - 1):.1f} %"
            lines.append([str(world_size), rates, bounds, f"{1e3 * self.step_s(world_size):.2f}", *split])
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        shown = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        top = f"{self.mode} scaling of {self.title}" if self.title else f"{self.mode} scaling"
        rounds = len(self.samples[self.base])
        return "\n".join(
            [
                textwrap.fill(f"{top}; {rounds} rounds, times of a step in ms", WIDTH),
                shown[0],
                "-" * len(shown[0]),
                *shown[1:],
            ]
        )

    def explain(self, world_size: int) -> str:
        """Say in words where the missing part went."""
        if world_size == self.base:
            return f"{_ranks(world_size)} is what the others are compared with."
        part, missing = self.efficiency(world_size), self.missing(world_size)
        alone = "one rank" if self.base == 1 else f"{self.base} ranks"
        start = (
            f"{_ranks(world_size)} train at {_percent(part)} of {world_size / self.base:g} times the rate of {alone}."
        )
        if part.holds(1.0):
            start += " The interval holds 100 %, so these rounds show neither loss nor gain; more rounds narrow it."
        shares = sorted(missing.items(), key=lambda item: -item[1].value)
        points = ", ".join(f"{name} {100 * share.value:+.1f}" for name, share in shares)
        lost = f"Of 100 points, {100 * (1 - part.value):.1f} are missing: {points}."
        return " ".join([start, lost, *self._why(world_size, shares[0][0])])

    def _why(self, world_size: int, largest: str) -> list[str]:
        step, exposed, waiting = self.step_s(world_size), self.split(world_size)[EXPOSED], self.waiting_s(world_size)
        said = [
            f"In a step of {1e3 * step:.2f} ms, {1e3 * exposed:.2f} ms pass between a rank's last gradient and its mean"
        ]
        said[0] += f", {1e3 * waiting:.2f} of them until the slowest rank has its own." if waiting else "."
        if largest == BACKWARD:
            said.append("Most is lost in backward: the ranks share memory, and messages run on the cores that compute.")
        elif largest != EXPOSED:
            said.append(f"Most is lost in {largest}, where nobody is talked to: the ranks share memory and power.")
        return said


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _no_less_than_nothing(rate: Interval) -> Interval:
    """The bell curve of a few wild rounds may reach below 0; no rate does."""
    return Interval(rate.value, max(0.0, rate.low), max(0.0, rate.high))


def _ranks(world_size: int) -> str:
    return f"{world_size} rank{'s' * (world_size > 1)}"


def _percent(part: Interval) -> str:
    return f"{100 * part.value:.1f} % ({100 * part.low:.1f} to {100 * part.high:.1f})"
