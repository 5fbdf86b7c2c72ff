"""The whole program: train on digits, on any number of ranks that divides 48.

    torchrun --standalone --nproc-per-node 2 train_whole.py

Where there is a run.pt, it resumes. --stop 100 leaves after step 100, without saving.
With --exact, one rank and several have the same losses. 7 to 15: not in `ddp.py`.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS, GLOBAL_BATCH, WARMUP, SEED = 5, 48, 30, 0  # the batch of all ranks; 30 steps


def share_of_rate(step, steps):  # 7: a schedule
    """Rise in a straight line, then fall along a cosine to zero."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2


def save(state, path):  # 8: an atomic checkpoint
    """Replace the file at `path`: a kill leaves the old one or the new one."""
    with open(path + ".new", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # the bytes are on the disk before the name is
    os.replace(path + ".new", path)


def train(device, cuda, options):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if GLOBAL_BATCH % world_size:
        raise ValueError(f"{world_size} ranks can't share {GLOBAL_BATCH} images evenly")
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    images = Subset(digits, range(1440))
    sampler, batch = DistributedSampler(images, seed=SEED), GLOBAL_BATCH // world_size
    loader = DataLoader(images, batch, sampler=sampler, pin_memory=cuda)  # 9: copies
    test_loader = DataLoader(Subset(digits, range(1440 + rank, 1797, world_size)), 100)
    torch.manual_seed(SEED)  # repeatable; DDP sends rank 0's weights to all
    dropout = nn.Dropout(0.0 if options.exact else 0.1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), dropout, nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=0.003)
    rate = LambdaLR(optimizer, lambda step: share_of_rate(step, EPOCHS * len(loader)))
    first, found = 0, [os.path.exists("run.pt")]
    dist.broadcast_object_list(found, src=0)  # 10: rank 0 decides for all ranks
    if found[0]:
        state = torch.load("run.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        rate.load_state_dict(state["rate"])
        first = state["epoch"]
    replica = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        torch.manual_seed(hash((SEED, epoch, rank)))  # 11: each rank's own dropout
        sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, n; right, n
        model.train()
        for x, y in loader:
            x, y = (each.to(device, non_blocking=True) for each in (x, y))
            with torch.autocast(device.type, torch.bfloat16, enabled=not options.exact):
                logits = replica(x)  # 12: matmuls in bfloat16, weights in float32
            loss = nn.functional.cross_entropy(logits.float(), y)
            optimizer.zero_grad()
            loss.backward()  # from here on the gradients are equal on all ranks
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # 13: clipping
            optimizer.step()
            rate.step()
            sums[0] += loss.detach() * len(y)
            sums[1] += len(y)
            if rate.last_epoch == options.stop:  # a scheduler calls its steps epochs
                return  # without saving
        model.eval()
        with torch.no_grad():
            for x, y in test_loader:  # no collective: shards may differ by one image
                sums[2] += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
                sums[3] += len(y)
        dist.all_reduce(sums)  # the only collective of an epoch besides DDP's
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(state | {"rate": rate.state_dict(), "epoch": epoch + 1}, "run.pt")
            loss, right = (sums[::2] / sums[1::2]).tolist()  # loss / n, right / n
            print(f"epoch {epoch}: loss {loss:.4f}, right {right:.4f}, norm {norm:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop", type=int, help="leave after this step")
    parser.add_argument("--exact", action="store_true", help="float32, no dropout")
    options = parser.parse_args()  # 14: --exact, for the comparison
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else None
    if cuda:  # 15: the second line allows TF32
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("highest" if options.exact else "high")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device)
    train(device or torch.device("cpu"), cuda, options)
    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()
