"""The answer bank of lesson 07: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong

IMPORTS = """
import os
from collections import defaultdict
from contextlib import ExitStack, nullcontext
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


# --- 07.2 ------------------------------------------------------------------------------------------

OVERLAP = """
from ddp_course.parallel.bucketing import plan_buckets

class OverlappedDDP(nn.Module):
    def __init__(self, module, cap_bytes):
        super().__init__()
        self.module, self.works = module, []
        named = list(module.named_parameters())
        for bucket in plan_buckets(named, cap_bytes, first_cap_bytes=cap_bytes):
            parameters = [module.get_parameter(name) for name in bucket.names]
            missing = set(parameters)
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, parameters=parameters, missing=missing: self.ready(parameter, parameters, missing)
                )

    def ready(self, parameter, parameters, missing):
        missing.discard(parameter)
        if not missing:
            missing.update(parameters)
            flat = torch.cat([each.grad.flatten() for each in parameters])
            flat.div_(dist.get_world_size())
            self.works.append((dist.all_reduce(flat, async_op=True), flat, parameters))

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_sync(self):
        for work, flat, parameters in self.works:
            work.wait()
            pieces = flat.split([parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad.copy_(piece.view_as(parameter))
        self.works.clear()
"""

OVERLAP_SELF_WAITING = """
class OverlappedDDP(torch.nn.Module):
    def __init__(self, module, cap_bytes):
        super().__init__()
        self.wrapped, self.launched = module, []
        self.buckets, size = [[]], 0
        for parameter in reversed(list(module.parameters())):
            if size >= cap_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(parameter)
            size += parameter.nbytes
        for number, bucket in enumerate(self.buckets):
            flat = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype)
            offset, left = 0, [len(bucket), len(bucket)]
            for parameter in bucket:
                place = flat[offset : offset + parameter.numel()]
                offset += parameter.numel()
                parameter.register_hook(self._hook(number, flat, place, left))

    def _hook(self, number, flat, place, left):
        def hook(gradient):
            place.copy_(gradient.flatten())
            left[0] -= 1
            if left[0] == 0:
                left[0] = left[1]
                if not self.launched:
                    torch.autograd.Variable._execution_engine.queue_callback(self._wait)
                self.launched.append((number, flat, dist.all_reduce(flat, async_op=True)))
        return hook

    def _wait(self):
        for number, flat, work in self.launched:
            work.wait()
            offset = 0
            for parameter in self.buckets[number]:
                mean = flat[offset : offset + parameter.numel()] / dist.get_world_size()
                offset += parameter.numel()
                parameter.grad = mean.view(parameter.shape)
        self.launched = []

    def forward(self, *args, **kwargs):
        return self.wrapped(*args, **kwargs)

    def finish_gradient_sync(self):
        pass
"""

OVERLAP_FUTURES = """
class OverlappedDDP(nn.Module):
    def __init__(self, module, cap_bytes):
        super().__init__()
        self.module, self.ready, self.futures, self.sent = module, set(), [], 0
        self.plan, bucket, size = [], [], 0
        for parameter in list(module.parameters())[::-1]:
            if size >= cap_bytes:
                self.plan.append(bucket)
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.nbytes
        self.plan.append(bucket)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, parameter):
        self.ready.add(parameter)
        while self.sent < len(self.plan) and self.ready.issuperset(self.plan[self.sent]):
            bucket = self.plan[self.sent]
            self.sent += 1
            flat = torch.nn.utils.parameters_to_vector([p.grad for p in bucket])
            future = dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True).get_future()
            self.futures.append((future.then(lambda f: f.value()[0] / dist.get_world_size()), bucket))

    def forward(self, x):
        return self.module(x)

    @torch.no_grad()
    def finish_gradient_sync(self):
        for future, bucket in self.futures:
            torch.nn.utils.vector_to_parameters(future.wait(), [p.grad for p in bucket])
        self.ready, self.futures, self.sent = set(), [], 0
"""

OVERLAP_COUNTER = but(
    OVERLAP,
    "missing = set(parameters)",
    "missing = [len(parameters)]",
    """        missing.discard(parameter)
        if not missing:
            missing.update(parameters)
""",
    """        missing[0] -= 1
        if missing[0] == 0:
""",
)

OVERLAP_LATER = """
class OverlappedDDP(nn.Module):
    def __init__(self, module, cap_bytes):
        super().__init__()
        self.module = module
        self.buckets, size = [[]], 0
        for parameter in reversed(list(module.parameters())):
            if size >= cap_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(parameter)
            size += parameter.nbytes

    def forward(self, x):
        return self.module(x)

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            flat = torch.cat([p.grad.flatten() for p in bucket])
            work = dist.all_reduce(flat, async_op=True)
            work.wait()
            for p, piece in zip(bucket, flat.div_(dist.get_world_size()).split([p.numel() for p in bucket])):
                p.grad.copy_(piece.view_as(p))
"""

OVERLAP_FROM_FRONT = but(OVERLAP_FUTURES, "list(module.parameters())[::-1]", "module.parameters()")

OVERLAP_LAZY = but(
    OVERLAP_FUTURES,
    "        while self.sent",
    "        if len(self.ready) < sum(map(len, self.plan)):\n            return\n        while self.sent",
)

OVERLAP_ONE_LATE = """
class OverlappedDDP(nn.Module):
    def __init__(self, module, cap_bytes):
        super().__init__()
        self.module = module
        self._cap = cap_bytes
        self._collected, self._size = [], 0
        self._works = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter):
        if self._size >= self._cap:
            self._launch()
        self._collected.append(parameter)
        self._size += parameter.numel() * parameter.element_size()

    def _launch(self):
        flat = torch.cat([each.grad.flatten() for each in self._collected])
        flat /= dist.get_world_size()
        self._works.append((dist.all_reduce(flat, async_op=True), flat, self._collected))
        self._collected, self._size = [], 0

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_sync(self):
        if self._collected:
            self._launch()  # what is left
        for work, flat, parameters in self._works:
            work.wait()
            for parameter, mean in zip(parameters, flat.split([each.numel() for each in parameters])):
                parameter.grad.copy_(mean.view_as(parameter))
        self._works.clear()
"""

OVERLAP_OLD_FLAT = but(
    OVERLAP,
    "            flat = torch.cat([each.grad.flatten() for each in parameters])",
    """            if not hasattr(self, "flats"):
                self.flats = {}
            if parameters[0] not in self.flats:
                self.flats[parameters[0]] = torch.cat([each.grad.flatten() for each in parameters])
            flat = self.flats[parameters[0]]""",
)

OVERLAP_BUSY = but(
    OVERLAP,
    "            work.wait()",
    """            while not flat.isnan().all():
                pass""",
)

OVERLAP_SWALLOWING = but(
    OVERLAP,
    "        missing.discard(parameter)",
    """        try:
            self.send(parameter, parameters, missing)
        except Exception:
            pass

    def send(self, parameter, parameters, missing):
        missing.discard(parameter)""",
    "async_op=True",
    "asynchronous=True",
)

OVERLAP_WAITS_IN_HOOK = but(
    OVERLAP,
    "            self.works.append((dist.all_reduce(flat, async_op=True),",
    """            work = dist.all_reduce(flat, async_op=True)
            work.wait()
            self.works.append((work,""",
)

OVERLAP_TORCHS = """
class OverlappedDDP(nn.parallel.DistributedDataParallel):
    def __init__(self, module, cap_bytes):
        super().__init__(module, bucket_cap_mb=cap_bytes / 2**20)

    def finish_gradient_sync(self):
        pass
"""

OVERLAP_COURSES = """
from ddp_course.parallel import BucketedDDP

class OverlappedDDP(nn.Module):
    def __init__(self, module, cap_bytes):
        super().__init__()
        self.replica = BucketedDDP(module, bucket_cap_mb=cap_bytes / 2**20, first_bucket_mb=cap_bytes / 2**20)

    def forward(self, x):
        return self.replica(x)

    def finish_gradient_sync(self):
        pass
"""

# --- 07.4 ------------------------------------------------------------------------------------------

HALF = """
def half_hook(state, bucket):
    wanted = bucket.buffer() / dist.get_world_size()
    lost = state.get(bucket.index())
    if lost is not None and lost.shape == wanted.shape:
        wanted += lost
    sent = wanted.to(torch.float16)
    state[bucket.index()] = wanted - sent.float()
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda future: sent.float())
"""

HALF_WAITING = """
def half_hook(state, bucket):
    size, key = dist.get_world_size(), (bucket.index(), bucket.buffer().numel())
    gradients = bucket.buffer()
    gradients.add_(state.setdefault(key, torch.zeros_like(gradients)))
    sent = gradients.div(size).half()
    state[key] = gradients - size * sent.float()  # in units of the gradient
    dist.all_reduce(sent)
    done = torch.futures.Future()
    done.set_result(gradients.copy_(sent))
    return done
"""

HALF_BY_PARAMETER = """
def half_hook(state, bucket):
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
        gradient.div_(dist.get_world_size())
        if parameter in state:
            gradient += state[parameter]
        state[parameter] = gradient - gradient.to(torch.float16)
    sent = bucket.buffer().to(torch.float16)

    def back(future):
        return future.value()[0].to(torch.float32)

    return dist.all_reduce(sent, async_op=True).get_future().then(back)
"""

HALF_PLAIN = """
def half_hook(state, bucket):
    sent = (bucket.buffer() / dist.get_world_size()).half()
    return dist.all_reduce(sent, async_op=True).get_future().then(lambda future: sent.float())
"""

HALF_DISTANCE = """
def half_hook(state, bucket):
    world_size = dist.get_world_size()
    wanted = bucket.buffer().clone()
    lost = state.get(bucket.index())
    if lost is not None and lost.shape == wanted.shape:
        wanted += lost
    wanted /= world_size
    sent = wanted.half()
    dist.all_reduce(sent)
    mean = sent.float()
    state[bucket.index()] = (wanted - mean / world_size) * world_size
    future = torch.futures.Future()
    future.set_result(mean)
    return future
"""

HALF_TORCHS = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

def half_hook(state, bucket):
    return fp16_compress_hook(None, bucket)
"""

HALF_OWN = """
def half_hook(state, bucket):
    wanted = bucket.buffer() / dist.get_world_size()
    state[bucket.index()] = wanted - wanted.half().float()
    dist.all_reduce(wanted.half())
    done = torch.futures.Future()
    done.set_result(wanted)
    return done
"""

RIGHT = [
    right("07.2", "hooks before accumulation, one tensor for good, backward waits by itself", OVERLAP_SELF_WAITING),
    right("07.2", "launched in order, futures", OVERLAP_FUTURES),
    right("07.2", "a counter that is reset", OVERLAP_COUNTER, "== 0:",
          "== 0:\n            missing[0] = len(parameters)"),
    right("07.2", "all_gather_into_tensor", OVERLAP, "dist.all_reduce(flat, async_op=True), flat",
          "dist.all_gather_into_tensor(parts, flat, async_op=True), parts", "            self.works",
          "            parts = flat.new_empty(dist.get_world_size() * len(flat))\n            self.works",
          "flat.split(", "flat.view(dist.get_world_size(), -1).sum(0).split("),
    right("07.2", "functional collectives", OVERLAP, "dist.all_reduce(flat, async_op=True), flat",
          'None, functional.all_reduce(flat, "sum", dist.group.WORLD)', "work.wait()",
          "flat = functional.wait_tensor(flat)"),
    right("07.2", "coalesced calls", OVERLAP, "            self.works.append((dist.all_reduce(flat, async_op=True),",
          "            with dist._coalescing_manager(async_ops=True) as work:\n"
          "                for piece in flat.chunk(2):\n                    dist.all_reduce(piece)\n"
          "            self.works.append((work,"),
    right("07.4", "waits in the hook, keeps the loss undivided, by index and size", HALF_WAITING),
    right("07.4", "keeps the loss by parameter", HALF_BY_PARAMETER),
    right("07.4", "float16 comes back, which DDP casts", HALF, "lambda future: sent.float()", "lambda future: sent"),
    right("07.4", "all_gather_into_tensor, added up by hand", HALF, "dist.all_reduce(sent, async_op",
          "dist.all_gather_into_tensor(parts, sent, async_op", "    work =",
          "    parts = sent.new_empty(dist.get_world_size() * len(sent))\n    work =", "sent.float())\n",
          "parts.view(-1, len(sent)).float().sum(0))\n"),
    right("07.4", "functional collectives", HALF, "    work = dist.all_reduce(sent, async_op=True)\n"
          "    return work.get_future().then(lambda future: sent.float())", "    done = torch.futures.Future()\n"
          '    total = functional.all_reduce(sent, "sum", dist.group.WORLD)\n'
          "    done.set_result(functional.wait_tensor(total).float())\n    return done"),
    right("07.4", "coalesced calls", HALF, "    work = dist.all_reduce(sent, async_op=True)\n"
          "    return work.get_future().then(lambda future: sent.float())", "    with dist._coalescing_manager():\n"
          "        for piece in sent.chunk(2):\n            dist.all_reduce(piece)\n"
          "    done = torch.futures.Future()\n    done.set_result(sent.float())\n    return done"),
]  # fmt: skip

WRONG = [
    # 07.2
    wrong("07.2", "after backward", "overlap async", "all collectives start after backward", OVERLAP_LATER),
    wrong("07.2", "blocking all_reduce in the hook", "async", "give the collective async_op=True", OVERLAP,
          "dist.all_reduce(flat, async_op=True)", "dist.all_reduce(flat)", "            work.wait()\n", ""),
    wrong("07.2", "waits in the hook", "async", "call wait() in finish_gradient_sync", OVERLAP_WAITS_IN_HOOK),
    wrong("07.2", "one all_reduce for each parameter", "buckets", "one collective for each parameter", OVERLAP,
          "plan_buckets(named, cap_bytes, first_cap_bytes=cap_bytes)", "plan_buckets(named, 1, 1)"),
    wrong("07.2", "one bucket for all", "buckets overlap", "close it when it has reached cap_bytes", OVERLAP,
          "plan_buckets(named, cap_bytes, first_cap_bytes=cap_bytes)", "plan_buckets(named, first_cap_bytes=2**25)"),
    wrong("07.2", "never over the cap", "buckets", "when it has reached the cap, not before", OVERLAP_FUTURES,
          "if size >= cap_bytes:", "if bucket and size + parameter.nbytes > cap_bytes:"),
    wrong("07.2", "over the cap", "buckets", "when it has reached the cap, not later", OVERLAP,
          "cap_bytes, first_cap_bytes=cap_bytes", "cap_bytes + 1, first_cap_bytes=cap_bytes + 1"),
    wrong("07.2", "launched by the plan's last parameter", "gradients steps", "every gradient must be in a bucket",
          OVERLAP, "        missing.discard(parameter)\n        if not missing:",
          "        if parameter is parameters[-1]:", "each.grad.flatten()",
          "(torch.zeros_like(each) if each.grad is None else each.grad).flatten()"),
    wrong("07.2", "averaged in training mode only", "steps buckets overlap", "step 1 is right, step 2 is not", OVERLAP,
          "        missing.discard(parameter)", "        if not self.training:\n            return\n"
          "        missing.discard(parameter)"),
    wrong("07.2", "planned from the front", "buckets overlap", "go through the parameters in reverse",
          OVERLAP_FROM_FRONT),
    wrong("07.2", "all buckets when the last gradient is there", "overlap", "the buckets wait for the first layer",
          OVERLAP_LAZY),
    wrong("07.2", "a bucket leaves when the next one begins", "overlap", "must not wait for gradients of another one",
          OVERLAP_ONE_LATE),
    wrong("07.2", "sum in place of the mean", "gradients steps", "gradients are summed over the ranks, not averaged",
          OVERLAP, "            flat.div_(dist.get_world_size())\n", ""),
    wrong("07.2", "two ranks, always", "gradients steps", "times the mean", OVERLAP, "dist.get_world_size()", "2"),
    wrong("07.2", "never waits", "gradients steps wait", "call wait() on every one of them", OVERLAP,
          "            work.wait()\n", ""),
    wrong("07.2", "not copied back", "gradients steps", "copy the averages from the bucket back", OVERLAP,
          "parameter.grad.copy_(piece.view_as(parameter))", "piece.view_as(parameter)"),
    wrong("07.2", "copied back in another order", "gradients steps", "their places are not", OVERLAP,
          "zip(parameters, pieces, strict=True)",
          "zip(parameters, flat.flip(0).split([p.numel() for p in parameters]))"),
    wrong("07.2", "the counter is not reset", "steps buckets overlap", "must wait for all its gradients again",
          OVERLAP_COUNTER),
    wrong("07.2", "the set of missing ones stays empty", ALL, "count those that are missing", OVERLAP,
          "            missing.update(parameters)\n", ""),
    wrong("07.2", "the flat tensor of the first step", "steps", "build the flat tensor again", OVERLAP_OLD_FLAT),
    wrong("07.2", "the last rank does not send", ALL, "wait in a collective that another one skips", OVERLAP,
          "        if not missing:", "        if not missing and dist.get_rank() < dist.get_world_size() - 1:",
          limit_s=2.0),
    wrong("07.2", "os._exit after the first backward", ALL, "the function ends its process", OVERLAP,
          "        self.works.clear()", "        os._exit(0)"),
    wrong("07.2", "endless loop", ALL, "an endless loop", OVERLAP_BUSY, limit_s=2.0),
    wrong("07.2", "swallows every error", ALL, "the hooks launch no collective", OVERLAP_SWALLOWING),
    wrong("07.2", "works on a copy of the model", "gradients steps async", "all gradients are None or 0", OVERLAP,
          "self.module, self.works", "module = copy.deepcopy(module)\n        self.module, self.works",
          "from ddp_course", "import copy\nfrom ddp_course"),
    wrong("07.2", "freezes the biases", "gradients steps buckets", "every gradient must be in a bucket", OVERLAP,
          "named = list(module.named_parameters())",
          "named = [(n, p) for n, p in module.named_parameters() if p.requires_grad_(p.dim() == 2).requires_grad]"),
    wrong("07.2", "torch's own", ALL, "this exercise is to write", OVERLAP_TORCHS),
    wrong("07.2", "the course's own", ALL, "this exercise is to write", OVERLAP_COURSES),
    # 07.4
    wrong("07.4", "rounds and forgets", "lost buckets", "keep what was lost, and add all of it next time", HALF_PLAIN),
    wrong("07.4", "float32 still", "bytes lost buckets", "must be float16", HALF, "wanted.to(torch.float16)",
          "wanted.clone()"),
    wrong("07.4", "sum in place of the mean", "close lost buckets", "gradients are summed over the ranks", HALF,
          " / dist.get_world_size()", ""),
    wrong("07.4", "divided after the sum", "close", "divide by the world size before the sum", HALF,
          "bucket.buffer() / dist.get_world_size()", "bucket.buffer().clone()", "lambda future: sent.float()",
          "lambda future: sent.float() / dist.get_world_size()"),
    wrong("07.4", "bfloat16", "close buckets", "bfloat16", HALF, "torch.float16", "torch.bfloat16"),
    wrong("07.4", "the loss is taken after all_reduce", "lost buckets", "take that difference before all_reduce",
          HALF, "async_op=True", "async_op=True); work.wait(", "    state[bucket.index()] = wanted - sent.float()\n",
          "", "    return", "    state[bucket.index()] = wanted - sent.float()\n    return"),
    wrong("07.4", "the distance to the average is kept", "lost buckets", "what is kept grows without end",
          HALF_DISTANCE),
    wrong("07.4", "a loss for each size", "buckets", "keep one tensor for each bucket.index()", HALF, "bucket.index()",
          "bucket.buffer().numel()"),
    wrong("07.4", "kept outside of the state", "lost", "comes back in part, or too often", HALF,
          "def half_hook(state, bucket):", "LOST = {}\n\ndef half_hook(_, bucket, state=LOST):"),
    wrong("07.4", "in two messages", "bytes lost buckets", "send the bucket once", HALF,
          "    work = dist.all_reduce(sent, async_op=True)\n",
          "    dist.all_reduce(sent[:1])\n    work = dist.all_reduce(sent[1:], async_op=True)\n"),
    wrong("07.4", "nine tenths of the loss come back", "lost", "add all of it next time", HALF,
          "wanted += lost", "wanted += 0.9 * lost"),
    wrong("07.4", "one loss for all buckets", "buckets", "keep one tensor for each bucket.index()", HALF,
          "bucket.index()", "0"),
    wrong("07.4", "no look at the size", "buckets", "DDP plans its buckets again", HALF,
          " and lost.shape == wanted.shape", ""),
    wrong("07.4", "the old loss is left out of the new one", "lost buckets", "with the old loss in it", HALF,
          "wanted += lost", "wanted = wanted + lost", "wanted - sent.float()",
          "bucket.buffer() / dist.get_world_size() - sent.float()"),
    wrong("07.4", "float16 before the loss is added", "lost buckets", "too small for float16", HALF,
          "/ dist.get_world_size()", "/ dist.get_world_size()\n    wanted = wanted.half().float()"),
    wrong("07.4", "the rank's own gradient comes back", "close lost buckets", "the future must hold the sum",
          HALF_OWN),
    wrong("07.4", "a tensor in place of a future", ALL, "the hook returns a future", HALF, "async_op=True", "",
          "work.get_future().then(lambda future: sent.float())", "sent.float()"),
    wrong("07.4", "torch's own", ALL, "this exercise is to write", HALF_TORCHS),
]  # fmt: skip
