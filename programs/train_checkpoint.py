"""Train a small network on handwritten digits, and save a checkpoint after each epoch.

    torchrun --standalone --nproc-per-node 2 train_checkpoint.py run.pt

Type the same line after a crash: the run resumes from run.pt, which all nodes must see.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 5


def save(state, path):
    """Replace the file at `path`, which is the old one or the new one at any moment."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # the bytes are on the disk before the name is
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name is on the disk
    os.close(folder)


# One GPU for each rank where there are enough, else the CPU.
cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
backend = "nccl" if cuda else "gloo"
dist.init_process_group(backend, device_id=device if cuda else None)
rank, world_size = dist.get_rank(), dist.get_world_size()

pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
digits = TensorDataset(x, y)
sampler = DistributedSampler(digits, seed=0)
loader = DataLoader(digits, 32 // world_size, sampler=sampler)
torch.manual_seed(0)
layers = [nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)]
model = nn.Sequential(*layers).to(device)
replica = DistributedDataParallel(model, device_ids=[device] if cuda else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
torch.manual_seed(100 + rank)  # each rank has its own dropout

path = Path(sys.argv[1])
found = [path.exists()]
dist.broadcast_object_list(found, src=0)  # rank 0 decides for all ranks
start = 0
if found[0]:
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    start = state["epoch"]
    if len(state["rng_states"]) == world_size:  # else the seed above stays
        torch.set_rng_state(state["rng_states"][rank]["cpu"])
        if cuda:
            torch.cuda.set_rng_state(state["rng_states"][rank]["cuda"])

for epoch in range(start, EPOCHS):
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for x, y in loader:
        loss = nn.functional.cross_entropy(replica(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(x)
    scheduler.step()
    dist.all_reduce(total)

    mine = {"cpu": torch.get_rng_state()}  # nothing draws from Python's or NumPy's
    if cuda:
        mine["cuda"] = torch.cuda.get_rng_state()
    rng_states = [None] * world_size
    dist.all_gather_object(rng_states, mine)
    if rank == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch + 1,
            "rng_states": rng_states,
        }
        save(state, path)
        print(f"epoch {epoch}: loss {total.item() / len(digits):.4f}", flush=True)

dist.barrier()  # no rank leaves while another still communicates with it
dist.destroy_process_group()
