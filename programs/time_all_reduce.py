"""Time all-reduce for tensors of several sizes, in the columns of NVIDIA's nccl-tests.

    torchrun --standalone --nproc-per-node 4 time_all_reduce.py
    torchrun --standalone --nproc-per-node 8 time_all_reduce.py --largest 1073741824

time    of one call, the mean over --repeat calls on the slowest rank
algbw   bytes / time
busbw   algbw * 2(W-1)/W: bytes that a ring's rank sends / time, to compare with a link
#wrong  elements of all ranks that are not the sum; must be 0
"""

import argparse
import os
import time

import torch
import torch.distributed as dist


def read_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest", type=int, default=64 * 2**20, help="bytes")
    parser.add_argument("--warmup", type=int, default=5, help="calls, not timed")
    parser.add_argument("--repeat", type=int, default=20, help="calls, timed")
    return parser.parse_args()


def finish(device):
    """Wait for the GPU: under NCCL a collective returns when it is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_wrong(x):
    """Sum known numbers; return how many elements of all ranks are wrong."""
    world_size = dist.get_world_size()
    x.fill_(dist.get_rank() + 1)
    dist.all_reduce(x)
    wrong = (x != world_size * (world_size + 1) / 2).sum()
    dist.all_reduce(wrong)
    return wrong.item()


def seconds_per_call(x, warmup, repeat):
    """Return the mean time of one all-reduce of `x`, on the slowest rank."""
    x.zero_()  # repeated sums of other numbers can overflow
    for _ in range(warmup):  # the first calls open connections and allocate
        dist.all_reduce(x)
    dist.barrier()  # start together: waiting for a late rank is no communication
    finish(x.device)
    start = time.perf_counter()
    for _ in range(repeat):
        dist.all_reduce(x)
    finish(x.device)
    mean = (time.perf_counter() - start) / repeat
    seconds = torch.tensor(mean, dtype=torch.float64, device=x.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def main():
    options = read_options()
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    if rank == 0:
        print(f"all_reduce, float32, {world_size} ranks, {backend}")
        print("     bytes   time (us)  algbw (GB/s)  busbw (GB/s)  #wrong")
    n_bytes = 4096
    while n_bytes <= options.largest:
        x = torch.empty(n_bytes // 4, device=device)
        wrong = count_wrong(x)
        seconds = seconds_per_call(x, options.warmup, options.repeat)
        algbw = n_bytes / seconds / 1e9
        busbw = algbw * 2 * (world_size - 1) / world_size
        if rank == 0:
            times = f"{1e6 * seconds:12.1f}{algbw:14.4f}{busbw:14.4f}"
            print(f"{n_bytes:10}{times}{wrong:8}", flush=True)
        n_bytes *= 4

    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
