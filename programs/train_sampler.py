"""Train on handwritten digits, evaluate exactly, resume in the middle of an epoch.

    torchrun --standalone --nproc-per-node 3 train_sampler.py --stop 75
    torchrun --standalone --nproc-per-node 2 train_sampler.py

run.pt is written every 10 steps: the second command resumes after step 70, and prints
what a run without a stop prints from there. Remove run.pt to begin again.
"""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS, GLOBAL_BATCH, SAVE_EVERY = 4, 48, 10  # the batch is that of all ranks together


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that skips the samples of an epoch that are consumed."""

    consumed = 0  # by all ranks together: a multiple of their number

    def set_epoch(self, epoch, consumed=0):
        super().set_epoch(epoch)
        self.consumed = consumed

    def __len__(self):
        return self.num_samples - self.consumed // self.num_replicas

    def __iter__(self):
        return islice(super().__iter__(), self.consumed // self.num_replicas, None)


def evaluate(model, loader, device):
    """Return the sums of losses, of right answers and of images over all ranks."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad():
        for x, y in loader:  # no collective in here: shards may differ by one image
            logits, y = model(x.to(device)), y.to(device)
            sums[0] += cross_entropy(logits, y, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == y).sum()
            sums[2] += len(y)
    dist.all_reduce(sums)
    return sums.tolist()


def train(device, last_step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if GLOBAL_BATCH % world_size:
        raise ValueError(f"{world_size} ranks can't share {GLOBAL_BATCH} images evenly")
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    images = Subset(digits, range(1440))  # the first 1440 of the digits
    sampler, batch = ResumableSampler(images, seed=0), GLOBAL_BATCH // world_size
    loader = DataLoader(images, batch, sampler=sampler, drop_last=True)  # full batches
    mine = Subset(digits, range(1440 + rank, 1797, world_size))  # each image once

    torch.manual_seed(0)  # repeatable; DDP sends rank 0's weights to all
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = consumed = step = 0  # epoch, images of all ranks in it, steps in all
    if os.path.exists("run.pt"):  # on several nodes: in a folder that all can read
        state = torch.load("run.pt", map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, consumed, step = state["position"]
    gpus = [device] if device.type == "cuda" else None
    replica = DistributedDataParallel(model, device_ids=gpus)

    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch, consumed)
        for x, y in loader:
            loss = cross_entropy(replica(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step, consumed = step + 1, consumed + GLOBAL_BATCH
            if rank == 0 and step % SAVE_EVERY == 0:
                position = (epoch, consumed, step)
                state = {"model": model.state_dict(), "position": position}
                torch.save(state | {"optimizer": optimizer.state_dict()}, "new.pt")
                os.replace("new.pt", "run.pt")  # never half a file
            if step == last_step:
                return
        consumed = 0  # the next epoch begins with the first image
        loss, right, n = evaluate(model, DataLoader(mine, 100), device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss / n:.4f}, {right:.0f} of {n:.0f} right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop", type=int, help="leave after this step")
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    train(torch.device(device), parser.parse_args().stop)
    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()
