"""Does our DDP pass the tests that torch has for its own?"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.parallel.torchs_tests import catalogue
from tests.parallel.torchs_tests.run import Row, as_table, rows

TABLES = (catalogue.RUN, catalogue.NOT_OURS, catalogue.NOT_HERE)
IS_MADE_FOR = torch.__version__.startswith(catalogue.MADE_FOR + ".")


def judge(found: list[Row]) -> None:
    """Print the table; fail where torch's DDP passes and ours does not, and where torch's itself does not."""
    table = as_table(found)
    print(f"\n{table}")
    new = {row.name for row in found} - {name for each in TABLES for name in catalogue.by_name(each)}
    ours = [row for row in found if set(row.failed("ours")) - set(row.failed("torch")) and row.name not in new]
    torchs = [row for row in found if row.failed("torch") and IS_MADE_FOR]
    said = [(row.name, key, text) for row in ours + torchs for key, text in row.said.items() if text]
    assert not said, "\n\n".join([table, *(f"{name}, {which}, W={w}:\n{text}" for name, (w, which), text in said)])


def test_every_test_of_torchs_is_run_or_has_its_reason():
    listed = Counter(name for table in TABLES for names in table.values() for name in names.split())
    assert not [name for name, count in listed.items() if count > 1]
    assert catalogue.SLOW.keys() <= catalogue.by_name(catalogue.RUN).keys()
    assert len(catalogue.by_name(catalogue.RUN)) >= 50
    there = set(catalogue.in_installed_torch())
    print(f"\nnew in torch {torch.__version__}: {sorted(there - listed.keys())}; gone: {sorted(listed.keys() - there)}")
    assert not IS_MADE_FOR or there == listed.keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_torchs_ddp_passes_ours_passes():
    judge(rows(name for name in catalogue.in_installed_torch() if name not in catalogue.SLOW))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_slow_ones_too():
    judge(rows((name for name in catalogue.in_installed_torch() if name in catalogue.SLOW), world_sizes=(2,)))
