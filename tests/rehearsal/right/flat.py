import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
g = torch.Generator().manual_seed(1)
x = torch.randn(512, 8, generator=g)
y = (x.sum(1) > 0).long()
ds = TensorDataset(x, y)
sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=32 // dist.get_world_size(), sampler=sampler, pin_memory=torch.cuda.is_available())
torch.manual_seed(0)
net = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).to(device))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    stats = torch.zeros(2, device=device)
    for xb, yb in loader:
        xb, yb = xb.to(device), yb.to(device)
        loss = F.cross_entropy(net(xb), yb)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        stats[0] += loss.item() * len(xb)
        stats[1] += len(xb)
    dist.all_reduce(stats)
    if dist.get_rank() == 0:
        print(f"[{epoch}] loss={stats[0].item() / stats[1].item():.4f}")
dist.barrier()
dist.destroy_process_group()
