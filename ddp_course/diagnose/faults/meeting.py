"""Why do ranks not find each other?

Before the first collective every rank must reach one place, under one address, and agree on how many they are.
Plain torch waits for that in silence, up to half an hour. `rendezvous.py` lets each rank sign in, so that the one
that is missing or that disagrees is named.

Read next: `processes.py`, for ranks that do not even start.
"""

from __future__ import annotations

import os

from ddp_course.diagnose.faults.fault import Diagnosis, Fault, watch
from ddp_course.groups import process_group
from ddp_course.rendezvous import free_port, listen_on


def call_another_address() -> Diagnosis:
    def join(rank, world_size, port, other_port):
        address = f"127.0.0.1:{other_port if rank == 1 else port}"  # a typo in the second machine's script
        with process_group("tcp", address, timeout_s=2):
            return "met"

    return watch(join, world_size=2, args=(free_port(), free_port()), init=False)


def call_one_address() -> Diagnosis:
    def join(rank, world_size, port):
        with process_group("tcp", f"127.0.0.1:{port}", timeout_s=20):
            return "met"

    return watch(join, world_size=2, args=(free_port(),), init=False)


def take_the_port() -> Diagnosis:
    def join(rank, world_size, port):
        with process_group("tcp", f"127.0.0.1:{port}", timeout_s=2):
            return "met"

    with listen_on() as other_job:  # of a colleague, or your own from an hour ago
        port = other_job.getsockname()[1]
        return watch(join, world_size=2, args=(port,), init=False)


def disagree_about_the_world() -> Diagnosis:
    def join(rank, world_size, port):
        if rank == 1:
            os.environ["WORLD_SIZE"] = "3"  # one script was changed, the other was not
        with process_group("tcp", f"127.0.0.1:{port}", timeout_s=2):
            return "met"

    return watch(join, world_size=2, args=(free_port(),), init=False)


FAULTS = (
    Fault(
        name="rendezvous-unreachable",
        title="A rank cannot reach the rendezvous",
        symptom="Silence, then a timeout, on all ranks: one of them could not connect, the others waited for it.",
        cause="The address or the port differs on one machine, a firewall lies between them, the name resolves to "
        "another interface, or rank 0 was never started.",
        cure="The same MASTER_ADDR and MASTER_PORT everywhere, an address that the other machine can reach (try: "
        "`ddp-course doctor` with --rendezvous), and a port that the firewall lets through.",
        met_at="https://github.com/pytorch/pytorch/issues/79388",
        provoke=call_another_address,
        fix=call_one_address,
    ),
    Fault(
        name="port-taken",
        title="The port of the rendezvous is taken",
        symptom="'Address already in use' at the start, on rank 0.",
        cause="Another job, or the last run's processes, listen on that port: 29500 is everybody's default.",
        cure="Let torchrun choose: --standalone, or --rdzv-endpoint localhost:0. End what is left of the last run. "
        "On one machine, use a file as the meeting point.",
        met_at="https://github.com/pytorch/pytorch/issues/126510",
        provoke=take_the_port,
        fix=call_one_address,
    ),
    Fault(
        name="world-size-mismatch",
        title="Ranks disagree about the world size",
        symptom="Plain torch: some ranks begin, the others wait until the time limit.",
        cause="The number of machines or of ranks was changed in one launch script and not in the other.",
        cure="One source for the numbers: torchrun's --nnodes and --nproc-per-node, or the cluster's own variables.",
        met_at="https://github.com/pytorch/pytorch/issues/52848",
        provoke=disagree_about_the_world,
        fix=call_one_address,
    ),
)
