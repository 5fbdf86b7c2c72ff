"""A resumed run is the uninterrupted one, bit for bit, and every part of the state is needed for that."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from ddp_course.checkpoint.folder import CheckpointError, load_checkpoint, save_checkpoint
from ddp_course.checkpoint.state import bare, capture_state, load_model, restore_state, rng_state, set_rng_state
from tests.checkpoint import folder_on_ranks as on_ranks

pytestmark = pytest.mark.timeout(60)


# --- Generators ------------------------------------------------------------------------------------


def draws() -> list:
    return [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), *torch.rand(3).tolist()]


@pytest.mark.parametrize("used", [0, 1, 3])  # an odd number of gauss() keeps one back in the generator
def test_all_generators_go_on_where_they_were_after_a_way_over_the_disk(tmp_path, used):
    for _ in range(used):
        random.gauss(0, 1), np.random.normal(), torch.randn(1)
    save_checkpoint(tmp_path / "rng.pt", {"rng": rng_state()})
    expected = draws()
    assert draws() != expected
    set_rng_state(load_checkpoint(tmp_path / "rng.pt", "cpu")["rng"])
    assert draws() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_generator_goes_on_even_if_its_state_was_loaded_onto_the_gpu(tmp_path):
    torch.rand(3, device="cuda")
    save_checkpoint(tmp_path / "rng.pt", {"rng": rng_state()})
    expected = torch.rand(3, device="cuda").tolist()
    set_rng_state(load_checkpoint(tmp_path / "rng.pt", "cuda")["rng"])
    assert torch.rand(3, device="cuda").tolist() == expected


# --- Bare and wrapped ------------------------------------------------------------------------------


def test_ddp_and_bare_models_take_each_others_weights_and_names_are_saved_bare(two_ranks):
    names = list(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict())
    one, two = two_ranks.run(on_ranks.bare_and_wrapped)
    assert one == [True] * 4 + [names] * 2
    assert two == [True] * 4 + [[], []]


class HasAModule(nn.Module):
    """No wrapper: `module` is one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 1)


def test_a_model_with_a_layer_called_module_is_no_wrapper():
    model = HasAModule()
    assert bare(model) is model
    only = nn.ModuleDict({"module": nn.Linear(2, 2)})  # looks like a wrapper and is treated as one, both ways
    saved = capture_state(only)["model"]
    other = nn.ModuleDict({"module": nn.Linear(2, 2)})
    load_model(other, saved)
    load_model(model, HasAModule().state_dict())
    assert torch.equal(other["module"].weight, only["module"].weight)


def test_weights_of_another_model_are_refused_with_names_and_nothing_is_loaded():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(3), "head.weight": torch.ones(1)}
    with pytest.raises(CheckpointError) as caught:
        load_model(model, state)
    assert "missing 1.weight, 1.bias; unknown head.weight; of another shape 0.bias is [3], not [2]" in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(CheckpointError, match=r"missing 0.weight, 0.bias, 1.weight and 1 more\. Build"):
        load_model(model, {})


# --- What belongs together -------------------------------------------------------------------------


def test_parts_must_be_those_that_were_captured():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="optimizer: the checkpoint holds one, and none was given"):
        restore_state(capture_state(model, optimizer), model)
    with pytest.raises(CheckpointError, match="scaler: the checkpoint holds none, and one was given"):
        restore_state(capture_state(model, optimizer), model, optimizer, scaler=torch.amp.GradScaler("cpu"))


def test_torchs_own_sampler_has_an_epoch_and_no_more():
    sampler, other = (DistributedSampler(range(8), 2, 0) for _ in range(2))
    sampler.set_epoch(3)
    state = capture_state(nn.Linear(1, 1), sampler=sampler, step=12, epoch=3, extra={"best": 0.5})
    assert (state["sampler"], state["step"], state["epoch"], state["extra"]) == ({"epoch": 3}, 12, 3, {"best": 0.5})
    assert restore_state(state, nn.Linear(1, 1), sampler=other) == []
    assert list(other) == list(sampler)


# --- The same run ----------------------------------------------------------------------------------

STEPS, STOP = 13, 7  # 5 steps an epoch: stopped in the middle of the second


@pytest.fixture(scope="module")
def uninterrupted(two_ranks):
    return two_ranks.run(on_ranks.straight, args=(STEPS,))


@pytest.fixture(scope="module")
def saved(two_ranks, tmp_path_factory, uninterrupted):
    folder = tmp_path_factory.mktemp("run")
    first = two_ranks.run(on_ranks.first_part, args=(folder, STOP))
    assert first == [losses[:STOP] for losses, _ in uninterrupted]
    return folder


def test_a_run_resumed_within_an_epoch_is_the_uninterrupted_one_bit_for_bit(two_ranks, saved, uninterrupted):
    resumed = two_ranks.run(on_ranks.second_part, args=(saved, STEPS))
    assert resumed == [(losses[STOP:], digest, []) for losses, digest in uninterrupted]


@pytest.mark.parametrize("part", ["optimizer", "scheduler", "scaler", "sampler", "generators"])
def test_without_any_one_part_it_is_another_run(two_ranks, saved, uninterrupted, part):
    resumed = two_ranks.run(on_ranks.second_part, args=(saved, STEPS, part))
    assert resumed[0][1] != uninterrupted[0][1]


def test_another_world_size_gets_all_but_the_generators_and_says_so(ranks, saved):
    (found,) = ranks(1).run(on_ranks.go_on_alone, args=(saved,))
    note, sampler, untouched, scheduler_steps = found
    assert note.startswith("saved by 2 ranks, resumed by 1: the random generators belong to the old ranks")
    assert (sampler["epoch"], sampler["consumed"]) == (1, 24)  # two steps of two ranks; goes on there, on one
    assert (untouched, scheduler_steps) == (True, STOP)
