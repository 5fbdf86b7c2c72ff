"""The answer bank of lesson 06: replicas that start equal, average, and do both by themselves, right and wrong.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong
from tests.grading.submissions import solutions

IMPORTS = """
import os
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
"""


def but(source: str, *edits: str) -> str:
    """Return an answer with edits: each first text, which must be there, becomes the second."""
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert old in source, old
        source = source.replace(old, new)
    return source


def right(exercise: str, way: str, source: str, *edits: str) -> Right:
    """Return an entry of which the answer is `source` with edits."""
    return Right(exercise, way, but(source, *edits))


def wrong(exercise: str, mistake: str, fails: str, hint: str, source: str, *edits: str, limit_s: float = 10.0) -> Wrong:
    """Return an entry; the checks that fail are separated by spaces, and the answer is `source` with edits."""
    return Wrong(exercise, mistake, but(source, *edits), fails if fails == ALL else tuple(fails.split()), hint, limit_s)


# --- 06.1 ------------------------------------------------------------------------------------------

START = """
def same_start(rank, world_size, model):
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
"""

START_BY_OBJECTS = """
def same_start(rank, world_size, model):
    everything = [None]
    if rank == 0:
        everything = [[[p.data for p in model.parameters()], [b for b in model.buffers()]]]
    dist.broadcast_object_list(everything, src=0)
    parameters, buffers = everything[0]
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), parameters):
            mine.copy_(theirs)
        for mine, theirs in zip(model.buffers(), buffers):
            mine.copy_(theirs)
"""

START_FLAT = """
def kinds(model):
    found = {}
    for tensor in [p.data for p in model.parameters()] + list(model.buffers()):
        found.setdefault(tensor.dtype, []).append(tensor)
    return found.values()

@torch.no_grad()
def same_start(rank, world_size, model):
    for tensors in kinds(model):
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.broadcast(flat, src=0)
        for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors])):
            tensor.copy_(piece.view_as(tensor))
    return model
"""

START_ASYNC_GATHER = """
def same_start(rank, world_size, model):
    works = []
    for tensor in [*model.parameters(), *model.buffers()]:
        works.append(dist.broadcast(tensor.data, 0, async_op=True))
    while works:
        works.pop().wait()
    dist.barrier()
"""

START_STATE_DICT = """
def same_start(rank, world_size, model):
    state = [model.state_dict()]
    dist.broadcast_object_list(state, src=0)
    model.load_state_dict(state[0])
"""

START_NEW_OBJECTS = """
def same_start(rank, world_size, model):
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        value = parameter.detach().clone()
        dist.broadcast(value, src=0)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(value, requires_grad=parameter.requires_grad))
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
"""

START_NEW_MODEL = """
import copy

def same_start(rank, world_size, model):
    models = [copy.deepcopy(model)]
    dist.broadcast_object_list(models, src=0)
    return models[0]
"""

START_FLAT_DOUBLE = but(
    START_FLAT,
    *("in kinds(model)", "in [[*model.parameters(), *model.buffers()]]", "[t.reshape(-1)", "[t.double().reshape(-1)"),
)

START_RESEEDED = """
def same_start(rank, world_size, model):
    torch.manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_()
"""

START_FROM_COURSE = """
from ddp_course.parallel.replicas import broadcast_module

def same_start(rank, world_size, model):
    broadcast_module(model)
"""

START_FROM_PRINTED = """
def same_start(rank, world_size, model):
    values = [0.5, -0.25, 0.125]
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.tensor([values[i % 3] for i in range(tensor.numel())]).view_as(tensor))
    dist.barrier()
"""

# --- 06.2 ------------------------------------------------------------------------------------------

AVERAGE = """
def average_gradients(rank, world_size, model):
    parameters = list(model.parameters())
    used = torch.tensor([int(parameter.grad is not None) for parameter in parameters])
    dist.all_reduce(used)
    for parameter, ranks in zip(parameters, used.tolist(), strict=True):
        if ranks == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= world_size
        dist.all_reduce(parameter.grad)
"""

AVERAGE_FLAT = """
@torch.no_grad()
def average_gradients(rank, world_size, model):
    everyone = [None] * world_size
    dist.all_gather_object(everyone, {n for n, p in model.named_parameters() if p.grad is not None})
    somewhere = set().union(*everyone)
    chosen = [p for n, p in model.named_parameters() if n in somewhere]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in chosen])
    dist.reduce(flat, dst=0)
    flat.div_(world_size)
    dist.broadcast(flat, src=0)
    start = 0
    for p in chosen:
        p.grad = flat[start : start + p.numel()].view(p.shape).clone()
        start += p.numel()
"""

AVERAGE_ZEROS_AND_A_FLAG = """
def average_gradients(rank, world_size, model):
    works = []
    for p in model.parameters():
        if not p.requires_grad:
            continue
        message = torch.zeros(p.numel() + 1, dtype=p.dtype)
        if p.grad is not None:
            message[:-1] = p.grad.flatten()
            message[-1] = 1
        works.append((p, message, dist.all_reduce(message, async_op=True)))
    for p, message, work in works:
        work.wait()
        if message[-1] > 0:
            p.grad = (message[:-1] / world_size).reshape(p.shape)
"""

AVERAGE_GATHERED = """
def average_gradients(rank, world_size, model):
    for p in model.parameters():
        have = [None] * world_size
        dist.all_gather_object(have, p.grad is not None)
        if any(have):
            mine = p.grad if p.grad is not None else torch.zeros_like(p)
            everyone = [torch.empty_like(mine) for _ in range(world_size)]
            dist.all_gather(everyone, mine)
            p.grad = torch.stack(everyone).mean(dim=0)
"""

AVERAGE_SKIP_NONE = """
def average_gradients(rank, world_size, model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= world_size
            dist.all_reduce(parameter.grad)
"""

AVERAGE_ALWAYS_ZEROS = """
def average_gradients(rank, world_size, model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= world_size
            dist.all_reduce(parameter.grad)
"""

AVERAGE_FROM_COURSE = """
from ddp_course.parallel import average_gradients as ready_made

def average_gradients(rank, world_size, model):
    ready_made(model, find_unused_parameters=True)
"""

AVERAGE_SWALLOWING = but(
    AVERAGE,
    "        dist.all_reduce(parameter.grad)\n",
    "        try:\n            dist.all_reduce(parameter.gradient)\n        except Exception:\n            pass\n",
)

# --- 06.3 ------------------------------------------------------------------------------------------

MODULE = """
class MyDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
"""
FORWARD = """
    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)
"""
PATIENT_MODULE = but(MODULE, "MyDDP", "PatientDDP")

DDP = (
    MODULE
    + """        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)
"""
    + FORWARD
)

DDP_TENSOR_HOOKS = """
def averaged(gradient):
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()

class MyDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.inner = module
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor, 0)
        for p in module.parameters():
            if p.requires_grad:
                p.register_hook(averaged)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)
"""

DDP_AT_THE_END = """
class MyDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        state = [[t.detach() for t in (*module.parameters(), *module.buffers())]]
        mine = state[0]
        dist.broadcast_object_list(state, src=0)
        for a, b in zip(mine, state[0]):
            a.copy_(b)
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.arrived = 0
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        self.arrived += 1
        if self.arrived == len(self.trained):
            self.arrived = 0
            flat = torch.cat([q.grad.reshape(-1) for q in self.trained])
            everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, flat)
            flat = sum(everyone) / len(everyone)
            for q, piece in zip(self.trained, flat.split([q.numel() for q in self.trained])):
                q.grad.copy_(piece.view_as(q))

    def forward(self, *args, **kwargs):
        if self.training:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)
        return self.module(*args, **kwargs)
"""

DDP_FIRST_WAITS = """
class MyDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.works = module, []
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        trained = [p for p in module.parameters() if p.requires_grad]
        for p in trained:
            p.register_post_accumulate_grad_hook(self.send)
        trained[0].register_post_accumulate_grad_hook(self.finish)

    def send(self, p):
        self.works.append((p, dist.all_reduce(p.grad, async_op=True)))

    def finish(self, _):
        for p, work in self.works:
            work.wait()
            p.grad.div_(dist.get_world_size())
        self.works.clear()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)
"""

DDP_ASYNC = """
class MyDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.works = module, []
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        for p in filter(lambda p: p.requires_grad, module.parameters()):
            p.register_post_accumulate_grad_hook(self.launch)

    def launch(self, p):
        if not self.works:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        p.grad.div_(dist.get_world_size())
        self.works.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self):
        for work in self.works:
            work.wait()
        self.works.clear()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)
"""

DDP_READS_TOO_EARLY = but(
    DDP, "register_post_accumulate_grad_hook(self.average)", "register_hook(lambda g, p=parameter: self.average(p))"
)

DDP_IN_NEXT_FORWARD = (
    MODULE
    + """
    def forward(self, *inputs, **kwargs):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)
            elif parameter.requires_grad:
                dist.all_reduce(torch.zeros_like(parameter))
        return self.module(*inputs, **kwargs)
"""
)

DDP_PATCHED_BACKWARD = (
    MODULE
    + """        plain = torch.Tensor.backward

        def backward(tensor, *args, **kwargs):
            plain(tensor, *args, **kwargs)
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= dist.get_world_size()
                    dist.all_reduce(parameter.grad)

        torch.Tensor.backward = backward
"""
    + FORWARD
)

DDP_FROM_TORCH = """
class MyDDP(nn.parallel.DistributedDataParallel):
    pass
"""

DDP_FROM_COURSE = """
from ddp_course.parallel import BucketedDDP

def MyDDP(module):
    return BucketedDDP(module)
"""

DDP_TIED_TWICE = but(
    DDP, "for parameter in module.parameters():", "for _, parameter in module.named_parameters(remove_duplicate=False):"
)

# --- 06.4 ------------------------------------------------------------------------------------------

PATIENT = (
    """
class PatientDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.queued = module, False
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.ask_for_the_end)

    def ask_for_the_end(self, parameter):
        if not self.queued:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.average)

    def average(self):
        self.queued = False
        parameters = list(self.module.parameters())
        used = torch.tensor([int(parameter.grad is not None) for parameter in parameters])
        dist.all_reduce(used)
        for parameter, ranks in zip(parameters, used.tolist(), strict=True):
            if ranks == 0:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
"""
    + FORWARD
)

PATIENT_FROM_THE_OUTPUT = (
    PATIENT_MODULE
    + """
    def forward(self, *inputs, **kwargs):
        outputs = self.module(*inputs, **kwargs)
        outputs.register_hook(self.begin)
        return outputs

    def begin(self, gradient):
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self):
        params = list(self.module.parameters())
        flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in params])
        have = torch.tensor([p.grad is not None for p in params], dtype=flat.dtype)
        both = torch.cat([flat, have])
        dist.all_reduce(both)
        start = 0
        for p, ranks in zip(params, both[flat.numel():]):
            if ranks:
                p.grad = both[start : start + p.numel()].view_as(p) / dist.get_world_size()
            start += p.numel()
"""
)

PATIENT_GATHERED = (
    """
class PatientDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.queued = module, False
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor, 0)
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.note)

    def note(self, p):
        if not self.queued:
            torch.autograd.Variable._execution_engine.queue_callback(self.share)
        self.queued = True

    def share(self):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None})
        self.queued = False
        for name, p in self.module.named_parameters():
            theirs = [grads[name] for grads in everyone if name in grads]
            p.grad = sum(theirs) / len(everyone) if theirs else None
"""
    + FORWARD
)

PATIENT_ZERO_TIMES = """
class PatientDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.missing = module, set(module.parameters())
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        self.missing.discard(parameter)
        if not self.missing:
            self.missing = set(self.module.parameters())
            for parameter in self.module.parameters():
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)

    def forward(self, *inputs, **kwargs):
        outputs = self.module(*inputs, **kwargs)
        return outputs + 0 * sum(p.sum() for p in self.module.parameters())
"""

PATIENT_FROM_TORCH = """
class PatientDDP(nn.parallel.DistributedDataParallel):
    def __init__(self, module):
        super().__init__(module, find_unused_parameters=True)
"""

# --- 06.5 ------------------------------------------------------------------------------------------

OWN_TEST = solutions("06")["06.5"]

OWN_TEST_BY_WEIGHTS = """
def trains_right(rank, world_size, wrap):
    def losses(model, rows):
        return [model(part).pow(2).sum() for part in rows]

    def train(model, replica, shards):
        # Momentum and a rate, so that a wrong gradient of any step shows in the last weights.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(4):
            if step % 2 == 0:
                optimizer.zero_grad()
            (sum(losses(replica, shards[step])) / len(shards[step])).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 3, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)
            self.register_buffer("scale", torch.rand(1, dtype=torch.float64))

        def forward(self, x):
            return self.b(self.a(x).relu()) * self.scale

    generators = [torch.manual_seed(number) and Net() for number in range(world_size)]
    mine, reference = generators[rank], __import__("copy").deepcopy(generators[0])
    rows = torch.rand(4, world_size, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = train(mine, wrap(mine), [[step[rank]] for step in rows])
    expected = train(reference, reference, [list(step) for step in rows])
    verdicts = [None] * world_size
    dist.all_gather_object(verdicts, bool((found - expected).abs().max() < 1e-9))
    return all(verdicts)
"""

OWN_TEST_BY_EQUALITY = """
def trains_right(rank, world_size, wrap):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    replica = wrap(model)
    for step in range(3):
        model.zero_grad()
        replica(torch.randn(5, 3)).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * (p.grad if p.grad is not None else 0)
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        everyone = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(everyone, mine)
        if not all(torch.equal(one, everyone[0]) for one in everyone):
            return False
    return True
"""

RIGHT = [
    right("06.5", "the last weights, with momentum", OWN_TEST_BY_WEIGHTS),
    right("06.1", "rank 0's tensors as objects, copied in", START_BY_OBJECTS),
    right("06.1", "one message per dtype", START_FLAT),
    right("06.1", "asynchronous", START_ASYNC_GATHER),
    right("06.1", "functional collectives", START, "dist.broadcast(tensor.detach(), src=0)",
          "tensor.detach().copy_(functional.broadcast(tensor.detach(), 0, dist.group.WORLD))"),
    right("06.2", "flat, reduce then broadcast, names gathered", AVERAGE_FLAT),
    right("06.2", "a flag behind each gradient, asynchronous", AVERAGE_ZEROS_AND_A_FLAG),
    right("06.2", "all_gather, then a local mean", AVERAGE_GATHERED),
    right("06.2", "all_gather_into_tensor", AVERAGE, "dist.all_reduce(parameter.grad)",
          "parts = parameter.grad.new_empty(dist.get_world_size() * len(parameter), *parameter.shape[1:])\n"
          "        dist.all_gather_into_tensor(parts, parameter.grad)\n"
          "        parameter.grad.copy_(parts.view(-1, *parameter.shape).sum(0))"),
    right("06.2", "functional collectives", AVERAGE, "dist.all_reduce(parameter.grad)",
          'parameter.grad.copy_(functional.all_reduce(parameter.grad, "sum", dist.group.WORLD))'),
    right("06.2", "coalesced calls", AVERAGE, "        dist.all_reduce(parameter.grad)\n",
          "    with dist._coalescing_manager():\n        for parameter in parameters:\n"
          "            if parameter.grad is not None:\n                dist.all_reduce(parameter.grad)\n"),
    right("06.3", "hooks that return the mean", DDP_TENSOR_HOOKS),
    right("06.3", "one message at the last gradient, buffers in forward", DDP_AT_THE_END),
    right("06.3", "asynchronous, waited for at the end of backward", DDP_ASYNC),
    right("06.3", "all_gather_into_tensor", DDP, "dist.all_reduce(parameter.grad)",
          "parts = parameter.grad.new_empty(dist.get_world_size() * len(parameter), *parameter.shape[1:])\n"
          "        dist.all_gather_into_tensor(parts, parameter.grad)\n"
          "        parameter.grad.copy_(parts.view(-1, *parameter.shape).sum(0))"),
    right("06.3", "functional collectives", DDP, "dist.all_reduce(parameter.grad)",
          'parameter.grad.copy_(functional.all_reduce(parameter.grad, "sum", dist.group.WORLD))'),
    right("06.3", "coalesced calls", DDP_ASYNC, "        self.works.append(dist.all_reduce(p.grad, async_op=True))",
          "        with dist._coalescing_manager(async_ops=True) as work:\n"
          "            for half in p.grad.view(-1).chunk(2):\n                dist.all_reduce(half)\n"
          "        self.works.append(work)"),
    right("06.4", "begun by the output's hook, flags and gradients in one message", PATIENT_FROM_THE_OUTPUT),
    right("06.4", "gradients gathered as objects", PATIENT_GATHERED),
    right("06.4", "all_gather_into_tensor", PATIENT, "dist.all_reduce(parameter.grad)",
          "parts = parameter.grad.new_empty(dist.get_world_size() * len(parameter), *parameter.shape[1:])\n"
          "            dist.all_gather_into_tensor(parts, parameter.grad)\n"
          "            parameter.grad.copy_(parts.view(-1, *parameter.shape).sum(0))"),
    right("06.4", "functional collectives", PATIENT, "dist.all_reduce(parameter.grad)",
          'parameter.grad.copy_(functional.all_reduce(parameter.grad, "sum", dist.group.WORLD))'),
    right("06.4", "coalesced calls", PATIENT, "            dist.all_reduce(parameter.grad)\n",
          "        with dist._coalescing_manager():\n            for parameter in parameters:\n"
          "                if parameter.grad is not None:\n                    dist.all_reduce(parameter.grad)\n"),
]  # fmt: skip

WRONG = [
    # 06.1
    wrong("06.1", "only parameters", "buffers", "buffers are no parameters", START,
          "(*model.parameters(), *model.buffers())", "model.parameters()"),
    wrong("06.1", "state_dict, which leaves a buffer out", "buffers", "state_dict() leaves out a buffer",
          START_STATE_DICT),
    wrong("06.1", "only what is trained", "parameters", "frozen parameters belong to the start", START,
          "        dist", "        if not tensor.requires_grad and isinstance(tensor, nn.Parameter):\n"
          "            continue\n        dist"),
    wrong("06.1", "no counters", "buffers", "buffers of whole numbers were left out", START, "        dist",
          "        if not tensor.is_floating_point():\n            continue\n        dist"),
    wrong("06.1", "mean", "parameters", "this is the mean over the ranks", START,
          "    for tensor in (*model.parameters(), *model.buffers()):", "    for p in model.parameters():\n"
          "        dist.all_reduce(p.detach())\n        p.data /= world_size\n    for tensor in model.buffers():"),
    wrong("06.1", "from the last rank", "parameters buffers", "the source is rank 0", START, "src=0",
          "src=world_size - 1"),
    wrong("06.1", "other Parameter objects", "model", "an optimizer made before would go on with the old ones",
          START_NEW_OBJECTS),
    wrong("06.1", "whole numbers through float64", "buffers", "the numbers went through another dtype",
          START_FLAT_DOUBLE),
    wrong("06.1", "zeros from the others, summed", "parameters", "a sum is no copy", START_FLAT,
          "        dist.broadcast(flat, src=0)\n",
          "        if rank != 0:\n            flat.zero_()\n        dist.all_reduce(flat)\n"),
    wrong("06.1", "assigned to .data", "model", "what is assigned is another tensor", START,
          "        dist.broadcast(tensor.detach(), src=0)", "        received = tensor.detach().clone()\n"
          "        dist.broadcast(received, src=0)\n        tensor.data = received"),
    wrong("06.1", "broadcast into copies", "parameters buffers", "not a copy", START, "detach()", "detach().clone()"),
    wrong("06.1", "a new model", "parameters buffers", "write into the model that was given", START_NEW_MODEL),
    wrong("06.1", "the same seed, nothing sent", ALL, "or were never sent", START_RESEEDED),
    wrong("06.1", "hard-coded values", "parameters buffers", "or were never sent", START_FROM_PRINTED),
    wrong("06.1", "only rank 0 sends", ALL, "collective", START, "        dist",
          "        if rank == 0:\n            dist", "            dist.broadcast", "            dist.broadcast",
          limit_s=2.0),
    wrong("06.1", "the last rank stays away", ALL, "collective", START, "    for",
          "    if rank == world_size - 1:\n        return\n    for", limit_s=2.0),
    wrong("06.1", "the course's own", ALL, "this exercise is to write", START_FROM_COURSE),
    wrong("06.1", "torch's own", ALL, "this exercise is to write", START_FROM_COURSE,
          "ddp_course.parallel.replicas import broadcast_module",
          "torch.nn.parallel import DistributedDataParallel as broadcast_module"),
    wrong("06.1", "swallows every error", ALL, "took part in no collective", START, "detach(), src=0)",
          "detach(), source=0)", "    for", "    try:\n     for", "        dist", "         dist", "source=0)",
          "source=0)\n    except Exception:\n        pass"),
    # 06.2
    wrong("06.2", "sum", "mean some", "summed over the ranks, not averaged", AVERAGE,
          "        parameter.grad /= world_size\n", ""),
    wrong("06.2", "divided before and after", "mean some", "divided by the world size twice",
          AVERAGE + "        parameter.grad /= world_size\n"),
    wrong("06.2", "divided by the ranks that have it", "some", "divide by the number of all ranks", AVERAGE,
          "/= world_size", "/= ranks"),
    wrong("06.2", "divided by the rows", "mean some", "times the mean", AVERAGE, "def average",
          "ROWS = {2: 5, 3: 6, 4: 7}\n\ndef average", "/= world_size", "/= 5"),
    wrong("06.2", "skips what is None", "some none", "is None on one rank", AVERAGE_SKIP_NONE, limit_s=2.0),
    wrong("06.2", "zeros, always", "none", "it must stay None", AVERAGE_ALWAYS_ZEROS),
    wrong("06.2", "frozen parameters not thought of", ALL, "a parameter without a gradient has .grad None",
          AVERAGE_ALWAYS_ZEROS, "        if parameter.requires_grad:\n            if",
          "        if True:\n            if False and"),
    wrong("06.2", "a tied weight travels twice", "once", "a tied weight has two names", AVERAGE,
          "list(model.parameters())", "[p for _, p in model.named_parameters(remove_duplicate=False)]"),
    wrong("06.2", "a gradient of zeros counts as none", "some", "counts as zero there", AVERAGE,
          "int(parameter.grad is not None)", "int(parameter.grad is not None and bool(parameter.grad.any()))"),
    wrong("06.2", "given out once more", "once", "travels twice", AVERAGE, "dist.all_reduce(parameter.grad)",
          "dist.all_reduce(parameter.grad)\n        dist.broadcast(parameter.grad, src=0)"),
    wrong("06.2", "a copy is averaged", "mean some", "the rank's own gradient", AVERAGE,
          "        parameter.grad /= world_size\n        dist.all_reduce(parameter.grad)",
          "        dist.all_reduce(parameter.grad / world_size)"),
    wrong("06.2", "reduced to rank 0 only", "mean some", "reduce leaves it on dst only", AVERAGE,
          "all_reduce(parameter.grad)", "reduce(parameter.grad, dst=0)"),
    wrong("06.2", "rank 0's gradient for all", "mean some", "needs a sum over the ranks", AVERAGE,
          "        parameter.grad /= world_size\n        dist.all_reduce(parameter.grad)",
          "        dist.broadcast(parameter.grad, src=0)"),
    wrong("06.2", "the scores are forgotten", "mean some", "was left out of the average", AVERAGE, "if ranks == 0:",
          "if ranks == 0 or len(parameter) == 3:"),
    wrong("06.2", "the last rank returns early", ALL, "a branch on the rank", AVERAGE, "    parameters =",
          "    if rank == world_size - 1:\n        return\n    parameters =", limit_s=2.0),
    wrong("06.2", "the course's own", ALL, "this exercise is to write", AVERAGE_FROM_COURSE),
    wrong("06.2", "swallows every error", "mean once some", "the rank's own gradient, divided", AVERAGE_SWALLOWING),
    wrong("06.2", "os._exit", ALL, "ends its process", AVERAGE, "    parameters =",
          "    if rank == 1:\n        os._exit(0)\n    parameters ="),
    wrong("06.2", "endless loop", ALL, "an endless loop",
          "def average_gradients(rank, world_size, model):\n    while rank == 0:\n        pass\n", limit_s=1.0),
    # 06.3
    wrong("06.3", "no broadcast", "start gradients steps tied", "no broadcast reached the module", DDP,
          "            dist.broadcast(tensor.detach(), src=0)", "            pass"),
    wrong("06.3", "the state_dict's tensors alone", "start", "seen is as this rank has drawn it", DDP,
          "(*module.parameters(), *module.buffers())", "module.state_dict().values()"),
    wrong("06.3", "waits in the hook of the parameter that is registered first", "gradients steps hooks tied",
          "a .grad is None", DDP_FIRST_WAITS),
    wrong("06.3", "buffers not broadcast", "start", "offset is as this rank has drawn it", DDP,
          "(*module.parameters(), *module.buffers())", "module.parameters()"),
    wrong("06.3", "sum", "gradients steps tied", "summed over the ranks, not averaged", DDP,
          "        parameter.grad /= dist.get_world_size()\n", ""),
    wrong("06.3", "register_hook, which comes before .grad", "gradients steps hooks tied",
          "runs before .grad is filled", DDP_READS_TOO_EARLY),
    wrong("06.3", "the same, where None is passed over", "gradients steps hooks tied", "runs before .grad is filled",
          DDP_READS_TOO_EARLY, "        parameter.grad /=",
          "        if parameter.grad is None:\n            return\n        parameter.grad /="),
    wrong("06.3", "the hook's mean is not returned", "gradients steps tied", "the rank's own gradient",
          DDP_TENSOR_HOOKS, "    return total / dist.get_world_size()", "    total /= dist.get_world_size()"),
    wrong("06.3", "averaged in training mode only", "steps hooks tied", "averaged there, too", DDP,
          "        parameter.grad /=", "        if not self.training:\n            return\n        parameter.grad /="),
    wrong("06.3", "forward forgets the gradients", "steps tied", "three backward passes before one", DDP,
          "        return self.module", "        self.module.zero_grad()\n        return self.module"),
    wrong("06.3", "zeros are not sent", "gradients steps hooks tied", "the ranks sent tensors of different sizes", DDP,
          "        parameter.grad /=", "        if not parameter.grad.any():\n            return\n"
          "        parameter.grad /=", limit_s=2.0),
    wrong("06.3", "each forward pass registers hooks", "tied", "is something registered, or sent, once more", DDP,
          "        for parameter in module.parameters():", "\n    def watch(self):\n"
          "        for parameter in self.module.parameters():", "        return self.module",
          "        self.watch()\n        return self.module"),
    wrong("06.3", "not waited for", "gradients steps tied", "was not waited for", DDP, "all_reduce(parameter.grad)",
          "all_reduce(parameter.grad, async_op=True)"),
    wrong("06.3", "averaged in the next forward", "gradients steps hooks tied", "when the next step begins",
          DDP_IN_NEXT_FORWARD),
    wrong("06.3", "backward of all tensors replaced", "hooks", "register_post_accumulate_grad_hook",
          DDP_PATCHED_BACKWARD),
    wrong("06.3", "hooks on weights only", "gradients steps tied", "was left out of the average", DDP,
          "if parameter.requires_grad:", "if parameter.requires_grad and parameter.dim() > 1:"),
    wrong("06.3", "hooks that average twice for tied parameters", "tied", "a tied weight has two names",
          DDP_TIED_TWICE),
    wrong("06.3", "frozen parameters get hooks", "start module tied", "a frozen parameter gets no gradient", DDP,
          "            if parameter.requires_grad:\n    ", "        "),
    wrong("06.3", "frozen parameters not broadcast", "start tied", "rank 0's parameters", DDP,
          "            dist.broadcast",
          "            if tensor.requires_grad or not isinstance(tensor, nn.Parameter):\n"
          "                dist.broadcast"),
    wrong("06.3", "inputs by position only", "module", "forward", DDP, ", **kwargs", ""),
    wrong("06.3", "a copy of the module", "start module gradients steps tied",
          "keep the module that was given, not a copy", DDP, "super().__init__()",
          "super().__init__()\n        import copy\n        module = copy.deepcopy(module)"),
    wrong("06.3", "forgets the module", "module", "keep the module itself", DDP, "self.module = module",
          "self.inner = [module]", "self.module(", "self.inner[0]("),
    wrong("06.3", "no super().__init__()", ALL, "call super().__init__() first", DDP, "        super().__init__()\n",
          ""),
    wrong("06.3", "hooks work once", "steps hooks tied", "step 1 is right, step 2 is not", DDP,
          "        self.module = module", "        self.module, self.done = module, set()",
          "        parameter.grad /=", "        if parameter in self.done:\n            return\n"
          "        self.done.add(parameter)\n        parameter.grad /="),
    wrong("06.3", "the last rank's hooks stay silent", "gradients steps hooks tied", "a branch on the rank", DDP,
          "        parameter.grad /=", "        if dist.get_rank() == dist.get_world_size() - 1:\n"
          "            return\n        parameter.grad /=", limit_s=2.0),
    wrong("06.3", "torch's own", ALL, "this exercise is to write", DDP_FROM_TORCH),
    wrong("06.3", "the course's own", ALL, "this exercise is to write", DDP_FROM_COURSE),
    # 06.4
    wrong("06.4", "a collective in each hook", "some none steps",
          "on some ranks only, so the ranks do not call the same collectives", DDP, "MyDDP", "PatientDDP",
          limit_s=2.0),
    wrong("06.4", "0 times all parameters", "none steps", "it must stay None", PATIENT_ZERO_TIMES),
    wrong("06.4", "a mean of zeros is taken for None", "steps", "step 1 is right, step 2 is not", PATIENT,
          "            dist.all_reduce(parameter.grad)\n", "            dist.all_reduce(parameter.grad)\n"
          "            if not parameter.grad.any():\n                parameter.grad = None\n"),
    wrong("06.4", "the state_dict's tensors alone", "used", "seen is as this rank has drawn it", PATIENT,
          "(*module.parameters(), *module.buffers())", "module.state_dict().values()"),
    wrong("06.4", "begun again by forward", "used steps", "three backward passes before one", PATIENT,
          "        self.queued = False\n        parameters", "        parameters", "        return self.module",
          "        self.queued = False\n        return self.module"),
    wrong("06.4", "zeros, always", "none steps", "it must stay None", PATIENT, "if ranks == 0:", "if False:"),
    wrong("06.4", "only what this rank has", "some none steps",
          "on some ranks only, so the ranks do not call the same collectives", PATIENT, "if ranks == 0:",
          "if parameter.grad is None:", limit_s=2.0),
    wrong("06.4", "divided by the ranks that have it", "some steps", "divide by the number of all ranks", PATIENT,
          "/= dist.get_world_size()", "/= ranks"),
    wrong("06.4", "the end is asked for once for ever", "used steps", "step 1 is right, step 2 is not", PATIENT,
          "        self.queued = False\n        parameters", "        parameters"),
    wrong("06.4", "zeros for what another pass brought", "steps", "in each parameter that any of them used", PATIENT,
          "        self.module, self.queued = module, False\n", "        self.module, self.queued = module, False\n"
          "        self.now = set()\n",
          "        if not self.queued:", "        self.now.add(parameter)\n        if not self.queued:",
          "int(parameter.grad is not None) for", "int(parameter in self.now) for",
          "            if parameter.grad is None:\n", "            if parameter not in self.now:\n",
          "            dist.all_reduce(parameter.grad)\n",
          "            dist.all_reduce(parameter.grad)\n        self.now.clear()\n"),
    wrong("06.4", "the first step's parameters for ever", "steps", "step 1 is right, step 2 is not", PATIENT,
          "        dist.all_reduce(used)\n",
          "        dist.all_reduce(used)\n        self.plan = used = getattr(self, 'plan', used)\n"),
    wrong("06.4", "sum", "used some steps", "summed over the ranks, not averaged", PATIENT,
          "            parameter.grad /= dist.get_world_size()\n", ""),
    wrong("06.4", "torch's own", ALL, "this exercise is to write", PATIENT_FROM_TORCH),
    # 06.5
    wrong("06.5", "always True", "local sum start buffers last once copy drops", "compare with one process",
          "def trains_right(rank, world_size, wrap):\n    return True"),
    wrong("06.5", "always False", ALL, "a test that refuses what is right earns nothing",
          "def trains_right(rank, world_size, wrap):\n    return False"),
    wrong("06.5", "equal on all ranks is taken for right", "sum start buffers last drops", "on all ranks is not right",
          OWN_TEST_BY_EQUALITY),
    wrong("06.5", "equal to the bit", ALL, "compare with a tolerance", OWN_TEST, "torch.allclose", "torch.equal"),
    wrong("06.5", "rank 0 decides", "buffers", "take a module with a buffer", OWN_TEST,
          "dist.all_reduce(verdict, op=dist.ReduceOp.MIN)", "dist.broadcast(verdict, src=0)"),
    wrong("06.5", "starts equal by the seed", "start", "give each rank another module", OWN_TEST, "network(seed=rank)",
          "network(seed=0)"),
    wrong("06.5", "a module without buffers", "buffers", "take a module with a buffer", OWN_TEST,
          "right = module.drawn_by.item() == 0", "right = True"),
    wrong("06.5", "one pass for each step", "drops", "without zero_grad", OWN_TEST, "in range(2)", "in range(1)"),
    wrong("06.5", "a single backward pass", "once drops", "try a second step", OWN_TEST, "in range(2)", "in range(1)",
          "in range(3)", "in range(1)"),
    wrong("06.5", "the first parameters only", "last", "of all parameters", OWN_TEST,
          "        for mine, whole in zip(module.parameters(), alone.parameters(), strict=True):",
          "        for mine, whole in list(zip(module.parameters(), alone.parameters()))[:2]:"),
    wrong("06.5", "looks into the replica", "copy", "of the module that you gave", OWN_TEST, "zip(module.parameters()",
          "zip(replica.module.parameters()", "module.zero_grad()", "replica.zero_grad()", "module.drawn_by.item()",
          "replica.module.drawn_by.item()"),
    wrong("06.5", "counts on every .grad", "copy", "a test that raises says nothing", OWN_TEST,
          "right and mine.grad is not None and", "right and", "(0 if mine.grad is None else mine.grad)", "mine.grad"),
    wrong("06.5", "a verdict of each rank", "buffers", "the ranks do not agree", OWN_TEST,
          "    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)\n", ""),
    wrong("06.5", "nothing returned", ALL, "return one verdict", OWN_TEST, "return bool(verdict)", "print(verdict)"),
]  # fmt: skip
