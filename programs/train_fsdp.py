"""Train a network whose layers are sharded over all ranks, and save it with DCP.

    torchrun --standalone --nproc-per-node 2 train_fsdp.py 2
    torchrun --standalone --nproc-per-node 4 train_fsdp.py 4

The number is that of the epochs. The second command resumes after epoch 1, on four
ranks, from the newest folder in checkpoints/. A last word, bf16, computes in bfloat16.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, MAX_NORM = 48, 1.0  # the batch is that of all ranks together


def build():
    parts = [(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*(nn.Sequential(*part) for part in parts), nn.Linear(64, 10))


def sharded(device, policy):
    """Build on no device, shard layer by layer, then fill in the weights of rank 0."""
    with torch.device("meta"):
        model = build()  # shapes without memory
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)  # memory for this rank's shards, without values
    torch.manual_seed(0)
    whole = build().state_dict() if dist.get_rank() == 0 else {}
    spread = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, whole, options=spread)
    return model


def state_of(model, optimizer, epoch):
    # DTensors, of which this rank has its shards. A new optimizer has no averages:
    # get_state_dict makes them by a step at learning rate 0.
    weights, averages = states.get_state_dict(model, optimizer)
    # The first two names are those of the arguments of set_state_dict.
    return {"model_state_dict": weights, "optim_state_dict": averages, "epoch": epoch}


# One GPU for each rank where there are enough, else the CPU.
cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
if cuda:
    torch.cuda.set_device(device)
backend = "nccl" if cuda else "gloo"
dist.init_process_group(backend, device_id=device if cuda else None)

pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
digits = TensorDataset(x, y)
sampler = DistributedSampler(digits, seed=0)
loader = DataLoader(digits, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
dtype = torch.bfloat16 if "bf16" in sys.argv else torch.float32
policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
model = sharded(device, policy)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)  # after fully_shard

start, found = 0, sorted(Path("checkpoints").glob("*/.metadata"))
newest = [found[-1].parent if found else None]
dist.broadcast_object_list(newest, src=0)  # rank 0 decides for all ranks
if newest[0]:
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=newest[0])  # overwrites the shards in `state`
    start = state.pop("epoch")
    # Gives them to model and optimizer, Adam's count of steps included.
    states.set_state_dict(model, optimizer, **state)

for epoch in range(start, int(sys.argv[1])):
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for x, y in loader:
        logits = model(x.to(device)).float()
        loss = nn.functional.cross_entropy(logits, y.to(device))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        total += loss.detach() * len(x)
    dist.all_reduce(total)
    norm = norm.full_tensor().item()  # all ranks call it, as they call dcp.save
    state = state_of(model, optimizer, epoch + 1)
    dcp.save(state, checkpoint_id=f"checkpoints/{epoch:04}")
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {total.item() / len(digits):.4f}, norm {norm:.4f}")

dist.barrier()  # no rank leaves while another still communicates with it
dist.destroy_process_group()
