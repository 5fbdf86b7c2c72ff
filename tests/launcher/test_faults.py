"""The launcher's report on each known bug: it names a culprit and never an innocent rank, the call and the line.

pytest -s tests/launcher/test_faults.py                     # every report, and the seconds that it took
pytest -s tests/launcher/test_faults.py -k sizes_differ     # one
"""

from __future__ import annotations

import ctypes
import re
import tempfile
import time
from pathlib import Path

import pytest

from ddp_course import RankError, launch
from tests.launcher import faults_on_ranks, faults_talking_on_ranks
from tests.launcher.fault_table import FAULTS, Fault, judge

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
KEPT = ("pymp-", "torchinductor_")  # folders that multiprocessing and torch keep while a process lives
BECOME_SUBREAPER = 36  # in prctl: what loses its parent becomes this process's child, so `nothing_left` sees it


def orphaned_shared_memory() -> set[Path]:
    """Shared memory that no live process maps; names do not say whose they were."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped += maps.read_text()
        except OSError:
            continue
    return {path for path in Path("/dev/shm").glob("*") if str(path) not in mapped}


@pytest.fixture(scope="module")
def nothing_left_on_disk(tmp_path_factory):
    """Fail when the faults together leave something in shared memory or in the temporary folder."""
    before, folder = orphaned_shared_memory(), tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 1)
        yield
        ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 0)
    assert orphaned_shared_memory() - before == set()
    left = [path for path in folder.iterdir() if not path.name.startswith(KEPT)]
    assert {path.name: [str(p) for p in path.rglob("*")] for path in left} == {}


def test_every_fault_is_sound():
    """Each program has its truth, is marked where that says, and each rank that is named exists."""
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) == 84
    assert set(names) >= QUICK
    for module in (faults_on_ranks, faults_talking_on_ranks):
        text = Path(module.__file__).read_text()
        assert set(re.findall(r"^def (\w+)\(rank: int, world_size", text, re.MULTILINE)) <= set(names)
        assert set(re.findall(r"# fault: (\w+)$", text, re.MULTILINE)) <= set(names)
    for fault in FAULTS:
        assert fault.culprits <= set(range(fault.world_size)), fault.name
        assert fault.culprits or fault.cannot_tell or fault.returns is not None, fault.name


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.name, marks=[] if f.name in QUICK else [pytest.mark.slow]) for f in FAULTS]
)
def test_report(fault: Fault):
    error = values = None
    began_s, settings = time.monotonic(), {"start_method": "forkserver", "quiet": True}
    try:
        values = launch(
            fault.run, fault.world_size, timeout_s=fault.timeout_s, limit_s=fault.timeout_s + 10, **settings
        )
    except RankError as raised:
        error = raised
    verdict, said = judge(fault, error, values)
    report = error.report if error else f"returned {values}"
    print(f"\n{fault.name}: {verdict} {said}, {time.monotonic() - began_s:.1f} s with the start\n{report}")
    assert verdict in ("ok", "cannot tell"), f"{said}: {report}\n{fault.run.__doc__}"
