"""The answer bank of lesson 01: gradients of shards put together, and the arithmetic of memory.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong, edited, spoilt

IMPORTS = """
import os
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
"""


# --- 01.1 ------------------------------------------------------------------------------------------

WHOLE = """
def whole_gradient(gradients, rows):
    total = torch.zeros(3, dtype=torch.float64)
    for gradient, n in zip(gradients, rows):
        if n > 0:
            total += n / sum(rows) * gradient
    return total
"""

WHOLE_STACKED = """
def whole_gradient(gradients, rows):
    weights = torch.tensor([n for n in rows if n], dtype=torch.float64) / sum(rows)
    return weights @ torch.stack([g for g in gradients if g is not None])
"""

WHOLE_BY_SUMS = """
def whole_gradient(gradients, rows):
    sums = [g * n for g, n in zip(gradients, rows) if n]
    return (torch.stack(sums).sum(0) / sum(rows)).tolist()
"""

# --- 01.2 ------------------------------------------------------------------------------------------

EXACT = """
def exact_gradient(rank, world_size, model, x, y):
    loss = ((model(x) - y) ** 2).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    flat = torch.cat([g.reshape(-1) for g in gradients] + [torch.tensor([len(x)], dtype=torch.float64)])
    dist.all_reduce(flat)
    return flat[:-1] / flat[-1]
"""

EXACT_INTO_TENSOR = edited(
    EXACT,
    (
        "    dist.all_reduce(flat)\n",
        "    everyone = flat.new_empty(world_size * len(flat))\n    dist.all_gather_into_tensor(everyone, flat)\n"
        "    flat = everyone.view(world_size, -1).sum(0)\n",
    ),
)

EXACT_FUNCTIONAL = edited(EXACT, ("dist.all_reduce(flat)", "flat = funcol.all_reduce(flat, 'sum', dist.group.WORLD)"))

EXACT_COALESCED = edited(
    EXACT,
    ("    dist.all_reduce(flat)\n", ""),
    (
        "    flat =",
        "    rows = torch.tensor([float(len(x))], dtype=torch.float64)\n    with dist._coalescing_manager():\n"
        "        for part in (rows, *gradients):\n            dist.all_reduce(part)\n    flat =",
    ),
    ("[torch.tensor([len(x)], dtype=torch.float64)]", "[rows]"),
)

EXACT_BY_SHARE = """
def exact_gradient(rank, world_size, model, x, y):
    counts = [None] * world_size
    dist.all_gather_object(counts, x.shape[0])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if x.shape[0]:
        nn.functional.mse_loss(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad *= x.shape[0] / sum(counts)
        dist.all_reduce(parameter.grad)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).tolist()
"""

EXACT_ROWS_FIRST = """
def exact_gradient(rank, world_size, model, x, y):
    rows = torch.tensor(len(x))
    dist.all_reduce(rows)
    loss = (model(x) - y).pow(2).sum() / rows
    model.zero_grad()
    loss.backward()
    for parameter in reversed(list(model.parameters())):
        dist.reduce(parameter.grad, dst=0)
        dist.broadcast(parameter.grad, src=0)
    return nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
"""

EXACT_PLAIN_MEAN = """
def exact_gradient(rank, world_size, model, x, y):
    model.zero_grad()
    if len(x):
        (model(x) - y).square().mean().backward()
    else:
        (model(x) - y).square().sum().backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    return flat / world_size
"""

# --- 01.3 ------------------------------------------------------------------------------------------

FIT = """
def ranks_needed(parameters, optimizer, bytes_per_row, global_batch, device_bytes):
    fixed = parameters * 4 * {"sgd": 3, "momentum": 4, "adam": 5}[optimizer]
    world_size = 1
    while world_size <= global_batch:
        rows = (global_batch + world_size - 1) // world_size
        if fixed + rows * bytes_per_row <= device_bytes:
            return world_size
        world_size += 1
    return None
"""

FIT_DIRECT = """
import math

def ranks_needed(parameters, optimizer, bytes_per_row, global_batch, device_bytes):
    state = 0
    if optimizer == "momentum":
        state = 1
    elif optimizer == "adam":
        state = 2
    most_rows = (device_bytes - (3 + state) * 4 * parameters) // bytes_per_row
    if most_rows < 1:
        return None
    return math.ceil(global_batch / most_rows)
"""

RIGHT = [
    Right("01.1", "added up in a loop", WHOLE),
    Right("01.1", "stacked", WHOLE_STACKED),
    Right("01.1", "sums over rows, as a list", WHOLE_BY_SUMS),
    Right("01.2", "rows travel with the gradient", EXACT),
    Right("01.2", "gathered into one tensor", EXACT_INTO_TENSOR),
    Right("01.2", "a functional sum", EXACT_FUNCTIONAL),
    Right("01.2", "coalesced sums", EXACT_COALESCED),
    Right("01.2", "weighed by its share, parameter by parameter", EXACT_BY_SHARE),
    Right("01.2", "rows first, then reduce and broadcast", EXACT_ROWS_FIRST),
    Right("01.3", "counted up", FIT),
    Right("01.3", "from the largest shard", FIT_DIRECT),
]

HARD_CODED = "def whole_gradient(gradients, rows):\n    return [1.0, 2.0, 3.0]\n"


WRONG = [
    Wrong(
        "01.1",
        "mean of means",
        "def whole_gradient(gradients, rows):\n"
        "    return sum(g for g in gradients if g is not None) / len(gradients)\n",
        ("unequal", "empty"),
        "this is the plain mean, in which each shard has the same weight",
    ),
    Wrong(
        "01.1",
        "mean over the shards that have rows",
        "def whole_gradient(gradients, rows):\n"
        "    return torch.stack([g for g in gradients if g is not None]).mean(0)\n",
        ("unequal", "empty"),
        "weigh each by its rows",
    ),
    Wrong("01.1", "empty shards not thought of",
          "def whole_gradient(gradients, rows):\n    return sum(g * n for g, n in zip(gradients, rows)) / sum(rows)\n",
          ("empty",), "a shard without rows has no gradient, but None"),
    Wrong(
        "01.1",
        "in place on what was given",
        "def whole_gradient(gradients, rows):\n"
        "    kept = [(g, n) for g, n in zip(gradients, rows) if n]\n"
        "    for g, n in kept:\n        g *= n / sum(rows)\n"
        "    return sum(g for g, _ in kept)\n",
        ("untouched",),
        "an operation in place",
    ),
    Wrong("01.1", "a hard-coded result", HARD_CODED, ALL, "the weight of a shard is its rows"),
    Wrong("01.1", "os._exit", "def whole_gradient(gradients, rows):\n    os._exit(0)\n", ALL,
          "the function ends its process"),
    *spoilt("01.1", WHOLE, [
        ("in float32", "equal unequal empty untouched", "the result is float32", (", dtype=torch.float64", "")),
        ("sum over rows, not divided", ALL, "divide by the number of all rows",
         ("n / sum(rows) * gradient", "n * gradient")),
        ("divided by the number of shards", ALL, "divided by the number of shards", ("n / sum(rows)", "n / len(rows)")),
        ("sum of the gradients", ALL, "each has to be weighed by its rows / all rows",
         ("n / sum(rows) * gradient", "gradient")),
        ("returns nothing", ALL, "returns nothing", ("return total", "total")),
        ("a gradient of zeros is taken for none", "unequal", "the weight of a shard is its rows",
         ("    total =", "    rows = [n if n and g.any() else 0 for g, n in zip(gradients, rows)]\n    total =")),
    ]),
    Wrong("01.2", "mean of means", EXACT_PLAIN_MEAN, ("unequal", "empty", "ranks"),
          "this is the plain mean of the shards' gradients"),
    Wrong("01.2", "endless loop", "def exact_gradient(rank, world_size, model, x, y):\n    while True:\n        pass\n",
          ALL, "an endless loop", limit_s=1.0),
    *spoilt("01.2", EXACT_PLAIN_MEAN, [
        ("summed, not averaged", "equal unequal empty ranks", "the gradients are summed over the ranks, not averaged",
         ("flat / world_size", "flat")),
    ]),
    *spoilt("01.2", EXACT, [
        ("the rank's own", ALL, "this is the rank's own gradient", ("    dist.all_reduce(flat)\n", "")),
        (".grad is not cleared", "equal unequal empty ranks", "the first call's gradient is still in .grad",
         ("gradients = torch.autograd.grad(loss, list(model.parameters()))",
          "loss.backward()\n    gradients = [p.grad for p in model.parameters()]")),
        ("divided by its own rows", "equal unequal empty ranks", "divided by this rank's own rows",
         ("/ flat[-1]", "/ max(1, len(x))")),
        ("divided by the ranks as well", "equal unequal empty ranks", "divided by the number of ranks once too often",
         ("/ flat[-1]", "/ flat[-1] / world_size")),
        ("a rank without rows stays away", "empty ranks", "one without rows must call them all, too",
         ("    loss =", "    if len(x) == 0:\n        return torch.zeros(36)\n    loss ="), 3.0),
        ("errors swallowed", "equal unequal empty ranks", "divided by this rank's own rows",
         ("    loss =",
          "    try:\n        assert len(x)\n        mine = 1 / len(x)\n    except Exception:\n        mine = 1.0\n"
          "    loss ="), ("/ flat[-1]", "* mine")),
    ]),
    Wrong(
        "01.3",
        "everything divided by the ranks",
        "def ranks_needed(parameters, optimizer, bytes_per_row, global_batch, device_bytes):\n"
        "    held = {'sgd': 3, 'momentum': 4, 'adam': 5}[optimizer] * 4 * parameters\n"
        "    return -(-(held + global_batch * bytes_per_row) // device_bytes)\n",
        ("divided", "optimizer", "uneven", "never"),
        "each rank holds all of them",
    ),
    Wrong(
        "01.3",
        "parts of rows",
        "import math\n\ndef ranks_needed(parameters, optimizer, bytes_per_row, global_batch, device_bytes):\n"
        "    left = device_bytes - {'sgd': 3, 'momentum': 4, 'adam': 5}[optimizer] * 4 * parameters\n"
        "    return math.ceil(global_batch * bytes_per_row / left) if left >= bytes_per_row else None\n",
        ("uneven",),
        "a device holds whole rows",
    ),
    *spoilt("01.3", FIT, [
        ("DDP's copy of gradients forgotten", "divided optimizer uneven never", "the gradient's copy in DDP's bucket",
         ('"sgd": 3, "momentum": 4, "adam": 5', '"sgd": 2, "momentum": 3, "adam": 4')),
        ("both gradients forgotten", "divided optimizer uneven never", "such as both gradients",
         ('"sgd": 3, "momentum": 4, "adam": 5', '"sgd": 1, "momentum": 2, "adam": 3')),
        ("shards rounded down", "uneven never", "the largest shard decides",
         ("(global_batch + world_size - 1) // world_size", "global_batch // world_size")),
        ("what fits exactly does not fit", "divided optimizer", "<=, not <",
         ("bytes_per_row <= device", "bytes_per_row < device")),
        ("one number is one byte", "divided optimizer uneven never",
         "each rank holds 5 numbers of 4 bytes for each parameter", ("parameters * 4 *", "parameters *")),
        ("stops at 1024 ranks", "uneven", "it does fit", ("<= global_batch", "<= min(global_batch, 1024)")),
        ("never ends when it cannot fit", "never", "an endless loop",
         ("while world_size <= global_batch", "while True"), 1.0),
    ]),
    *spoilt("01.3", FIT_DIRECT, [
        ("optimizer state forgotten", "optimizer uneven never", "the optimizer's state is missing",
         ("(3 + state)", "3")),
        ("a division by zero", "never", "ZeroDivisionError", ("    if most_rows < 1:\n        return None\n", "")),
        ("only an empty room is too small", "never", "not even one row fits", ("most_rows < 1", "most_rows == 0")),
        ("one byte more for each row", "divided optimizer", "<=, not <",
         ("// bytes_per_row", "// (bytes_per_row + 1)")),
        ("not rounded up", ALL, "a number of ranks is whole",
         ("math.ceil(global_batch / most_rows)", "global_batch / most_rows")),
    ]),
]  # fmt: skip
