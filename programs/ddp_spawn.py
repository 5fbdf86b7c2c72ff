"""The program of `ddp.py` without torchrun: this process starts the ranks by itself, as many articles do.

python ddp_spawn.py 2
"""

import os
import socket
import sys

import ddp
import torch.multiprocessing as mp


def run(rank, world_size, port, arguments):
    """What torchrun does for a rank: tell it, in its environment, which rank it is and where to meet."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    sys.argv[1:] = arguments
    ddp.main()


def free_port():
    """A port that is free now; if another program takes it before the ranks do, start again."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    world_size = int(sys.argv[1])
    mp.spawn(run, args=(world_size, free_port(), sys.argv[2:]), nprocs=world_size)
