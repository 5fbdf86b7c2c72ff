"""Functions that the tests of replicas run on ranks, and the models they train. Ranks import this file."""

from __future__ import annotations

import re
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_course.parallel import BucketedDDP, NaiveDDP, broadcast_module, check_same_model, comm_hooks

STEPS, ROWS = 20, 12  # rows of the whole batch: 1, 2 and 3 ranks share them evenly
SMALL = {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0001}  # several buckets, though the models are small


class Tied(nn.Module):
    """Two layers share a weight."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.two.weight = self.one.weight

    def forward(self, x, step=0):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Frozen(nn.Module):
    """The layer in the middle is not trained."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.layers[2].requires_grad_(False)

    def forward(self, x, step=0):
        return self.layers(x)


class Unused(nn.Module):
    """One layer is never used, one in every second step, and one in some steps by some ranks only."""

    def __init__(self):
        super().__init__()
        self.body, self.never, self.second = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.some, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, step=0, some=False):
        x = torch.tanh(self.body(x))
        x = torch.tanh(self.second(x)) if step % 2 else x
        return self.head(torch.tanh(self.some(x)) if some else x)


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x, step=0):
        return self.layers(x)


class Mixed(nn.Module):
    """Two layers of different dtypes."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()

    def forward(self, x):
        return self.two(self.one(x).bfloat16())


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x, step=0):
        return self.layers(x)


MODELS = {"plain": Plain, "tied": Tied, "frozen": Frozen, "unused": Unused, "uneven": Plain, "batchnorm": WithBatchNorm}
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


def train_case(rank: int, world_size: int, case: str, way: str, accumulate: bool = False) -> dict[str, torch.Tensor]:
    """Train for `STEPS` steps and return the parameters by name, the buffers too."""
    torch.manual_seed(rank)  # each rank begins elsewhere: the wrapper must give all of them rank 0's start
    model = MODELS[case]().double()
    replica = model if way == "alone" else wrapped(way, model, find_unused=case == "unused")
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    rows = rows_of(rank, world_size, case)
    for step in range(STEPS):
        optimizer.zero_grad()
        if accumulate:
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
    if case == "unused":
        # One process has no ranks that differ, so the layer is used row by row: the rows of ranks 1, 3, ...
        parts = [replica(x[part], step=step, some=some) for part, some in parts_of(rows, world_size, step)]
        guess = torch.cat(parts)
    else:
        guess = replica(x[rows], step=step)
    return (guess - y[rows]).square().mean(dim=1).sum() * world_size / ROWS


def parts_of(rows: slice, world_size: int, step: int) -> list[tuple[slice, bool]]:
    """Rows 6 to 11 go through the layer `some` in every third step, wherever they are."""
    if step % 3:
        return [(rows, False)]
    half = ROWS // 2
    cuts = [(slice(rows.start, min(rows.stop, half)), False), (slice(max(rows.start, half), rows.stop), True)]
    return [(part, some) for part, some in cuts if part.start < part.stop]


def train_all(rank, world_size, cases, ways):
    return {(case, way): train_case(rank, world_size, case, way) for case in cases for way in ways}


def accumulate_all(rank, world_size, ways):
    return {way: train_case(rank, world_size, "plain", way, accumulate=True) for way in ways}


# --- What is talked about, and when ------------------------------------------------------------------


class Journal:
    """Notes in one list when a layer's backward ends, and when an all_reduce begins."""

    def __init__(self, monkey_dist=dist):
        self.events: list[str] = []
        self._dist, self._real = monkey_dist, monkey_dist.all_reduce

    def __enter__(self):
        def noted(tensor, *args, **kwargs):
            self.events.append(f"all_reduce {tensor.numel()}")
            return self._real(tensor, *args, **kwargs)

        self._dist.all_reduce = noted
        return self

    def __exit__(self, *_):
        self._dist.all_reduce = self._real


class Watched(nn.Module):
    """Three layers; the journal hears when backward reaches the input of the first."""

    def __init__(self, journal: Journal):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.journal = [journal]  # in a list: no part of the module

    def forward(self, x):
        hidden = self.first(x)
        hidden.register_hook(lambda gradient: self.journal[0].events.append("first layer begins"))
        return self.last(torch.relu(self.middle(torch.relu(hidden))))


def events_of_a_step(rank, world_size):
    """What happens in two accumulated passes and one that is averaged."""
    with Journal() as journal:
        replica = BucketedDDP(Watched(journal), bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
        journal.events.clear()
        with replica.no_sync():
            replica(torch.ones(2, 4)).sum().backward()
        quiet = list(journal.events)
        try:
            with replica.no_sync():
                raise KeyError("leaves the block")
        except KeyError:
            pass
        journal.events.clear()
        replica(torch.ones(2, 4)).sum().backward()
        return quiet, journal.events, [bucket.numel for bucket in replica.buckets]


# --- Single properties -------------------------------------------------------------------------------


WRAPPERS = (BucketedDDP, DistributedDataParallel)


def properties(rank, world_size):
    """Small facts about BucketedDDP, each under its name."""
    torch.manual_seed(rank)
    found = {}
    replica = BucketedDDP(Plain(), **SMALL)
    theirs = DistributedDataParallel(Plain())
    found["same names"] = list(replica.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(replica.state_dict())

    x = torch.full((2, 6), float(rank + 1))
    (replica(x).sum() + 2 * replica(3 * x).sum()).backward()  # two forward passes before one backward
    (theirs(x).sum() + 2 * theirs(3 * x).sum()).backward()
    pairs = list(zip(replica.parameters(), theirs.parameters(), strict=True))
    found["two forwards"] = all(torch.allclose(a.grad, b.grad, atol=1e-5) for a, b in pairs)
    inside = {bucket.flat.untyped_storage().data_ptr() for bucket in replica._work}
    found["views"] = {param.grad.untyped_storage().data_ptr() for param in replica.parameters()} == inside

    torch.manual_seed(0)
    large, theirs = (wrap(nn.Sequential(nn.Linear(6, 200), nn.Linear(200, 100))) for wrap in WRAPPERS)
    theirs.load_state_dict(large.state_dict())
    found["large"] = []
    for _ in range(3):  # without zero_grad: from the second pass on, the gradients lie in the buckets
        large(x).square().sum().backward()
        theirs(x).square().sum().backward()
        pairs = zip(large.parameters(), theirs.parameters(), strict=True)
        found["large"].append(all(torch.allclose(a.grad, b.grad, rtol=1e-4) for a, b in pairs))

    torch.manual_seed(0)
    saving, plain = (BucketedDDP(Plain()) for _ in range(2))
    saving.load_state_dict(plain.state_dict())
    checkpoint(saving, x, use_reentrant=False).sum().backward()
    plain(x).sum().backward()
    pairs = zip(saving.parameters(), plain.parameters(), strict=True)
    found["activations computed twice"] = all(torch.equal(a.grad, b.grad) for a, b in pairs)

    mixed = Mixed()
    both = BucketedDDP(mixed)
    both(torch.full((1, 4), float(rank))).sum().mul(rank + 1).backward()
    found["dtypes"] = [(str(bucket.dtype), bucket.numel) for bucket in both.buckets]
    found["mixed bias"] = [mixed.two.bias.grad.tolist(), mixed.two.weight.grad.dtype == torch.bfloat16]

    norm = BucketedDDP(nn.BatchNorm1d(2))
    norm(torch.full((2, 2), float(rank)))
    own = norm.module.running_mean.tolist()
    norm(torch.zeros(2, 2))  # before this pass, every rank gets rank 0's
    found["buffers"] = (own, norm.module.running_mean.tolist())
    return found


def hooked(rank, world_size, way, hook):
    """Train with a communication hook; the parameters in one tensor, and the bytes sent where the hook counts."""
    torch.manual_seed(0)
    # One bucket: torch's PowerSGD starts a bucket's second all_reduce from a callback of its first. With several
    # buckets under way these come in another order on each rank, and gloo hangs, on torch's DDP as on ours.
    options = {} if hook == "torch power" else SMALL
    replica = BucketedDDP(Plain(), **options) if way == "ours" else DistributedDataParallel(Plain())
    state = None
    if hook == "torch fp16":
        replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "torch power":
        state = torch_power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        replica.register_comm_hook(state, torch_power_sgd.powerSGD_hook)
    elif hook == "all_reduce":
        replica.register_comm_hook(None, comm_hooks.all_reduce_hook)
    elif hook == "fp16":
        replica.register_comm_hook(None, comm_hooks.fp16_compress_hook)
    elif hook and hook.startswith("power"):
        state = comm_hooks.PowerSGD(int(hook.split()[1]))
        replica.register_comm_hook(state, comm_hooks.power_sgd_hook)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(30):
        x = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        (replica(x) - x[:, :3]).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in replica.parameters()]), getattr(state, "bytes_sent", None)


def hooked_all(rank, world_size, pairs):
    return {pair: hooked(rank, world_size, *pair) for pair in pairs}


def power_sgd_sums(rank, world_size):
    """The same gradient step after step: its mean, and after each step what was sent so far and what is still owed."""
    torch.manual_seed(rank)
    layer = nn.Linear(12, 9, bias=False)
    replica = BucketedDDP(layer)
    state = comm_hooks.PowerSGD(1)
    replica.register_comm_hook(state, comm_hooks.power_sgd_hook)
    direction = torch.randn(9, 12)
    sent, balances = torch.zeros(9, 12), []
    for _ in range(40):
        replica.zero_grad()
        replica(torch.eye(12)).mul(direction.T).sum().backward()
        sent += layer.weight.grad
        (matrix,) = state._matrices[0]
        lost = matrix.lost_nm.clone()
        dist.all_reduce(lost)
        balances.append((sent.clone(), lost / world_size))
    dist.all_reduce(direction)
    return direction / world_size, balances, state.bytes_sent


# --- What is refused -------------------------------------------------------------------------------


def message_of(call) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {re.sub(r' +', ' ', str(error))}"
    return "no error"


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
    said["nothing to train"] = message_of(lambda: BucketedDDP(nn.ReLU()))
    said["sparse"] = message_of(lambda: BucketedDDP(sparse))
    twice = BucketedDDP(nn.Linear(2, 2))
    twice.register_comm_hook(None, comm_hooks.all_reduce_hook)
    said["second hook"] = message_of(lambda: twice.register_comm_hook(None, comm_hooks.all_reduce_hook))

    unused = BucketedDDP(Unused())
    unused(torch.ones(1, 6)).sum().backward()
    said["unused"] = message_of(lambda: unused(torch.ones(1, 6)))
    said["unused, once more"] = message_of(lambda: unused(torch.ones(1, 6)))
    dropped = BucketedDDP(Unused(), find_unused_parameters=True)
    dropped(torch.ones(1, 6), some=True)  # nobody calls backward
    said["dropped"] = message_of(lambda: dropped(torch.ones(1, 6)).sum().backward())
    twice = BucketedDDP(Plain())
    out = twice(torch.ones(1, 6))
    out[0, 0].backward(retain_graph=True, inputs=list(twice.parameters())[:1])
    said["two gradients"] = message_of(lambda: out.sum().backward())
    naive = NaiveDDP(Unused())
    naive(torch.ones(1, 6)).sum().backward()
    said["unused, naive"] = message_of(naive.average_gradients)
    return said


def broadcast_all(rank, world_size):
    torch.manual_seed(rank)
    model = WithBatchNorm()
    model.layers[0].weight.data = model.layers[0].weight.data.T.contiguous().T  # other strides
    model.layers[1].running_mean.fill_(rank)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    broadcast_module(model, src=1)
    return before, dict(model.state_dict())


def skip_backward(rank, world_size):
    replica = BucketedDDP(Plain(), **SMALL)
    loss = replica(torch.ones(1, 6)).sum()
    if rank != 1:
        loss.backward()


def other_class_of_model(rank, world_size):
    BucketedDDP(Plain() if rank == 0 else Tied())
