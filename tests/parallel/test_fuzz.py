"""Does `BucketedDDP` do, in programs that nobody thought of, what torch's DistributedDataParallel does?

pytest tests/parallel/test_fuzz.py -k end_as_with_torch --fuzz-seed 17       # one program
"""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from tests.parallel import fuzz_broken
from tests.parallel.fuzz_compare import Record, first_difference
from tests.parallel.fuzz_nets import CONTAINERS, KINDS
from tests.parallel.fuzz_programs import random_case
from tests.parallel.fuzz_search import Search

FEW, MORE, MANY = range(40), range(40, 100), range(100, 340)
ENOUGH = 3  # differences; each is made smaller, which takes time


@pytest.fixture(scope="module")
def search():
    """One for all tests: starting ranks costs more than a program."""
    search = Search()
    yield search
    for world_size in list(search.pools):
        search.end(world_size)


def expect_no_difference(search: Search, *seeds_and_wrapper) -> None:
    if found := list(islice(search.differences(*seeds_and_wrapper), ENOUGH)):
        pytest.fail("\n\n".join(map(str, found)), pytrace=False)


# --- Without ranks ---------------------------------------------------------------------------------


def test_a_seed_is_always_the_same_program_and_the_programs_hold_everything():
    cases = [random_case(seed) for seed in MANY]
    assert list(map(str, cases)) == [str(random_case(seed)) for seed in MANY]
    blocks = [block for case in cases for block in case.net.blocks]
    assert {block.kind for block in blocks} == set(KINDS)
    assert {block.used for block in blocks} == {"always", "never", "even", "rank 0", "not rank 0"}
    assert {block.checkpoint for block in blocks} == {"", "reentrant", "not reentrant"}
    assert {case.net.container for case in cases} == set(CONTAINERS)
    assert {case.world_size for case in cases} == {1, 2, 3}
    names = {op.name for case in cases for op in case.program}
    assert names >= {"wrap", "wrap_again", "back_to_old", "deepcopy", "save_and_load", "trainable", "user_hook"}
    assert names >= {"gradient", "data", "load_state", "zero", "drop", "mode"}
    # A layer that only some ranks use, and is not looked for, would leave the other ranks waiting.
    assert all(case.wrapping["find_unused_parameters"] for case in cases if case.net.by_rank)


def test_what_counts_as_a_difference():
    case = next(case for case in map(random_case, MANY) if case.world_size == 2 and len(case.program) > 1)
    one = torch.ones(3, dtype=torch.float64)

    def kind(theirs, mine) -> str:
        return first_difference(case, [theirs], [mine])[0]

    def gradient(value) -> Record:
        return Record(state={"gradient of weight": value})

    assert kind(gradient(one), gradient(one + 1e-13)) == ""
    assert kind(gradient(one), gradient(one + 1e-6)) == "gradient"
    assert kind(gradient(None), gradient(torch.zeros(3))) == "gradient"
    assert kind(gradient(one), gradient(one.float())) == "gradient"
    assert kind(gradient(one), Record()) == "names"
    assert kind(Record(error="RuntimeError: x"), Record(error="ValueError: y")) == ""
    assert kind(Record(), Record(error="ValueError: y")) == "raises"
    assert kind(Record(error="ValueError: y"), Record()) == "raises"
    assert kind(Record(), Record(error="RuntimeError: Timed out waiting")) == "hangs"
    # torch has not ended its reduction, so its gradients are neither local ones nor averages.
    assert kind(Record(complete=False, state={"gradient of weight": one}), gradient(2 * one)) == ""
    assert kind(Record(error="Encountered gradient which is undefined, but"), Record()) == ""


# --- On ranks --------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
def test_random_programs_end_as_with_torch(search, request):
    expect_no_difference(search, request.config.getoption("--fuzz-seed") or FEW)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", [MORE, pytest.param(MANY, marks=pytest.mark.nightly)], ids=len)
def test_many_random_programs_end_as_with_torch(search, seeds):
    expect_no_difference(search, seeds)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [FEW, pytest.param(range(100), marks=pytest.mark.nightly)], ids=len)
def test_torch_agrees_with_itself_and_programs_run_far(search, seeds):
    search.found.clear()
    expect_no_difference(search, seeds, fuzz_broken.OtherBuckets)
    assert sum(bool(found.torch_error) for found in search.found) < len(seeds) / 5
    assert sum(found.compared for found in search.found) > 15 * len(seeds)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrapper", fuzz_broken.BROKEN)
def test_a_broken_wrapper_is_found(search, wrapper):
    assert next(search.differences(range(40, 340), wrapper, shrink=False), None)
