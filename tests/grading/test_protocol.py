"""What crosses the border from a box is the same data on the other side, and nothing else can cross."""

import math

import pytest
import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.sandbox.protocol import NotPlain, read, written
from ddp_course.grading.vocabulary.observe import Call

VALUES = [
    [1, -2.5, 1e-300, None, True, "ü", b"\0\xff", 2**80],
    {"a": (1, (2, [3])), 1: {2, 3}, (0, 1): -0.0},
    [Call("all_reduce", (0, 1), 5.0, 8, True, None), Fault("e", "f", 1, "c", "r")],
    [math.inf, -math.inf],
]
TENSORS = [
    torch.randn(2, 3, dtype=torch.bfloat16),
    torch.zeros(0, 3),
    torch.tensor(3),
    torch.arange(6).reshape(2, 3).T,
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
    torch.nn.Parameter(torch.ones(2)),
]
REFUSED = {
    "code": '{"!":["eval","1+1"]}',
    "no number": "NaN",
    "cut": "[1",
    "an object of another form": '{"a":1}',
    "bytes of another size": '{"!":["tensor","float32",[4],"AAAA"]}',
    "a size below zero": '{"!":["tensor","float32",[-1],"AAAAAA=="]}',
    "a size beyond memory": '{"!":["tensor","float32",[99999999999],""]}',
    "no dtype": '{"!":["tensor","__class__",[1],"AAAAAA=="]}',
    "too deep": "[" * 100_000 + "]" * 100_000,
    "deep": "[" * 200 + "]" * 200,
    "a call of other parts": '{"!":["call",1,2,3,4,5,6]}',
    "a fault of another kind": '{"!":["fault",1]}',
    "a list as a key": '{"!":["dict",[[1],2]]}',
    "a list in a set": '{"!":["set",[1]]}',
    "too long": " " * (2**26 + 1),
}


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_data_come_as_they_went(value):
    found = read(written(value))
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}{list(t.shape)}")
def test_tensors_come_as_they_went(tensor):
    found = read(written([tensor]))[0]
    assert type(found) is torch.Tensor and found.dtype == tensor.dtype and torch.equal(found, tensor.detach())


def test_nan_comes_as_nan():
    assert math.isnan(read(written([math.nan]))[0])


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_what_is_no_data_is_refused(text):
    with pytest.raises(NotPlain):
        read(text)


NO_DATA = {
    "an object": object(),
    "a function": print,
    "a module": torch.nn.Linear(1, 1),
    "a function in a list": [open],
    "a sparse tensor": torch.ones(2).to_sparse(),
}


@pytest.mark.parametrize("value", NO_DATA.values(), ids=NO_DATA)
def test_what_is_no_data_cannot_be_written(value):
    with pytest.raises(NotPlain):
        written(value)
