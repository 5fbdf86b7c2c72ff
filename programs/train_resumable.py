"""Train on handwritten digits; whatever ended the run, the same line continues it.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a new store after each restart
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 train_resumable.py run.pt

It saves every 20 steps, and when any rank receives SIGTERM. Then all ranks leave, after
the same step and with status 143.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, GLOBAL_BATCH, SAVE_EVERY = 3, 48, 20  # the batch is that of all ranks together

# One GPU for each rank where there are enough, else the CPU.
cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else "cpu"
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
rank, world_size = dist.get_rank(), dist.get_world_size()
if GLOBAL_BATCH % world_size:
    raise ValueError(f"{world_size} ranks can't share {GLOBAL_BATCH} images evenly")

pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels / 16).float(), torch.tensor(labels)
images, x_test, y_test = TensorDataset(x[:1440], y[:1440]), x[1440:], y[1440:]
local_batch, steps_per_epoch = GLOBAL_BATCH // world_size, 1440 // GLOBAL_BATCH
sampler = DistributedSampler(images, seed=0)
torch.manual_seed(0)
layers = [nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)]
model = nn.Sequential(*layers).to(device)
replica = DistributedDataParallel(model, device_ids=[device] if cuda else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
last = EPOCHS * steps_per_epoch
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=last)
torch.manual_seed(100 + rank)  # own dropout for each rank; lesson 11: better seeds
stateful = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
generators = [torch, torch.cuda] if cuda else [torch]  # each has get_rng_state
path = Path(sys.argv[1])  # on several nodes: in a folder that all of them see


def save(step):
    """Replace the checkpoint by the state after this step: called on every rank."""
    rng_states = [None] * world_size
    dist.all_gather_object(rng_states, [one.get_rng_state() for one in generators])
    if rank == 0:
        state = {name: part.state_dict() for name, part in stateful.items()}
        unfinished = path.with_name(f".{path.name}.unfinished")
        torch.save(state | {"step": step, "rng_states": rng_states}, unfinished)
        os.replace(unfinished, path)  # after a kill: the old file or the new one


told = []  # the signals that this rank received
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
step, found = 0, [path.exists()]
dist.broadcast_object_list(found, src=0)  # rank 0 decides for all ranks
if found[0]:
    state = torch.load(path, map_location="cpu", weights_only=True)  # on each rank
    for name, part in stateful.items():
        part.load_state_dict(state[name])
    step = state["step"]
    if len(state["rng_states"]) == world_size:  # else they begin again from their seeds
        for one, rng_state in zip(generators, state["rng_states"][rank], strict=True):
            one.set_rng_state(rng_state)
if rank == 0:
    print(f"{world_size} ranks start after step {step}", flush=True)

for epoch in range(step // steps_per_epoch, EPOCHS):
    sampler.set_epoch(epoch)
    # This rank's images of the epoch, less those of the steps done.
    rest = list(sampler)[step % steps_per_epoch * local_batch :]
    own = torch.Generator()  # else the loader draws from the generator of dropout
    for x, y in DataLoader(images, local_batch, sampler=rest, generator=own):
        loss = cross_entropy(replica(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        leave = torch.tensor(len(told), device=device)
        dist.all_reduce(leave, op=dist.ReduceOp.MAX)  # now equal on all ranks
        if leave or step % SAVE_EVERY == 0 or step == last:
            save(step)
        if leave:
            print(f"rank {rank} leaves after step {step}", flush=True)
            dist.barrier()
            dist.destroy_process_group()
            sys.exit(128 + signal.SIGTERM)
    if rank == 0:  # the replicas are equal, and there is no collective in here
        model.eval()
        with torch.no_grad():
            loss = cross_entropy(model(x_test.to(device)), y_test.to(device))
        model.train()
        print(f"epoch {epoch}: test loss {loss.item():.4f}", flush=True)

dist.barrier()  # gloo may still be using a tensor: leave together
dist.destroy_process_group()
