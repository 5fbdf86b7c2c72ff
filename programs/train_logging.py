"""Train on handwritten digits, and log numbers of all ranks: loss, accuracy, speed.

    torchrun --standalone --nproc-per-node 2 train_logging.py run.jsonl

Each rank adds up sums and counts on its own device. For a line of the log all ranks
reduce them in one collective, and rank 0 prints the line and appends it to the file as
JSON. Any number of ranks that divides 32 logs the same losses.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS, EVERY = 3, 15  # an epoch has 45 steps, and each 15th step has a line


def add(totals, logits, y):
    """Add a batch's sum of losses, correct samples and samples, on the device."""
    with torch.no_grad():
        totals[0] += nn.functional.cross_entropy(logits, y, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == y).sum()
        totals[2] += len(y)


def over_ranks(totals):
    """Return loss, accuracy and samples of all ranks, which all call this."""
    dist.all_reduce(totals)
    loss, correct, samples = totals.tolist()  # waits for the GPU
    totals.zero_()
    return loss / samples, correct / samples, samples


def write(path, step, shown, **also):
    """On rank 0 alone: print `shown`, and append all numbers to the file."""
    if dist.get_rank() == 0:
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
        print(f"step {step:3}: {numbers}", flush=True)
        with open(path, "a") as file:
            print(json.dumps({"step": step} | shown | also), file=file)


def main():
    # One GPU for each rank where there are enough, else the CPU.
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    path, rank, world_size = sys.argv[1], dist.get_rank(), dist.get_world_size()

    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    train, test = Subset(digits, range(1440)), Subset(digits, range(1440, 1797))
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 32 // world_size, sampler=sampler)
    own_test = Subset(test, range(rank, len(test), world_size))  # no sample twice

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    replica = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    test_totals = torch.zeros_like(totals)
    step, clock = 0, time.perf_counter()  # of the line to come

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            logits = replica(x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, y).backward()  # the mean, to train
            norm = nn.utils.clip_grad_norm_(model.parameters(), 5)  # on all ranks equal
            optimizer.step()
            add(totals, logits, y)
            step += 1
            if step % EVERY == 0:
                loss, accuracy, samples = over_ranks(totals)
                shown = {"loss": loss, "accuracy": accuracy, "grad_norm": norm.item()}
                speed = samples / (time.perf_counter() - clock)
                write(path, step, shown, samples_per_s=speed)
                clock = time.perf_counter()

        model.eval()
        with torch.no_grad():
            for x, y in DataLoader(own_test, 64):
                add(test_totals, model(x.to(device)), y.to(device))  # not replica
        model.train()
        loss, accuracy, samples = over_ranks(test_totals)
        shown = {"test_loss": loss, "test_accuracy": accuracy}
        write(path, step, shown, samples=samples)
        clock = time.perf_counter()  # the speed is that of training alone

    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
