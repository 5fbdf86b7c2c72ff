"""How is a time measured, summarised and written down?

A benchmark fills `Row`s with samples and compares some of them with `Target`s. Here are the two, what is made of
them (a table for people, JSON for programs), and the state of the machine, without which no time means anything.
Nothing here talks to ranks, so all of it is tested with planted numbers.

The JSON holds `schema`, `started`, `quick`, `machine`, and under `benchmarks`, by name: `title`, `notes`, `rows`
(`key`, `way`, `ranks`, `unit`, `median`, `q1`, `q3`, `n`, `samples`, `missing`, `failed`) and `targets`
(`what`, `limit`, `unit`, `measured`, `holds`). A number that could not be had is null.

Read next: `launch.py`, a benchmark; `run.py`, the command.
"""

from __future__ import annotations

import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA = 1
LIMIT_S = 120.0  # for one thing that is tried
BUSY = 0.25  # load per core above which a table is marked
WARNING = "A busy machine distorts every figure, the shortest most. Trust ratios of one run, on an idle machine."


@dataclass(frozen=True)
class Plan:
    """What was asked for on the command line."""

    quick: bool = False
    only: frozenset[str] = frozenset()  # keys of ways; empty means all
    world_sizes: tuple[int, ...] = (2, 4)

    def wants(self, key: str) -> bool:
        return not self.only or key in self.only


@dataclass
class Row:
    """The samples of one way on one number of ranks."""

    key: str  # "rank_pool_call"
    way: str  # as the table shows it
    ranks: int
    unit: str = "s"  # "s", "%", or "" for plain numbers
    samples: list[float] = field(default_factory=list)
    missing: str = ""  # why it could not be tried here
    failed: str = ""  # what went wrong when it was tried

    @property
    def quartiles(self) -> tuple[float, float, float] | None:
        """The lower quartile, the median and the upper quartile; None without samples."""
        if not self.samples:
            return None
        if len(self.samples) == 1:
            return (self.samples[0],) * 3
        q1, median, q3 = statistics.quantiles(self.samples, n=4, method="inclusive")
        return q1, median, q3

    @property
    def median(self) -> float | None:
        return self.quartiles[1] if self.quartiles else None


@dataclass(frozen=True)
class Target:
    """A limit that a measured number should keep."""

    what: str
    limit: float
    measured: float | None  # None: not measured in this run
    unit: str = ""  # "s", "%", or "" for a ratio

    @property
    def holds(self) -> bool | None:
        return None if self.measured is None else self.measured <= self.limit


@dataclass
class Result:
    """All that one benchmark found."""

    title: str
    rows: list[Row]
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    baseline: str = ""  # key of the row that the last column divides by

    @property
    def failures(self) -> list[str]:
        return [f"{row.way}, {row.ranks} ranks: {row.failed}" for row in self.rows if row.failed]


def ratio(above: Row | None, below: Row | None) -> float | None:
    """Return the quotient of two medians, or None when either was not measured."""
    if above is None or below is None or above.median is None or not below.median:
        return None
    return above.median / below.median


def find(rows: list[Row], key: str, ranks: int) -> Row | None:
    return next((row for row in rows if row.key == key and row.ranks == ranks), None)


# --- For people ------------------------------------------------------------------------------------


def show_number(value: float | None, unit: str = "s") -> str:
    """Write a time with its unit, a percentage as it is, a ratio below 1 as a fraction of 1, to three figures."""
    if value is None:
        return "not measured"
    if unit == "%":
        return ("-" if value < 0 else "") + _figures(abs(value)) + " %"
    if unit == "s":
        return _figures(value) + " s" if value >= 1 else _figures(value * 1e3) + " ms"
    return f"1/{_figures(1 / value)}" if 0 < value < 1 else _figures(value)


def _figures(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def table(result: Result) -> str:
    """Lay a benchmark's rows and targets out as text."""
    base = next((row.way for row in result.rows if row.key == result.baseline), "")
    head = ["way", "ranks", "median", "middle half", "n", *([f"/ {base}"] if base else [])]
    lines = [result.title, *_columns([head, *(_cells(row, result, bool(base)) for row in result.rows)])]
    if result.targets:
        verdict = {True: "holds", False: "does not hold", None: "-"}
        cells = [[t.what, show_number(t.limit, t.unit), show_number(t.measured, t.unit), verdict[t.holds]]
                 for t in result.targets]  # fmt: skip
        lines += ["", *_columns([["target", "at most", "measured", ""], *cells])]
    return "\n".join([*lines, "", *result.notes, WARNING])


def _cells(row: Row, result: Result, with_ratio: bool) -> list[str]:
    if row.quartiles is None:
        return [row.way, str(row.ranks), "FAILED" if row.failed else row.missing or "not measured"]
    q1, median, q3 = (show_number(value, row.unit) for value in row.quartiles)
    times = ratio(row, find(result.rows, result.baseline, row.ranks))
    last = [show_number(times, "") if times is not None else ""] if with_ratio else []
    mark = " FAILED" if row.failed else ""  # after some samples
    return [row.way + mark, str(row.ranks), median, f"{q1} to {q3}", str(len(row.samples)), *last]


def _columns(lines: list[list[str]]) -> list[str]:
    """Pad every column but a line's last to the widest of its cells."""
    widths = [
        max((len(line[i]) for line in lines if i < len(line) - 1), default=0) for i in range(max(map(len, lines)))
    ]
    padded = ["  ".join(cell.ljust(widths[i]) for i, cell in enumerate(line)).rstrip() for line in lines]
    return [padded[0], "-" * max(map(len, padded)), *padded[1:]]


# --- For programs ----------------------------------------------------------------------------------


def as_json(results: dict[str, Result], machine: dict[str, Any], started: str, quick: bool) -> dict[str, Any]:
    """Return everything that was found, in the shape that this file's header documents."""
    benchmarks = {
        name: {
            "title": result.title,
            "notes": result.notes,
            "rows": [_row_as_json(row) for row in result.rows],
            "targets": [vars(target) | {"holds": target.holds} for target in result.targets],
        }
        for name, result in results.items()
    }
    return {"schema": SCHEMA, "started": started, "quick": quick, "machine": machine, "benchmarks": benchmarks}


def _row_as_json(row: Row) -> dict[str, Any]:
    q1, median, q3 = row.quartiles or (None, None, None)
    samples = [round(sample, 7) for sample in row.samples]
    return vars(row) | {"median": median, "q1": q1, "q3": q3, "n": len(samples), "samples": samples}


# --- The machine -----------------------------------------------------------------------------------


def machine_state() -> dict[str, Any]:
    """Return what the figures depend on; call it before the first measurement."""
    packages = {}
    for name in ("torch", "cloudpickle"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": packages,
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def show_machine(machine: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in machine["packages"].items())
    load = machine["load_before"][0]
    busy = "  (BUSY: the figures below are distorted)" if load > BUSY * machine["cores"] else ""
    return (
        f"{machine['cores']} cores ({machine['processor']}), {machine['system']}, "
        f"Python {machine['python']}, {packages}\n"
        f"load average before: {load}{busy}"
    )


# --- What may go wrong -----------------------------------------------------------------------------


def refuse_unknown(name: str, plan: Plan, rows: Iterable[Row]) -> None:
    """End the program if `plan` names a row that this benchmark does not have."""
    known = {row.key for row in rows}
    if unknown := plan.only - known:
        sys.exit(f"{name} has no row {', '.join(sorted(unknown))}; choose from {', '.join(sorted(known))}")


def show_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def attempt(rows: Iterable[Row], what: str, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Note an error in the rows that it concerns, and let the others go on."""
    try:
        with limit(limit_s, what):
            yield
    except Exception as error:
        told = f"{what}: {type(error).__name__}: {error}"
        for row in rows:
            row.failed = row.failed or told
        show_progress(f"FAILED: {told}")


@contextmanager
def limit(seconds: float, what: str) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the body takes longer: a benchmark must not hang."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"{what} took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_fresh_interpreter(code: str) -> str:
    """Return what this code prints in a Python of its own."""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"the fresh interpreter ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
