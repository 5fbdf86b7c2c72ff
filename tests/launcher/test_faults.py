"""The launcher's report on each known bug: it names a culprit and never an innocent rank, the call and the line.

The truth is in `fault_table`; `python -m tests.launcher.try_faults` prints the whole table, with the seconds that each
report took, which no test asserts.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from ddp_course import RankError, launch
from tests.launcher.fault_table import FAULTS, Fault, judge
from tests.launcher.try_faults import NOT_OURS, orphaned_shared_memory

pytestmark = [
    pytest.mark.alone,
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("nothing_left", "nothing_left_on_disk"),
]

QUICK = {  # one of each kind; the rest are slow together
    "raises_in_the_middle",
    "killed_for_memory",
    "threads_deadlock",
    "returns_a_generator",
    "one_call_too_few",
    "two_groups_in_opposite_order",
    "sizes_differ",
    "slow_while_nobody_waits",
}


@pytest.fixture(scope="module")
def nothing_left_on_disk(tmp_path_factory):
    """Fail when the faults together leave something in shared memory or in the temporary folder."""
    before, folder = orphaned_shared_memory(), tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
    assert orphaned_shared_memory() - before == set()
    assert [path.name for path in folder.iterdir() if not path.name.startswith(NOT_OURS)] == []


def rows() -> list:
    return [
        pytest.param(fault, id=fault.name, marks=[] if fault.name in QUICK else [pytest.mark.slow]) for fault in FAULTS
    ]


def test_every_row_is_sound():
    """Each program is in the table once, marked where the table says, and each rank that is named exists."""
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert set(names) >= QUICK
    for module in {Path(fault.run.__code__.co_filename) for fault in FAULTS}:
        text = module.read_text()
        assert set(re.findall(r"^def (\w+)\(rank: int, world_size", text, re.MULTILINE)) <= set(names)
        assert set(re.findall(r"# fault: (\w+)$", text, re.MULTILINE)) <= set(names)
    for fault in FAULTS:
        assert fault.culprits <= set(range(fault.world_size)), fault.name
        assert fault.culprits or fault.cannot_tell or fault.returns is not None, fault.name


@pytest.mark.parametrize("fault", rows())
def test_report(fault: Fault):
    error = values = None
    try:
        values = launch(
            fault.run,
            fault.world_size,
            timeout_s=fault.timeout_s,
            limit_s=fault.timeout_s + 10,
            start_method="forkserver",
            quiet=True,
        )
    except RankError as raised:
        error = raised
    verdict, said = judge(fault, error, values)
    assert verdict in ("ok", "cannot tell"), f"{said}: {error.report if error else fault.why}"
