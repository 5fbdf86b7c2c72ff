"""Does our DDP pass the tests that torch has for its own?

pytest -s tests/parallel/torchs_tests -k test_ddp_inference      # one of them, with what it says

Starting ranks costs seconds, a test mostly a fraction of one, so the ranks stay until a test fails. Then the next test
gets fresh ones: a failed test may leave anything behind.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from ddp_course import RankError, RankPool
from tests.parallel.torchs_tests import catalogue, on_ranks
from tests.parallel.torchs_tests.shim import Ours, Torchs

TABLES = (catalogue.RUN, catalogue.NOT_OURS, catalogue.NOT_HERE)
LISTED = Counter(name for table in TABLES for names in table.values() for name in names.split())
RUN, NOT_OURS = catalogue.by_name(catalogue.RUN), catalogue.by_name(catalogue.NOT_OURS)
IS_MADE_FOR = torch.__version__.startswith(catalogue.MADE_FOR + ".")
LIMIT_S = 120.0  # for one test; the longest, which compiles, takes 40 s on two cores


class Ranks:
    """Three ranks for test after test, replaced after one that failed."""

    pool: RankPool | None = None

    def verdict(self, name: str, world_size: int, ddp: type, folder: Path) -> tuple[str, str]:
        """Run one test; return "pass", "skip" or "FAIL", and what the first rank that did not pass has said."""
        if self.pool is None or not self.pool.alive:
            self.pool = RankPool(3, backend="gloo", init=False, start_method="forkserver", quiet=True)
        try:
            found = self.pool.run(on_ranks.verdict, (name, world_size, ddp, str(folder)), limit_s=LIMIT_S)
        except RankError as error:  # a rank hung or died; the pool has ended, unless all ranks are idle
            found = [(on_ranks.FAILED, error.report)]
        worst = max(found, key=lambda one: [on_ranks.PASSED, on_ranks.SKIPPED, on_ranks.FAILED].index(one[0]))
        if worst[0] == on_ranks.FAILED:
            self.close()
        print(f"{name}, {ddp.__name__}, W={world_size}: {' '.join(worst)}")
        return worst

    def close(self) -> None:
        if self.pool is not None and self.pool.alive:
            self.pool.close()


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


def test_every_test_of_torchs_is_run_or_has_its_reason():
    assert not [name for name, count in LISTED.items() if count > 1]
    assert catalogue.SLOW.keys() <= RUN.keys()
    assert len(RUN) >= 50
    there = set(catalogue.in_installed_torch())
    print(f"\nnew in torch {torch.__version__}: {sorted(there - LISTED.keys())}; gone: {sorted(LISTED.keys() - there)}")
    assert not IS_MADE_FOR or there == LISTED.keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, 2) for name in RUN]
    + [pytest.param(name, 3, marks=pytest.mark.nightly) for name in RUN if name not in catalogue.SLOW],
)
def test_what_torchs_ddp_passes_ours_passes(ranks, name, world_size, tmp_path):
    """A test that this torch no longer has is skipped by both."""
    theirs, ours = (ranks.verdict(name, world_size, ddp, tmp_path) for ddp in (Torchs, Ours))
    assert theirs[0] != on_ranks.FAILED or not IS_MADE_FOR, f"torch's: {theirs[1]}"
    assert ours[0] != on_ranks.FAILED or theirs[0] == on_ranks.FAILED, f"ours: {ours[1]}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NOT_OURS)
def test_what_ours_is_not_asked_torchs_ddp_passes_here(ranks, name, tmp_path):
    """It shows that the shim works."""
    found, said = ranks.verdict(name, 2, Torchs, tmp_path)
    assert found != on_ranks.FAILED or not IS_MADE_FOR, said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_new_in_this_torch_is_run_and_reported(ranks, tmp_path):
    for name in sorted(set(catalogue.in_installed_torch()) - LISTED.keys()):
        for ddp in (Torchs, Ours):
            ranks.verdict(name, 2, ddp, tmp_path)
