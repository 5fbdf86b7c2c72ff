"""The answer bank of lesson 17: bytes, a share of the optimizer, and layers that are cut, right and wrong.

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


# --- 17.1 ------------------------------------------------------------------------------------------

BYTES = """
def bytes_on_a_rank(parameters, world_size, strategy, mixed):
    share, whole = (parameters + world_size - 1) // world_size, parameters
    number, gradient, state = (2, 2, 12) if mixed else (4, 4, 8)
    a, b, c = whole, whole, whole
    if strategy in ("zero1", "zero2", "zero3"):
        c = share
    if strategy in ("zero2", "zero3"):
        b = share
    if strategy == "zero3":
        a = share
    return {"parameters": a * number, "gradients": b * gradient, "state": c * state}
"""

BYTES_BY_SHARDS = """
def bytes_on_a_rank(parameters, world_size, strategy, mixed):
    largest = len(range(0, parameters, world_size))
    stage = 0 if strategy == "ddp" else int(strategy[-1])
    found = {}
    for name, needs, wide, narrow in (("state", 1, 8, 12), ("gradients", 2, 4, 2), ("parameters", 3, 4, 2)):
        each = narrow if mixed else wide
        found[name] = each * (largest if stage >= needs else parameters)
    return found
"""

# --- 17.2 ------------------------------------------------------------------------------------------

STEP = """
class ShardedStep:
    def __init__(self, rank, world_size, parameters, make_optimizer):
        self.owner, loads = {}, [0] * world_size
        for parameter in parameters:
            self.owner[parameter] = loads.index(min(loads))
            loads[self.owner[parameter]] += parameter.numel()
        self.mine = [p for p, owner in self.owner.items() if owner == rank]
        self.make_optimizer, self.optimizer = make_optimizer, make_optimizer(self.mine)
        self.rank, self.world_size, self.parameters = rank, world_size, parameters

    def step(self):
        self.optimizer.step()
        for parameter, owner in self.owner.items():
            dist.broadcast(parameter.detach(), src=owner)
"""

SEND = """        for parameter, owner in self.owner.items():
            dist.broadcast(parameter.detach(), src=owner)
"""

STEP_FLAT = """
class ShardedStep:
    def __init__(self, rank, world_size, parameters, make_optimizer):
        self.shares = [[] for _ in range(world_size)]
        for parameter in sorted(parameters, key=lambda p: p.numel(), reverse=True):
            min(self.shares, key=lambda share: sum(p.numel() for p in share)).append(parameter)
        self.rank, self.optimizer = rank, make_optimizer(self.shares[rank])

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        for owner, share in enumerate(self.shares):
            flat = torch.cat([p.flatten() for p in share])
            dist.broadcast(flat, owner)
            for parameter, values in zip(share, flat.split([p.numel() for p in share])):
                parameter.copy_(values.view_as(parameter))
"""

STEP_ALL_GATHER = """
class ShardedStep:
    def __init__(self, rank, world_size, parameters, make_optimizer):
        self.shares, total, before = [[] for _ in range(world_size)], sum(p.numel() for p in parameters), 0
        for parameter in parameters:
            middle = before + parameter.numel() / 2
            self.shares[int(middle * world_size / total)].append(parameter)
            before += parameter.numel()
        self.rank, self.optimizer = rank, make_optimizer(self.shares[rank])

    def step(self):
        self.optimizer.step()
        with torch.no_grad():
            flats = [torch.cat([torch.empty(0).double(), *[p.flatten() for p in share]]) for share in self.shares]
            longest = max(len(flat) for flat in flats)
            mine = torch.cat([flats[self.rank], torch.zeros(longest - len(flats[self.rank])).double()])
            theirs = [torch.empty(longest).double() for _ in self.shares]
            dist.all_gather(theirs, mine)
            for share, flat in zip(self.shares, theirs):
                for parameter in share:
                    values, flat = flat[: parameter.numel()], flat[parameter.numel() :]
                    parameter.copy_(values.view_as(parameter))
"""

STEP_OBJECTS = """
class ShardedStep:
    def __init__(self, rank, world_size, parameters, make_optimizer):
        order = sorted(range(len(parameters)), key=lambda i: -parameters[i].numel())
        snake = [*range(world_size), *reversed(range(world_size))]
        self.owner = {i: snake[place % len(snake)] for place, i in enumerate(order)}
        self.rank, self.world_size, self.parameters = rank, world_size, parameters
        self.optimizer = make_optimizer(parameters[i] for i in self.owner if self.owner[i] == rank)

    def step(self):
        self.optimizer.step()
        works = [dist.broadcast(self.parameters[i].data, src=self.owner[i], async_op=True) for i in sorted(self.owner)]
        for work in works:
            work.wait()
"""

STEP_INTO_TENSOR = edited(
    STEP_ALL_GATHER,
    ("[torch.empty(longest).double() for _ in self.shares]", "torch.empty(longest * len(self.shares)).double()"),
    ("all_gather(theirs", "all_gather_into_tensor(theirs"),
    ("zip(self.shares, theirs)", "zip(self.shares, theirs.split(longest))"),
)

STEP_COALESCED = edited(
    STEP_INTO_TENSOR,
    (
        "            dist.all_gather_into_tensor",
        "            with dist._coalescing_manager():\n                dist.all_gather_into_tensor",
    ),
)

STEP_FUNCTIONAL = edited(
    STEP,
    (
        "dist.broadcast(parameter.detach(), src=owner)",
        "parameter.data.copy_(funcol.broadcast(parameter.detach(), owner, dist.group.WORLD))",
    ),
)

STEP_ALL = """
class ShardedStep:
    def __init__(self, rank, world_size, parameters, make_optimizer):
        self.optimizer = make_optimizer(parameters)

    def step(self):
        self.optimizer.step()
"""


STEP_COUNTED = STEP.replace("loads[self.owner[parameter]] += parameter.numel()", "loads[self.owner[parameter]] += 1")


STEP_COURSE = """
from ddp_course.beyond.sharded_optimizer import ShardedOptimizer

class ShardedStep:
    def __init__(self, rank, world_size, parameters, make_optimizer):
        self.optimizer = ShardedOptimizer(parameters, torch.optim.Adam, lr=0.1)

    def step(self):
        self.optimizer.step()
"""


# --- 17.3 ------------------------------------------------------------------------------------------

CUT = """
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class CutLayers(nn.Module):
    def __init__(self, rank, world_size, first, second):
        super().__init__()

        def part(tensor, dim):
            return nn.Parameter(tensor.detach().chunk(world_size, dim)[rank].clone())

        self.first_weight, self.first_bias = part(first.weight, 0), part(first.bias, 0)
        self.second_weight = part(second.weight, 1)
        self.second_bias = nn.Parameter(second.bias.detach().clone())
        self.rank, self.world_size = rank, world_size

    def forward(self, x):
        hidden = torch.tanh(nn.functional.linear(Enter.apply(x), self.first_weight, self.first_bias))
        return Leave.apply(nn.functional.linear(hidden, self.second_weight)) + self.second_bias
"""

CUT_BY_HOOK = """
def summed(grad):
    grad = grad.contiguous().clone()
    dist.all_reduce(grad)
    return grad

class CutLayers(nn.Module):
    def __init__(self, rank, world_size, first, second):
        super().__init__()
        width = first.out_features // world_size
        mine = slice(rank * width, (rank + 1) * width)
        for name, value in {
            "first_weight": first.weight[mine],
            "first_bias": first.bias[mine],
            "second_weight": second.weight[:, mine],
            "second_bias": second.bias,
        }.items():
            self.register_parameter(name, nn.Parameter(value.detach().clone()))

    def forward(self, x):
        x = x + 0
        if x.requires_grad:
            x.register_hook(summed)
        part = torch.tanh(x @ self.first_weight.T + self.first_bias) @ self.second_weight.T
        others = part.detach().clone()
        dist.all_reduce(others)
        return part + (others - part.detach()) + self.second_bias
"""

CUT_IN_ONE = """
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2):
        h = torch.tanh(x @ w1.T + b1)
        ctx.save_for_backward(x, h, w1, w2)
        y = h @ w2.T
        dist.all_reduce(y)
        return y + b2

    @staticmethod
    def backward(ctx, dy):
        x, h, w1, w2 = ctx.saved_tensors
        da = (dy @ w2) * (1 - h * h)
        dx = da @ w1
        dist.all_reduce(dx)
        return dx, da.T @ x, da.sum(0), dy.T @ h, dy.sum(0)


class CutLayers(nn.Module):
    def __init__(self, rank, world_size, first, second):
        super().__init__()
        self.first_weight = nn.Parameter(first.weight.data.tensor_split(world_size)[rank].clone())
        self.first_bias = nn.Parameter(first.bias.data.tensor_split(world_size)[rank].clone())
        self.second_weight = nn.Parameter(second.weight.data.tensor_split(world_size, 1)[rank].clone())
        self.second_bias = nn.Parameter(second.bias.data.clone())

    def forward(self, x):
        return Both.apply(x, self.first_weight, self.first_bias, self.second_weight, self.second_bias)
"""

CUT_TORCHS_SUM = "import torch.distributed.nn.functional as dist_nn\n" + CUT.replace(
    "Leave.apply(", "dist_nn.all_reduce("
)
CUT_COALESCED = edited(
    CUT,
    (
        "        dist.all_reduce(x)\n",
        "        with dist._coalescing_manager():\n            dist.all_reduce(x)\n",
    ),
)

CUT_FUNCTIONAL = edited(
    CUT,
    *(
        (f"dist.all_reduce({x})", f"{x} = funcol.all_reduce({x}, 'sum', dist.group.WORLD).clone()")
        for x in ("x", "grad")
    ),
)

CUT_WHOLE_LAYERS = """
class CutLayers(nn.Module):
    def __init__(self, rank, world_size, first, second):
        super().__init__()
        self.first_weight, self.first_bias = nn.Parameter(first.weight.data), nn.Parameter(first.bias.data)
        self.second_weight, self.second_bias = nn.Parameter(second.weight.data), nn.Parameter(second.bias.data)

    def forward(self, x):
        h = torch.tanh(x @ self.first_weight.T + self.first_bias)
        return h @ self.second_weight.T + self.second_bias
"""
CUT_COURSE = """
from ddp_course.beyond.tensor_parallel import ColumnParallelLinear, RowParallelLinear

class CutLayers(nn.Module):
    def __init__(self, rank, world_size, first, second):
        super().__init__()
        self.first, self.second = ColumnParallelLinear(first), RowParallelLinear(second)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))
"""

RIGHT = [
    Right("17.1", "if by if", BYTES),
    Right("17.1", "by counting a share", BYTES_BY_SHARDS),
    Right("17.2", "one broadcast per parameter", STEP),
    Right("17.2", "one flat broadcast per rank, the largest first", STEP_FLAT),
    Right("17.2", "cut in order, one padded all_gather", STEP_ALL_GATHER),
    Right("17.2", "cut in order, gathered into one tensor", STEP_INTO_TENSOR),
    Right("17.2", "a coalesced gather", STEP_COALESCED),
    Right("17.2", "functional broadcasts", STEP_FUNCTIONAL),
    Right("17.2", "dealt there and back, broadcasts at once, a generator", STEP_OBJECTS),
    Right("17.3", "two autograd functions", CUT),
    Right("17.3", "a coalesced sum", CUT_COALESCED),
    Right("17.3", "functional collectives", CUT_FUNCTIONAL),
    Right("17.3", "a hook, and the others' parts as constants", CUT_BY_HOOK),
    Right("17.3", "one autograd function with the derivative by hand", CUT_IN_ONE),
]


WRONG = [
    *spoilt("17.1", BYTES, [
        ("no master copy", ALL, "the float32 copy of the weights is missing", ("12)", "8)")),
        ("master copy among the parameters", ALL, "belongs to the state", ("(2, 2, 12)", "(6, 2, 8)")),
        ("float32 gradients", ALL, "in bfloat16 too, 2 bytes each", ("(2, 2, 12)", "(2, 4, 12)")),
        ("a master copy in float32", ALL, "a master copy is needed in mixed precision only",
         ("(4, 4, 8)", "(4, 4, 12)")),
        ("one moment", ALL, "two numbers for each parameter", ("(4, 4, 8)", "(4, 4, 4)")),
        ("the share rounded down", "uneven", "the fullest rank decides",
         ("(parameters + world_size - 1) // world_size", "parameters // world_size")),
        ("the bytes rounded up", "uneven", "the bytes are rounded up",
         ("(parameters + world_size - 1) // world_size, parameters", "1, world_size"),
         ("a * number", "-(-a * number * parameters // world_size)"),
         ("b * gradient", "-(-b * gradient * parameters // world_size)"),
         ("c * state", "-(-c * state * parameters // world_size)")),
        ("half a master copy", ALL, "the master copy is float32: 4 bytes", ("12)", "10)")),
        ("floats", "zero1 zero2 zero3 uneven", "whole numbers",
         ("(parameters + world_size - 1) // world_size", "parameters / world_size")),
        ("ZeRO-1 divides the gradients too", "zero1 uneven", "this is what zero2 holds",
         ('("zero2", "zero3")', '("zero1", "zero2", "zero3")')),
        ("ZeRO-3 leaves the parameters whole", "zero3 uneven",
         "this is what zero2 holds; zero3 divides the parameters and the gradients and the state",
         ('"zero3":', '"zero4":')),
        ("the sum alone", ALL, "return a dictionary",
         ('return {"parameters": a * number, "gradients": b * gradient, "state": c * state}', "return a + b")),
        ("an endless loop", ALL, "endless loop", ("    a, b", "    while True: pass\n    a, b"), 1.0),
    ]),
    Wrong(
        "17.1",
        "ceil of a float",
        "import math\n"
        + BYTES.replace("(parameters + world_size - 1) // world_size", "math.ceil(parameters / world_size)"),
        ("uneven",),
        "goes through a float",
    ),
    Wrong("17.2", "all state on every rank", STEP_ALL, ("share", "balance", "messages"), "the state of all parameters"),
    Wrong("17.2", "the course's own", STEP_COURSE, ALL, "this exercise is to write what it does"),
    *spoilt("17.2", STEP, [
        ("copies", "share balance values", "no copies",
         ("make_optimizer(self.mine)", "make_optimizer([p.clone() for p in self.mine])")),
        ("sent before the step", "values", "Send after the step",
         ("        self.optimizer.step()\n" + SEND, SEND + "        self.optimizer.step()\n")),
        ("an optimizer for each step", "share values", "forgets its moments",
         ("        self.optimizer.step()\n", "        self.make_optimizer(self.mine).step()\n")),
        ("summed with zeros", "messages", "new values need no sum",
         (SEND, "        with torch.no_grad():\n            for parameter, owner in self.owner.items():\n"
          "                if owner != self.rank:\n                    parameter.zero_()\n"
          "                dist.all_reduce(parameter.detach())\n")),
        ("averaged", "values messages", "mixed with the old ones",
         (SEND, "        for parameter in self.parameters:\n            dist.all_reduce(parameter.detach())\n"
          "            parameter.data /= self.world_size\n")),
        ("cut by number", "balance", "deal out elements, not numbers",
         ("        self.mine =", "        each = len(parameters) // world_size\n"
          "        self.owner = {p: min(i // each, world_size - 1) for i, p in enumerate(parameters)}\n"
          "        self.mine =")),
        ("the rest has no owner", "share balance values", "nobody steps it",
         ("        self.mine =", "        each = (len(parameters) - 1) // world_size\n"
          "        self.owner = {p: i // each for i, p in enumerate(parameters) if i // each < world_size}\n"
          "        self.mine =")),
        ("gradients travel", "messages", "no gradients, nothing twice",
         ("        self.optimizer.step()\n",
          "        for parameter in self.parameters:\n            dist.broadcast(parameter.grad, src=0)\n"
          "        self.optimizer.step()\n")),
        ("sent twice", "messages", "nothing twice", (SEND, SEND + SEND)),
        ("all from rank 0", "values", "from its owner", ("src=owner", "src=0")),
        ("the last rank leaves", ALL, "that another one never calls",
         (SEND, "        if self.rank == self.world_size - 1:\n            return\n" + SEND), 2.0),
        ("only the owner broadcasts", ALL, "each broadcast, the owner and",
         (SEND, "        for parameter, owner in self.owner.items():\n            if owner == self.rank:\n"
          "                dist.broadcast(parameter.detach(), src=owner)\n"), 2.0),
        ("an error swallowed", "values messages", "has not arrived",
         (SEND, "        try:\n            for parameter, owner in self.owner.items():\n"
          "                dist.broadcast(parameter, source=owner)\n        except Exception:\n            pass\n")),
        ("a new object for the value", "values", "and write it into the parameter",
         (SEND, "        for place, (parameter, owner) in enumerate(self.owner.items()):\n"
          "            new = parameter.detach().clone()\n            dist.broadcast(new, src=owner)\n"
          "            self.parameters = [*self.parameters[:place], nn.Parameter(new), *self.parameters[place + 1 "
          ":]]\n")),
        ("into a leaf", ALL, "use parameter.detach(), or torch.no_grad()",
         (SEND, "        for parameter, owner in self.owner.items():\n            new = parameter.detach().clone()\n"
          "            dist.broadcast(new, src=owner)\n            parameter.copy_(new)\n")),
        ("an endless loop", ALL, "endless loop", (SEND, "        while True:\n            pass\n"), 1.0),
        ("exit", ALL, "remove exit()", (SEND, "        os._exit(0)\n")),
    ]),
    *spoilt("17.3", CUT, [
        ("not summed", "output bias messages", "the output is the sum over the ranks",
         ("Leave.apply(nn.functional.linear(hidden, self.second_weight))", "hidden @ self.second_weight.T")),
        ("the input's gradient not summed", "input messages", "is the sum over the ranks", ("Enter.apply(x)", "x")),
        ("the bias W times", "bias", "it counts W times",
         ("Leave.apply(nn.functional.linear(hidden, self.second_weight)) + self.second_bias",
          "Leave.apply(nn.functional.linear(hidden, self.second_weight, self.second_bias))")),
        ("summed in backward again", "gradients input messages", "backward sums what forward has summed already",
         ("    def backward(ctx, grad):\n        return grad\n",
          "    def backward(ctx, grad):\n        grad = grad.clone()\n        dist.all_reduce(grad)\n"
          "        return grad\n")),
        ("a mean in backward", "input", "this is a mean over the ranks",
         ("        dist.all_reduce(grad)\n", "        dist.all_reduce(grad)\n        grad /= dist.get_world_size()\n")),
        ("gathered", "messages", "W times the bytes",
         ("        x = x.clone()\n        dist.all_reduce(x)\n        return x\n",
          "        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]\n"
          "        dist.all_gather(parts, x.contiguous())\n        return sum(parts)\n")),
        ("cut the other way", ALL, "torch stores a weight as (outputs, inputs)",
         ("part(first.weight, 0)", "part(first.weight, 1)")),
        ("parts in another order", "parts gradients", "in order",
         ("[rank].clone()", "[world_size - 1 - rank].clone()")),
        ("the whole layer kept", "parts", "no whole layer as an attribute",
         ("        self.rank,", "        self.whole = second\n        self.rank,")),
        ("views of the layers", "parts", "a view keeps all of the tensor alive", ("[rank].clone()", "[rank]")),
        ("views of a whole copy", "parts", "a view keeps all of the tensor alive",
         ("tensor.detach().chunk(world_size, dim)[rank].clone()",
          "tensor.detach().clone().chunk(world_size, dim)[rank]")),
        ("the bias on rank 0", "gradients", "after the sum, on every rank",
         ("Leave.apply(nn.functional.linear(hidden, self.second_weight)) + self.second_bias",
          "Leave.apply(nn.functional.linear(hidden, self.second_weight, self.second_bias))"),
         ("self.second_weight, self.second_bias))", "self.second_weight, None if self.rank else self.second_bias))")),
        ("a W-th of the bias", "gradients", "after the sum, on every rank",
         ("Leave.apply(nn.functional.linear(hidden, self.second_weight)) + self.second_bias",
          "Leave.apply(nn.functional.linear(hidden, self.second_weight, self.second_bias))"),
         ("self.second_weight, self.second_bias))", "self.second_weight, self.second_bias / self.world_size))")),
        ("the bias after the sum on rank 0 alone", "bias gradients", "it after the sum, on every rank",
         (" + self.second_bias\n", " + (0 if self.rank else self.second_bias)\n")),
        ("detached", "input messages", "no detach", ("Enter.apply(x)", "Enter.apply(x.detach())")),
        ("the last rank skips", ALL, "here one rank skips it",
         ("        x = x.clone()\n        dist.all_reduce(x)\n",
          "        x = x.clone()\n        if dist.get_rank() < dist.get_world_size() - 1:\n"
          "            dist.all_reduce(x)\n"), 2.0),
        ("a number that was printed", "output bias messages", "sum over",
         ("        x = x.clone()\n        dist.all_reduce(x)\n        return x\n",
          "        return torch.full_like(x, 0.1234)\n")),
    ]),
    Wrong("17.3", "torch's differentiable all_reduce", CUT_TORCHS_SUM, ("gradients", "input", "messages"),
          "only the gradient of x has to be summed"),
    Wrong("17.3", "nothing cut", CUT_WHOLE_LAYERS, ("parts", "gradients", "messages"), "each rank keeps 1/W of it"),
    Wrong("17.3", "the course's own", CUT_COURSE, ALL, "this exercise is to write what it does"),
]  # fmt: skip
