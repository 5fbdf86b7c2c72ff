"""A checkpoint written while the training goes on holds the values of its step, and its failure is known to all."""

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_course.checkpoint import folder as checkpoint
from ddp_course.checkpoint.folder import Checkpointer, CheckpointError, copied_to_cpu, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 20


def tied_model() -> nn.Module:
    """Three layers, two of which are one tensor, and buffers of two kinds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 40, bias=False))
    model[2].weight = model[0].weight
    return model


class Gate:
    """Holds back each write until it is opened, and counts those that are under way at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.came = threading.Event(), threading.Event()
        self.now = self.most = 0
        self.written: list[str] = []
        monkeypatch.setattr(checkpoint, "save_checkpoint", self.save)

    def save(self, path: Path, state: dict) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        self.came.set()
        assert self.opened.wait(LIMIT_S), "the gate was not opened"
        save_checkpoint(path, state)
        self.written.append(path.name)
        self.now -= 1


@pytest.fixture
def gate(monkeypatch) -> Gate:
    return Gate(monkeypatch)


# --- What is written -------------------------------------------------------------------------------


def test_it_holds_the_values_of_its_step_although_everything_changes_right_after(tmp_path, gate):
    weights, momentum, losses = torch.ones(1000), torch.ones(3, dtype=torch.float64), [0.5]
    pair = (torch.ones(2), [torch.ones(2)])
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save_later({"model": {"w": weights}, "m": [momentum], "losses": losses, "pair": pair}, 1)
        for tensor in (weights, momentum, pair[0], pair[1][0]):
            tensor.zero_()
        losses.append(0.4)
        gate.opened.set()
        checkpoints.finish()
        state = checkpoints.load_latest().state
    assert state["losses"] == [0.5]
    for tensor in (state["model"]["w"], state["m"][0], state["pair"][0], state["pair"][1][0]):
        assert tensor.eq(1).all()
    assert state["m"][0].dtype == torch.float64


def test_it_is_the_file_that_save_would_have_written(tmp_path):
    model = tied_model()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1, "place": {"epoch": 0}}
    with Checkpointer(tmp_path / "at once") as at_once, Checkpointer(tmp_path / "later") as later:
        at_once.save(state, 1)
        later.save_later(state, 1)
        later.finish()
        one, two = at_once.load_latest(), later.load_latest()
        assert one.path.stat().st_size == two.path.stat().st_size  # so tied weights are there once, not twice
    assert two.state["optimizer"]["state"].keys() == {0, 1, 2}  # a moment for each of weights, scale and shift
    assert str(one.state) == str(two.state)
    for name, tensor in one.state["model"].items():
        assert torch.equal(tensor, two.state["model"][name]) and tensor.dtype == two.state["model"][name].dtype
    assert two.state["model"]._metadata == model.state_dict()._metadata
    assert two.state["model"]["1.num_batches_tracked"].dtype == torch.int64
    assert two.state["model"]["0.weight"].data_ptr() == two.state["model"]["2.weight"].data_ptr()


def test_a_copy_shares_what_was_shared_and_nothing_with_the_original():
    whole = torch.arange(10.0)
    odd = {
        "part": whole[2:5], "turned": whole.view(2, 5).t(), "empty": torch.empty(0, 3), "number": torch.tensor(2.5),
        "conjugate": torch.tensor([1 + 2j]).conj(), "negative": torch.tensor([1 + 2j]).conj().imag,
        "sparse": torch.eye(3).to_sparse(), "half": torch.ones(2, dtype=torch.bfloat16), "grad": nn.Parameter(whole),
    }  # fmt: skip
    copy = copied_to_cpu(odd)
    for name, tensor in odd.items():
        expected = tensor.detach()
        assert copy[name].shape == expected.shape and copy[name].dtype == expected.dtype
        assert torch.equal(copy[name].to_dense(), expected.to_dense()), name
        assert not copy[name].requires_grad
    assert copy["part"].untyped_storage().data_ptr() == copy["turned"].untyped_storage().data_ptr()
    assert copy["turned"].stride() == odd["turned"].stride()
    whole.zero_(), odd["sparse"].values().zero_()
    assert copy["part"].tolist() == [2, 3, 4] and copy["sparse"].to_dense().trace() == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_of_a_gpus_tensors_is_in_the_cpus_memory():
    weight = torch.ones(1000, 1000, device="cuda")
    copy = copied_to_cpu({"w": weight, "tied": weight, "part": weight[1]})
    weight.zero_()
    assert {tensor.device.type for tensor in copy.values()} == {"cpu"}
    assert all(tensor.eq(1).all() for tensor in copy.values())
    assert copy["w"].data_ptr() == copy["tied"].data_ptr()


# --- One at a time ---------------------------------------------------------------------------------


def test_one_is_under_way_at_a_time_and_the_order_is_kept(tmp_path, gate):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.save_later({"step": 1}, 1)
        assert gate.came.wait(LIMIT_S) and checkpoints.steps() == []  # it has returned, and nothing is there yet
        opener = threading.Timer(0.05, gate.opened.set)
        opener.start()
        checkpoints.save_later({"step": 2}, 2)  # waits for the first
        assert 1 in checkpoints.steps()
        checkpoints.save({"step": 3}, 3)
        assert checkpoints.steps() == [2, 3]
        checkpoints.save_later({"step": 4}, 4)
        checkpoints.finish(), checkpoints.finish()
        opener.join()
    assert gate.most == 1
    assert gate.written == [f"step-{step:010d}.pt" for step in (1, 2, 3, 4)]


def test_close_lets_the_writing_end_without_a_word_to_anybody(tmp_path, gate):
    checkpoints = Checkpointer(tmp_path)
    with pytest.raises(KeyError), checkpoints:
        checkpoints.save_later({"step": 1}, 1)
        threading.Timer(0.05, gate.opened.set).start()
        raise KeyError  # the training has failed
    assert checkpoints.steps() == [1] and load_checkpoint(checkpoints.path_of(1), "cpu") == {"step": 1}
    with Checkpointer(tmp_path) as another:  # the folder is free
        another.save({"step": 2}, 2)


# --- What goes wrong -------------------------------------------------------------------------------


def full_disk(rank: int, world_size: int, folder: Path, then: str) -> tuple[str, list[int], int]:
    """Save step 2 later, for which there is no room; return what `then` raises, and what is there afterwards."""
    with Checkpointer(folder) as checkpoints:
        checkpoints.save({"step": 1}, 1)
        if rank == 0:
            (folder / ".step-0000000002.pt.unfinished").symlink_to("/dev/full")
        checkpoints.save_later({"w": torch.ones(1000)}, 2)
        try:
            checkpoints.finish() if then == "finish" else getattr(checkpoints, then)({"step": 3}, 3)
        except CheckpointError as error:
            said = str(error)
        there = checkpoints.load_latest().step
        checkpoints.save_later({"step": 4}, 4)  # the ranks are in step, and the next one is written
        checkpoints.finish()
        return said, there, checkpoints.load_latest().step


@pytest.mark.parametrize("then", ["finish", "save_later", "save"])
def test_a_full_disk_is_known_to_every_rank_at_the_next_call(two_ranks, tmp_path, then):
    (zero, *found_0), (one, *found_1) = two_ranks.run(full_disk, args=(tmp_path, then))
    assert "step-0000000002.pt cannot be written: No space left on device. The state needs 4,000 bytes" in zero
    assert one == f"rank 0 could not save step 2: CheckpointError: {zero}"
    assert found_0 == found_1 == [1, 4]  # nothing of step 3 was written, for its caller was told of an error
    assert sorted(os.listdir(tmp_path)) == [".writer", "step-0000000001.pt", "step-0000000004.pt"]


def failing(rank: int, world_size: int, folder: Path, no_memory: bool) -> str:
    """Return what `finish` raises of a save in a folder that cannot be made, or whose copy finds no memory."""

    def no_room(state: dict) -> dict:
        raise MemoryError("too large")

    with pytest.MonkeyPatch.context() as monkeypatch, Checkpointer(folder) as checkpoints:
        monkeypatch.setattr(checkpoint, "copied_to_cpu", no_room if no_memory else copied_to_cpu)
        checkpoints.save_later({"step": 7} if rank == 0 else None, 7)
        try:
            checkpoints.finish()
        except (CheckpointError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"


def test_other_failures_of_the_writer_are_everybodys_too(two_ranks, tmp_path):
    (tmp_path / "file").touch()
    for folder, no_memory, said in (
        (tmp_path / "file" / "run", False, f"CheckpointError: cannot write into {tmp_path}/file/run: "),
        (tmp_path, True, "MemoryError: too large"),
    ):
        zero, one = two_ranks.run(failing, args=(folder, no_memory))
        assert zero.startswith(said) and one == f"CheckpointError: rank 0 could not save step 7: {zero}"
