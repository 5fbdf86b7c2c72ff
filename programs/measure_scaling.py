"""Time the training step of a small language model, with and without communication.

    torchrun --standalone --nproc-per-node 2 measure_scaling.py --strong 512

tokens    weak: of one rank in a step (--tokens); strong: of all ranks (--strong)
alone     ms of a step without DDP, on rank 0 while the others wait; strong: whole batch
without   ms of a step without DDP, on all ranks at once: of the slowest rank
DDP       ms of a step with DDP: of the slowest rank; loss: the ranks' mean
exposed   1 - without / DDP; effic.: alone / DDP, strong: divided by the ranks
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, VOCABULARY, LENGTH, WARMUP, STEPS = 256, 2, 256, 64, 2, 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        kind = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **kind)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        return self.head(self.layers(self.embedding(x), mask=mask, is_causal=True))


def build(device):
    torch.manual_seed(0)
    model = Model().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def timed_step(model, optimizer, batch):
    """Train once; return the seconds, and the loss."""
    start = time.perf_counter()
    logits = model(batch[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if batch.is_cuda:
        torch.cuda.synchronize(batch.device)  # until here the step is only queued
    return time.perf_counter() - start, loss.detach()


def measure(tokens, strong, device):
    """Return a row of the table; each time is the median over the rounds."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sequences = tokens // LENGTH * (1 if strong else world_size)  # of all ranks
    if tokens % LENGTH or sequences % world_size:
        raise ValueError(f"{world_size} ranks can't share {tokens} tokens evenly")
    model, optimizer = build(device)  # trained without DDP: the ranks' weights differ
    bare, its_optimizer = build(device)  # trained with DDP only, so its loss is DDP's
    replica, rounds = DistributedDataParallel(bare), []  # on the GPU of its weights
    for number in range(WARMUP + STEPS):  # in turn: what slows one kind slows all
        generator = torch.Generator().manual_seed(number)
        shape = (sequences, LENGTH + 1)  # all ranks draw the global batch
        batch = torch.randint(VOCABULARY, shape, generator=generator).to(device)
        mine, seconds = batch[rank::world_size], [0.0, 0.0, 0.0]
        seconds[2], loss = timed_step(replica, its_optimizer, mine)  # all start at once
        seconds[1], _ = timed_step(model, optimizer, mine)
        dist.barrier()  # from here the other ranks are idle
        if rank == 0:
            seconds[0], _ = timed_step(model, optimizer, batch if strong else mine)
        slowest = torch.tensor(seconds, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # the others wait here
        rounds.append(slowest)
    alone, without, ddp = torch.stack(rounds[WARMUP:]).median(dim=0).values.tolist()
    dist.all_reduce(loss)  # the sum
    efficiency = alone / ddp / (world_size if strong else 1)
    times = f"{1e3 * alone:8.1f}{1e3 * without:9.1f}{1e3 * ddp:7.1f}"
    shares = f"{1 - without / ddp:9.0%}{efficiency:8.0%}"
    rates = f"{sequences * LENGTH / ddp:9.0f}{loss.item() / world_size:8.4f}"
    return f"{'strong' if strong else 'weak':6}{tokens:7}{times}{shares}{rates}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 256, 512])
    parser.add_argument("--strong", type=int, nargs="*", default=[])
    options = parser.parse_args()
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    rows = [measure(tokens, False, device) for tokens in options.tokens]
    rows += [measure(tokens, True, device) for tokens in options.strong]
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in Model().parameters())
        print(f"{dist.get_world_size()} ranks, {backend}, {parameters} parameters")
        print("kind   tokens   alone  without    DDP  exposed  effic. tokens/s    loss")
        print(*rows, sep="\n")
    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()
