"""Train a network with BatchNorm in small local batches: the numbers of one process.

    torchrun --standalone --nproc-per-node 2 sync_batchnorm.py
    torchrun --standalone --nproc-per-node 2 sync_batchnorm.py --statistics rank

Statistics of all ranks, which is the default, or of the ranks of a node, or of each
rank alone, which then needs two images.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS, GLOBAL_BATCH = 90, 4  # the batch is that of all ranks together


class SumOverRanks(torch.autograd.Function):
    """An all-reduce through which gradients flow back to all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SyncBatchNorm(nn.BatchNorm2d):
    """nn.SyncBatchNorm for CPUs; a `process_group` of None means all ranks."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)  # running statistics: no communication
        dims, shape, group = (0, 2, 3), (1, -1, 1, 1), self.process_group
        count = x.new_tensor([x.numel() / x.size(1)])  # samples * pixels
        totals = SumOverRanks.apply(torch.cat([x.sum(dims), count]), group)
        mean, count = totals[:-1] / totals[-1], totals[-1]
        centred = x - mean.view(shape)
        var = SumOverRanks.apply(centred.square().sum(dims), group) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
        std, weight, bias = (var + self.eps).sqrt(), self.weight, self.bias
        return centred / std.view(shape) * weight.view(shape) + bias.view(shape)


def train(device, statistics):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if GLOBAL_BATCH % world_size:
        raise ValueError(f"{world_size} ranks can't share {GLOBAL_BATCH} images evenly")
    x, y = (torch.tensor(part, device=device) for part in load_digits(return_X_y=True))
    x = x.view(-1, 1, 8, 8) / 16  # float64

    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 10)).double().to(device)
    cuda, group = device.type == "cuda", None
    if statistics == "node":  # DDP's group is still all ranks
        group, _ = dist.new_subgroups(int(os.environ["LOCAL_WORLD_SIZE"]))
    if cuda and statistics != "rank":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # before DDP
    elif statistics != "rank":
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):  # same tensors, another forward
                layer.__class__, layer.process_group = SyncBatchNorm, group
    replica = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    order = torch.randperm(1440)[: STEPS * GLOBAL_BATCH]  # one seed, so one order
    for step, batch in enumerate(order.split(GLOBAL_BATCH), start=1):
        mine = batch.chunk(world_size)[rank].to(device)
        loss = cross_entropy(replica(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0 and rank == 0:
            with torch.no_grad():  # eval mode, and no DDP: no communication
                logits = model.eval()(x[1440:])
            model.train()
            loss, right = cross_entropy(logits, y[1440:]), logits.argmax(1) == y[1440:]
            print(f"step {step}: test loss {loss:.6f}, {right.sum()} of 357 right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--statistics", choices=["world", "node", "rank"])
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    train(device, parser.parse_args().statistics)
    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()
