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


def gathered(value):
    """Return the values of all ranks; all ranks must call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gradient_of(p):
    return torch.zeros_like(p) if p.grad is None else p.grad


class Check:
    """Compares the ranks with each other, and with one process on all samples."""

    def __init__(self):
        self.step, self.seen, self.found = 0, [], {}

    def note(self, what, number, allowed=0, where=""):
        """Keep the largest number of all ranks, and where it was first too large."""
        largest, first = self.found.get(what, (0, ""))
        worst = torch.tensor([largest, *gathered(number)], dtype=torch.float64).max()
        if not worst <= allowed and not first:  # "not <=" is true for NaN, ">" is not
            first = f", first in step {self.step}{where}"
        self.found[what] = worst.item(), first

    def after_backward(self, model, indices, x, y):
        everyone = sorted(torch.cat(gathered(indices)).tolist())  # of all ranks
        self.note("samples twice in a step", len(everyone) - len(set(everyone)))
        self.note("steps that came before", self.seen.count(everyone))
        self.seen.append(everyone)
        alone = copy.deepcopy(model)  # stands for one process; has no gradients yet
        cross_entropy(alone(x[everyone]), y[everyone]).backward()
        right = {name: gradient_of(p) for name, p in alone.named_parameters()}
        length = nn.utils.get_total_norm(list(right.values())) + 1e-12  # not 0
        for name, p in model.named_parameters():
            off = (gradient_of(p) - right[name]).norm() / length
            self.note("gradient off, relatively", off.item(), 1e-9, f": {name}")

    def after_step(self, model):
        for name, p in model.named_parameters():
            first = p.detach().clone()
            dist.broadcast(first, src=0)  # now it has rank 0's values
            apart = (p.detach() - first).abs().max()
            self.note("weights apart", apart.item(), where=f": {name}")
        self.step += 1


def train(device, check):
    pixels, labels = load_digits(return_X_y=True)
    dtype = torch.float64 if check else torch.float32  # rounding shrinks, a bug stays
    x = torch.tensor(pixels[:1440] / 16, dtype=dtype, device=device)
    y = torch.tensor(labels[:1440], device=device)
    sampler = DistributedSampler(x)  # the loader below yields indices of samples
    loader = DataLoader(range(1440), 32 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = model.to(device, dtype)
    replica = DDP(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for indices in loader:
            loss = cross_entropy(replica(x[indices]), y[indices])
            optimizer.zero_grad()
            loss.backward()
            if check:
                check.after_backward(model, indices, x, y)
            optimizer.step()
            if check:
                check.after_step(model)
            total += loss.detach() * len(indices)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / 1440:.4f}")
    if check and dist.get_rank() == 0:
        for what, (number, first) in check.found.items():
            shown = number if first else round(number, 9)  # rounding varies
            print(f"{'WRONG' if first else 'ok':5} {what}: {shown:g}{first}")


if __name__ == "__main__":
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    train(device, Check() if "--check" in sys.argv else None)
    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()
