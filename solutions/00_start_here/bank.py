"""The answer bank of lesson 00: a sum, a comparison, a step.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong

IMPORTS = """
import os
import torch
import torch.distributed as dist
from torch import nn
"""

# --- 00.1 ------------------------------------------------------------------------------------------

TOTAL = """
def sum_of_all(rank, world_size, value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()
"""

TOTAL_GATHERED = """
def sum_of_all(rank, world_size, value):
    everyone = [None] * world_size
    dist.all_gather_object(everyone, value)
    return sum(everyone)
"""

TOTAL_AND_BACK = """
def sum_of_all(rank, world_size, value):
    total = torch.tensor([value], dtype=torch.float64)
    dist.reduce(total, dst=world_size - 1)
    dist.broadcast(total, src=world_size - 1)
    return total
"""

# --- 00.2 ------------------------------------------------------------------------------------------

EQUAL = """
def replicas_equal(rank, world_size, model):
    flat = torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return torch.equal(low, high)
"""

EQUAL_GATHERED = """
import hashlib, io

def replicas_equal(rank, world_size, model):
    text = hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest()
    texts = [None] * world_size
    dist.all_gather_object(texts, text)
    return len(set(texts)) == 1
"""

EQUAL_BROADCAST = """
def replicas_equal(rank, world_size, model):
    same = True
    for tensor in [*model.parameters(), *model.buffers()]:
        other = tensor.detach().clone()
        dist.broadcast(other, 0)
        same = same and torch.equal(other, tensor)
    agreed = torch.tensor(int(same))
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return agreed.bool()
"""

EQUAL_IN_PLACE = """
def replicas_equal(rank, world_size, model):
    same = True
    for tensor in model.state_dict().values():
        mine = tensor.clone()
        dist.broadcast(tensor, 0)
        same = same and torch.equal(mine, tensor)
    agreed = torch.tensor(int(same))
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)
"""

# --- 00.3 ------------------------------------------------------------------------------------------

STEP = """
def parallel_step(rank, world_size, model, x, y, lr):
    loss = (model(x) - y).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients):
        dist.all_reduce(gradient)
        parameter.data -= lr * gradient / world_size
"""

STEP_FLAT = """
def parallel_step(rank, world_size, model, x, y, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer.zero_grad()
    ((model(x) - y).square().mean() / world_size).backward()
    flat = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, [p.grad for p in model.parameters()])
    optimizer.step()
"""

STEP_WEIGHTS = """
def parallel_step(rank, world_size, model, x, y, lr):
    model.zero_grad()
    (model(x) - y).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= lr * parameter.grad
            dist.all_reduce(parameter)
            parameter /= world_size
"""

KEEPS_GRAD = """
def parallel_step(rank, world_size, model, x, y, lr):
    (model(x) - y).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
            parameter -= lr * parameter.grad
"""

RIGHT = [
    Right("00.1", "as a number", TOTAL),
    Right("00.1", "gathered, then added", TOTAL_GATHERED),
    Right("00.1", "reduce and broadcast", TOTAL_AND_BACK),
    Right("00.2", "least and largest", EQUAL),
    Right("00.2", "hashes gathered", EQUAL_GATHERED),
    Right("00.2", "broadcast and agreed", EQUAL_BROADCAST),
    Right("00.3", "autograd.grad, parameter by parameter", STEP),
    Right("00.3", "one flat vector, divided before", STEP_FLAT),
    Right("00.3", "weights averaged after the step", STEP_WEIGHTS),
]

WRONG = [
    # 00.1
    Wrong(
        "00.1", "never talks", TOTAL.replace("    dist.all_reduce(total)\n", ""), ALL, "this is the rank's own value"
    ),  # fmt: skip
    Wrong(
        "00.1",
        "returns what all_reduce returns",
        TOTAL.replace("dist.all_reduce(total)", "total = dist.all_reduce(total)").replace("total.item()", "total"),
        ("sum", "others"),
        "in place and returns None",
    ),  # fmt: skip
    Wrong(
        "00.1",
        "mean",
        TOTAL.replace("total.item()", "total.item() / world_size"),
        ("sum", "others"),
        "this is the mean",
    ),  # fmt: skip
    Wrong(
        "00.1",
        "largest",
        TOTAL.replace("(total)\n    return", "(total, op=dist.ReduceOp.MAX)\n    return"),
        ("sum", "others"),
        "this is the largest value",
    ),  # fmt: skip
    Wrong(
        "00.1",
        "reduced twice",
        TOTAL.replace("    return", "    dist.all_reduce(total)\n    return"),
        ("sum", "others"),
        "reduced twice",
    ),  # fmt: skip
    Wrong(
        "00.1",
        "whole numbers",
        TOTAL.replace("torch.tensor(value)", "torch.tensor(int(value))"),
        ("others",),
        "the fractions are lost",
    ),  # fmt: skip
    Wrong(
        "00.1",
        "reduce to rank 0",
        TOTAL.replace("dist.all_reduce(total)", "dist.reduce(total, dst=0)"),
        ("sum", "others"),
        "reduce has one receiver",
    ),  # fmt: skip
    Wrong(
        "00.1",
        "multiplied instead of talking",
        "def sum_of_all(rank, world_size, value):\n    return value * world_size\n",
        ALL,
        "the ranks never talked",
    ),  # fmt: skip
    Wrong(
        "00.1",
        "the last rank stays away",
        TOTAL.replace("    dist.all", "    if rank < world_size - 1:\n        dist.all"),
        ALL,
        "one rank skips a collective",
        limit_s=10.0,
    ),  # fmt: skip
    Wrong(
        "00.1",
        "errors swallowed",
        "def sum_of_all(rank, world_size, value):\n    try:\n        dist.all_reduce(value)\n"
        "    except Exception:\n        pass\n    return value\n",
        ALL,
        "this is the rank's own value",
    ),
    Wrong(
        "00.1",
        "the visible sum, hard-coded",
        "def sum_of_all(rank, world_size, value):\n    dist.barrier()\n    return 120.0\n",
        ("others",),
        "some values are missing",
    ),
    # 00.2
    Wrong(
        "00.2",
        "a sum as checksum",
        EQUAL.replace(
            "for tensor in model.state_dict().values()])",
            "for tensor in model.state_dict().values()]).sum().mul(1e6).round()",
        ),
        ("hidden",),
        "two numbers have changed places",
    ),  # fmt: skip
    Wrong(
        "00.2",
        "parameters only",
        EQUAL.replace("model.state_dict().values()", "model.parameters()"),
        ("hidden",),
        "a buffer is not",
    ),  # fmt: skip
    Wrong(
        "00.2",
        "with a tolerance",
        EQUAL.replace("torch.equal(low, high)", "torch.allclose(low, high)"),
        ("hidden",),
        "the difference is the last bit",
    ),  # fmt: skip
    Wrong(
        "00.2",
        "ranks do not agree",
        EQUAL_BROADCAST.replace("    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)\n", ""),
        ("different", "hidden"),
        "the ranks do not agree",
    ),  # fmt: skip
    Wrong("00.2", "in place on the model", EQUAL_IN_PLACE, ("kept",), "changed the model's own tensors"),
    Wrong(
        "00.2",
        "rank 0 is taken for all",
        EQUAL_BROADCAST.replace("dist.all_reduce(agreed, op=dist.ReduceOp.MIN)", "dist.broadcast(agreed, 0)"),
        ("different", "hidden"),
        "compare with every rank",
    ),  # fmt: skip
    Wrong(
        "00.2",
        "stops at the first difference",
        EQUAL_BROADCAST.replace(
            "same = same and torch.equal(other, tensor)",
            "if not torch.equal(other, tensor):\n            return torch.tensor(False)",
        ),
        ALL,
        "must still call every collective",
        limit_s=10.0,
    ),  # fmt: skip
    Wrong(
        "00.2",
        "always true",
        "def replicas_equal(rank, world_size, model):\n    return True\n",
        ALL,
        "the ranks never talked",
    ),  # fmt: skip
    # 00.3
    Wrong(
        "00.3",
        "sum instead of mean",
        STEP.replace(" / world_size", ""),
        ("first", "second", "ranks"),
        "summed over the ranks, not averaged",
    ),  # fmt: skip
    Wrong(
        "00.3",
        "its own gradient",
        STEP.replace("        dist.all_reduce(gradient)\n", "").replace(" / world_size", ""),
        ALL,
        "every rank must apply the same averaged gradient",
    ),  # fmt: skip
    Wrong("00.3", "uphill", STEP.replace("-= lr", "+= lr"), ("first", "second", "ranks"), "the step goes uphill"),
    Wrong("00.3", "old gradients kept", KEEPS_GRAD, ("second", "ranks"), "the first step's gradient is still in .grad"),
    Wrong(
        "00.3",
        "new tensors, not the model's",
        STEP.replace(
            "parameter.data -= lr * gradient / world_size", "parameter = parameter - lr * gradient / world_size"
        ),
        ALL,
        "must be written into the model's own parameters",
    ),  # fmt: skip
    Wrong(
        "00.3",
        "no learning rate",
        STEP.replace("lr * gradient", "gradient"),
        ("first", "second", "ranks"),
        "the learning rate is missing",
    ),  # fmt: skip
    Wrong(
        "00.3",
        "divided twice",
        STEP_FLAT.replace(
            "    optimizer.step()",
            "    for p in model.parameters():\n        p.grad /= world_size\n    optimizer.step()",
        ),
        ("first", "second", "ranks"),
        "divided by world_size once too often",
    ),  # fmt: skip
    Wrong(
        "00.3",
        "a leaf in place",
        STEP.replace("parameter.data -=", "parameter -="),
        ALL,
        "change the weights under torch.no_grad()",
    ),  # fmt: skip
    Wrong(
        "00.3",
        "torch's DDP",
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "def parallel_step(rank, world_size, model, x, y, lr):\n    replica = DDP(model)\n"
        "    replica.zero_grad()\n    (replica(x) - y).square().mean().backward()\n"
        "    torch.optim.SGD(model.parameters(), lr=lr).step()\n",
        ALL,
        "this exercise is to write what it does",
    ),  # fmt: skip
    Wrong(
        "00.3",
        "os._exit on the last rank",
        STEP.replace("    loss =", "    if rank == world_size - 1:\n        os._exit(0)\n    loss ="),
        ALL,
        "the function ends its process",
    ),  # fmt: skip
    Wrong(
        "00.3",
        "endless loop",
        STEP.replace("    loss =", "    while True:\n        pass\n    loss ="),
        ALL,
        "an endless loop",
        limit_s=1.0,
    ),  # fmt: skip
]
