"""Train a small network on handwritten digits, on as many ranks as torchrun starts.

torchrun --standalone --nproc-per-node 2 train.py
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# One GPU for each rank where there are enough, else the CPU.
cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
backend = "nccl" if cuda else "gloo"
dist.init_process_group(backend, device_id=device if cuda else None)

pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
digits = TensorDataset(x, y)
sampler = DistributedSampler(digits, seed=0)  # this rank's images
loader = DataLoader(digits, 32 // dist.get_world_size(), sampler=sampler)
torch.manual_seed(0)  # the same first weights on any number of ranks
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
replica = DistributedDataParallel(model, device_ids=[device] if cuda else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

for epoch in range(5):
    sampler.set_epoch(epoch)  # a different order in each epoch
    total = torch.zeros((), device=device)
    for x, y in loader:
        loss = nn.functional.cross_entropy(replica(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()  # computes the gradients, and averages them over the ranks
        optimizer.step()
        total += loss.detach() * len(x)
    dist.all_reduce(total)  # the losses of all images, not only of this rank's
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {total.item() / len(digits):.4f}")

dist.barrier()  # leave together: without it, gloo sometimes aborts as a rank ends
dist.destroy_process_group()
