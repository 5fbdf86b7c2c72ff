"""Train on handwritten digits; with --check, compare the ranks in every step.

torchrun --standalone --nproc-per-node 2 train_check.py --check
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, GLOBAL_BATCH = 2, 32  # the batch is that of all ranks together


def gathered(value):
    """Return the values of all ranks; all ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Check:
    """Compares the ranks with each other, and with one process on all samples."""

    def __init__(self):
        self.step, self.seen, self.found = 0, [], {}

    def note(self, what, number, allowed, where=""):
        """Keep the largest number, and the first step in which it was too large."""
        largest, first = self.found.get(what, (0, ""))
        if not (first or number <= allowed):  # not >: NaN is wrong, too
            first = f", first in step {self.step}{where}"
        self.found[what] = max(number, largest), first

    def after_backward(self, model, numbers, x, y):
        everyone = sorted(sum(gathered(numbers.tolist()), []))
        self.note("samples twice in a step", len(everyone) - len(set(everyone)), 0)
        self.note("steps that came before", self.seen.count(everyone), 0)
        self.seen.append(everyone)
        alone = copy.deepcopy(model)  # one process
        cross_entropy(alone(x[everyone]), y[everyone]).backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        off = max((p.grad - q.grad).norm() / (q.grad.norm() + 1e-12) for p, q in pairs)
        self.note("gradient off, relatively", max(gathered(off.item())), 1e-9)

    def after_step(self, model):
        sums = gathered({n: p.sum().item() for n, p in model.named_parameters()})
        for name in sums[0]:
            values = sorted(sums_of_rank[name] for sums_of_rank in sums)
            self.note("checksums apart", values[-1] - values[0], 0, f": {name}")
        self.step += 1


def train(device, check):
    pixels, labels = load_digits(return_X_y=True)
    dtype = torch.float64 if check else torch.float32  # rounding shrinks, a bug stays
    x, y = torch.tensor(pixels[:1440] / 16, dtype=dtype), torch.tensor(labels[:1440])
    x, y = x.to(device), y.to(device)
    sampler, batch = DistributedSampler(x), GLOBAL_BATCH // dist.get_world_size()
    loader = DataLoader(range(1440), batch, sampler=sampler)  # numbers of samples
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = model.to(device, dtype)
    replica = DDP(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for numbers in loader:
            loss = cross_entropy(replica(x[numbers]), y[numbers])
            optimizer.zero_grad()
            loss.backward()
            check and check.after_backward(model, numbers, x, y)
            optimizer.step()
            check and check.after_step(model)
            total += loss.detach() * len(numbers)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / 1440:.4f}")
    for what, (number, first) in check.found.items() if check else ():
        if dist.get_rank() == 0:
            print(f"{'WRONG' if first else 'ok':5} {what}: {round(number, 9):g}{first}")


if __name__ == "__main__":
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    train(torch.device(device), Check() if "--check" in sys.argv else None)
    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()
