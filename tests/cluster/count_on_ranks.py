"""A program for torchrun that counts to N together, in a file: killed anywhere, it goes on where it was.

Run as `torchrun count_on_ranks.py FOLDER STEPS HOLD_AT TIMEOUT_S`. From HOLD_AT on it counts only once FOLDER/go is
there, and talks on meanwhile, as ranks in training do. At the end each rank prints what it saw, as JSON.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course.groups import process_group


def count(folder: Path, steps: int, hold_at: int, rank: int, world_size: int) -> int:
    """Return the number that the counting began with."""
    file, go = folder / "count", folder / "go"
    at = torch.tensor([int(file.read_text()) if file.exists() else 0])
    dist.broadcast(at, src=0)
    first = step = int(at)
    while step < steps:
        told = torch.tensor([1.0, rank == 0 and go.exists()])
        dist.all_reduce(told)
        assert told[0].item() == world_size
        if step >= hold_at and not told[1]:
            continue
        step += 1
        if rank == 0:
            (folder / "unfinished").write_text(str(step))
            (folder / "unfinished").replace(file)
    return first


if __name__ == "__main__":
    folder, steps, hold_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with process_group(backend="gloo", timeout_s=float(sys.argv[4])) as place:
        first = count(folder, steps, hold_at, place.rank, place.world_size)
    says = {"rank": place.rank, "world_size": place.world_size, "first": first}
    says |= {"restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
    says |= {"interface": os.environ.get("GLOO_SOCKET_IFNAME"), "master": os.environ["MASTER_ADDR"]}
    print(json.dumps(says) + "\n", end="", flush=True)
