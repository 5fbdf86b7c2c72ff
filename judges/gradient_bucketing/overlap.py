"""07.2 `OverlappedDDP(module, cap_bytes)`: do buckets leave while backward still computes? An order of events.

No clock is read: at each collective is noted how many bytes of gradients were there. In the first step the last rank
begins its backward pass only when all others are through with theirs, and a little later than they could have needed
its gradients. A rank that sends in a blocking way never gets through; one that does not wait at the end is done too
early. Read next: `accumulation.py`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from itertools import accumulate
from random import Random

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

STEPS, ROWS, RATE = 3, 4, 0.5
THROUGH_S, FINISHED_S, LATE_S = 3.0, 0.2, 0.02
STUCK = {  # of three exercises: the limit of the run came before that of the collective
    "limit: waited in (all_reduce|barrier|broadcast|reduce|all_gather)": "some ranks wait in a "
    "collective that another one skips, or calls at another place; look for a branch on the rank"
}


class Crossed(nn.Sequential):
    """The last two layers are used in the other order: so the last gradient in a plan need not be the last to come."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *others, one, activation, two = self
        for module in (*others, two, activation, one):
            x = module(x)
        return x


def cases(rng: Random) -> list[Round]:
    """Six layers in three buckets, with a gate; then seven in three, with another number of ranks.

    First a bucket has just the cap, then the gradient that fills it is too large for it.
    """

    def made(layers: int, per_bucket: float, gate: str) -> tuple:
        width = rng.randint(5, 9)
        return layers, width, rng.randint(1, 10**6), int(8 * per_bucket * (width * width + width)), gate

    one, two = rng.sample((2, 3, 4), 2)
    return [Round(one, [("gated", made(6, 2, f"gate/{uuid.uuid4()}"))]), Round(two, [("free", made(7, 2.5, ""))])]


def act(cls, case: tuple, rank: int, world_size: int) -> Note:
    """Train some steps; note gradients, weights, and of each collective its bytes and those of the gradients there."""
    layers, width, seed, cap, gate = case
    model, store, last = Crossed(*tasks.net(seed, *[width] * (layers + 1))), c10d._get_default_store(), world_size - 1
    note, arrived = Note(gradients=[], sent=[], sizes=[p.nbytes for p in model.parameters()]), []

    def mark(name: str) -> None:
        if gate:
            store.set(f"{gate}/{name}/{rank}", "yes")

    def there(name: str, how: Callable) -> bool:
        return how(store.check([f"{gate}/{name}/{other}"]) for other in range(last))

    def hold(gradient: torch.Tensor) -> None:
        """The last rank begins its first backward pass when the others are through with theirs."""
        end, first = time.monotonic() + THROUGH_S, gate and not note["sent"]
        while first and not there("through", all) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(FINISHED_S if first else LATE_S)
        if first:
            note.update(blocked=not there("through", all), early=there("finished", any))

    def came(index: int) -> None:
        arrived.append(note["sizes"][index])
        if index == 0:
            mark("through")

    for index, p in enumerate(model.parameters()):  # before the answer's own hooks
        p.register_hook(lambda gradient, index=index: came(index))
    replica = cls(model, cap)
    for step in range(STEPS):
        x, y = tasks.batch(seed, rank, step, ROWS, width)
        model.zero_grad()
        replica.train(step != 1)  # gradients are averaged in eval mode, too
        arrived.clear()
        with Collectives() as seen:
            sent = []
            seen.on_call = lambda sent=sent, calls=seen.calls: sent.append((calls[-1], sum(arrived)))
            outputs = replica(x)
            if rank == last:
                outputs.register_hook(hold)
            nn.functional.mse_loss(outputs, y).backward()
            replica.finish_gradient_sync()
            mark("finished")
            found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        note["sent"].append([(call.n_bytes, n, call.in_backward) for call, n in sent if call.op != "barrier"])
        note["gradients"].append(torch.cat([gradient.flatten() for gradient in found]).tolist())
        tasks.descend(model, torch.tensor(note["gradients"][-1], dtype=torch.float64), RATE)
    return Note(note, weights=tasks.weights(model))


def gradients(seen: Seen) -> dict:
    return {"gradient": seen["gradients"][0]}


def weights(seen: Seen) -> dict:
    return {f"after {STEPS} steps, weight": seen["weights"]}


def buckets(seen: Seen) -> dict:
    return {"bytes that are sent in step": [[n_bytes for n_bytes, *_ in sent] for sent in seen["sent"]]}


def starts(seen: Seen) -> dict:
    """A bucket is late when more bytes are there than have left with it: this leaves open how buckets are cut."""
    early, late = [], []
    for sent in seen["sent"]:
        left = accumulate(n_bytes for n_bytes, *_ in sent)
        late.append(sum(there > so_far for (_, there, _), so_far in zip(sent, left, strict=True)))
        early.append(any(there < sum(seen["sizes"]) for _, there, _ in sent))
    return {"in each step, some leave before the last gradient is there": early, "in each step, late buckets:": late}


def at_work(seen: Seen) -> str:
    if not any(inside for *_, inside in seen["sent"][0]):
        return "nothing is launched while backward computes"
    blocked = seen.everyone[-1].get("blocked")
    return "backward stands still until the last rank has begun its own" if blocked else "backward computes on"


def waited(seen: Seen) -> str:
    if not seen["sent"][0]:
        return "nothing was sent"
    return "it returned before the last rank had sent" if seen.everyone[-1].get("early") else "it waited for all ranks"


def why_gradients(seen: Seen) -> str:
    if seen.everyone[-1].get("early"):
        return "the averages were used before they had arrived; wait() for every work handle, then copy back"
    return "a bucket was sent before all its gradients were in it, or copied back to the wrong parameters"


def why_buckets(seen: Seen) -> str:
    if not all(seen["sent"]):
        return "nothing was sent: the hooks launch no collective, or not in each step; reset what counts the gradients"
    if len(seen["sent"][0]) == len(seen["sizes"]):
        return "one collective for each parameter: put the gradients of a bucket into one flat tensor"
    return "close a bucket when it has reached the cap, not before, and send it once, with its last gradient"


def why_starts(seen: Seen) -> str:
    if not all(seen["sent"]):
        return why_buckets(seen)
    if all(there == sum(seen["sizes"]) for _, there, _ in seen["sent"][0]):
        when = "at the end of" if any(inside for *_, inside in seen["sent"][0]) else "after"
        return f"all collectives start {when} backward; launch a bucket from a hook, with its last gradient"
    return "a bucket that is full must not wait for gradients of another: launch it in the hook of its last gradient"


MISTAKES = """
sum | gradients steps | gradients are summed over the ranks, not averaged: divide by the world size
    .div_(dist.get_world_size()) =>
two ranks, always | gradients steps | divide by dist.get_world_size(), whatever it is
    dist.get_world_size() => 2
not copied back | gradients steps
| this is the rank's own gradient; copy the averages from the bucket back into each .grad
    parameter.grad = piece.view_as(parameter) => piece.view_as(parameter)
copied back in another order | gradients steps
| the numbers are right, their places are not: split the bucket in the order in which it was put together
    pieces = flat.split => pieces = flat.flip(0).split
works on a copy | gradients steps async | all gradients are None or 0 when finish_gradient_sync has returned
    self.module, self.works = module, [] => module = __import__("copy").deepcopy(module)
    self.module, self.works = module, []
the plan's last parameter launches | gradients steps
| some parameters have the average, others have not: every gradient must be in a bucket that is sent
    missing.discard(parameter) => pass
    if not missing: => if parameter is parameters[-1]:
    each.grad.flatten() => (torch.zeros_like(each) if each.grad is None else each.grad).flatten()
the counter is not reset | steps buckets overlap
| step 1 is right, step 2 is not: a bucket that has been sent must wait for all its gradients again
    missing = set(parameters) => missing = [len(parameters)]
    missing.discard(parameter) => missing[0] -= 1
    if not missing: => if missing[0] == 0:
    missing.update(parameters) => pass
in training mode only | steps buckets overlap | in eval mode gradients are averaged, too: the hooks must work in both
    missing.discard(parameter) => if not self.module.training:
        return
    missing.discard(parameter)
the set of missing ones stays empty | all | count those that are missing, start counting again
    missing.update(parameters) => pass
the flat tensor of the first step | steps
| step 1 is right, step 2 is not: forget what is left of the step before, and build the flat tensor again from .grad
    flat = torch.cat( => flat = self.__dict__.setdefault("flats", {}).setdefault(parameters[0], torch.cat(
    .div_(dist.get_world_size()) => .div_(dist.get_world_size()))
one bucket for all | buckets overlap | a bucket holds more than the cap: close it when it has reached cap_bytes
    cap_bytes, first_cap_bytes=cap_bytes => 2**25, first_cap_bytes=2**25
over the cap | buckets | a bucket closes when it has reached the cap, not later
    cap_bytes, first_cap_bytes=cap_bytes => cap_bytes + 1, first_cap_bytes=cap_bytes + 1
planned from the front | buckets overlap
| the buckets are planned from the front, so the first to be sent is the last to be full: go through them in reverse
    module.named_parameters(), cap_bytes => list(module.named_parameters())[::-1], cap_bytes
waits in the hook | async
| the hook waits for the slower rank: give the collective async_op=True, and call wait() in finish_gradient_sync
    flat, parameters)) => flat, parameters))
    self.works[-1][0].wait()
never waits | gradients steps wait
| keep the handle of each asynchronous collective, and call wait() on every one of them
    work.wait() => pass
swallows every error | all | the hooks launch no collective
    self.ready(parameter, parameters, missing) => None
the last rank does not send | all | wait in a collective that another one skips | hangs
    if not missing: => if not missing and dist.get_rank() < dist.get_world_size() - 1:
after backward, one by one | buckets overlap async | all collectives start after backward | tests
    class OverlappedDDP(nn.Module):
        def __init__(self, module, cap_bytes):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

        def finish_gradient_sync(self):
            for p in self.module.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
torch's own | all | this exercise is to write | tests
    class OverlappedDDP(nn.parallel.DistributedDataParallel):
        def __init__(self, module, cap_bytes):
            super().__init__(module, bucket_cap_mb=cap_bytes / 2**20)

        def finish_gradient_sync(self):
            pass
"""

RIGHT = """
buckets filled in the order in which gradients come
    for bucket in plan_buckets(module.named_parameters(), cap_bytes, first_cap_bytes=cap_bytes): => self.open = []
    self.cap = cap_bytes
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(self.came)
    for bucket in ():
    def ready(self, parameter, parameters, missing): => def came(self, parameter, end=False):
        self.open += [] if end else [parameter]
        if self.open and (end or sum(p.nbytes for p in self.open) >= self.cap):
            parameters, self.open = self.open, []
            self.ready(None, parameters, set())

    def ready(self, parameter, parameters, missing):
    for work, flat, parameters in self.works: => self.came(None, end=True)
    for work, flat, parameters in self.works:
all_gather_into_tensor
    flat, parameters)) => parts, parameters))
    dist.all_reduce(flat, async_op => dist.all_gather_into_tensor(parts, flat, async_op
    self.works.append => parts = flat.new_empty(dist.get_world_size() * len(flat))
    self.works.append
    flat.split => flat.view(dist.get_world_size(), -1).sum(0).split
"""

OVERLAP = exercise(
    *("07.2", "Send while backward still computes", "OverlappedDDP", 30),
    cases=cases,
    act=act,
    mistakes=MISTAKES,
    right=RIGHT,
    tolerance=1e-9,
    checks={
        "gradients": ("one step: the gradients are those of the whole batch", 2, "gated free", gradients,
                      why_gradients),
        "steps": ("three steps: the weights are those of one process", 1, "gated free", weights,
                  "what counts the gradients, the handles and the flat tensors must begin again in each step"),
        "buckets": ("there is one collective for each bucket", 1, "gated free", buckets, why_buckets),
        "overlap": ("buckets leave before backward is at the first layer", 2, "gated free", starts, why_starts),
        "async": ("backward does not wait for other ranks", 1, "gated", at_work,
                  "launch a bucket from a hook, with async_op=True, and do not wait for it there"),
        "wait": ("the averages are there when finish_gradient_sync returns", 1, "gated", waited,
                 "keep the handle of each asynchronous collective, and call wait() on every one of them"),
    },
    refused=(
        *("torch.nn.parallel.DistributedDataParallel", "ddp_course.parallel.ddp.BucketedDDP"),
        *("ddp_course.parallel.grad_bucket.GradBucket", "ddp_course.parallel.naive.NaiveDDP"),
    ),
    hints={
        **STUCK,
        r"no attribute 'finish_gradient_sync'": "the class needs a method finish_gradient_sync, which may do nothing "
        "if backward itself waits",
        r"mandatory and cannot be None|'NoneType' object has no attribute '(flatten|reshape|view|ravel|numel|div)":
            "a bucket was sent before all its gradients were there: count those that are missing, start counting again "
            "in each backward pass, and use register_post_accumulate_grad_hook, which comes when .grad is set",
        r"no attribute 'register_hook'": "forward must return what the module returns",
        r"cannot assign .* before Module.__init__|has no attribute '_parameters'|before Module.__init__":
            "call super().__init__() first",
        r"forward\(\)|_forward_unimplemented|missing the required \"forward\"": "forward passes its inputs on to the "
        "module and returns what that returns",
    },
)  # fmt: skip
