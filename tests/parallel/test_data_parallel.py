"""Does one process on several devices compute what it computes on one, and say so when it can't?

Almost everything runs on virtual CPU devices, where every copy between devices is a real copy. float64, and a
tolerance of 1e-12: cut in four, sums are added in another order, and nothing else differs.
"""

from __future__ import annotations

import copy
import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn

from ddp_course.models import MLP
from ddp_course.parallel import DataParallel, gather, replicate, scatter
from ddp_course.parallel.data_parallel import Traffic

CLOSE = {"rtol": 0, "atol": 1e-12}
FOUR = ["cpu"] * 4


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def model(**options) -> MLP:
    return MLP(5, 7, 3, **options).double()


def gradients(module: nn.Module, call, *inputs, **kwargs) -> list[torch.Tensor | None]:
    """Outputs of `call`, and the gradients that a loss which weighs all outputs differently leaves in `module`."""
    module.zero_grad()
    output = call(*inputs, **kwargs)
    weight = torch.linspace(1, 2, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
    (weight * output.square()).sum().backward()
    return [output.detach(), *(parameter.grad for parameter in module.parameters())]


def assert_same(module: nn.Module, devices: list, *inputs, pick=lambda output: output, **kwargs) -> list:
    """`module` on several devices has the outputs and gradients of one process; return them."""
    parallel = DataParallel(module, devices)
    expected = gradients(module, lambda: pick(module(*inputs, **kwargs)))
    expected = [None if each is None else each.clone() for each in expected]
    found = gradients(module, lambda: pick(parallel(*inputs, **kwargs)))
    assert_all_close(found, expected)
    return found


def assert_all_close(found, expected):
    for one, two in zip(found, expected, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, **CLOSE)


# --- Scatter and gather ----------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "sizes"), [(8, [2, 2, 2, 2]), (10, [3, 3, 3, 1]), (5, [2, 2, 1]), (1, [1])])
def test_scatter_cuts_as_torch_does_and_small_batches_into_fewer_chunks(rows, sizes):
    x_NF = torch.arange(rows * 2.0).view(rows, 2)
    chunks = scatter(x_NF, FOUR)
    assert [len(chunk) for chunk in chunks] == sizes
    torch.testing.assert_close(gather(chunks, "cpu"), x_NF)


def test_only_the_chunks_that_leave_the_master_are_copied_and_counted():
    traffic, x_NF = Traffic(), torch.zeros(10, 2, dtype=torch.float64)
    chunks = scatter(x_NF, FOUR, traffic=traffic)
    assert chunks[0].data_ptr() == x_NF.data_ptr()
    storages = {chunk.untyped_storage().data_ptr() for chunk in chunks}
    assert len(storages) == 4
    assert traffic.bytes == {"out: inputs": 7 * 2 * 8}


def test_nested_inputs_keep_their_structure_and_share_what_is_no_tensor():
    class Pair(NamedTuple):
        image: torch.Tensor
        name: str

    x, y = torch.arange(4), torch.arange(4) + 10
    first, second = scatter(({"x": x, "same": [x, None]}, Pair(y, "digits")), ["cpu"] * 2)
    assert first[0]["x"].tolist() == [0, 1] and second[0]["x"].tolist() == [2, 3]
    assert second[0]["same"][0].tolist() == [2, 3] and second[0]["same"][1] is None
    assert isinstance(second[1], Pair) and second[1].name == "digits" and second[1].image.tolist() == [12, 13]


def test_scatter_along_another_dimension():
    x = torch.arange(6).view(2, 3)
    assert [chunk.tolist() for chunk in scatter(x, ["cpu"] * 2, dim=1)] == [[[0, 1], [3, 4]], [[2], [5]]]


def test_tensors_that_cannot_be_cut_alike_are_refused():
    with pytest.raises(ValueError, match=r"tensors give \[3, 4\] chunks: give all of them the same number of rows"):
        scatter((torch.zeros(5), torch.zeros(8)), FOUR)
    with pytest.raises(ValueError, match="cannot cut a tensor without dimensions"):
        scatter((torch.zeros(4), torch.tensor(1.0)), FOUR)


def test_gather_joins_nested_outputs_and_stacks_losses():
    parts = [{"y": torch.full((2, 1), float(i)), "loss": torch.tensor(float(i)), "none": None} for i in range(3)]
    joined = gather(parts, "cpu")
    assert joined["y"].flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert joined["loss"].tolist() == [0, 1, 2] and joined["none"] is None


def test_gather_refuses_what_cannot_be_joined():
    with pytest.raises(TypeError, match="cannot gather float from 2 replicas: return tensors"):
        gather([1.0, 2.0], "cpu")
    with pytest.raises(ValueError, match=r"replica 1 returned a dict with \['b'\], replica 0 a dict with \['a'\]"):
        gather([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], "cpu")
    with pytest.raises(ValueError, match="replica 1 returned a tuple with 1, replica 0 a tuple with 2"):
        gather([(torch.zeros(1), torch.zeros(1)), (torch.zeros(1),)], "cpu")


# --- Replicas --------------------------------------------------------------------------------------


def test_replica_0_shares_storage_and_the_others_do_not():
    module = model(batchnorm=True)
    replicas = replicate(module, ["cpu"] * 3)
    own, first, second = (m.scores.weight.data_ptr() for m in (module, *replicas[:2]))
    assert own == first != second
    buffers = [m.hidden[1].running_mean.data_ptr() for m in (module, *replicas)]
    assert buffers[0] == buffers[1] and len(set(buffers)) == 3


def test_replicas_hold_no_parameters_and_leave_the_module_as_it_was():
    module = model(batchnorm=True)
    before = list(module.state_dict())
    replicas = replicate(module, ["cpu"] * 2)
    assert [list(replica.parameters()) for replica in replicas] == [[], []]
    assert list(module.state_dict()) == before and len(list(module.parameters())) == 8
    assert not isinstance(replicas[0].scores.weight, nn.Parameter) and replicas[0].scores.weight.grad_fn is not None


def test_a_shared_submodule_and_a_tied_weight_stay_shared_in_each_replica():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    module.append(module[0])
    for replica in replicate(module, ["cpu"] * 2):
        assert replica[0] is replica[3] and replica[0].weight is replica[2].weight


def test_broadcast_adds_up_the_gradients_of_all_replicas_also_a_second_time():
    weight = nn.ParameterList([nn.Parameter(torch.tensor([3.0], dtype=torch.float64))])
    replicas = replicate(weight, ["cpu"] * 3)
    total = sum((i + 1) * replica[0] ** 3 for i, replica in enumerate(replicas))
    (slope,) = torch.autograd.grad(total, weight[0], create_graph=True)
    (bend,) = torch.autograd.grad(slope, weight[0])
    assert slope.item() == 6 * 3 * 9 and bend.item() == 6 * 6 * 3


# --- Threads ---------------------------------------------------------------------------------------


class Fails(nn.Module):
    def __init__(self, *rows: float) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x):
        if x[0].item() in self.rows:
            raise ZeroDivisionError(f"row {x[0].item():g}")
        return x


def test_the_first_failing_replica_is_named_and_its_own_error_raised():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="row 1") as caught:
        DataParallel(Fails(1, 3), FOUR)(torch.arange(4.0))
    assert caught.value.__notes__ == ["in replica 1 of 4, on device cpu"]
    assert threading.active_count() == before


def test_replicas_run_at_the_same_time_each_in_a_thread():
    together = threading.Barrier(3, timeout=20)

    class Meets(nn.Module):
        def forward(self, x):
            together.wait()  # a replica that ran alone would wait in vain
            return x

    assert DataParallel(Meets(), ["cpu"] * 3)(torch.arange(3)).tolist() == [0, 1, 2]


def test_threads_compute_in_the_modes_of_the_caller():
    class Modes(nn.Module):
        def forward(self, x):
            on = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
            return torch.tensor([on])

    parallel, x = DataParallel(Modes(), ["cpu"] * 2), torch.zeros(2)
    assert parallel(x).tolist() == [[True, False, False]] * 2
    with torch.no_grad():
        assert parallel(x).tolist() == [[False, False, False]] * 2
    with torch.inference_mode():
        assert parallel(x).tolist() == [[False, True, False]] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert parallel(x).tolist() == [[True, False, True]] * 2
        assert DataParallel(model().float(), ["cpu"] * 2)(torch.randn(4, 5)).dtype == torch.bfloat16


# --- All of it, against one process ----------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_outputs_and_gradients_are_those_of_one_process(devices, rows):
    module, x_NF = model(), torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    expected = gradients(module, module, x_NF) + [x_NF.grad]
    x_NF.grad = None
    found = gradients(module, DataParallel(module, ["cpu"] * devices), x_NF) + [x_NF.grad]
    assert_all_close(found, expected)


def test_twenty_steps_of_an_optimizer_end_at_the_same_parameters():
    alone, module = model(), model()
    module.load_state_dict(alone.state_dict())
    for each, call in ((alone, alone), (module, DataParallel(module, ["cpu"] * 3))):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.002, momentum=0.9)
        for _ in range(20):
            gradients(each, call, torch.randn(10, 5, dtype=torch.float64))
            optimizer.step()
    assert_all_close(module.parameters(), alone.parameters())
    torch.manual_seed(0)
    assert not torch.allclose(module.scores.weight, model().scores.weight)


def test_tied_frozen_and_unused_parameters_get_the_gradients_of_one_process():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
            self.tied[1].weight = self.tied[0].weight
            self.frozen, self.unused = nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 5)

        def forward(self, x):
            return self.tied[1](self.frozen(self.tied[0](x)))

    found = assert_same(Odd().double(), FOUR, torch.randn(7, 5, dtype=torch.float64))
    assert sum(gradient is None for gradient in found) == 4


def test_a_recurrent_layer_uses_the_weights_of_its_replica():
    module, x = nn.LSTM(4, 3, batch_first=True).double(), torch.randn(6, 2, 4, dtype=torch.float64)
    assert_same(module, FOUR[:2], x, pick=lambda output: output[0])  # its states are joined along dim 0: unused


def test_keyword_arguments_and_nested_inputs_and_outputs():
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, pair, *, scale, by):
            return {"sum": self.layer(pair[0] + pair[1]["z"]) * scale * by, "first": (pair[0],)}

    module = Nested().double()
    x, z, scale = (torch.randn(6, width, dtype=torch.float64) for width in (5, 5, 1))
    assert_same(module, FOUR, (x, {"z": z}), scale=scale, by=3, pick=lambda output: output["sum"])
    torch.testing.assert_close(DataParallel(module, FOUR)((x, {"z": z}), scale=scale, by=3)["first"][0], x)


def test_a_model_without_inputs_runs_once():
    class Constant(nn.Module):
        def forward(self):
            return torch.ones(1)

    assert DataParallel(Constant(), FOUR)().tolist() == [1.0]


def test_losses_from_replicas_weigh_alike_so_their_mean_is_wrong_for_unequal_chunks():
    class MeanLoss(nn.Module):
        def forward(self, x):
            return x.mean()

    x = torch.tensor([0.0, 0.0, 0.0, 0.0, 10.0])  # chunks of 2, 2 and 1
    losses = DataParallel(MeanLoss(), FOUR)(x)
    assert losses.tolist() == [0.0, 0.0, 10.0]
    assert losses.mean().item() == pytest.approx(10 / 3) and x.mean().item() == 2.0


# --- BatchNorm -------------------------------------------------------------------------------------


def test_running_statistics_are_those_of_the_first_chunk_alone():
    norm, x_NC = nn.BatchNorm1d(3).double(), torch.randn(8, 3, dtype=torch.float64)
    only_first, whole = copy.deepcopy(norm), copy.deepcopy(norm)
    DataParallel(norm, FOUR)(x_NC)
    only_first(x_NC[:2])
    whole(x_NC)
    torch.testing.assert_close(norm.running_mean, only_first.running_mean, **CLOSE)
    torch.testing.assert_close(norm.running_var, only_first.running_var, **CLOSE)
    assert not torch.allclose(norm.running_mean, whole.running_mean)
    assert norm.num_batches_tracked.item() == 1


def test_batchnorm_normalises_each_chunk_by_itself_in_training_and_all_rows_alike_in_evaluation():
    module, x_NF = model(batchnorm=True), torch.randn(8, 5, dtype=torch.float64)
    alone = copy.deepcopy(module)
    by_chunk = torch.cat([copy.deepcopy(alone)(chunk) for chunk in x_NF.chunk(2)])
    parallel = DataParallel(module, ["cpu"] * 2)
    torch.testing.assert_close(parallel(x_NF), by_chunk, **CLOSE)
    assert not torch.allclose(by_chunk, alone(x_NF))
    parallel.eval()
    torch.testing.assert_close(parallel(x_NF), module(x_NF), **CLOSE)


# --- What it tells ---------------------------------------------------------------------------------


def test_traffic_counts_every_byte_over_the_masters_links():
    module, x_NF = model(), torch.randn(9, 5, dtype=torch.float64)  # chunks of 3, 3 and 3
    parallel = DataParallel(module, ["cpu"] * 3)
    gradients(module, parallel, x_NF)
    parameters = sum(parameter.numel() for parameter in module.parameters()) * 8
    assert parallel.traffic.bytes == {
        "out: inputs": 6 * 5 * 8,
        "out: parameters": 2 * parameters,
        "in: outputs": 6 * 3 * 8,
        "out: output gradients": 6 * 3 * 8,
        "in: parameter gradients": 2 * parameters,
    }


def test_traffic_tells_buffers_from_parameters_and_can_be_cleared():
    parallel = DataParallel(nn.BatchNorm1d(3), ["cpu"] * 2)
    parallel(torch.randn(4, 3))
    assert parallel.traffic.bytes["out: buffers"] == 3 * 4 + 3 * 4 + 8
    parallel.traffic.clear()
    assert not parallel.traffic.bytes


def test_state_dict_has_the_prefix_of_torchs():
    module = model()
    names = list(nn.DataParallel(module).state_dict())
    assert list(DataParallel(module, FOUR).state_dict()) == names and names[0].startswith("module.")


def test_a_module_that_is_not_on_the_master_and_missing_devices_are_refused():
    with pytest.raises(ValueError, match=r"weight is on meta, expected the master cpu: call module.to\('cpu'\)"):
        DataParallel(nn.Linear(2, 2, device="meta"), ["cpu"] * 2)(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="expected at least one device, found none"):
        DataParallel(nn.Linear(2, 2), [])


# --- On GPUs ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: none is there")
def test_two_replicas_on_one_gpu_agree_with_one_process():
    assert_same(model().cuda(), ["cuda:0", "cuda:0"], torch.randn(9, 5, dtype=torch.float64, device="cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, since torch's DataParallel uses each once")
@pytest.mark.parametrize("batchnorm", [False, True])
def test_outputs_gradients_and_statistics_are_those_of_torchs_data_parallel(batchnorm):
    module, x_NF = model(batchnorm=batchnorm).cuda(), torch.randn(9, 5, dtype=torch.float64, device="cuda")
    theirs = copy.deepcopy(module)
    expected = gradients(theirs, nn.DataParallel(theirs, device_ids=[0, 1]), x_NF)
    assert_all_close(gradients(module, DataParallel(module, ["cuda:0", "cuda:1"]), x_NF), expected)
    assert_all_close(module.buffers(), theirs.buffers())
