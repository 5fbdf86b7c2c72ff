"""A process group from start to end: the frame of a program that torchrun starts.

    torchrun --standalone --nproc-per-node 4 process_groups.py
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-id JOB \
        --rdzv-backend c10d --rdzv-endpoint NODE:29500 process_groups.py

The second command is typed on both nodes, with the name of one of them for NODE and a
name of your choice for JOB. The ranks compute the mean and the standard deviation of a
data set: each rank sums its own samples, then the ranks of a node add their sums, then
the nodes.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

TIMEOUT = timedelta(minutes=2)  # longer than any normal delay


def set_up():
    """Take a device, join the default group, and create the groups of a mesh."""
    local_rank = int(os.environ["LOCAL_RANK"])
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    cuda = torch.cuda.device_count() >= per_node  # a job that needs GPUs: True
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        device_id=device if cuda else None,
        timeout=TIMEOUT,
    )
    shape = (dist.get_world_size() // per_node, per_node)  # nodes, ranks of each
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("node", "local"))
    for name in mesh.mesh_dim_names:
        dist.set_timeout(TIMEOUT, mesh.get_group(name))  # subgroups do not inherit it
    return device, mesh


def main():
    device, mesh = set_up()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)  # the same data set on every rank
    # float64, because the subtraction below loses digits.
    samples = torch.randn(1201, generator=generator, dtype=torch.float64)

    mine = samples[rank::world_size].to(device)
    sums = torch.stack([torch.ones_like(mine).sum(), mine.sum(), (mine**2).sum()])
    dist.all_reduce(sums, group=mesh.get_group("local"))  # the ranks of a node
    dist.all_reduce(sums, group=mesh.get_group("node"))  # one rank of each node
    count, total, squares = sums.tolist()
    mean = total / count
    deviation = (squares / count - mean**2) ** 0.5

    node, local_rank = mesh.get_coordinate()
    place = f"rank {rank}: node {node}, local rank {local_rank}, {len(mine)} samples"
    places = [None] * world_size if rank == 0 else None
    dist.gather_object(place, places)  # rank 0 gets all texts
    if rank == 0:  # one rank prints, for all
        print(*places, sep="\n")
        print(f"result of {count:.0f}: mean {mean:.6f}, deviation {deviation:.6f}")

    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
