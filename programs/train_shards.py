"""Train with one global batch, cut into shards for ranks and micro-batches in time.

    torchrun --standalone --nproc-per-node 2 train_shards.py --micro-batch 8

Any number of ranks, and any size of a micro-batch, prints the losses of one process.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR


def train(device, global_batch, micro_batch, rate, warmup, epochs=3):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels[:1437] / 16).float().to(device)
    y = torch.tensor(labels[:1437]).to(device)

    torch.manual_seed(0)  # the same first weights on all ranks
    order = torch.Generator().manual_seed(0)  # the same order, whatever else draws
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    # Warm-up: step 1 runs at rate / warmup, step `warmup` is the first at `rate`.
    ramp = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)

    for epoch in range(epochs):
        total = torch.zeros((), device=device)
        for batch in torch.randperm(len(x), generator=order).split(global_batch):
            optimizer.zero_grad()
            shard = batch[rank::world_size]  # the last batch's shards are unequal
            # A rank without samples gets one empty part, so it has gradients: zeros.
            for part in shard.split(micro_batch):
                loss = cross_entropy(model(x[part]), y[part], reduction="sum")
                (loss / len(batch)).backward()  # adds to .grad; a sample weighs 1/batch
                total += loss.detach()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)  # a sum: the weights are in it already
            optimizer.step()
            ramp.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(x):.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64, help="samples of one step")
    parser.add_argument("--micro-batch", type=int, default=64, help="of one backward")
    parser.add_argument("--rate", type=float, default=0.4)
    parser.add_argument("--warmup", type=int, default=20, help="steps, at least 1")
    options = parser.parse_args()
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    train(device, options.batch, options.micro_batch, options.rate, options.warmup)
    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()
