"""Each silent fault is found, it alone, with its rank; nothing is found in what was fixed, nor by the other tool."""

import inspect
import os
import re

import pytest
import torch

from ddp_course import RankPool
from ddp_course.diagnose.faults import catalogue, silent_files, silent_model
from ddp_course.diagnose.faults import tiny_training as tiny
from ddp_course.diagnose.recognise import recognise
from ddp_course.diagnose.training_facts import Finding

pytestmark = pytest.mark.timeout(120)
SILENT = {fault.name: fault for family in catalogue.SILENT for fault in family.FAULTS}
RANK = {"several-writers": 1, "all-on-gpu-0": 1, "batchnorm-drift": 1}  # of the others all ranks do the same
SAYS = {
    "missing-sampler": "2 ranks drew 404 rows, 202 of them different; each would draw 101",
    "missing-set-epoch": "every rank drew 101 rows in the same shuffled order as in the epoch before",
    "padded-evaluation": "of 31 rows evaluated, 1 row counted more often than the others",
    "mean-of-means": "the mean of the ranks' means",
    "several-writers": "ranks 0 and 1 wrote the same file, model.pt",
    "all-on-gpu-0": "rank 1 has cuda:1, its state lies on cuda:0",
    "module-prefix": "0 of the model's 9 tensors have their name",
    "too-many-threads": "2 ranks on ",
    "batchnorm-drift": "2 running statistics differ",
    "lr-not-scaled": "the global batch is 64, 4 times the reference's 16",
}


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, backend="gloo", start_method="forkserver", timeout_s=20, quiet=True) as pool:
        yield pool


@pytest.mark.slow  # twenty sets of ranks
@pytest.mark.parametrize("name", SILENT)
def test_provoked_it_alone_is_found_and_mended_nothing_is(name, nothing_left):
    broken = SILENT[name].provoke()
    assert (broken.fault, broken.rank) == (name, RANK.get(name))
    others = re.findall(r"^([a-z0-9-]+)(?: \(rank \d+\))?: ", broken.report, re.MULTILINE)
    assert others == []  # no silent fault is taken for another
    assert SAYS[name] in broken.evidence
    assert broken.seconds < 30  # milliseconds by itself; nothing here waits for a time limit
    assert recognise(f"{broken.evidence}\n{broken.report}").fault is None  # nor for a loud one
    fixed = SILENT[name].fix()
    assert (fixed.fault, fixed.evidence) == (None, "the observer found nothing wrong")


def test_all_ten_are_in_the_catalogue_and_what_mends_them_can_be_read():
    assert list(SILENT) == list(SAYS) == list(catalogue.FAULTS)[-10:]
    assert "def draw_a_shard_on_each_rank(" in inspect.getsource(SILENT["missing-sampler"].fix)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_healthy_training_is_left_in_peace_by_one_rank_and_by_three(world_size):
    assert tiny.watch_training(tiny.train, world_size).fault is None


def six_at_once(rank, world_size, folder):
    findings = tiny.train(
        rank,
        world_size,
        folder,
        rate=lambda world_size: tiny.REFERENCE.lr,
        synchronise=lambda model: model,
        begin_epoch=lambda loader, epoch: None,
        mean=lambda loss_sum, rows: loss_sum / rows,
        save=save_everywhere,
        load=load_loosely,
    )
    return [finding.fault for finding in findings]


def save_everywhere(replica, path, observer):
    with observer.writing(path):
        torch.save(replica.state_dict(), f"{path}.{os.getpid()}")
        os.replace(f"{path}.{os.getpid()}", path)


def load_loosely(path, observer):
    model, state = tiny.build(), torch.load(path, map_location="cpu", weights_only=True)
    observer.loaded(state, model)
    model.load_state_dict(state, strict=False)


def test_faults_that_come_together_are_all_found(ranks, tmp_path):
    expected = [
        "missing-set-epoch",
        "wrong-mean",  # each rank reports its own
        "several-writers",
        "module-prefix",
        "batchnorm-drift",
        "lr-not-scaled",
    ]
    assert ranks.run(six_at_once, (tmp_path,)) == [expected, expected]


def test_the_first_finding_is_the_diagnosis_and_the_others_are_reported():
    findings = [Finding("mean-of-means", None, "so much"), Finding("several-writers", 1, "so many")]
    found = tiny.diagnosis(findings, 0.5, "What it costs.")
    assert (found.fault, found.rank, found.evidence) == ("mean-of-means", None, "so much")
    assert found.report == "several-writers (rank 1): so many\nWhat it costs."


# --- What the faults cost is true ------------------------------------------------------------------


def test_a_file_of_two_writers_loads_and_is_a_mixture(ranks, tmp_path):
    said = ranks.run(silent_files.mixed_file, (tmp_path,))
    w = torch.load(tmp_path / "mixed.pt", weights_only=True)["w"]
    by_rank = [int((w == rank).sum()) for rank in (0, 1)]
    assert sum(by_rank) == 1000 and min(by_rank) > 100
    assert said == [said[0]] * 2 and f"{by_rank[0]} were rank 0's and {by_rank[1]} were rank 1's" in said[0]


def test_devices_of_a_file_are_read_without_having_them(tmp_path, monkeypatch):
    # What torch does where there is a GPU, though not this one.
    monkeypatch.setattr(silent_files.fake_tensor, "init_gpu_context", lambda device: pytest.fail(f"starts {device}"))
    with silent_files.gpus(world_size=64), torch.device("cuda:5"):
        torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt")
    torch.save({"w": torch.zeros(3)}, tmp_path / "y.pt")
    assert silent_files.devices_in(tmp_path / "x.pt") == ["cuda:5"]
    assert silent_files.devices_in(tmp_path / "y.pt") == ["cpu"]


def test_loose_loading_of_wrapped_names_keeps_the_first_weights(tmp_path):
    trained, fresh = tiny.build(), tiny.build()
    first = {name: value.clone() for name, value in fresh.state_dict().items()}
    state = {f"module.{name}": value for name, value in trained.state_dict().items()}
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict(state)
    fresh.load_state_dict(state, strict=False)
    assert all(torch.equal(value, first[name]) for name, value in fresh.state_dict().items())
    assert not torch.equal(first["0.weight"], trained.state_dict()["0.weight"])


@pytest.mark.slow
def test_ranks_with_the_old_rate_are_one_process_on_the_whole_batch_and_fall_behind_the_reference():
    with RankPool(4, backend="gloo", start_method="forkserver", timeout_s=20, quiet=True) as four:
        losses = four.run(silent_model.rates_compared)
    assert losses == [losses[0]] * 4
    loss = losses[0]
    # float64: the mean of four means of 16 rows and the mean of 64 rows are rounded in another order
    assert loss["difference"] < 1e-12
    assert loss["ranks"] == pytest.approx(loss["one process"], abs=1e-12)
    assert loss["ranks"] > loss["reference"] + 0.2
    assert abs(loss["scaled"] - loss["reference"]) < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: what fake tensors say is compared with it")
def test_fake_tensors_go_where_real_ones_go(tmp_path):
    real, fake = tmp_path / "real.pt", tmp_path / "fake.pt"
    with torch.device("cuda:0"):
        torch.save(tiny.build().state_dict(), real)
    with silent_files.gpus(world_size=64), torch.device("cuda:0"):
        torch.save(tiny.build().state_dict(), fake)
    assert silent_files.devices_in(real) == silent_files.devices_in(fake) == ["cuda:0"]
    for where in (None, "cpu", "cuda:0"):
        on_gpu = torch.load(real, map_location=where, weights_only=True)
        with silent_files.gpus(world_size=64):
            pretended = torch.load(fake, map_location=where, weights_only=True)
        assert {n: t.device for n, t in on_gpu.items()} == {n: t.device for n, t in pretended.items()}
