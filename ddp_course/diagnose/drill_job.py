"""How does an incident of a drill come about? By a training on three ranks with its faults in it.

The ranks are processes that meet over gloo, so what they write when one of them dies is what gloo really says. An
incident whose logs do not have its faults as their only answer is run again.

Read next: `drill.py`, where the faults are drawn and found.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from ddp_course.diagnose.drill import BATCH, EPOCHS, RANKS, ROWS, Incident, drawn, solve

SLOW_S, PATIENCE_S = 0.06, 3.0
TRIES, LIMIT_S = 3, 60  # of a run that a busy machine has spoilt; for each rank, imports included


def happen(level: int, seed: int, folder: Path) -> None:
    """Run the incident, and leave `rank0.log` to `rank2.log` in `folder`, which is there.

    Raises:
        TimeoutError: this machine is too busy for logs that have one answer.
    Collective: of its own ranks, in processes of their own.
    """
    incident = drawn(level, seed)
    for _ in range(TRIES):
        _run(incident, folder)
        try:
            if solve(folder) == incident.faults:
                return
        except ValueError:
            pass  # a rank that the machine kept waiting, say
    raise TimeoutError("this machine is too busy for an incident that has one answer; try again")


def _run(incident: Incident, folder: Path) -> None:
    # Not `launch`: it ends all ranks once one has died, perhaps before they have written their last words.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks = [context.Process(target=_rank, args=(r, str(folder), incident), daemon=True) for r in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_S)
        rank.kill()
    (folder / "meeting").unlink(missing_ok=True)


def _rank(rank: int, folder: str, incident: Incident) -> None:
    torch.set_num_threads(1)
    with open(f"{folder}/rank{rank}.log", "w", buffering=1) as log:
        try:
            store = dist.FileStore(f"{folder}/meeting", RANKS)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE_S)
            )
            _train(rank, incident, log)
            log.write("done\n")
        except Exception as error:
            log.write(f"{type(error).__name__}: {error}\n")


def _train(rank: int, incident: Incident, log) -> None:
    faults, when = incident.faults, incident.when
    torch.manual_seed(incident.world)
    x_NF, y_N1 = torch.randn(ROWS, 4), torch.randn(ROWS, 1)
    model = nn.Linear(4, 1)
    sampler = DistributedSampler(range(ROWS), RANKS, 0 if "same-rows" in faults else rank, seed=incident.world)
    step = calls = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(0 if "missing-set-epoch" in faults else epoch)
        order = list(sampler)
        for start in range(0, len(order), BATCH):
            rows, began = order[start : start + BATCH], time.perf_counter()
            if faults.get("one-rank-raises") == rank and step == when:
                raise ValueError(f"rank {rank} cannot read its batch: the file ends too early")
            if faults.get("killed") == rank and step == when:
                os.kill(os.getpid(), signal.SIGKILL)
            if faults.get("straggler") == rank:
                time.sleep(SLOW_S)
            if rank == incident.cold and step == 0:
                time.sleep(2 * SLOW_S)  # a first step is slow, and not on all ranks alike: caches, kernels, files
            model.zero_grad()
            loss = (model(x_NF[rows]) - y_N1[rows]).square().mean()
            loss.backward()
            own_s = time.perf_counter() - began
            skipped = faults.get("skipped-collective") == rank and step == when
            for parameter in model.parameters():
                total = parameter.grad.clone()
                if not skipped:
                    dist.all_reduce(total)
                    calls += 1
                if "not-averaged" not in faults:
                    parameter.grad = total / RANKS
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                    if faults.get("drift") == rank and step == when // 2:
                        parameter += 0.01
            checksum = sum(parameter.double().sum().item() for parameter in model.parameters())
            log.write(f"step {step} epoch {epoch} rows {','.join(map(str, rows))} loss {loss.item():.4f} ")
            log.write(f"weights {checksum:.6f} own {1e3 * own_s:.1f} ms calls {calls}\n")
            step += 1
    dist.barrier()
