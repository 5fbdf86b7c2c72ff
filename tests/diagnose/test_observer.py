"""The observer takes notes of what happened, and changes nothing of it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from ddp_course.diagnose.observer import ROWS_KEPT, TrainingObserver
from ddp_course.diagnose.training_facts import Reference

pytestmark = pytest.mark.timeout(60)
TEN = TensorDataset(torch.arange(10))


def observer(model=None, **options):
    return TrainingObserver(model or nn.Linear(2, 2), **options)


def rows_of(loader):
    return [batch.tolist() for (batch,) in loader]


def test_the_last_two_epochs_are_noted_and_the_loader_gives_what_it_gave():
    watch, loader = observer(), DataLoader(TEN, 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    watch.training_rows(loader)
    epochs = [sum(rows_of(loader), []) for _ in range(3)]
    unwatched = DataLoader(TEN, 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    assert epochs == [sum(rows_of(unwatched), []) for _ in range(3)]
    assert watch.facts().epochs == epochs[1:] and watch.facts().local_batch == 4
    assert len(loader) == 3


def test_rows_are_noted_with_workers_too():
    watch, loader = observer(), DataLoader(TEN, 4, num_workers=1)
    watch.evaluation_rows(loader)
    assert sum(rows_of(loader), []) == watch.facts().evaluated == list(range(10))
    assert watch.facts().evaluation_size == 10


def test_a_subset_of_a_subset_is_looked_through():
    watch, loader = observer(), DataLoader(Subset(Subset(TEN, [9, 7, 5, 3]), [3, 0]), 1)
    watch.evaluation_rows(loader)
    assert sum(rows_of(loader), []) == watch.facts().evaluated == [3, 9]
    assert watch.facts().evaluation_size is None


def test_rows_without_numbers_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    with pytest.raises(TypeError, match="rows of Stream cannot be noted: expected a dataset with a length"):
        observer().training_rows(DataLoader(Stream(), 2))
    with pytest.raises(TypeError, match="a DataLoader with a batch_size"):
        observer().training_rows(DataLoader(TEN, batch_size=None))


def test_of_a_very_long_epoch_a_part_is_kept():
    class Counted(torch.utils.data.Dataset):
        def __len__(self):
            return ROWS_KEPT + 10

        def __getitems__(self, indices):
            return [0] * len(indices)

    watch, loader = observer(), DataLoader(Counted(), 50_000)
    watch.training_rows(loader)
    assert sum(len(batch) for batch in loader) == ROWS_KEPT + 10
    assert len(watch.facts().epochs[0]) == ROWS_KEPT


def test_a_metric_is_summed_until_it_is_reported_and_then_begins_anew():
    watch = observer()
    for loss, rows in ((torch.tensor(1.0, requires_grad=True), 4), (torch.tensor(4.0), 1)):
        watch.batch("loss", loss, rows)
    watch.reported("loss", 1.6)
    noted = watch.facts().means["loss"]
    assert (noted.total, noted.rows, noted.batch_means, noted.batches, noted.reported) == (8.0, 5, 5.0, 2, 1.6)
    assert watch.look() == []
    watch.batch("loss", 3.0, 2)
    assert (watch.facts().means["loss"].total, watch.facts().means["loss"].reported) == (6.0, None)
    watch.reported("loss", 2.5)
    assert [finding.fault for finding in watch.look()] == ["wrong-mean"]  # one process: no group is needed


def test_files_devices_and_names_are_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watch, model = observer(), nn.Linear(2, 2)
    with watch.writing("last.pt"):
        torch.save(model.state_dict(), "last.pt")
    (write,) = watch.facts().writes
    assert write.path == str(tmp_path / "last.pt") and write.began <= write.ended
    with pytest.raises(OSError), watch.writing("none/last.pt"):
        (tmp_path / "none" / "last.pt").write_bytes(b"")
    assert len(watch.facts().writes) == 1  # it was not written
    watch.loaded({"weight": torch.empty(2, 2, device="meta"), "step": 3}, model)
    (load,) = watch.facts().loads
    assert (load.names, load.model_names, load.devices) == (("weight", "step"), ("weight", "bias"), ("meta",))


def test_the_model_is_hashed_by_its_bits_and_batchnorm_is_known():
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.BatchNorm1d(2))
    model.register_buffer("scale", torch.tensor(1.0))
    watch = observer(model)
    before = watch.facts()
    assert before.of_batchnorm == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert "scale" in before.buffers and before.device == "cpu"
    with torch.no_grad():
        model[0].weight[0, 0] += 1
        model[1].running_mean += 1
    after = watch.facts()
    changed = [name for name in before.parameters if before.parameters[name] != after.parameters[name]]
    assert changed == ["0.weight"]
    assert before.buffers["1.running_mean"].tolist() == [0, 0]  # the notes are copies


def test_the_rate_is_the_one_that_a_schedule_began_with():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    watch = observer(model, optimizer=optimizer, reference=Reference(16, 0.1))
    assert watch.facts().lr == 0.4
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.004) and watch.facts().lr == 0.4
    assert observer(device="cuda:3").facts().device == "cuda:3"


def look_on_rank(rank, world_size):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(rank)
        model.bias.zero_()
    watch = observer(model)
    return [(finding.fault, finding.rank, finding.numbers) for finding in watch.look()]


def test_all_ranks_see_the_same_findings(two_ranks):
    expected = [("replicas-differ", 1, {"tensors": 1})]
    assert two_ranks.run(look_on_rank) == [expected, expected]
