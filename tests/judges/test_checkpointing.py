"""Lesson 10's solutions, held to torch's own reading: their judges ask nothing but them."""

import pytest
import torch
from torch import nn

from ddp_course.grading.source import function_of, solution_of


def test_the_file_holds_the_state_and_a_failure_leaves_it(ranks, tmp_path):
    save, path = function_of("10.1", "save_atomically", solution_of("10.1")), tmp_path / "last.pt"
    ranks(2).run(lambda rank, world_size: save(rank, world_size, {"w": torch.arange(3) + rank}, path))
    with pytest.raises(AttributeError, match="pickle"):
        save(0, 1, {"w": lambda: 0}, path)
    assert list(tmp_path.iterdir()) == [path]
    assert torch.load(path, weights_only=True)["w"].tolist() == [0, 1, 2]


def test_the_names_are_those_of_the_model(tmp_path):
    load, model, other = function_of("10.2", "load_onto", solution_of("10.2")), nn.Linear(2, 1), nn.Linear(2, 1)
    torch.save({"model": {f"module.{k}": v for k, v in other.state_dict().items()}, "step": 7}, tmp_path / "a.pt")
    assert load(tmp_path / "a.pt", model, "cpu") == 7
    assert torch.equal(model.weight, other.weight)
