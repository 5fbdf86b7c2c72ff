"""Which random programs tell ours from torch's, and what is the smallest such program?

For each seed a case is drawn and compared on ranks that stay. A case that differs is made smaller, operation by
operation and block by block, as long as it still differs in the same way.
Read next: `fuzz_programs.py`, what a case is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ddp_course import RankError, RankPool
from ddp_course.parallel import BucketedDDP
from tests.parallel import fuzz_on_ranks as on_ranks
from tests.parallel.fuzz_programs import Case, random_case

TIMEOUT_S = 10.0  # in one collective: programs take well below a second
LIMIT_S = 40.0  # for one program on both wrappers
SHRINK_S = 30.0


@dataclass
class Difference:
    """A case that tells the wrappers apart: what differed, by rank, and the smallest case found."""

    case: Case
    kind: str
    text: str
    smallest: Case | None = None

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.text}", str(self.case)]
        if self.smallest and self.smallest != self.case:
            parts += ["smallest that still differs:", str(self.smallest)]
        return "\n".join(parts)


class Search:
    """Compares cases on ranks that stay, one set of ranks per world size, replaced when a case has spoilt it."""

    def __init__(self) -> None:
        self.pools: dict[int, RankPool] = {}
        self.found: list[on_ranks.Found] = []  # rank 0's, of every case that ran to its end

    def pool(self, world_size: int) -> RankPool:
        if world_size not in self.pools or not self.pools[world_size].alive:
            self.pools[world_size] = RankPool(
                world_size, backend="gloo", start_method="forkserver", timeout_s=TIMEOUT_S, quiet=True
            )
        return self.pools[world_size]

    def end(self, world_size: int) -> None:
        self.pools.pop(world_size).__exit__(RankError)  # at once: the ranks may be out of step

    def compare(self, case: Case, ours: type) -> Difference | None:
        """Return how `ours` differs from torch's wrapper in `case`, or None.

        Raises:
            RankError: torch's wrapper, alone, does not come to an end either.
        """
        try:
            answers = self.pool(case.world_size).run(on_ranks.compare, (case, ours), limit_s=LIMIT_S)
        except RankError as error:
            self.end(case.world_size)
            self.pool(case.world_size).run(on_ranks.play_alone, (case,), limit_s=LIMIT_S)
            return Difference(case, error.code if error.code in ("raised", "died", "start") else "hangs", error.report)
        self.found.append(answers[0])
        different = [(rank, answer) for rank, answer in enumerate(answers) if answer.kind]
        if not different:
            return None
        if {answer.kind for _, answer in different} & {"raises", "hangs"}:
            self.end(case.world_size)  # messages may be left that nobody has taken
        text = "\n".join(f"rank {rank}: {answer.text}" for rank, answer in different)
        return Difference(case, different[0][1].kind, text)

    def smallest(self, difference: Difference, ours: type) -> Difference:
        """Drop operations and blocks, one by one, while the case differs in the same kind."""
        difference.smallest, deadline = difference.case, time.monotonic() + SHRINK_S
        smaller = True
        while smaller:
            smaller = False
            for case in simpler(difference.smallest):
                if time.monotonic() > deadline:
                    return difference
                try:
                    again = self.compare(case, ours)
                except RankError:  # a program that torch cannot carry out
                    self.end(case.world_size)
                    continue
                if again and again.kind == difference.kind:
                    difference.smallest, difference.text, smaller = case, again.text, True
                    break
        return difference

    def differences(self, seeds: Iterable[int], ours: type = BucketedDDP, shrink: bool = True) -> Iterator[Difference]:
        """Compare the case of each seed, and yield those that differ, made smaller if `shrink`."""
        for seed in seeds:
            if difference := self.compare(random_case(seed), ours):
                yield self.smallest(difference, ours) if shrink else difference


def simpler(case: Case) -> Iterator[Case]:
    """Every case with one thing less."""
    for index in reversed(range(len(case.program))):
        if case.program[index].name != "wrap":
            yield replace(case, program=case.program[:index] + case.program[index + 1 :])
    blocks = case.net.blocks
    for index in reversed(range(len(blocks))):
        if all(block.tied_to is None for block in blocks[index:]):  # others' numbers stay
            yield replace(case, net=replace(case.net, blocks=blocks[:index] + blocks[index + 1 :]))
    for index, block in enumerate(blocks):
        plain = replace(block, twice=False, checkpoint="", dtype=case.net.dtype, frozen=False)
        if block != plain and block.tied_to is None:
            yield replace(case, net=replace(case.net, blocks=blocks[:index] + (plain,) + blocks[index + 1 :]))
    if case.hook != "none":
        yield replace(case, hook="none")
    if case.second:
        yield replace(case, second=False)
    if case.wrapping["bucket_cap_mb"] != 25:
        yield replace(case, wrapping={**case.wrapping, "bucket_cap_mb": 25})
    if case.world_size == 3:
        yield replace(case, world_size=2)
