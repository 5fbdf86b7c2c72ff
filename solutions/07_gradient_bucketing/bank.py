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
from torch import nn
"""

# --- 07.1 ------------------------------------------------------------------------------------------

PLAN = """
def plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes):
    closed, opened, caps = [], {}, {}
    for index in reversed(range(len(sizes))):
        dtype = dtypes[index]
        bucket = opened.setdefault(dtype, [])
        bucket.append(index)
        if sum(sizes[i] for i in bucket) >= caps.get(dtype, first_cap_bytes):
            closed.append(opened.pop(dtype))
            caps[dtype] = cap_bytes
    plan = closed + list(opened.values())
    return sorted(plan, key=lambda bucket: bucket[0], reverse=True)
"""

PLAN_BY_DTYPE = """
def plan_of(indices, sizes, cap_bytes, first_cap_bytes):
    while indices:
        total, count = 0, 0
        while count < len(indices) and total < first_cap_bytes:
            total += sizes[indices[count]]
            count += 1
        yield tuple(indices[:count])
        indices, first_cap_bytes = indices[count:], cap_bytes

def plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes):
    plan = []
    for dtype in set(dtypes):
        indices = [i for i in range(len(sizes) - 1, -1, -1) if dtypes[i] == dtype]
        plan += plan_of(indices, sizes, cap_bytes, first_cap_bytes)
    return tuple(sorted(plan)[::-1])
"""

PLAN_NUMBERED = """
def plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes):
    number, filled, plan = defaultdict(int), defaultdict(int), {}
    for index, (size, dtype) in list(enumerate(zip(sizes, dtypes)))[::-1]:
        plan.setdefault((dtype, number[dtype]), []).append(index)
        filled[dtype] += size
        if filled[dtype] >= (cap_bytes if number[dtype] else first_cap_bytes):
            number[dtype] += 1
            filled[dtype] = 0
    return list(plan.values())
"""

PLAN_ONE_OPEN = """
def plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes):
    plan, size, started = [], 0, set()
    for index in reversed(range(len(sizes))):
        dtype = dtypes[index]
        full = size >= (cap_bytes if dtype in started else first_cap_bytes)
        if not plan or full or dtypes[plan[-1][-1]] != dtype:
            if full:
                started.add(dtype)
            plan.append([])
            size = 0
        plan[-1].append(index)
        size += sizes[index]
    return plan
"""

PLAN_NEVER_OVER = """
def plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes):
    closed, opened, caps = [], {}, {}
    for index in reversed(range(len(sizes))):
        dtype = dtypes[index]
        bucket = opened.setdefault(dtype, [])
        total = sum(sizes[i] for i in bucket)
        if bucket and total + sizes[index] > caps.get(dtype, first_cap_bytes):
            closed.append(bucket)
            opened[dtype] = bucket = []
            caps[dtype] = cap_bytes
        bucket.append(index)
    return sorted(closed + list(opened.values()), reverse=True)
"""

PLAN_EMPTY_LAST = """
def plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes):
    plan = []
    for dtype in dict.fromkeys(dtypes):
        buckets, size, cap = [[]], 0, first_cap_bytes
        for index in reversed(range(len(sizes))):
            if dtypes[index] == dtype:
                buckets[-1].append(index)
                size += sizes[index]
                if size >= cap:
                    buckets.append([])
                    size, cap = 0, cap_bytes
        plan += buckets
    return sorted(plan, reverse=True)
"""

PLAN_FROM_COURSE = """
from ddp_course.parallel.bucketing import plan_buckets as ready_made

def plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes):
    tensors = [torch.empty(size // dtype.itemsize, dtype=dtype) for size, dtype in zip(sizes, dtypes)]
    named = [(str(index), tensor) for index, tensor in enumerate(tensors)]
    return [[int(name) for name in bucket.names] for bucket in ready_made(named, cap_bytes, first_cap_bytes)]
"""

PLAN_FROM_TORCH = """
def plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes):
    tensors = [torch.empty(size // dtype.itemsize, dtype=dtype) for size, dtype in zip(sizes, dtypes)][::-1]
    plan, _ = dist._compute_bucket_assignment_by_size(tensors, [first_cap_bytes, cap_bytes])
    return [[len(sizes) - 1 - i for i in bucket] for bucket in plan]
"""

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
        for parameter in list(module.parameters())[::-1]:  # closes before the cap is passed, which is as good
            if bucket and size + parameter.nbytes > cap_bytes:
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

OVERLAP_COUNTER = OVERLAP.replace("missing = set(parameters)", "missing = [len(parameters)]").replace(
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

OVERLAP_FROM_FRONT = OVERLAP_FUTURES.replace("list(module.parameters())[::-1]", "module.parameters()")

OVERLAP_LAZY = OVERLAP_FUTURES.replace(
    "        while self.sent",
    "        if len(self.ready) < sum(map(len, self.plan)):\n            return\n        while self.sent",
)

OVERLAP_OLD_FLAT = OVERLAP.replace(
    "            flat = torch.cat([each.grad.flatten() for each in parameters])",
    """            if not hasattr(self, "flats"):
                self.flats = {}
            if parameters[0] not in self.flats:
                self.flats[parameters[0]] = torch.cat([each.grad.flatten() for each in parameters])
            flat = self.flats[parameters[0]]""",
)

OVERLAP_BUSY = OVERLAP.replace(
    "            work.wait()",
    """            while not flat.isnan().all():
                pass""",
)

OVERLAP_SWALLOWING = OVERLAP.replace(
    "        missing.discard(parameter)",
    """        try:
            self.send(parameter, parameters, missing)
        except Exception:
            pass

    def send(self, parameter, parameters, missing):
        missing.discard(parameter)""",
).replace("async_op=True", "asynchronous=True")

OVERLAP_WAITS_IN_HOOK = OVERLAP.replace(
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

# --- 07.3 ------------------------------------------------------------------------------------------

ACCUMULATE = """
def accumulate(replica, loss_function, micro_batches):
    count = len(micro_batches)
    with replica.no_sync():
        for x, y in micro_batches[:-1]:
            (loss_function(replica(x), y) / count).backward()
    x, y = micro_batches[-1]
    (loss_function(replica(x), y) / count).backward()
"""

ACCUMULATE_CONTEXTS = """
def accumulate(replica, loss_function, micro_batches):
    for number, (x, y) in enumerate(micro_batches, 1):
        quiet = number < len(micro_batches)
        with replica.no_sync() if quiet else nullcontext():
            loss = loss_function(replica(x), y)
            loss.backward()
    for parameter in replica.parameters():
        parameter.grad /= len(micro_batches)
"""

ACCUMULATE_BY_SWITCH = """
def accumulate(replica, loss_function, micro_batches):
    total = 0.0
    try:
        for number, (x, y) in enumerate(micro_batches):
            replica.require_backward_grad_sync = number == len(micro_batches) - 1
            loss = loss_function(replica(x), y) / len(micro_batches)
            loss.backward()
            total += loss.item()
    finally:
        replica.require_backward_grad_sync = True
    return total
"""

ACCUMULATE_GRADIENT = """
def accumulate(replica, loss_function, micro_batches):
    weight = torch.tensor(1 / len(micro_batches), dtype=torch.float64)
    with ExitStack() as stack:
        stack.enter_context(replica.no_sync())
        for number, (x, y) in enumerate(micro_batches):
            if number == len(micro_batches) - 1:
                stack.close()
            loss_function(replica(x), y).backward(weight)
"""

ACCUMULATE_BACKWARD_ONLY = """
def accumulate(replica, loss_function, micro_batches):
    for number, (x, y) in enumerate(micro_batches, 1):
        loss = loss_function(replica(x), y) / len(micro_batches)
        with replica.no_sync() if number < len(micro_batches) else nullcontext():
            loss.backward()
"""

ACCUMULATE_BY_HAND = """
def accumulate(replica, loss_function, micro_batches):
    with replica.no_sync():
        for x, y in micro_batches:
            (loss_function(replica(x), y) / len(micro_batches)).backward()
    for parameter in replica.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
"""

ACCUMULATE_AT_ONCE = """
def accumulate(replica, loss_function, micro_batches):
    xs, ys = zip(*micro_batches)
    loss_function(replica(torch.cat(xs)), torch.cat(ys)).backward()
"""

ACCUMULATE_LOSSES = """
def accumulate(replica, loss_function, micro_batches):
    losses = [loss_function(replica(x), y) for x, y in micro_batches]
    (sum(losses) / len(losses)).backward()
"""

ACCUMULATE_SWITCHED_OFF = """
def accumulate(replica, loss_function, micro_batches):
    for number, (x, y) in enumerate(micro_batches, 1):
        if number == len(micro_batches):
            replica.require_backward_grad_sync = True
        (loss_function(replica(x), y) / len(micro_batches)).backward()
        replica.require_backward_grad_sync = False
"""

ACCUMULATE_SWALLOWING = """
def accumulate(replica, loss_function, micro_batches):
    try:
        with replica.no_sync:
            for x, y in micro_batches:
                (loss_function(replica(x), y) / len(micro_batches)).backward()
    except Exception:
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
    Right("07.1", "each dtype by itself, tuples", PLAN_BY_DTYPE),
    Right("07.1", "numbered buckets in a dictionary, which keeps the order", PLAN_NUMBERED),
    Right("07.2", "hooks before accumulation, one tensor for good, backward waits by itself", OVERLAP_SELF_WAITING),
    Right("07.2", "a stricter cap, launched in order, futures", OVERLAP_FUTURES),
    Right(
        "07.2",
        "a counter that is reset",
        OVERLAP_COUNTER.replace("== 0:", "== 0:\n            missing[0] = len(parameters)"),
    ),
    Right("07.3", "nullcontext, divided at the end", ACCUMULATE_CONTEXTS),
    Right("07.3", "the switch behind no_sync, put back", ACCUMULATE_BY_SWITCH),
    Right("07.3", "a weight given to backward", ACCUMULATE_GRADIENT),
    Right("07.4", "waits in the hook, keeps the loss undivided, by index and size", HALF_WAITING),
    Right("07.4", "keeps the loss by parameter", HALF_BY_PARAMETER),
    Right(
        "07.4",
        "float16 comes back, which DDP casts",
        HALF.replace("lambda future: sent.float()", "lambda future: sent"),
    ),
]

WRONG = [
    # 07.1
    Wrong(
        "07.1",
        "in the order of the model",
        PLAN.replace("reversed(range(len(sizes)))", "range(len(sizes))").replace(", reverse=True", ""),
        ("order", "dtypes"),
        "this is the order of the model",
    ),
    Wrong(
        "07.1",
        "planned forwards, then reversed",
        PLAN.replace("reversed(range(len(sizes)))", "range(len(sizes))").replace(
            "plan = closed + list(opened.values())",
            "plan = [bucket[::-1] for bucket in closed + list(opened.values())]",
        ),
        ("cap", "dtypes"),
        "the left-over is in the first bucket",
    ),
    Wrong(
        "07.1",
        "indices rise inside a bucket",
        PLAN.replace(
            "plan = closed + list(opened.values())", "plan = [sorted(b) for b in closed + list(opened.values())]"
        ),
        ("order", "dtypes"),
        "the indices inside a bucket are not",
    ),
    Wrong(
        "07.1",
        "never over the cap",
        PLAN_NEVER_OVER,
        ("cap", "first", "dtypes"),
        "the gradient that fills it belongs to it",
    ),
    Wrong(
        "07.1",
        "closes when it is over the cap",
        PLAN.replace(">= caps", "> caps"),
        ("cap",),
        "when its size is at least the cap",
    ),
    Wrong(
        "07.1",
        "the left-over is lost",
        PLAN.replace("closed + list(opened.values())", "closed"),
        ("once", "dtypes"),
        "still open at the end belongs to the plan",
    ),
    Wrong("07.1", "an empty bucket at the end", PLAN_EMPTY_LAST, ("once",), "there is an empty bucket"),
    Wrong(
        "07.1",
        "one cap for all",
        PLAN.replace("caps.get(dtype, first_cap_bytes)", "cap_bytes"),
        ("first", "dtypes"),
        "first_cap_bytes is not used",
    ),
    Wrong(
        "07.1",
        "the first cap for all",
        PLAN.replace("caps.get(dtype, first_cap_bytes)", "first_cap_bytes"),
        ("first", "dtypes"),
        "all others close at cap_bytes",
    ),
    Wrong(
        "07.1",
        "a small first bucket for one dtype only",
        PLAN.replace("caps[dtype] = cap_bytes", "first_cap_bytes = cap_bytes"),
        ("dtypes",),
        "each dtype has a small first bucket",
    ),
    Wrong(
        "07.1",
        "dtypes are mixed",
        PLAN.replace("dtype = dtypes[index]", "dtype = 0"),
        ("dtypes",),
        "float16 and float32 share one",
    ),
    Wrong(
        "07.1", "a change of dtype closes the bucket", PLAN_ONE_OPEN, ("dtypes",), "keep one open bucket for each dtype"
    ),
    Wrong(
        "07.1",
        "in the order of closing",
        PLAN.replace("sorted(plan, key=lambda bucket: bucket[0], reverse=True)", "plan"),
        ("dtypes",),
        "sort them by their first gradient",
    ),
    Wrong(
        "07.1",
        "the example of the text, hard-coded",
        "def plan_buckets(sizes, dtypes, cap_bytes, first_cap_bytes):\n    return [[4], [3, 2], [1, 0]]\n",
        ALL,
        "is in no bucket",
    ),
    Wrong("07.1", "the course's own", PLAN_FROM_COURSE, ALL, "this exercise is to write"),
    Wrong("07.1", "torch's own", PLAN_FROM_TORCH, ALL, "this exercise is to write"),
    Wrong(
        "07.1",
        "no look at an empty model",
        PLAN.replace("    closed,", "    largest = max(sizes)\n    closed,"),
        ALL,
        "a model without parameters",
    ),
    Wrong(
        "07.1",
        "endless loop",
        PLAN_BY_DTYPE.replace("            count += 1\n", ""),
        ALL,
        "an endless loop",
        limit_s=1.0,
    ),
    # 07.2
    Wrong("07.2", "after backward", OVERLAP_LATER, ("overlap", "async"), "all collectives start after backward"),
    Wrong(
        "07.2",
        "blocking all_reduce in the hook",
        OVERLAP.replace("dist.all_reduce(flat, async_op=True)", "dist.all_reduce(flat)").replace(
            "            work.wait()\n", ""
        ),
        ("async",),
        "give the collective async_op=True",
    ),
    Wrong(
        "07.2",
        "waits in the hook",
        OVERLAP_WAITS_IN_HOOK,
        ("async",),
        "call wait() in finish_gradient_sync",
    ),
    Wrong(
        "07.2",
        "one all_reduce for each parameter",
        OVERLAP.replace("plan_buckets(named, cap_bytes, first_cap_bytes=cap_bytes)", "plan_buckets(named, 1, 1)"),
        ("buckets",),
        "one collective for each parameter",
    ),
    Wrong(
        "07.2",
        "one bucket for all",
        OVERLAP.replace(
            "plan_buckets(named, cap_bytes, first_cap_bytes=cap_bytes)", "plan_buckets(named, first_cap_bytes=2**25)"
        ),
        ("buckets", "overlap"),
        "close it when it has reached cap_bytes",
    ),
    Wrong("07.2", "planned from the front", OVERLAP_FROM_FRONT, ("overlap",), "go through the parameters in reverse"),
    Wrong(
        "07.2",
        "all buckets when the last gradient is there",
        OVERLAP_LAZY,
        ("overlap",),
        "the buckets wait for the first layer",
    ),
    Wrong(
        "07.2",
        "sum in place of the mean",
        OVERLAP.replace("            flat.div_(dist.get_world_size())\n", ""),
        ("gradients", "steps"),
        "gradients are summed over the ranks, not averaged",
    ),
    Wrong(
        "07.2",
        "two ranks, always",
        OVERLAP.replace("dist.get_world_size()", "2"),
        ("gradients", "steps"),
        "times the mean",
    ),
    Wrong(
        "07.2",
        "never waits",
        OVERLAP.replace("            work.wait()\n", ""),
        ("gradients", "steps", "wait"),
        "call wait() on every one of them",
    ),
    Wrong(
        "07.2",
        "not copied back",
        OVERLAP.replace("parameter.grad.copy_(piece.view_as(parameter))", "piece.view_as(parameter)"),
        ("gradients", "steps"),
        "copy the averages from the bucket back",
    ),
    Wrong(
        "07.2",
        "copied back in another order",
        OVERLAP.replace(
            "zip(parameters, pieces, strict=True)",
            "zip(parameters, flat.flip(0).split([p.numel() for p in parameters]))",
        ),
        ("gradients", "steps"),
        "their places are not",
    ),
    Wrong(
        "07.2",
        "the counter is not reset",
        OVERLAP_COUNTER,
        ("steps", "buckets", "overlap"),
        "must wait for all its gradients again",
    ),
    Wrong(
        "07.2",
        "the set of missing ones stays empty",
        OVERLAP.replace("            missing.update(parameters)\n", ""),
        ALL,
        "count those that are missing",
    ),
    Wrong(
        "07.2",
        "the flat tensor of the first step",
        OVERLAP_OLD_FLAT,
        ("steps",),
        "build the flat tensor anew",
    ),
    Wrong(
        "07.2",
        "the last rank does not send",
        OVERLAP.replace(
            "        if not missing:", "        if not missing and dist.get_rank() < dist.get_world_size() - 1:"
        ),
        ALL,
        "wait in a collective that another one skips",
        limit_s=2.0,
    ),
    Wrong(
        "07.2",
        "os._exit after the first backward",
        OVERLAP.replace("        self.works.clear()", "        os._exit(0)"),
        ALL,
        "the function ends its process",
    ),
    Wrong(
        "07.2",
        "endless loop",
        OVERLAP_BUSY,
        ALL,
        "an endless loop",
        limit_s=2.0,
    ),
    Wrong(
        "07.2",
        "swallows every error",
        OVERLAP_SWALLOWING,
        ALL,
        "the hooks launch no collective",
    ),
    Wrong("07.2", "torch's own", OVERLAP_TORCHS, ALL, "this exercise is to write"),
    Wrong("07.2", "the course's own", OVERLAP_COURSES, ALL, "this exercise is to write"),
    # 07.3
    Wrong(
        "07.3",
        "talks in every micro-batch",
        ACCUMULATE.replace("replica.no_sync()", "nullcontext()"),
        ("silent",),
        "all micro-batches but the last belong inside",
    ),
    Wrong("07.3", "no_sync around backward only", ACCUMULATE_BACKWARD_ONLY, ("silent",), "which must be inside too"),
    Wrong(
        "07.3",
        "never talks",
        ACCUMULATE_CONTEXTS.replace("replica.no_sync() if quiet else nullcontext()", "replica.no_sync()"),
        ("mean", "last", "one"),
        "the last micro-batch must be outside no_sync",
    ),
    Wrong(
        "07.3",
        "not divided",
        ACCUMULATE.replace(" / count", ""),
        ("mean",),
        "divide each loss by the number of micro-batches",
    ),
    Wrong(
        "07.3",
        "divided by the world size as well",
        ACCUMULATE.replace(" / count", " / count / dist.get_world_size()"),
        ("mean", "one"),
        "torch's DDP averages over the ranks already",
    ),
    Wrong(
        "07.3",
        "divided by the wrong number",
        ACCUMULATE.replace("count = len(micro_batches)", "count = len(micro_batches[0])"),
        ("mean", "one"),
        "every micro-batch counts the same",
    ),
    Wrong(
        "07.3",
        "zero_grad between",
        ACCUMULATE_CONTEXTS.replace("        with replica", "        replica.zero_grad()\n        with replica"),
        ("mean",),
        "so that gradients add up",
    ),
    Wrong("07.3", "averaged by hand", ACCUMULATE_BY_HAND, ("last", "one"), "something is sent outside backward"),
    Wrong("07.3", "all rows at once", ACCUMULATE_AT_ONCE, ("silent", "last"), "at once need the memory"),
    Wrong("07.3", "one backward for all losses", ACCUMULATE_LOSSES, ("silent",), "call backward for each micro-batch"),
    Wrong(
        "07.3",
        "the first talks, not the last",
        ACCUMULATE_CONTEXTS.replace("number < len(micro_batches)", "number > 1"),
        ("mean", "silent", "last"),
        "belong inside replica.no_sync()",
    ),
    Wrong("07.3", "switched off for good", ACCUMULATE_SWITCHED_OFF, ("silent", "after"), "no_sync was left on"),
    Wrong(
        "07.3",
        "no_sync of the module",
        ACCUMULATE.replace("replica.no_sync()", "replica.module.no_sync()"),
        ALL,
        "no_sync belongs to the replica",
    ),
    Wrong(
        "07.3",
        "the last rank is silent",
        ACCUMULATE_CONTEXTS.replace("quiet = number", "quiet = dist.get_rank() == dist.get_world_size() - 1 or number"),
        ALL,
        "wait in a collective that another one skips",
        limit_s=2.0,
    ),
    Wrong("07.3", "swallows every error", ACCUMULATE_SWALLOWING, ALL, "there is no gradient"),
    Wrong(
        "07.3", "does nothing", "def accumulate(replica, loss_function, micro_batches):\n    pass\n", ALL, "no gradient"
    ),
    # 07.4
    Wrong("07.4", "rounds and forgets", HALF_PLAIN, ("lost", "buckets"), "keep what was lost, and add it next time"),
    Wrong(
        "07.4",
        "float32 still",
        HALF.replace("wanted.to(torch.float16)", "wanted.clone()"),
        ("bytes", "lost", "buckets"),
        "must be float16",
    ),
    Wrong(
        "07.4",
        "sum in place of the mean",
        HALF.replace(" / dist.get_world_size()", ""),
        ("close", "lost", "buckets"),
        "gradients are summed over the ranks",
    ),
    Wrong(
        "07.4",
        "divided after the sum",
        HALF.replace("bucket.buffer() / dist.get_world_size()", "bucket.buffer().clone()").replace(
            "lambda future: sent.float()", "lambda future: sent.float() / dist.get_world_size()"
        ),
        ("close",),
        "divide by the world size before the sum",
    ),
    Wrong("07.4", "bfloat16", HALF.replace("torch.float16", "torch.bfloat16"), ("close",), "bfloat16"),
    Wrong(
        "07.4",
        "the loss is taken after all_reduce",
        HALF.replace("async_op=True", "async_op=True); work.wait(")
        .replace("    state[bucket.index()] = wanted - sent.float()\n", "")
        .replace("    return", "    state[bucket.index()] = wanted - sent.float()\n    return"),
        ("lost", "buckets"),
        "take that difference before all_reduce",
    ),
    Wrong(
        "07.4",
        "one loss for all buckets",
        HALF.replace("bucket.index()", "0"),
        ("buckets",),
        "keep one tensor for each bucket.index()",
    ),
    Wrong(
        "07.4",
        "no look at the size",
        HALF.replace(" and lost.shape == wanted.shape", ""),
        ("buckets",),
        "DDP plans its buckets anew",
    ),
    Wrong(
        "07.4",
        "the old loss is left out of the new one",
        HALF.replace("wanted += lost", "wanted = wanted + lost").replace(
            "wanted - sent.float()", "bucket.buffer() / dist.get_world_size() - sent.float()"
        ),
        ("lost", "buckets"),
        "with the old loss in it",
    ),
    Wrong(
        "07.4",
        "float16 before the loss is added",
        HALF.replace("/ dist.get_world_size()", "/ dist.get_world_size()\n    wanted = wanted.half().float()"),
        ("lost", "buckets"),
        "too small for float16",
    ),
    Wrong(
        "07.4",
        "the rank's own gradient comes back",
        HALF_OWN,
        ("close", "lost", "buckets"),
        "the future must hold the sum",
    ),
    Wrong(
        "07.4",
        "a tensor in place of a future",
        HALF.replace("async_op=True", "").replace(
            "work.get_future().then(lambda future: sent.float())", "sent.float()"
        ),
        ALL,
        "the hook returns a future",
    ),
    Wrong("07.4", "torch's own", HALF_TORCHS, ALL, "this exercise is to write"),
]
