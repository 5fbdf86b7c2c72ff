"""Functions that the tests of replicas run on ranks, and the models they train. Ranks import this file."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd
from torch.nn.parallel import DistributedDataParallel

from ddp_course.parallel import BucketedDDP, NaiveDDP, broadcast_module, check_same_model
from tests.refusals import message_of

STEPS, ROWS = 20, 12  # rows of the whole batch: 1, 2 and 3 ranks share them evenly
SMALL = {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0001}  # several buckets, though the models are small


class Layers(nn.Sequential):
    def forward(self, x, step=0):
        return super().forward(x)


def plain() -> Layers:
    return Layers(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def frozen() -> Layers:
    """The layer in the middle is not trained."""
    layers = Layers(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    layers[2].requires_grad_(False)
    return layers


def with_batchnorm() -> Layers:
    return Layers(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Tied(nn.Module):
    """Two layers share a weight."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.two.weight = self.one.weight

    def forward(self, x, step=0):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Unused(nn.Module):
    """One layer is never used, one in every second step, and one in some steps by some ranks only."""

    def __init__(self):
        super().__init__()
        self.body, self.never, self.second = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.some, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, step=0, some_N=None):
        x = torch.tanh(self.body(x))
        x = torch.tanh(self.second(x)) if step % 2 else x
        if some_N is not None and some_N.any():
            x = torch.where(some_N[:, None], torch.tanh(self.some(x)), x)
        return self.head(x)


class Mixed(nn.Module):
    """Two layers of different dtypes."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()

    def forward(self, x):
        return self.two(self.one(x).bfloat16())


MODELS = {
    "plain": plain,
    "accumulated": plain,
    "tied": Tied,
    "frozen": frozen,
    "unused": Unused,
    "uneven": plain,
    "batchnorm": with_batchnorm,
}
WAYS = ("naive", "flat", "bucketed", "bucketed, own gradients", "torch")


def wrapped(way: str, module: nn.Module, find_unused: bool = False, **options):
    options = {"find_unused_parameters": find_unused, **options}
    if way in ("naive", "flat"):
        return NaiveDDP(module, flat=way == "flat", **options)
    if way == "torch":
        return DistributedDataParallel(module, **options)
    return BucketedDDP(module, **SMALL, gradient_as_bucket_view=way == "bucketed", **options)


def rows_of(rank: int, world_size: int, case: str) -> slice:
    """This rank's rows of the whole batch; in the uneven case the last rank has the fewest."""
    if case != "uneven" or world_size == 1:
        share = ROWS // world_size
        return slice(rank * share, (rank + 1) * share)
    ends = [0, *(ROWS - world_size + other for other in range(1, world_size)), ROWS]
    return slice(ends[rank], ends[rank + 1])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 3, generator=generator)
    return x.double(), y.double()


def train_case(rank: int, world_size: int, case: str, way: str) -> dict[str, torch.Tensor]:
    """Train for `STEPS` steps and return the parameters by name, the buffers too."""
    torch.manual_seed(rank)  # each rank begins elsewhere: the wrapper must give all of them rank 0's start
    model = MODELS[case]().double()
    replica = model if way == "alone" else wrapped(way, model, find_unused=case == "unused")
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    rows = rows_of(rank, world_size, case)
    for step in range(STEPS):
        optimizer.zero_grad()
        if case == "accumulated":
            with replica.no_sync() if hasattr(replica, "no_sync") else nullcontext():
                loss_of(replica, case, step + 1000, rows, world_size).backward()
        loss_of(replica, case, step, rows, world_size).backward()
        if way in ("naive", "flat"):
            replica.average_gradients()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def loss_of(replica: nn.Module, case: str, step: int, rows: slice, world_size: int) -> torch.Tensor:
    """The sum over this rank's rows, so scaled that the mean over ranks is the mean over all rows."""
    x, y = batch(step)
    # In every third step, rows 6 to 11 go through a layer of their own, wherever they are.
    odd = {"some_N": (torch.arange(ROWS) >= ROWS // 2)[rows]} if case == "unused" and step % 3 == 0 else {}
    guess = replica(x[rows], step=step, **odd)
    return (guess - y[rows]).square().mean(dim=1).sum() * world_size / ROWS


def train_all(rank, world_size, cases, ways):
    return {(case, way): train_case(rank, world_size, case, way) for case in cases for way in ways}


# --- Single properties -------------------------------------------------------------------------------


def buckets_of_two_dtypes(rank, world_size):
    """The dtype and the numbers of each bucket, and whether gradients are views of the buckets."""
    replica = BucketedDDP(Mixed())
    replica(torch.ones(1, 4)).sum().backward()
    inside = {bucket.flat.untyped_storage().data_ptr() for bucket in replica._work}
    views = {param.grad.untyped_storage().data_ptr() for param in replica.parameters()} == inside
    return [(str(bucket.dtype), bucket.numel) for bucket in replica.buckets], views


def large_gradients(rank, world_size):
    """After each of three passes: whether the gradients of layers too large for the fuzz are torch's."""
    torch.manual_seed(0)
    wrappers = (BucketedDDP, DistributedDataParallel)
    large, theirs = (wrap(nn.Sequential(nn.Linear(6, 200), nn.Linear(200, 100))) for wrap in wrappers)
    theirs.load_state_dict(large.state_dict())
    x, found = torch.full((2, 6), float(rank + 1)), []
    for _ in range(3):  # without zero_grad: from the second pass on, the gradients lie in the buckets
        large(x).square().sum().backward()
        theirs(x).square().sum().backward()
        pairs = zip(large.parameters(), theirs.parameters(), strict=True)
        found.append(all(torch.allclose(a.grad, b.grad, rtol=1e-4) for a, b in pairs))
    return found


def hook_of(name):
    """A communication hook, and its state."""
    if name == "power":
        state = torch_power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        return state, torch_power_sgd.powerSGD_hook
    return None, {"all_reduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}[name]


def hooked(rank, world_size, way, hook):
    """Train with a communication hook; the parameters in one tensor."""
    torch.manual_seed(0)
    # One bucket: torch's PowerSGD starts a bucket's second all_reduce from a callback of its first. With several
    # buckets under way these come in another order on each rank, and gloo hangs, on torch's DDP as on ours.
    options = {} if hook == "power" else SMALL
    replica = BucketedDDP(plain(), **options) if way == "ours" else DistributedDataParallel(plain())
    if hook:
        replica.register_comm_hook(*hook_of(hook))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(30):
        x = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        (replica(x) - x[:, :3]).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in replica.parameters()])


def hooked_all(rank, world_size, pairs):
    return {pair: hooked(rank, world_size, *pair) for pair in pairs}


# --- What is refused -------------------------------------------------------------------------------


def refusals(rank, world_size):
    """The sentence for each mistake that every rank notices."""
    sparse = nn.Embedding(4, 2, sparse=True)
    models = {
        "shape": nn.Linear(4, 2 + rank),
        "one more": nn.Sequential(nn.Linear(2, 2), *([nn.Linear(2, 2)] if rank == 1 else [])),
        "frozen": nn.Linear(2, 2).requires_grad_(rank == 0),
        "buffer": nn.BatchNorm1d(2, track_running_stats=rank == 0),
        "none": nn.ReLU(),
    }
    said = {name: message_of(lambda model=model: check_same_model(model)) for name, model in models.items()}
    said["another class"] = message_of(lambda: BucketedDDP(plain() if rank == 0 else Tied()))
    said["nothing to train"] = message_of(lambda: BucketedDDP(nn.ReLU()))
    said["sparse"] = message_of(lambda: BucketedDDP(sparse))
    twice = BucketedDDP(nn.Linear(2, 2))
    twice.register_comm_hook(None, default_hooks.allreduce_hook)
    said["second hook"] = message_of(lambda: twice.register_comm_hook(None, default_hooks.allreduce_hook))

    unused = BucketedDDP(Unused())
    unused(torch.ones(1, 6)).sum().backward()
    said["unused"] = message_of(lambda: unused(torch.ones(1, 6)))
    said["unused, once more"] = message_of(lambda: unused(torch.ones(1, 6)))
    dropped = BucketedDDP(Unused(), find_unused_parameters=True)
    dropped(torch.ones(1, 6), some_N=torch.ones(1) > 0)  # nobody calls backward
    said["dropped"] = message_of(lambda: dropped(torch.ones(1, 6)).sum().backward())
    twice = BucketedDDP(plain())
    out = twice(torch.ones(1, 6))
    out[0, 0].backward(retain_graph=True, inputs=list(twice.parameters())[:1])
    said["two gradients"] = message_of(lambda: out.sum().backward())
    naive = NaiveDDP(Unused())
    naive(torch.ones(1, 6)).sum().backward()
    said["unused, naive"] = message_of(naive.average_gradients)
    return said


def broadcast_all(rank, world_size):
    torch.manual_seed(rank)
    model = with_batchnorm()
    model[0].weight.data = model[0].weight.data.T.contiguous().T  # other strides
    model[1].running_mean.fill_(rank)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    broadcast_module(model, src=1)
    return before, dict(model.state_dict())


def skip_backward(rank, world_size):
    replica = BucketedDDP(plain(), **SMALL)
    loss = replica(torch.ones(1, 6)).sum()
    if rank != 1:
        loss.backward()
