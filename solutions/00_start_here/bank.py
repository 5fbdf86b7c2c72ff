"""The answer bank of lesson 00: a sum, a comparison, a step.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong, edited, spoilt
from tests.grading.bank import wrong as strangers

IMPORTS = """
import os
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
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

TOTAL_INTO_TENSOR = """
def sum_of_all(rank, world_size, value):
    everyone = torch.empty(world_size)
    dist.all_gather_into_tensor(everyone, torch.tensor([value]))
    return everyone.sum().item()
"""

TOTAL_FUNCTIONAL = edited(
    TOTAL, ("dist.all_reduce(total)", "total = funcol.all_reduce(total, 'sum', dist.group.WORLD)")
)
TOTAL_COALESCED = edited(TOTAL, ("    dist.all", "    with dist._coalescing_manager():\n        dist.all"))

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

EQUAL_INTO_TENSOR = """
def replicas_equal(rank, world_size, model):
    flat = torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])
    everyone = torch.empty(world_size * len(flat)).double()
    dist.all_gather_into_tensor(everyone, flat)
    return torch.equal(everyone, everyone[: len(flat)].repeat(world_size))
"""

EQUAL_FUNCTIONAL = edited(
    EQUAL,
    ("dist.all_reduce(low, op=dist.ReduceOp.MIN)", "low = funcol.all_reduce(low, 'min', dist.group.WORLD)"),
    ("dist.all_reduce(high, op=dist.ReduceOp.MAX)", "high = funcol.all_reduce(high, 'max', dist.group.WORLD)"),
    ("torch.equal(low, high)", "bool((low == high).all())"),
)

EQUAL_COALESCED = edited(
    EQUAL,
    ("high = flat.clone(), flat.clone()", "high = flat.clone(), -flat"),
    ("    dist.all_reduce(low", "    with dist._coalescing_manager():\n        dist.all_reduce(low"),
    ("    dist.all_reduce(high, op=dist.ReduceOp.MAX)", "        dist.all_reduce(high, op=dist.ReduceOp.MIN)"),
    ("(low, high)", "(low, -high)"),
)

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

STEP_FUNCTIONAL = edited(
    STEP, ("dist.all_reduce(gradient)", "gradient = funcol.all_reduce(gradient, 'sum', dist.group.WORLD)")
)

STEP_COALESCED = edited(
    STEP,
    ("        dist.all_reduce(gradient)\n", ""),
    (
        "    for parameter,",
        "    with dist._coalescing_manager():\n"
        "        for gradient in gradients:\n            dist.all_reduce(gradient)\n    for parameter,",
    ),
)

STEP_INTO_TENSOR = edited(
    STEP_FLAT,
    ("mean() / world_size", "mean()"),
    (
        "    dist.all_reduce(flat)\n",
        "    everyone = flat.new_empty(world_size * len(flat))\n    dist.all_gather_into_tensor(everyone, flat)\n"
        "    flat = everyone.view(world_size, -1).mean(0)\n",
    ),
)

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
    Right("00.1", "gathered into one tensor", TOTAL_INTO_TENSOR),
    Right("00.1", "a functional sum", TOTAL_FUNCTIONAL),
    Right("00.1", "a coalesced sum", TOTAL_COALESCED),
    Right("00.2", "gathered into one tensor", EQUAL_INTO_TENSOR),
    Right("00.2", "functional least and largest", EQUAL_FUNCTIONAL),
    Right("00.2", "coalesced least and largest", EQUAL_COALESCED),
    Right("00.3", "functional sums", STEP_FUNCTIONAL),
    Right("00.3", "coalesced sums", STEP_COALESCED),
    Right("00.3", "gathered into one tensor", STEP_INTO_TENSOR),
    Right("00.2", "least and largest", EQUAL),
    Right("00.2", "hashes gathered", EQUAL_GATHERED),
    Right("00.2", "broadcast and agreed", EQUAL_BROADCAST),
    Right("00.3", "autograd.grad, parameter by parameter", STEP),
    Right("00.3", "one flat vector, divided before", STEP_FLAT),
    Right("00.3", "weights averaged after the step", STEP_WEIGHTS),
]


WRONG = [
    *spoilt("00.1", TOTAL, [
        ("never talks", ALL, "this is the rank's own value", ("    dist.all_reduce(total)\n", "")),
        ("returns what all_reduce returns", "sum others", "in place and returns None",
         ("dist.all_reduce(total)", "total = dist.all_reduce(total)"), ("total.item()", "total")),
        ("mean", "sum others", "this is the mean", ("total.item()", "total.item() / world_size")),
        ("largest", "sum others", "this is the largest value",
         ("(total)\n    return", "(total, op=dist.ReduceOp.MAX)\n    return")),
        ("a list of one number", "sum others", "return one number", ("total.item()", "[total.item()]")),
        ("reduced twice", "sum others", "reduced twice", ("    return", "    dist.all_reduce(total)\n    return")),
        ("whole numbers", "others", "the fractions are lost", ("torch.tensor(value)", "torch.tensor(int(value))")),
        ("two decimal places", "others", "some values are missing", ("total.item()", "round(total.item(), 2)")),
        ("reduce to rank 0", "sum others", "reduce has one receiver",
         ("dist.all_reduce(total)", "dist.reduce(total, dst=0)")),
        ("the last rank stays away", ALL, "one rank skips a collective",
         ("    dist.all", "    if rank < world_size - 1:\n        dist.all"), 10.0),
    ]),
    Wrong("00.1", "multiplied instead of talking",
          "def sum_of_all(rank, world_size, value):\n    return value * world_size\n", ALL, "the ranks never talked"),
    Wrong(
        "00.1",
        "errors swallowed",
        "def sum_of_all(rank, world_size, value):\n    try:\n        dist.all_reduce(value)\n"
        "    except Exception:\n        pass\n    return value\n",
        ALL,
        "this is the rank's own value",
    ),
    Wrong("00.1", "a set of the values, in which equal ones count once",
          TOTAL_GATHERED.replace("sum(everyone)", "sum(set(everyone))"), ("others",), "some values are missing"),
    Wrong("00.1", "the visible sum, hard-coded",
          "def sum_of_all(rank, world_size, value):\n    dist.barrier()\n    return 120.0\n", ("others", "talk"),
          "some values are missing"),
    *spoilt("00.2", EQUAL, [
        ("a sum as checksum", "hidden", "two numbers have changed places",
         ("for tensor in model.state_dict().values()])",
          "for tensor in model.state_dict().values()]).sum().mul(1e6).round()")),
        ("parameters only", "hidden", "a buffer is not", ("model.state_dict().values()", "model.parameters()")),
        ("with a tolerance", "hidden", "the difference is the last bit",
         ("torch.equal(low, high)", "torch.allclose(low, high)")),
        ("in float32", "hidden", "in its own dtype", ("tensor.double()", "tensor.float()")),
        ("one dtype for all", "hidden", "a whole number differs that no float32 holds", ("tensor.double()", "tensor")),
        ("gradients turned off for good", "kept", "or its mode",
         ("    low,", "    model.requires_grad_(False)\n    low,")),
    ]),
    *spoilt("00.2", EQUAL_BROADCAST, [
        ("ranks do not agree", "different hidden", "the ranks do not agree",
         ("    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)\n", "")),
        ("rank 0 is taken for all", "different hidden", "compare with every rank",
         ("dist.all_reduce(agreed, op=dist.ReduceOp.MIN)", "dist.broadcast(agreed, 0)")),
        ("stops at the first difference", ALL, "must still call every collective",
         ("same = same and torch.equal(other, tensor)",
          "if not torch.equal(other, tensor):\n            return torch.tensor(False)"), 10.0),
    ]),
    Wrong("00.2", "in place on the model", EQUAL_IN_PLACE, ("kept",), "changed the model's own tensors"),
    Wrong("00.2", "always true", "def replicas_equal(rank, world_size, model):\n    return True\n", ALL,
          "the ranks never talked"),
    *spoilt("00.3", STEP, [
        ("sum instead of mean", "first second ranks", "summed over the ranks, not averaged", (" / world_size", "")),
        ("its own gradient", ALL, "every rank must apply the same averaged gradient",
         ("        dist.all_reduce(gradient)\n", ""), (" / world_size", "")),
        ("uphill", "first second ranks", "the step goes uphill", ("-= lr", "+= lr")),
        ("new tensors, not the model's", ALL, "must be written into the model's own parameters",
         ("parameter.data -= lr * gradient / world_size", "parameter = parameter - lr * gradient / world_size")),
        ("divided by the rows", "first second ranks", "mean() divides by all numbers", ("mean()", "sum() / len(x)")),
        ("in float32", "first second ranks", "right to six digits",
         ("dist.all", "gradient = gradient.float()\n        dist.all")),
        ("the learning rate of the first call, for ever", "ranks", "a mix of some",
         ("    loss =", "    global first\n    lr = first = globals().get('first', lr)\n    loss =")),
        ("no learning rate", "first second ranks", "the learning rate is missing", ("lr * gradient", "gradient")),
        ("a leaf in place", ALL, "change the weights under torch.no_grad()", ("parameter.data -=", "parameter -=")),
        ("os._exit on the last rank", ALL, "the function ends its process",
         ("    loss =", "    if rank == world_size - 1:\n        os._exit(0)\n    loss =")),
        ("endless loop", ALL, "an endless loop", ("    loss =", "    while True:\n        pass\n    loss ="), 1.0),
    ]),
    Wrong("00.3", "old gradients kept", KEEPS_GRAD, ("second", "ranks"), "the first step's gradient is still in .grad"),
    Wrong(
        "00.3",
        "torch's DDP",
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "def parallel_step(rank, world_size, model, x, y, lr):\n    replica = DDP(model)\n"
        "    replica.zero_grad()\n    (replica(x) - y).square().mean().backward()\n"
        "    torch.optim.SGD(model.parameters(), lr=lr).step()\n",
        ALL,
        "this exercise is to write what it does",
    ),
    *spoilt("00.3", STEP_FLAT, [
        ("divided twice", "first second ranks", "divided by world_size once too often",
         ("    optimizer.step()",
          "    for p in model.parameters():\n        p.grad /= world_size\n    optimizer.step()")),
    ]),
]  # fmt: skip

# --- From strangers, who had seen the texts alone -------------------------------------------------

WRONG += strangers(
    "00.3",
    "",
    r"""
puts new Parameter objects into the model | same | an optimizer
    def parallel_step(rank, world_size, model, x, y, lr):
        model.zero_grad()
        (model(x) - y).square().mean().backward()
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                grad = p.grad.clone()
                dist.all_reduce(grad)
                setattr(module, name, torch.nn.Parameter(p.detach() - lr * grad / world_size))
""",
)
