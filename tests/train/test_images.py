"""Training on two ranks is training on one with the whole batch, whoever starts the ranks."""

import math
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from ddp_course import RankError, launch
from ddp_course.checkpoint.folder import load_checkpoint
from ddp_course.data import Images, load
from ddp_course.data.augment import Augmented
from ddp_course.models import MLP, resnet18_small
from ddp_course.parallel.syncbn import SyncBatchNorm
from ddp_course.train import speed
from ddp_course.train.images import Config, Result, checksum, evaluate, share_buffers, synchronised, train

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
QUICK = Config(epochs=2, hidden=32, progress=False)
EXACT = replace(QUICK, dtype="float64", local_batch=32)  # 719 rows on a rank: 22 batches of 32, one of 15


@pytest.fixture(scope="module")
def run(ranks):
    """A function that trains on two ranks."""
    return lambda config: ranks(2).run(train, args=(config,), limit_s=90)


@pytest.fixture(scope="module")
def quick(run, tmp_path_factory) -> tuple[list[Result], Config]:
    """What two epochs bring, and the config with which they can be resumed."""
    saved = replace(QUICK, checkpoint=str(tmp_path_factory.mktemp("quick") / "run"))
    return run(saved), replace(saved, resume=True)


# --- Two ranks learn -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(run) -> list[Result]:
    return run(Config(progress=False))


@pytest.mark.slow
def test_two_ranks_learn_the_digits(digits):
    assert digits[0].accuracy >= 0.95
    assert digits[0].accuracy == digits[0].accuracies[-1]
    assert len(digits[0].losses) == 20 and digits[0].losses[-1] < 0.05 < digits[0].losses[0]


def test_the_replicas_are_equal_and_the_reported_loss_is_the_mean_of_the_ranks_own(digits):
    one, two = digits
    assert (one.checksum, one.losses, one.accuracies) == (two.checksum, two.losses, two.accuracies)
    assert one.own_losses[0] != two.own_losses[0]
    means = [(a + b) / 2 for a, b in zip(one.own_losses, two.own_losses, strict=True)]  # of 719 rows each
    assert one.losses == pytest.approx(means, rel=1e-12)


def test_a_seed_gives_the_same_bits_and_another_seed_others(run, quick):
    first, again, other = quick[0][0], run(QUICK)[0], run(replace(QUICK, seed=4))[0]
    assert (first.checksum, first.losses) == (again.checksum, again.losses)
    assert first.checksum != other.checksum


# --- Parity with one process on the whole batch ----------------------------------------------------


def one_process(config: Config, world_size: int, shards: tuple[int, ...]) -> dict:
    """Train without DDP on the global batch: the rows that the ranks in `shards` have in the same step."""
    images = load(config.dataset)
    labels = images.labels
    rows_of = Augmented(images, config.seed) if config.augment else images
    torch.manual_seed(config.seed)
    model = MLP(64, config.hidden, 10).double()
    settings = {"momentum": config.momentum, "weight_decay": config.weight_decay}
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, **settings)
    samplers = [DistributedSampler(images, world_size, rank, seed=config.seed) for rank in shards]
    report = {"losses": [], "own_losses": [], "means_of_means": []}
    for epoch in range(config.epochs):
        [sampler.set_epoch(epoch) for sampler in samplers]
        if config.augment:
            rows_of.set_epoch(epoch)
        x, done = torch.stack([rows_of[i][0] for i in range(len(images))]).double(), 0
        row_losses: list[list[torch.Tensor]] = [[] for _ in shards]  # by rank, then by step
        for batches in zip(*(torch.tensor(list(s)).split(config.local_batch) for s in samplers), strict=True):
            losses = [F.cross_entropy(model(x[rows]), labels[rows], reduction="none") for rows in batches]
            optimizer.zero_grad()
            torch.cat(losses).mean().backward()
            optimizer.param_groups[0]["lr"] = config.lr * cosine(config, epoch + done / len(images))
            optimizer.step()
            done += sum(map(len, batches))
            [own.append(loss.detach()) for own, loss in zip(row_losses, losses, strict=True)]
        report["own_losses"].append([torch.cat(own).mean().item() for own in row_losses])
        report["losses"].append(torch.cat([row for own in row_losses for row in own]).mean().item())
        means = [loss.mean() for own in row_losses for loss in own]
        report["means_of_means"].append(torch.stack(means).mean().item())
    return report | {"model": model.state_dict()}


def cosine(config: Config, place: float) -> float:
    if config.schedule == "constant":
        return 1.0
    if place < config.warmup:
        return 0.1 + 0.9 * place / config.warmup
    return 0.5 + 0.5 * math.cos(math.pi * (place - config.warmup) / (config.epochs - config.warmup))


@pytest.fixture(scope="module")
def two_ranks_exact(run, tmp_path_factory) -> tuple[list[Result], dict]:
    folder = tmp_path_factory.mktemp("exact")
    results = run(replace(EXACT, checkpoint=str(folder), keep=1))
    assert [path.name for path in folder.glob("*.pt")] == ["step-0000000046.pt"]
    return results, load_checkpoint(folder / "step-0000000046.pt", CPU)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_two_ranks_take_the_steps_of_one_process_on_the_whole_batch(two_ranks_exact):
    results, saved = two_ranks_exact
    whole = one_process(EXACT, 2, shards=(0, 1))
    assert largest_difference(saved["model"], whole["model"]) < 1e-12
    assert results[0].losses == pytest.approx(whole["losses"], rel=1e-12)
    for rank, result in enumerate(results):
        assert result.own_losses == pytest.approx([own[rank] for own in whole["own_losses"]], rel=1e-12)
    # The comparison would notice a missing reduction:
    alone = one_process(EXACT, 2, shards=(0,))  # as if the gradients were not averaged
    assert largest_difference(saved["model"], alone["model"]) > 1e-2
    # The last batch has 15 rows, not 32, so a mean of the batches' means is another number.
    assert abs(whole["means_of_means"][0] - results[0].losses[0]) > 1e-4


def test_also_with_a_schedule_changed_images_and_weight_decay(run, tmp_path):
    more = {"schedule": "cosine", "warmup": 0.5, "augment": True, "weight_decay": 0.01}
    config = replace(EXACT, **more, checkpoint=str(tmp_path), keep=1)
    run(config)
    saved, whole = load_checkpoint(tmp_path / "step-0000000046.pt", CPU), one_process(config, 2, shards=(0, 1))
    assert largest_difference(saved["model"], whole["model"]) < 1e-12
    for name, without in {"schedule": "constant", "warmup": 0.1, "augment": False, "weight_decay": 0.0}.items():
        other = one_process(replace(config, **{name: without}), 2, shards=(0, 1))
        assert largest_difference(saved["model"], other["model"]) > 1e-3, name


# --- Evaluation ------------------------------------------------------------------------------------


def first_rows(n: int) -> Images:
    test = load(split="test")
    return replace(test, pixels=test.pixels[:n], labels=test.labels[:n])


def evaluate_on_rank(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(0)
    model = MLP(64, 16, 10)
    return [evaluate(model, first_rows(n), rank, world_size, CPU, batch=8) for n in (1, 17, 101)]


def test_accuracy_counts_each_row_once_on_shards_of_unequal_length(ranks):
    torch.manual_seed(0)
    model, expected = MLP(64, 16, 10), []
    for images in map(first_rows, (1, 17, 101)):
        guesses = model(images.pixels / images.white).argmax(dim=1)
        expected.append((guesses == images.labels).double().mean().item())
    for found in ranks(2).run(evaluate_on_rank):
        assert found == pytest.approx(expected, abs=1e-15)


# --- BatchNorm -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "device", "kind"),
    [(2, torch.device("cuda", 0), nn.SyncBatchNorm), (2, CPU, SyncBatchNorm), (1, CPU, nn.BatchNorm1d)],
)
def test_batchnorm_is_synchronised_by_torchs_layer_on_gpus_and_by_ours_elsewhere(world_size, device, kind):
    model = MLP(64, 8, 10, batchnorm=True)
    names = list(model.state_dict())
    model = synchronised(model, world_size, device)
    assert sum(type(layer) is kind for layer in model.modules()) == 2
    assert list(model.state_dict()) == names


def drifted_buffers(rank: int, world_size: int) -> tuple[str, str, str]:
    torch.manual_seed(0)
    model = MLP(64, 8, 10, batchnorm=True)
    torch.manual_seed(rank)
    model(torch.rand(5, 64))  # each rank's running statistics see other rows
    before = checksum(model)
    share_buffers(model)
    return before, checksum(model), str(model.hidden[1].running_mean.tolist())


def test_buffers_that_drifted_are_rank_0s_again(ranks):
    (before_0, after_0, mean_0), (before_1, after_1, mean_1) = ranks(2).run(drifted_buffers)
    assert before_0 != before_1
    assert before_0 == after_0 == after_1 and mean_0 == mean_1


@pytest.mark.slow
def test_replicas_of_a_deep_network_with_batchnorm_end_equal(run):
    results = run(replace(QUICK, model="resnet18", epochs=1, local_batch=360))
    assert results[0].checksum == results[1].checksum
    assert all(result.notes == [] for result in results)


# --- Checkpoints -----------------------------------------------------------------------------------


def test_the_checkpoint_fits_the_bare_model_and_holds_all_that_a_run_needs(two_ranks_exact):
    results, saved = two_ranks_exact
    model = MLP(64, 32, 10).double()
    model.load_state_dict(saved["model"])  # strict: no "module." prefix, nothing missing
    assert checksum(model) == results[0].checksum
    assert (saved["epoch"], saved["world_size"], len(saved["generators"])) == (2, 2, 2)
    assert Config(**saved["extra"]["config"]).lr == EXACT.lr
    assert len(saved["optimizer"]["state"]) == 6  # a momentum for each of three weights and three biases


def same(result: Result) -> tuple:
    """What must not depend on whether the run was interrupted."""
    return result.checksum, result.losses, result.own_losses, result.accuracies, result.accuracy, result.steps


def test_a_resumed_run_ends_as_the_uninterrupted_one(run, quick, tmp_path):
    straight = run(replace(QUICK, epochs=4))
    shutil.copytree(quick[1].checkpoint, tmp_path / "run")
    longer = replace(quick[1], epochs=4, checkpoint=str(tmp_path / "run"))
    resumed = run(longer)
    assert [(r.first_epoch, r.first_step) for r in resumed] == [(2, 90), (2, 90)]
    finished = run(longer)  # nothing is left to train
    assert [same(r) for r in finished] == [same(r) for r in resumed] == [same(r) for r in straight]


def test_a_run_with_everything_on_goes_on_exactly_within_an_epoch(run, tmp_path):
    everything = {"schedule": "cosine", "warmup": 0.5, "augment": True, "amp": True, "weight_decay": 1e-4}
    config = replace(QUICK, model="mlp_bn", local_batch=64, **everything, checkpoint=str(tmp_path / "run"))
    straight = run(replace(config, save_every=3, keep=100))
    assert straight[0].steps == 24 and straight[0].checksum == straight[1].checksum
    state = load_checkpoint(tmp_path / "run" / "step-0000000009.pt", CPU)
    assert {tensor.dtype for name, tensor in state["model"].items() if "num_" not in name} == {torch.float32}
    (tmp_path / "torn").mkdir()
    shutil.copy(tmp_path / "run" / "step-0000000009.pt", tmp_path / "torn")  # as if it had been killed in step 10
    resumed = run(replace(config, checkpoint=str(tmp_path / "torn"), resume=True, workers=1))
    assert resumed[0].first_step == 9
    assert [same(r) for r in resumed] == [same(r) for r in straight]

    wide = run(replace(config, checkpoint=None, amp=False))
    assert wide[0].checksum != straight[0].checksum  # bfloat16 was really used
    assert wide[0].losses == pytest.approx(straight[0].losses, rel=0.05)  # 8 bits of a number are 1 part in 256


@pytest.mark.parametrize(("setting", "found"), [({"lr": 0.5}, "lr=0.1"), ({"hidden": 16}, "hidden=32")])
def test_a_checkpoint_of_another_run_is_refused(run, quick, setting, found):
    with pytest.raises(RankError) as caught:
        run(replace(quick[1], **setting))
    assert caught.value.error_type == "CheckpointError"
    assert f"was written with {found}, this run has" in caught.value.message


def test_a_resume_begins_without_a_checkpoint_and_goes_on_with_other_ranks_with_a_note(run, ranks, tmp_path, capsys):
    first = run(replace(QUICK, epochs=1, checkpoint=str(tmp_path), resume=True))
    assert first[0].notes == [f"{tmp_path} has no checkpoint yet, so the run begins"]
    go_on = replace(QUICK, checkpoint=str(tmp_path), resume=True)
    (alone,) = ranks(1).run(train, args=(go_on,), limit_s=90)
    assert (alone.first_epoch, alone.losses[0], len(alone.losses)) == (1, first[0].losses[0], 2)
    assert alone.own_losses == [None, alone.losses[1]]
    assert alone.notes[0].startswith("saved by 2 ranks, resumed by 1: the random generators")

    capsys.readouterr()
    launch(train, 2, args=(go_on,), backend="gloo", start_method="forkserver", limit_s=90)  # nothing is left to train
    said = [line for line in capsys.readouterr().out.splitlines() if "note" in line]
    assert len(said) == 1 and said[0].startswith("rank 0 | note: saved by 1 ranks, resumed by 2"), said


# --- Faster ----------------------------------------------------------------------------------------


def with_compile_broken_on_rank_1(rank: int, world_size: int, config: Config) -> Result:
    def broken(function, **options):
        raise RuntimeError("InvalidCxxCompiler: no compiler found\nand a long story")

    with mock.patch.object(torch, "compile", broken if rank == 1 else lambda function, **options: function):
        return train(rank, world_size, config)


def test_where_one_rank_cannot_compile_no_rank_does_and_the_result_says_so(ranks, quick):
    asked = ranks(2).run(with_compile_broken_on_rank_1, (replace(QUICK, compile=True),))
    assert [same(r) for r in asked] == [same(r) for r in quick[0]]
    for result in asked:
        (note,) = result.notes
        assert note.startswith("compile was left out: rank 1 cannot (InvalidCxxCompiler: no compiler found); on CPUs")


def traced_gradients(rank: int, world_size: int, traced: bool) -> list[float]:
    torch.manual_seed(0)
    model = synchronised(MLP(64, 8, 10, batchnorm=True), world_size, CPU)
    replica = DistributedDataParallel(model)
    if traced:
        # All of torch.compile but the writing of C++, which takes long.
        speed.compile_in_place(replica, backend="aot_eager")
    torch.manual_seed(rank)
    for _ in range(2):  # DDP plans its buckets again in between
        replica.zero_grad()
        F.cross_entropy(replica(torch.rand(8, 64)), torch.arange(8)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()


@pytest.mark.slow
def test_a_compiled_replica_has_the_same_gradients_and_still_sends_them(ranks):
    plain, compiled = (ranks(2).run(traced_gradients, (traced,), limit_s=120) for traced in (False, True))
    assert compiled[0] == compiled[1] and compiled[0] == pytest.approx(plain[0], rel=1e-5, abs=1e-7)


def test_the_images_follow_the_filters_layout():
    config = Config(model="resnet18", channels_last=True)
    model = speed.laid_out(resnet18_small(10, 1), config)
    seen = []
    model.layer1[0].conv1.register_forward_hook(lambda module, given, result: seen.append(result))
    model(torch.rand(4, 1, 8, 8))
    assert seen[0].is_contiguous(memory_format=torch.channels_last) and not seen[0].is_contiguous()
