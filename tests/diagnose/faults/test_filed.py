"""Each is provoked and named; what was fixed has nothing; and what the silent ones cost is the figure they say."""

import pytest

from ddp_course.diagnose.faults.filed import FAULTS

FAULT = {fault.name: fault for fault in FAULTS}
SAYS = {
    "local-rank-argument": "unrecognized arguments: --local-rank",
    "marked-ready-twice": "Expected to mark a variable ready only once",
    "iterable-duplicates": "2 ranks drew 32 rows, 16 of them different",
    "same-augmentation": "by 0.097627 and 0.097627",
    "all-gather-gradient": "the gradient is 0.50 times that of one process on all rows",
    "padded-accumulation": "the gradient is 6.500, and 6.333 where each word counts once",
}


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", SAYS)
def test_provoked_it_is_named_and_mended_it_is_gone(name, nothing_left):
    broken = FAULT[name].provoke()
    assert broken.fault == name and SAYS[name] in broken.evidence
    fixed = FAULT[name].fix()
    assert fixed.fault is None, fixed.evidence


def test_all_are_here():
    assert list(SAYS) == list(FAULT)
