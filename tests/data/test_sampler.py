"""Does every sample come once, on one rank, in torch's order where that is promised, also after a resume?"""

import pickle
import warnings
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from ddp_course import launch
from ddp_course.data.sampler import MODES, ShardSampler
from ddp_course.models import MLP

LENGTHS, WORLD_SIZES = st.integers(1, 200), st.integers(1, 9)
SEEDS, EPOCHS = st.integers(0, 2**31), st.integers(0, 1000)


def in_global_order(parts: list[list[int]]) -> list[int]:
    """The order in which the ranks together see the samples: a row of W at a time."""
    longest = max(map(len, parts))
    return [part[row] for row in range(longest) for part in parts if row < len(part)]


# --- Compatible mode -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)  # a busy machine is no mistake
@given(LENGTHS, WORLD_SIZES, st.booleans(), st.booleans(), SEEDS, EPOCHS)
def test_compatible_mode_yields_torchs_indices(length, world_size, shuffle, drop_last, seed, epoch):
    for rank in range(world_size):
        theirs = DistributedSampler(range(length), world_size, rank, shuffle, seed, drop_last)
        ours = ShardSampler(range(length), world_size, rank, shuffle, seed, drop_last)
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs) and len(ours) == len(theirs)


def test_compatible_is_the_default_and_takes_torchs_arguments_in_torchs_order():
    ours, theirs = ShardSampler(range(10), 3, 1), DistributedSampler(range(10), 3, 1)
    assert ours.mode == "compatible" and list(ours) == list(theirs)


# --- Streaming mode --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(LENGTHS, WORLD_SIZES, st.booleans(), SEEDS, EPOCHS)
def test_streaming_gives_each_sample_to_one_rank(length, world_size, shuffle, seed, epoch):
    parts = []
    for rank in range(world_size):
        sampler = ShardSampler(length, world_size, rank, shuffle, seed, mode="streaming")
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
        assert len(parts[-1]) == len(sampler)
    assert sorted(chain(*parts)) == list(range(length))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    if not shuffle:
        assert in_global_order(parts) == list(range(length))


# --- Epochs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_new_epoch_has_another_order_and_begins_at_its_start(mode):
    sampler = ShardSampler(1000, 2, 0, mode=mode)
    first = list(sampler)
    assert first == list(sampler)  # who forgets set_epoch gets the same order again
    sampler.advance(10)
    sampler.set_epoch(0)
    assert list(sampler) == first[10:]  # the epoch it is in: the position stays
    sampler.set_epoch(1)
    second = list(sampler)
    assert len(second) == 500 and second != first
    assert sum(one == two for one, two in zip(first, second, strict=True)) < 10
    sampler.set_epoch(0)
    assert list(sampler) == first


@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_that_is_used_up_or_has_too_few_samples_left_for_all_ranks_says_so(mode):
    used_up, too_few = ShardSampler(7, 2, 1, mode=mode), ShardSampler(10, 4, 3, drop_last=True, mode=mode)
    used_up.advance(4)  # 8 with the repeated one
    assert used_up.state_dict()["consumed"] == 7
    too_few.advance(2)
    for sampler in (used_up, too_few):
        with pytest.warns(UserWarning, match="epoch 0 is used up; call set_epoch"):
            assert list(sampler) == [] and len(sampler) == 0


def test_streaming_with_the_next_seed_is_not_the_next_epoch():
    """With torch's order it is: seed and epoch are added. Then two runs with neighbouring seeds are nearly the same."""
    for mode, same in (("compatible", True), ("streaming", False)):
        next_epoch = ShardSampler(100, 2, 0, seed=0, mode=mode)
        next_epoch.set_epoch(1)
        assert (list(next_epoch) == list(ShardSampler(100, 2, 0, seed=1, mode=mode))) == same


# --- Going on in mid-epoch -------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.data(), LENGTHS, st.sampled_from(MODES), st.booleans(), SEEDS, EPOCHS)
def test_going_on_with_other_ranks_repeats_and_loses_nothing(data, length, mode, shuffle, seed, epoch):
    options = {"shuffle": shuffle, "seed": seed, "mode": mode}
    order = ShardSampler(length, 1, 0, **options)
    order.set_epoch(epoch)
    order, seen, state = list(order), [], None
    for _ in range(data.draw(st.integers(1, 4), "runs")):
        world_size = data.draw(WORLD_SIZES, "world size")
        samplers = [ShardSampler(length, world_size, rank, **options) for rank in range(world_size)]
        for sampler in samplers:
            sampler.set_epoch(epoch) if state is None else sampler.load_state_dict(state)
        full_rows = (length - len(seen)) // world_size
        rows = data.draw(st.integers(0, full_rows), "rows")
        parts = [list(zip(range(rows), sampler, strict=False)) if rows else [] for sampler in samplers]
        seen += in_global_order([[index for _, index in part] for part in parts])
        for sampler in samplers:
            sampler.advance(rows)
        states = [sampler.state_dict() for sampler in samplers]
        assert all(other == states[0] for other in states)
        state = states[0]
        assert state["epoch"] == epoch and state["consumed"] == len(seen)
    assert seen == order[: len(seen)]
    if len(seen) < length:
        seen += rest(length, options, state, data.draw(WORLD_SIZES, "last world size"))
    assert seen[:length] == order
    assert set(seen[length:]) <= set(order[: len(seen) - length])  # padding in the compatible mode, from the beginning


def rest(length: int, options: dict, state: dict, world_size: int) -> list[int]:
    """What the ranks of one more run see until the end of the epoch."""
    samplers = [ShardSampler(length, world_size, rank, **options) for rank in range(world_size)]
    for sampler in samplers:
        sampler.load_state_dict(state)
    parts = [list(sampler) for sampler in samplers]
    assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
    if options["mode"] == "compatible":
        assert len({len(part) for part in parts}) == 1
    return in_global_order(parts)


@pytest.mark.filterwarnings("ignore:epoch 0 is used up")  # some draws leave too few samples for all ranks
@settings(deadline=None, max_examples=200)
@given(LENGTHS, WORLD_SIZES, WORLD_SIZES, st.sampled_from(MODES), st.data())
def test_drop_last_after_going_on_drops_less_than_a_row(length, before, after, mode, data):
    rows = data.draw(st.integers(0, length // before))
    old = ShardSampler(length, before, 0, drop_last=True, mode=mode)
    old.advance(rows)
    samplers = [ShardSampler(length, after, rank, drop_last=True, mode=mode) for rank in range(after)]
    for sampler in samplers:
        sampler.load_state_dict(old.state_dict())
    left = length - rows * before
    parts = [list(sampler) for sampler in samplers] if left else [[]]
    assert {len(part) for part in parts} == {left // after}
    assert len(set(chain(*parts))) == left - left % after


@pytest.mark.parametrize("mode", MODES)
def test_the_position_survives_a_file_of_plain_values(mode, tmp_path):
    sampler = ShardSampler(1000, 4, 2, seed=3, mode=mode)
    sampler.set_epoch(6)
    sampler.advance(20)
    torch.save(sampler.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert loaded == {"epoch": 6, "consumed": 80, "length": 1000, "seed": 3, "shuffle": True, "mode": mode}
    assert {type(value) for value in loaded.values()} <= {int, bool, str}
    other = ShardSampler(1000, 4, 2, seed=3, mode=mode)
    other.load_state_dict(loaded)
    assert list(other) == list(sampler)


@pytest.mark.parametrize(("name", "value"), [("dataset", 999), ("seed", 1), ("shuffle", False), ("mode", "streaming")])
def test_a_position_in_another_order_is_refused(name, value):
    other = ShardSampler(**{"dataset": 1000, "num_replicas": 2, "rank": 0, name: value})
    named = name.replace("dataset", "length")
    with pytest.raises(ValueError, match=f"the saved position has {named}=.*, this sampler {value!r}"):
        other.load_state_dict(ShardSampler(1000, 2, 0).state_dict())
    assert (other.epoch, other.consumed) == (0, 0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", MODES)
def test_workers_that_fetch_ahead_do_not_move_the_position(mode):
    sampler = ShardSampler(96, 2, 1, mode=mode)
    loader = DataLoader(
        range(96), 4, sampler=sampler, num_workers=2, prefetch_factor=4, multiprocessing_context="forkserver"
    )
    seen = []
    for batch in loader:  # 2 workers times 4 batches are on their way when the first one arrives
        seen += batch.tolist()
        sampler.advance(len(batch))
        if len(seen) == 12:
            break
    assert sampler.state_dict()["consumed"] == 24
    assert seen + list(sampler) == list(ShardSampler(96, 2, 1, mode=mode))


# --- Mistakes --------------------------------------------------------------------------------------


def test_mistakes_are_named():
    for rank, world_size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} does not exist among {world_size} ranks"):
            ShardSampler(10, world_size, rank)
    with pytest.raises(ValueError, match="the dataset is empty"):
        ShardSampler([], 2, 0)
    with pytest.raises(ValueError, match="mode='stream' is not known; choose from compatible, streaming"):
        ShardSampler(10, 2, 0, mode="stream")
    with pytest.raises(ValueError, match="rows=-1: the position can only go forward"):
        ShardSampler(10, 2, 0).advance(-1)


def test_a_dataset_counts_by_its_length_and_is_not_kept():
    sampler = ShardSampler(torch.zeros(12, 5), 3, 0)
    assert sampler.length == 12 and len(sampler) == 4
    assert len(pickle.dumps(ShardSampler(10**12, 3, 0, mode="streaming"))) < 1000


def test_no_warning_where_nothing_is_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(ShardSampler(10, 3, 1, mode="streaming"))) == 3


# --- On ranks --------------------------------------------------------------------------------------


def right_answers(rank: int, world_size: int, digits: Dataset) -> tuple[float, list[int], list[int]]:
    """Evaluate all digits on all ranks; and what a sampler yields that is told nothing of the group."""
    torch.manual_seed(0)
    model, right = MLP(64, 16, 10), torch.zeros(())
    for x, label in DataLoader(Subset(digits, range(rank, len(digits), world_size)), 256):
        right += (model(x).argmax(dim=1) == label).sum()
    dist.all_reduce(right)
    return right.item(), list(ShardSampler(10)), list(DistributedSampler(range(10)))


@pytest.mark.timeout(60)
def test_four_ranks_count_as_many_right_answers_of_1797_as_one_process():
    options = {"backend": "gloo", "start_method": "forkserver", "quiet": True, "limit_s": 50}
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    found = launch(right_answers, 4, args=(digits,), **options)
    torch.manual_seed(0)
    right = (MLP(64, 16, 10)(digits.tensors[0]).argmax(dim=1) == digits.tensors[1]).sum().item()
    assert 0 < right < 1797
    for share, ours, theirs in found:
        assert share == pytest.approx(right, abs=1e-9) and ours == theirs
    assert sorted(set(chain(*(ours for _, ours, _ in found)))) == list(range(10))
