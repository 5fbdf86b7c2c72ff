"""The answer bank of lesson 17: bytes, a share of the optimizer, and layers that are cut, right and wrong.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong

IMPORTS = """
import os
import torch
import torch.distributed as dist
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

STEP_ALL = """
class ShardedStep:
    def __init__(self, rank, world_size, parameters, make_optimizer):
        self.optimizer = make_optimizer(parameters)

    def step(self):
        self.optimizer.step()
"""

STEP_COPIES = STEP.replace("make_optimizer(self.mine)", "make_optimizer([p.clone() for p in self.mine])")

STEP_LATE = STEP.replace("        self.optimizer.step()\n" + SEND, SEND + "        self.optimizer.step()\n")

STEP_ANEW = STEP.replace("        self.optimizer.step()\n", "        self.make_optimizer(self.mine).step()\n")

STEP_SUMMED = STEP.replace(
    SEND,
    """        with torch.no_grad():
            for parameter, owner in self.owner.items():
                if owner != self.rank:
                    parameter.zero_()
                dist.all_reduce(parameter.detach())
""",
)

STEP_MEAN = STEP.replace(
    SEND,
    """        for parameter in self.parameters:
            dist.all_reduce(parameter.detach())
            parameter.data /= self.world_size
""",
)

STEP_COUNTED = STEP.replace("loads[self.owner[parameter]] += parameter.numel()", "loads[self.owner[parameter]] += 1")

STEP_CUT_BY_NUMBER = STEP.replace(
    "        self.mine =",
    "        each = len(parameters) // world_size\n"
    "        self.owner = {p: min(i // each, world_size - 1) for i, p in enumerate(parameters)}\n"
    "        self.mine =",
)

STEP_LOST_REST = STEP.replace(
    "        self.mine =",
    "        each = (len(parameters) - 1) // world_size\n"
    "        self.owner = {p: i // each for i, p in enumerate(parameters) if i // each < world_size}\n"
    "        self.mine =",
)

STEP_GRADIENTS_TOO = STEP.replace(
    "        self.optimizer.step()\n",
    "        for parameter in self.parameters:\n"
    "            dist.broadcast(parameter.grad, src=0)\n"
    "        self.optimizer.step()\n",
)

STEP_TWICE = STEP.replace(SEND, SEND + SEND)

STEP_FROM_0 = STEP.replace("src=owner", "src=0")

STEP_LAST_RANK_LEAVES = STEP.replace(SEND, "        if self.rank == self.world_size - 1:\n            return\n" + SEND)

STEP_OWN_ONLY = STEP.replace(
    SEND,
    """        for parameter, owner in self.owner.items():
            if owner == self.rank:
                dist.broadcast(parameter.detach(), src=owner)
""",
)

STEP_SWALLOWS = STEP.replace(
    SEND,
    """        try:
            for parameter, owner in self.owner.items():
                dist.broadcast(parameter, source=owner)
        except Exception:
            pass
""",
)

STEP_LEAF = STEP.replace(
    SEND,
    """        for parameter, owner in self.owner.items():
            new = parameter.detach().clone()
            dist.broadcast(new, src=owner)
            parameter.copy_(new)
""",
)

STEP_REBOUND = STEP.replace(
    SEND,
    """        for place, (parameter, owner) in enumerate(self.owner.items()):
            new = parameter.detach().clone()
            dist.broadcast(new, src=owner)
            self.parameters = [*self.parameters[:place], nn.Parameter(new), *self.parameters[place + 1 :]]
""",
)

STEP_COURSE = """
from ddp_course.beyond.sharded_optimizer import ShardedOptimizer

class ShardedStep:
    def __init__(self, rank, world_size, parameters, make_optimizer):
        self.optimizer = ShardedOptimizer(parameters, torch.optim.Adam, lr=0.1)

    def step(self):
        self.optimizer.step()
"""

STEP_FOREVER = STEP.replace(SEND, "        while True:\n            pass\n")
STEP_EXIT = STEP.replace(SEND, "        os._exit(0)\n")

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

CUT_NO_SUM = CUT.replace(
    "Leave.apply(nn.functional.linear(hidden, self.second_weight))", "hidden @ self.second_weight.T"
)
CUT_NO_ENTER = CUT.replace("Enter.apply(x)", "x")
CUT_BIAS_EVERYWHERE = CUT.replace(
    "Leave.apply(nn.functional.linear(hidden, self.second_weight)) + self.second_bias",
    "Leave.apply(nn.functional.linear(hidden, self.second_weight, self.second_bias))",
)
CUT_SUM_TWICE = CUT.replace(
    "    def backward(ctx, grad):\n        return grad\n",
    "    def backward(ctx, grad):\n        grad = grad.clone()\n        dist.all_reduce(grad)\n        return grad\n",
)
CUT_TORCHS_SUM = "import torch.distributed.nn.functional as dist_nn\n" + CUT.replace(
    "Leave.apply(", "dist_nn.all_reduce("
)
CUT_MEAN_IN_BACKWARD = CUT.replace(
    "        dist.all_reduce(grad)\n", "        dist.all_reduce(grad)\n        grad /= dist.get_world_size()\n"
)
CUT_GATHERED = CUT.replace(
    "        x = x.clone()\n        dist.all_reduce(x)\n        return x\n",
    "        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]\n"
    "        dist.all_gather(parts, x.contiguous())\n        return sum(parts)\n",
)
CUT_OTHER_WAY = CUT.replace("part(first.weight, 0)", "part(first.weight, 1)")
CUT_OTHER_ORDER = CUT.replace("[rank].clone()", "[world_size - 1 - rank].clone()")
CUT_WHOLE_KEPT = CUT.replace("        self.rank,", "        self.whole = second\n        self.rank,")
CUT_VIEWS = CUT.replace("[rank].clone()", "[rank]")
CUT_VIEWS_OF_A_COPY = CUT.replace(
    "tensor.detach().chunk(world_size, dim)[rank].clone()", "tensor.detach().clone().chunk(world_size, dim)[rank]"
)
CUT_BIAS_ON_RANK_0 = CUT_BIAS_EVERYWHERE.replace(
    "self.second_weight, self.second_bias))", "self.second_weight, None if self.rank else self.second_bias))"
)
CUT_BIAS_DIVIDED = CUT_BIAS_EVERYWHERE.replace(
    "self.second_weight, self.second_bias))", "self.second_weight, self.second_bias / self.world_size))"
)
CUT_BIAS_AFTER_ON_RANK_0 = CUT.replace(" + self.second_bias\n", " + (0 if self.rank else self.second_bias)\n")
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
CUT_DETACHED = CUT.replace("Enter.apply(x)", "Enter.apply(x.detach())")
CUT_LAST_RANK_SKIPS = CUT.replace(
    "        x = x.clone()\n        dist.all_reduce(x)\n",
    "        x = x.clone()\n        if dist.get_rank() < dist.get_world_size() - 1:\n            dist.all_reduce(x)\n",
)
CUT_COURSE = """
from ddp_course.beyond.tensor_parallel import ColumnParallelLinear, RowParallelLinear

class CutLayers(nn.Module):
    def __init__(self, rank, world_size, first, second):
        super().__init__()
        self.first, self.second = ColumnParallelLinear(first), RowParallelLinear(second)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))
"""
CUT_NOTHING_SENT_BUT_GUESSED = CUT.replace(
    "        x = x.clone()\n        dist.all_reduce(x)\n        return x\n",
    "        return torch.full_like(x, 0.1234)\n",
)

RIGHT = [
    Right("17.1", "if by if", BYTES),
    Right("17.1", "by counting a share", BYTES_BY_SHARDS),
    Right("17.2", "one broadcast per parameter", STEP),
    Right("17.2", "one flat broadcast per rank, the largest first", STEP_FLAT),
    Right("17.2", "cut in order, one padded all_gather", STEP_ALL_GATHER),
    Right("17.2", "dealt there and back, broadcasts at once, a generator", STEP_OBJECTS),
    Right("17.3", "two autograd functions", CUT),
    Right("17.3", "a hook, and the others' parts as constants", CUT_BY_HOOK),
    Right("17.3", "one autograd function with the derivative by hand", CUT_IN_ONE),
]

WRONG = [
    Wrong("17.1", "no master copy", BYTES.replace("12)", "8)"), ALL, "the float32 copy of the weights is missing"),
    Wrong(
        "17.1",
        "master copy among the parameters",
        BYTES.replace("(2, 2, 12)", "(6, 2, 8)"),
        ALL,
        "belongs to the state",
    ),
    Wrong("17.1", "float32 gradients", BYTES.replace("(2, 2, 12)", "(2, 4, 12)"), ALL, "in bfloat16 too, 2 bytes each"),
    Wrong(
        "17.1",
        "a master copy in float32",
        BYTES.replace("(4, 4, 8)", "(4, 4, 12)"),
        ALL,
        "a master copy is needed in mixed precision only",
    ),
    Wrong("17.1", "one moment", BYTES.replace("(4, 4, 8)", "(4, 4, 4)"), ALL, "two numbers for each parameter"),
    Wrong(
        "17.1",
        "the share rounded down",
        BYTES.replace("(parameters + world_size - 1) // world_size", "parameters // world_size"),
        ("uneven",),
        "the fullest rank decides",
    ),
    Wrong(
        "17.1",
        "the bytes rounded up",
        BYTES.replace("(parameters + world_size - 1) // world_size, parameters", "1, world_size")
        .replace("a * number", "-(-a * number * parameters // world_size)")
        .replace("b * gradient", "-(-b * gradient * parameters // world_size)")
        .replace("c * state", "-(-c * state * parameters // world_size)"),
        ("uneven",),
        "the bytes are rounded up",
    ),
    Wrong("17.1", "half a master copy", BYTES.replace("12)", "10)"), ALL, "the master copy is float32: 4 bytes"),
    Wrong(
        "17.1",
        "floats",
        BYTES.replace("(parameters + world_size - 1) // world_size", "parameters / world_size"),
        ("zero1", "zero2", "zero3", "uneven"),
        "whole numbers",
    ),
    Wrong(
        "17.1",
        "ceil of a float",
        "import math\n"
        + BYTES.replace("(parameters + world_size - 1) // world_size", "math.ceil(parameters / world_size)"),
        ("uneven",),
        "goes through a float",
    ),
    Wrong(
        "17.1",
        "ZeRO-1 divides the gradients too",
        BYTES.replace('("zero2", "zero3")', '("zero1", "zero2", "zero3")'),
        ("zero1", "uneven"),
        "this is what zero2 holds",
    ),
    Wrong(
        "17.1",
        "ZeRO-3 leaves the parameters whole",
        BYTES.replace('"zero3":', '"zero4":'),
        ("zero3", "uneven"),
        "this is what zero2 holds; zero3 divides the parameters and the gradients and the state",
    ),
    Wrong(
        "17.1",
        "the sum alone",
        BYTES.replace(
            'return {"parameters": a * number, "gradients": b * gradient, "state": c * state}', "return a + b"
        ),
        ALL,
        "return a dictionary",
    ),
    Wrong(
        "17.1", "an endless loop", BYTES.replace("    a, b", "    while True: pass\n    a, b"), ALL, "endless loop", 1.0
    ),
    Wrong("17.2", "all state on every rank", STEP_ALL, ("share", "balance", "messages"), "the state of all parameters"),
    Wrong("17.2", "copies", STEP_COPIES, ("share", "balance", "values"), "no copies"),
    Wrong("17.2", "sent before the step", STEP_LATE, ("values",), "Send after the step"),
    Wrong("17.2", "an optimizer for each step", STEP_ANEW, ("share", "values"), "forgets its moments"),
    Wrong("17.2", "summed with zeros", STEP_SUMMED, ("messages",), "new values need no sum"),
    Wrong("17.2", "averaged", STEP_MEAN, ("values", "messages"), "mixed with the old ones"),
    Wrong("17.2", "cut by number", STEP_CUT_BY_NUMBER, ("balance",), "deal out elements, not numbers"),
    Wrong("17.2", "the rest has no owner", STEP_LOST_REST, ("share", "balance", "values"), "nobody steps it"),
    Wrong("17.2", "gradients travel", STEP_GRADIENTS_TOO, ("messages",), "no gradients, nothing twice"),
    Wrong("17.2", "sent twice", STEP_TWICE, ("messages",), "nothing twice"),
    Wrong("17.2", "all from rank 0", STEP_FROM_0, ("values",), "from its owner"),
    Wrong("17.2", "the last rank leaves", STEP_LAST_RANK_LEAVES, ALL, "that another one never calls", 2.0),
    Wrong("17.2", "only the owner broadcasts", STEP_OWN_ONLY, ALL, "each broadcast, the owner and", 2.0),
    Wrong("17.2", "an error swallowed", STEP_SWALLOWS, ("values", "messages"), "has not arrived"),
    Wrong("17.2", "a new object for the value", STEP_REBOUND, ("values",), "and write it into the parameter"),
    Wrong("17.2", "into a leaf", STEP_LEAF, ALL, "use parameter.detach(), or torch.no_grad()"),
    Wrong("17.2", "the course's own", STEP_COURSE, ALL, "this exercise is to write what it does"),
    Wrong("17.2", "an endless loop", STEP_FOREVER, ALL, "endless loop", 1.0),
    Wrong("17.2", "exit", STEP_EXIT, ALL, "remove exit()"),
    Wrong("17.3", "not summed", CUT_NO_SUM, ("output", "bias", "messages"), "the output is the sum over the ranks"),
    Wrong("17.3", "the input's gradient not summed", CUT_NO_ENTER, ("input", "messages"), "is the sum over the ranks"),
    Wrong("17.3", "the bias W times", CUT_BIAS_EVERYWHERE, ("bias",), "it counts W times"),
    Wrong(
        "17.3",
        "summed in backward again",
        CUT_SUM_TWICE,
        ("gradients", "input", "messages"),
        "backward sums what forward has summed already",
    ),
    Wrong(
        "17.3",
        "torch's differentiable all_reduce",
        CUT_TORCHS_SUM,
        ("gradients", "input", "messages"),
        "only the gradient of x has to be summed",
    ),
    Wrong("17.3", "a mean in backward", CUT_MEAN_IN_BACKWARD, ("input",), "this is a mean over the ranks"),
    Wrong("17.3", "gathered", CUT_GATHERED, ("messages",), "W times the bytes"),
    Wrong("17.3", "cut the other way", CUT_OTHER_WAY, ALL, "torch stores a weight as (outputs, inputs)"),
    Wrong("17.3", "parts in another order", CUT_OTHER_ORDER, ("parts", "gradients"), "in order"),
    Wrong("17.3", "the whole layer kept", CUT_WHOLE_KEPT, ("parts",), "no whole layer as an attribute"),
    Wrong("17.3", "views of the layers", CUT_VIEWS, ("parts",), "a view keeps all of the tensor alive"),
    Wrong("17.3", "views of a whole copy", CUT_VIEWS_OF_A_COPY, ("parts",), "a view keeps all of the tensor alive"),
    Wrong("17.3", "the bias on rank 0", CUT_BIAS_ON_RANK_0, ("gradients",), "after the sum, on every rank"),
    Wrong("17.3", "a W-th of the bias", CUT_BIAS_DIVIDED, ("gradients",), "after the sum, on every rank"),
    Wrong(
        "17.3",
        "the bias after the sum on rank 0 alone",
        CUT_BIAS_AFTER_ON_RANK_0,
        ("bias", "gradients"),
        "it after the sum, on every rank",
    ),
    Wrong("17.3", "nothing cut", CUT_WHOLE_LAYERS, ("parts", "gradients", "messages"), "each rank keeps 1/W of it"),
    Wrong("17.3", "detached", CUT_DETACHED, ("input", "messages"), "no detach"),
    Wrong("17.3", "the last rank skips", CUT_LAST_RANK_SKIPS, ALL, "here one rank skips it", 2.0),
    Wrong("17.3", "the course's own", CUT_COURSE, ALL, "this exercise is to write what it does"),
    Wrong(
        "17.3", "a number that was printed", CUT_NOTHING_SENT_BUT_GUESSED, ("output", "bias", "messages"), "sum over"
    ),
]
