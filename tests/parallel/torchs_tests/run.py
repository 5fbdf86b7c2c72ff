"""What do torch's tests find, on torch's DDP and on ours?

    python -m tests.parallel.torchs_tests.run                                  # all, as a table
    python -m tests.parallel.torchs_tests.run test_ddp_inference               # one, on ours
    python -m tests.parallel.torchs_tests.run test_ddp_inference --ddp torch --world-size 3

Starting ranks costs seconds, a test mostly a fraction of one, so the ranks stay until a test fails. Then the next test
gets fresh ones: a failed test may leave anything behind.

Read next: `catalogue.py`, which tests there are; `test_torchs_tests.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ddp_course import RankError, RankPool
from tests.parallel.torchs_tests import catalogue, on_ranks

CLASSES = {"torch": "tests.parallel.torchs_tests.shim:Torchs", "ours": "tests.parallel.torchs_tests.shim:Ours"}
WORLD_SIZES = (2, 3)
LIMIT_S = 120.0  # for one test; the longest, which compiles, takes 40 s on two cores
NOT_RUN = "-"


class Ranks:
    """Ranks for test after test, and a folder that goes with them."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ddp_course_torchs_tests_")
        self._runs = 0

    def verdict(self, name: str, world_size: int, ddp: str) -> tuple[str, str]:
        """Run one test; return "pass", "skip" or "FAIL", and what the first rank that did not pass has said."""
        if self._pool is None or not self._pool.alive:
            self._pool = RankPool(max(WORLD_SIZES), backend="gloo", init=False, start_method="forkserver", quiet=True)
        self._runs += 1
        folder = Path(self._folder.name, str(self._runs))
        folder.mkdir()
        try:
            found = self._pool.run(on_ranks.verdict, (name, world_size, ddp, str(folder)), limit_s=LIMIT_S)
        except RankError as error:  # a rank hung or died; the pool has ended, unless all ranks are idle
            found = [(on_ranks.FAILED, error.report)]
        worst = max(found, key=lambda one: [on_ranks.PASSED, on_ranks.SKIPPED, on_ranks.FAILED].index(one[0]))
        if worst[0] == on_ranks.FAILED and self._pool.alive:
            self._pool.close()
        return worst

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
        self._folder.cleanup()


@dataclass
class Row:
    """One test of torch's: its verdicts by (world size, "torch" or "ours"), and what we have to say of it."""

    name: str
    remark: str
    verdicts: dict[tuple[int, str], str] = field(default_factory=dict)
    said: dict[tuple[int, str], str] = field(default_factory=dict)

    def failed(self, which: str) -> list[int]:
        """The world sizes at which this class fails."""
        return [w for (w, other), found in self.verdicts.items() if other == which and found == on_ranks.FAILED]


def rows(names: Iterable[str], world_sizes: tuple[int, ...] = WORLD_SIZES) -> list[Row]:
    """Run the tests as the catalogue says, on both classes, and return a row for each.

    What ours is not asked is run on torch's DDP at the first of the world sizes only: it shows that the shim works.
    """
    run, not_ours, not_here = (
        catalogue.by_name(table) for table in (catalogue.RUN, catalogue.NOT_OURS, catalogue.NOT_HERE)
    )
    found = []
    with Ranks() as ranks:
        for name in names:
            remark = not_here.get(name) or not_ours.get(name) or run.get(name, "new in this torch")
            row = Row(name, remark)
            found.append(row)
            for world_size in world_sizes:
                for which, ddp in CLASSES.items():
                    key = world_size, which
                    if name in not_here or (name in not_ours and key != (world_sizes[0], "torch")):
                        continue
                    row.verdicts[key], row.said[key] = ranks.verdict(name, world_size, ddp)
    return found


def as_table(found: list[Row]) -> str:
    """Return the verdicts as text, with the number that passed in each column."""
    columns = list(dict.fromkeys(key for row in found for key in row.verdicts))
    columns.sort(key=lambda key: (key[0], list(CLASSES).index(key[1])))
    passed = [sum(row.verdicts.get(column) == on_ranks.PASSED for row in found) for column in columns]
    lines = [(f"torch {torch.__version__}", [f"{which}, W={w}" for w, which in columns], "")]
    lines += [(row.name, [row.verdicts.get(column, NOT_RUN) for column in columns], row.remark) for row in found]
    lines += [("passed", passed, "")]
    width = max(len(first) for first, _, _ in lines)
    texts = (f"{first:{width}}  " + "".join(f"{cell:<12}" for cell in cells) + last for first, cells, last in lines)
    return "\n".join(text.rstrip() for text in texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tests of torch's; none: all that the catalogue lets run")
    parser.add_argument("--ddp", default="ours", help='"ours", "torch" or "module:Class"')
    parser.add_argument("--world-size", type=int, choices=WORLD_SIZES, default=2)
    options = parser.parse_args()
    if not options.names:
        found = rows(catalogue.in_installed_torch())
        print(as_table(found))
        return any(row.failed("ours") or row.failed("torch") for row in found)
    verdicts = []
    with Ranks() as ranks:
        for name in options.names:
            verdict, said = ranks.verdict(name, options.world_size, CLASSES.get(options.ddp, options.ddp))
            print(f"{verdict}  {name}\n{said}".rstrip(), flush=True)
            verdicts.append(verdict)
    return on_ranks.FAILED in verdicts


if __name__ == "__main__":
    sys.exit(main())
