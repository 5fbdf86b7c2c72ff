"""Train on a mesh of two dimensions: tensor parallel in a node, FSDP between nodes.

    torchrun --standalone --nproc-per-node 4 train_parallel.py 2

The number is that of the ranks which compute a layer together. It must divide the ranks
of a node. The other dimension of the mesh has the rest: here it is two times two.
"""

import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS = 48, 2  # the batch is that of all ranks together
# Harmless here: FSDP warns of in-place operations on a view, but there are none.
warnings.filterwarnings("ignore", "FSDP2-wrapped module")
# Harmless, too: it says that a norm is summed over one dimension after the other.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class Pair(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, outputs)

    def forward(self, x):
        y = self.down(F.gelu(self.up(x)))
        return x + y if x.shape == y.shape else y


# One GPU for each rank where there are enough, else the CPU.
cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
if cuda:
    torch.cuda.set_device(device)
backend = "nccl" if cuda else "gloo"
dist.init_process_group(backend, device_id=device if cuda else None)

# Neighbours are in one node, so they are the last dimension.
tensor_size = int(sys.argv[1])
shape = (dist.get_world_size() // tensor_size, tensor_size)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
data = mesh["data"]

# Small enough to build whole on each rank; a large model begins on the meta device.
torch.manual_seed(0)
model = nn.Sequential(*(Pair(64) for _ in range(3)), Pair(10)).to(device)
# Columns, then rows: one all-reduce for each pair in forward, one in backward.
cuts = {"*.up": parallel.ColwiseParallel(), "*.down": parallel.RowwiseParallel()}
parallel.parallelize_module(model, mesh["tensor"], cuts)
for pair in model:  # after the cut into columns and rows
    fully_shard(pair, mesh=data)
fully_shard(model, mesh=data)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
digits = TensorDataset(x, y)
# Ranks that compute a layer together get the same samples: the place is that in `data`.
place = {"num_replicas": data.size(), "rank": data.get_local_rank()}
sampler = DistributedSampler(digits, **place, seed=0)
loader = DataLoader(digits, GLOBAL_BATCH // data.size(), sampler=sampler)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for x, y in loader:
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.detach() * len(x)
    dist.all_reduce(total, group=data.get_group())
    norm = norm.full_tensor().item()  # all ranks call it
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {total.item() / len(digits):.4f}, norm {norm:.4f}")

weight = tuple(model[0].up.weight.to_local().shape)
if dist.get_rank() == 0:
    print(f"mesh {shape}, rank 0 has {weight} of (256, 64)")
dist.barrier()  # no rank leaves while another still communicates with it
dist.destroy_process_group()
