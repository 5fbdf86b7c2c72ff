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


def gradients(model):
    zeros, named = torch.zeros_like, model.named_parameters()
    return {n: zeros(p) if p.grad is None else p.grad for n, p in named}


class Check:
    """Compares the ranks with each other, and with one process on all samples."""

    def __init__(self):
        self.step, self.seen, self.found = 0, [], {}

    def note(self, what, number, allowed=0, where=""):
        """Keep the largest number of all ranks, and where it was first too large."""
        largest, first = self.found.get(what, (0, ""))
        worst = torch.tensor([largest, *gathered(number)], dtype=torch.float64).max()
        if not (first or worst <= allowed):  # not >: NaN is wrong, too
            first = f", first in step {self.step}{where}"
        self.found[what] = worst.item(), first

    def after_backward(self, model, indices, x, y):
        everyone = sorted(sum(gathered(indices.tolist()), []))
        self.note("samples twice in a step", len(everyone) - len(set(everyone)))
        self.note("steps that came before", self.seen.count(everyone))
        self.seen.append(everyone)
        alone = copy.deepcopy(model)  # one process: a copy has no gradients yet
        cross_entropy(alone(x[everyone]), y[everyone]).backward()
        right, averaged = gradients(alone), gradients(model)
        length = torch.stack([g.norm() for g in right.values()]).norm() + 1e-12
        for name in right:
            off = ((averaged[name] - right[name]).norm() / length).item()
            self.note("gradient off, relatively", off, 1e-9, f": {name}")

    def after_step(self, model):
        for name, p in model.named_parameters():
            dist.broadcast(first := p.detach().clone(), src=0)  # rank 0's
            apart = (p.detach() - first).abs().max().item()
            self.note("weights apart", apart, where=f": {name}")
        self.step += 1


def train(device, check):
    pixels, labels = load_digits(return_X_y=True)
    dtype = torch.float64 if check else torch.float32  # rounding shrinks, a bug stays
    x, y = torch.tensor(pixels[:1440] / 16, dtype=dtype), torch.tensor(labels[:1440])
    x, y = x.to(device), y.to(device)
    sampler, batch = DistributedSampler(x), GLOBAL_BATCH // dist.get_world_size()
    loader = DataLoader(range(1440), batch, sampler=sampler)  # indices of samples
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = model.to(device, dtype)
    replica = DDP(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for indices in loader:
            loss = cross_entropy(replica(x[indices]), y[indices])
            optimizer.zero_grad()
            loss.backward()
            check and check.after_backward(model, indices, x, y)
            optimizer.step()
            check and check.after_step(model)
            total += loss.detach() * len(indices)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / 1440:.4f}")
    for what, (number, first) in check.found.items() if check else ():
        number = number if first else round(number, 9)
        if dist.get_rank() == 0:
            print(f"{'WRONG' if first else 'ok':5} {what}: {number:g}{first}")


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
