"""The answer bank of lesson 17: bytes, a share of the optimizer, and layers that are cut, right and wrong.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, right, spoilt
from tests.grading.bank import wrong as strangers
from tests.grading.submissions import solutions

IMPORTS = """
import math
import os
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch import nn
"""

BYTES, STEP, CUT = solutions("17").values()

# --- 17.1 ------------------------------------------------------------------------------------------

BYTES_RIGHT = """
by counting a share
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

SEND = """        for parameter, owner in self.owner.items():
            dist.broadcast(parameter.detach(), src=owner)
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

GATHER_RIGHT = r"""
cut in order, gathered into one tensor
    [torch.empty(longest).double() for _ in self.shares] => torch.empty(longest * len(self.shares)).double()
    all_gather(theirs => all_gather_into_tensor(theirs
    zip(self.shares, theirs) => zip(self.shares, theirs.split(longest))
a coalesced gather
    [torch.empty(longest).double() for _ in self.shares] => torch.empty(longest * len(self.shares)).double()
    dist.all_gather(theirs => with dist._coalescing_manager():
                    dist.all_gather_into_tensor(theirs
    zip(self.shares, theirs) => zip(self.shares, theirs.split(longest))
"""

STEP_RIGHT = r"""
functional broadcasts
    dist.broadcast(parameter.detach(), src=owner) => parameter.data.copy_(
                    funcol.broadcast(parameter.detach(), owner, dist.group.WORLD))
one flat broadcast per rank, the largest first
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
dealt there and back, broadcasts at once, a generator
    class ShardedStep:
        def __init__(self, rank, world_size, parameters, make_optimizer):
            order = sorted(range(len(parameters)), key=lambda i: -parameters[i].numel())
            snake = [*range(world_size), *reversed(range(world_size))]
            self.owner = {i: snake[place % len(snake)] for place, i in enumerate(order)}
            self.rank, self.world_size, self.parameters = rank, world_size, parameters
            self.optimizer = make_optimizer(parameters[i] for i in self.owner if self.owner[i] == rank)

        def step(self):
            self.optimizer.step()
            data = [(self.parameters[i].data, self.owner[i]) for i in sorted(self.owner)]
            for work in [dist.broadcast(values, src=owner, async_op=True) for values, owner in data]:
                work.wait()
"""

# --- 17.3 ------------------------------------------------------------------------------------------

SUMMED = "Leave.apply(nn.functional.linear(hidden, self.second_weight)) + self.second_bias"
BIAS_SUMMED = "Leave.apply(nn.functional.linear(hidden, self.second_weight, self.second_bias))"

CUT_RIGHT = r"""
a coalesced sum
    dist.all_reduce(x) => with dist._coalescing_manager():
                dist.all_reduce(x)
functional collectives
    dist.all_reduce(x) => x = funcol.all_reduce(x, 'sum', dist.group.WORLD).clone()
    dist.all_reduce(grad) => grad = funcol.all_reduce(grad, 'sum', dist.group.WORLD).clone()
a hook, and the others' parts as constants
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
one autograd function with the derivative by hand
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
            dx = da @ w1 if ctx.needs_input_grad[0] else None
            if dx is not None:
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

RIGHT = [
    *right("17.1", BYTES, BYTES_RIGHT),
    Right("17.2", "cut in order, one padded all_gather", STEP_ALL_GATHER),
    *right("17.2", STEP_ALL_GATHER, GATHER_RIGHT),
    *right("17.2", STEP, STEP_RIGHT),
    *right("17.3", CUT, CUT_RIGHT),
]

WRONG = [
    *spoilt("17.1", BYTES, [
        ("no master copy", ALL, "the float32 copy of the weights is missing", ("12 if", "8 if")),
        ("master copy among the parameters", ALL, "belongs to the state",
         ("12 if", "8 if"), ('"parameters": 2', '"parameters": 6')),
        ("float32 gradients", ALL, "in bfloat16 too, 2 bytes each", ('"gradients": 2', '"gradients": 4')),
        ("a master copy in float32", ALL, "a master copy is needed in mixed precision only", ("else 8", "else 12")),
        ("one moment", ALL, "two numbers for each parameter", ("else 8", "else 4")),
        ("the share rounded down", "uneven", "the fullest rank decides", ("-(-parameters // world_size)",
         "parameters // world_size")),
        ("the bytes rounded up", "uneven", "the bytes are rounded up",
         ("size * (share if place < divided else parameters)",
          "-(-size * parameters // (world_size if place < divided else 1))")),
        ("half a master copy", ALL, "the master copy is float32: 4 bytes", ("12 if", "10 if")),
        ("floats", "zero1 zero2 zero3 uneven", "whole numbers",
         ("-(-parameters // world_size)", "parameters / world_size")),
        ("ceil of a float", "uneven", "goes through a float",
         ("-(-parameters // world_size)", "math.ceil(parameters / world_size)")),
        ("ZeRO-1 divides the gradients too", "zero1 uneven", "this is what zero2 holds", ('"zero1": 1', '"zero1": 2')),
        ("ZeRO-3 leaves the parameters whole", "zero3 uneven",
         "this is what zero2 holds; zero3 divides the parameters and the gradients and the state",
         ('"zero3": 3', '"zero3": 2')),
        ("remembered without `mixed`", "ddp zero1 zero2 zero3", "this is float32 throughout; mixed is True here",
         ("def", "KNOWN = {}\n\n\ndef"), ("return {", "return KNOWN.setdefault((parameters, world_size, strategy), {"),
         ("each.items())\n    }", "each.items())\n    })")),
        ("the sum alone", ALL, "return a dictionary", ("return {", "return share * sum(each.values())\n    return {")),
        ("an endless loop", ALL, "endless loop", ("    share =", "    while True: pass\n    share ="), 1.0),
    ]),
    *spoilt("17.2", STEP, [
        ("all state on every rank", "share balance messages", "the state of all parameters",
         ("[p for p, owner in self.owner.items() if owner == rank]", "parameters"), (SEND, "")),
        ("the course's own", ALL, "this exercise is to write what it does",
         ("        self.owner, loads", "        from ddp_course.beyond.sharded_optimizer import ShardedOptimizer\n"
          "        ShardedOptimizer(parameters, torch.optim.Adam, lr=0.1)\n        self.owner, loads")),
        ("copies", "share balance values", "no copies", ("[p for", "[p.clone() for")),
        ("sent before the step", "values", "Send after the step",
         ("        self.optimizer.step()\n" + SEND, SEND + "        self.optimizer.step()\n")),
        ("an optimizer for each step", "share values", "forgets its moments",
         ("self.optimizer = make", "self.make = lambda: make"), ("self.optimizer.step()", "self.make().step()")),
        ("summed with zeros", "messages", "new values need no sum",
         ("            dist.broadcast(parameter.detach(), src=owner)",
          "            parameter.data *= owner == dist.get_rank()\n            dist.all_reduce(parameter.data)")),
        ("averaged", "values messages", "mixed with the old ones",
         ("            dist.broadcast(parameter.detach(), src=owner)",
          "            dist.all_reduce(parameter.data)\n            parameter.data /= dist.get_world_size()")),
        ("cut by number", "balance", "deal out elements, not numbers",
         ("        self.optimizer =", "        each = len(parameters) // world_size\n"
          "        self.owner = {p: min(i // each, world_size - 1) for i, p in enumerate(parameters)}\n"
          "        self.optimizer =")),
        ("the rest has no owner", "share balance values", "nobody steps it",
         ("        self.optimizer =", "        each = (len(parameters) - 1) // world_size\n"
          "        self.owner = {p: i // each for i, p in enumerate(parameters) if i // each < world_size}\n"
          "        self.optimizer =")),
        ("gradients travel", "messages", "no gradients, nothing twice",
         (SEND, SEND + "            dist.broadcast(parameter.grad, src=0)\n")),
        ("the owners are sent round", "messages", "the same rule deals it alike",
         ("        self.optimizer = make", "        dist.broadcast_object_list([*self.owner.values()])\n"
          "        self.optimizer = make")),
        ("sent twice", "messages", "nothing twice", (SEND, SEND + SEND)),
        ("all from rank 0", "values", "from its owner", ("src=owner", "src=0")),
        ("the last rank leaves", ALL, "that another one never calls",
         (SEND, "        if dist.get_rank() == dist.get_world_size() - 1: return\n" + SEND), 2.0),
        ("only the owner broadcasts", ALL, "each broadcast, the owner and",
         ("dist.broadcast(", "owner != dist.get_rank() or dist.broadcast("), 2.0),
        ("an error swallowed", "values messages", "has not arrived",
         (SEND, "        try:\n            dist.broadcast(next(iter(self.owner)), source=0)\n"
          "        except Exception:\n            pass\n")),
        ("a new object for the value", "values", "and write it into the parameter",
         ("            dist", "            parameter = nn.Parameter(parameter.detach().clone())\n            dist")),
        ("into a leaf", ALL, "use parameter.detach(), or torch.no_grad()",
         ("            dist.broadcast(parameter.detach(), src=owner)", "            new = parameter.detach().clone()\n"
          "            dist.broadcast(new, src=owner)\n            parameter.copy_(new)")),
        ("an endless loop", ALL, "endless loop", (SEND, "        while True: pass\n"), 1.0),
        ("exit", ALL, "remove exit()", (SEND, "        os._exit(0)\n")),
    ]),
    *spoilt("17.3", CUT, [
        ("not summed", "output bias messages", "the output is the sum over the ranks", ("Leave.apply(", "(")),
        ("the input's gradient not summed", "input messages", "is the sum over the ranks", ("Enter.apply(x)", "x")),
        ("a hook on x itself", "input", "sum the gradient of a view of x",
         ("Enter.apply(x)", "x"), ("        hidden =", "        if x.requires_grad:\n"
          "            x.register_hook(lambda gradient: Enter.backward(None, gradient))\n        hidden =")),
        ("the bias W times", "bias", "it counts W times", (SUMMED, BIAS_SUMMED)),
        ("summed in backward again", "gradients input messages", "backward sums what forward has summed already",
         ("SOLUTION\n        return grad", "\n        grad = grad.clone()\n        dist.all_reduce(grad)\n"
          "        return grad")),
        ("a mean in backward", "input", "this is a mean over the ranks",
         ("        dist.all_reduce(grad)\n", "        dist.all_reduce(grad)\n        grad /= dist.get_world_size()\n")),
        ("gathered", "messages", "W times the bytes",
         ("        dist.all_reduce(x)\n        return x\n",
          "        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]\n"
          "        dist.all_gather(parts, x.contiguous())\n        return sum(parts)\n")),
        ("cut the other way", ALL, "torch stores a weight as (outputs, inputs)",
         ("part(first.weight, 0)", "part(first.weight, 1)")),
        ("parts in another order", "parts gradients", "in order", ("[rank].clone()", "[-1 - rank].clone()")),
        ("the whole layer kept", "parts", "no whole layer as an attribute",
         ("        self.second_bias =", "        self.whole = second\n        self.second_bias =")),
        ("the whole layers kept in a list", "parts", "no whole layer",
         ("        self.second_bias =", "        self.layers = [first, second]\n        self.second_bias =")),
        ("views of the layers", "parts", "a view keeps all of the tensor alive", ("[rank].clone()", "[rank]")),
        ("views of a whole copy", "parts", "a view keeps all of the tensor alive",
         (".chunk(world_size, dim)[rank].clone()", ".clone().chunk(world_size, dim)[rank]")),
        ("the bias on rank 0", "gradients", "after the sum, on every rank", (SUMMED, BIAS_SUMMED),
         ("self.second_bias))", "None if dist.get_rank() else self.second_bias))")),
        ("a W-th of the bias", "gradients", "after the sum, on every rank", (SUMMED, BIAS_SUMMED),
         ("self.second_bias))", "self.second_bias / dist.get_world_size()))")),
        ("the bias after the sum on rank 0 alone", "bias gradients", "it after the sum, on every rank",
         (" + self.second_bias", " + (0 if dist.get_rank() else self.second_bias)")),
        ("detached", "input messages", "no detach", ("Enter.apply(x)", "Enter.apply(x.detach())")),
        ("the last rank skips", ALL, "here one rank skips it",
         ("dist.all_reduce(x)", "dist.get_rank() == dist.get_world_size() - 1 or dist.all_reduce(x)"), 2.0),
        ("a number that was printed", "output bias messages", "sum over",
         ("        dist.all_reduce(x)\n        return x\n", "        return torch.full_like(x, 0.1234)\n")),
        ("torch's differentiable all_reduce", "gradients input messages",
         "only the gradient of x has to be summed", ("Leave.apply(", "dist_nn.all_reduce(")),
        ("nothing cut", "parts gradients messages", "each rank keeps 1/W of it",
         (".chunk(world_size, dim)[rank]", ""), ("Enter.apply(x)", "x"), ("Leave.apply(", "(")),
        ("the course's own", ALL, "this exercise is to write what it does",
         ("        self.second_bias =", "        from ddp_course.beyond.tensor_parallel import RowParallelLinear\n"
          "        RowParallelLinear(second)\n        self.second_bias =")),
    ]),
]  # fmt: skip

# --- From strangers, who had seen the texts alone -------------------------------------------------

WRONG += strangers(
    "17.2",
    "",
    r"""
dealt in turn, whatever their size | balance | deal out elements
    class ShardedStep:
        def __init__(self, rank, world_size, parameters, make_optimizer):
            self.world_size = world_size
            self.parameters = parameters
            self.optimizer = make_optimizer(parameters[rank::world_size])

        def step(self):
            self.optimizer.step()
            for i, p in enumerate(self.parameters):
                dist.broadcast(p.data, src=i % self.world_size)
the list's entries are replaced by new parameters | share | write into the parameters
    class ShardedStep:
        def __init__(self, rank, world_size, parameters, make_optimizer):
            self.rank = rank
            self.parameters = parameters
            loads = [0] * world_size
            self.owners = []
            for p in parameters:
                owner = min(range(world_size), key=loads.__getitem__)
                loads[owner] += p.numel()
                self.owners.append(owner)
            self.optimizer = make_optimizer([p for p, owner in zip(parameters, self.owners) if owner == rank])

        def step(self):
            self.optimizer.step()
            for i, owner in enumerate(self.owners):
                value = self.parameters[i].detach().clone()
                dist.broadcast(value, src=owner)
                if owner != self.rank:
                    self.parameters[i] = nn.Parameter(value)
""",
)
WRONG += strangers(
    "17.2",
    "",
    r"""
one rank after the other is filled, and the last one gets what is left | balance | fewest elements
    class ShardedStep:

        def __init__(self, rank, world_size, parameters, make_optimizer):
            self.parameters, self.owner = parameters, []
            mean = sum(p.numel() for p in parameters) / world_size
            r = load = 0
            for number, p in enumerate(parameters):
                if load and load + p.numel() > mean and r < world_size - 1:
                    r, load = r + 1, 0
                self.owner.append(r)
                load += p.numel()
            mine = [p for p, owner in zip(parameters, self.owner) if owner == rank]
            self.optimizer = make_optimizer(mine) if mine else None

        def step(self):
            if self.optimizer is not None:
                self.optimizer.step()
            for p, r in zip(self.parameters, self.owner):
                dist.broadcast(p.data, src=r)
""",
)
WRONG += strangers(
    "17.3",
    "",
    r"""
x is made to need a gradient, so backward sums one that nobody asked for | messages | x.requires_grad
    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.contiguous().clone()
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
            self.first_weight = nn.Parameter(first.weight.chunk(world_size, 0)[rank].detach().clone())
            self.first_bias = nn.Parameter(first.bias.chunk(world_size, 0)[rank].detach().clone())
            self.second_weight = nn.Parameter(second.weight.chunk(world_size, 1)[rank].detach().clone())
            self.second_bias = nn.Parameter(second.bias.detach().clone())

        def forward(self, x):
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            hidden = torch.tanh(nn.functional.linear(Enter.apply(x), self.first_weight, self.first_bias))
            return Leave.apply(nn.functional.linear(hidden, self.second_weight)) + self.second_bias
""",
)
