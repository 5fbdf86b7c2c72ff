"""A checkpoint is whole or it is the one before; reading it runs no code."""

import os
import pickle

import pytest
import torch

from ddp_course.checkpoint import CheckpointError, load_checkpoint, save_checkpoint

CPU = torch.device("cpu")
STATE = {"model": {"w": torch.arange(3.0)}, "epochs_done": 2, "config": {"lr": 0.1, "root": None}}


def test_what_was_saved_is_read_back(tmp_path):
    path = tmp_path / "new folder" / "last.pt"
    save_checkpoint(path, STATE)
    state = load_checkpoint(path, CPU)
    assert torch.equal(state["model"]["w"], torch.tensor([0.0, 1.0, 2.0]))
    assert (state["epochs_done"], state["config"]) == (2, {"lr": 0.1, "root": None})
    assert os.listdir(path.parent) == ["last.pt"]


def test_tensors_go_to_the_device_that_is_named(tmp_path):
    save_checkpoint(tmp_path / "last.pt", STATE)
    state = load_checkpoint(tmp_path / "last.pt", torch.device("meta"))  # stands for any other device
    assert state["model"]["w"].device.type == "meta"


def test_a_save_that_fails_keeps_the_checkpoint_before(tmp_path):
    path = tmp_path / "last.pt"
    save_checkpoint(path, STATE)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        save_checkpoint(path, {"model": torch.ones(1000), "open file": open(os.devnull)})  # noqa: SIM115
    assert load_checkpoint(path, CPU)["epochs_done"] == 2
    save_checkpoint(path, STATE | {"epochs_done": 3})  # and what the failure left is in nobody's way
    assert load_checkpoint(path, CPU)["epochs_done"] == 3
    assert os.listdir(tmp_path) == ["last.pt"]


def test_the_new_name_appears_only_after_the_content_is_on_the_disk(tmp_path, monkeypatch):
    path, steps = tmp_path / "last.pt", []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(("fsync", path.exists())), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(("replace", path.exists())), replace(a, b)))
    save_checkpoint(path, STATE)
    assert steps == [("fsync", False), ("replace", False), ("fsync", True)]


def test_a_missing_checkpoint_says_where_and_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*last\.pt .*leave resume out"):
        load_checkpoint(tmp_path / "last.pt", CPU)


@pytest.mark.parametrize("damage", ["empty", "text", "half"])
def test_a_broken_checkpoint_is_named(tmp_path, damage):
    path = tmp_path / "last.pt"
    save_checkpoint(path, STATE)
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"not a checkpoint", "half": content[: len(content) // 2]}[damage])
    with pytest.raises(CheckpointError, match=r"last\.pt is not a checkpoint that can be read"):
        load_checkpoint(path, CPU)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


def test_a_checkpoint_that_carries_code_is_refused_unrun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Trap()}, "trap.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_checkpoint("trap.pt", CPU)
    assert not os.path.exists("sprung")
