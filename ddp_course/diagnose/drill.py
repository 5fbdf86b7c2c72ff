"""Can you tell what happened from what a job leaves? An incident, made by a real run with one to three faults in it.

A small training runs on three ranks, and each writes a log: the rows it read, the loss, a checksum of its weights, its
times, and its last words. The faults are drawn by level and seed, at most one from each channel of evidence, so that
no fault hides another and no incident has two right answers. `solve` is the proof: it sees the logs alone.

Left out on purpose: a story. Real incidents have none.
Read next: `commands/drill.py`, which asks; lesson 12, notebooks/12_failure_lab.ipynb, which teaches what is asked.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from ddp_course.launcher import RankError, launch

RANKS, ROWS, BATCH, EPOCHS = 3, 48, 4, 3
STEPS = EPOCHS * ROWS // (RANKS * BATCH)
SLOW_S, PATIENCE_S = 0.06, 3.0

# Channel of evidence -> the faults that show in it, each with whether one rank is to blame.
CHANNELS = {
    "end": {"one-rank-raises": True, "killed": True, "skipped-collective": True},
    "rows": {"same-rows": False, "no-set-epoch": False},
    "weights": {"drift": True, "not-averaged": False},
    "time": {"straggler": True},
}
BLAMED = {name: whose for channel in CHANNELS.values() for name, whose in channel.items()}
HIDDEN = {"same-rows", "not-averaged"}  # from the same rows all ranks have the same gradients, averaged or not
# Level -> how many faults, and from which channels.
LEVELS = {
    1: (1, ("end",)),
    2: (1, ("rows",)),
    3: (1, ("weights", "time")),
    4: (1, ("rows", "weights", "time")),
    5: (1, tuple(CHANNELS)),
    6: (2, ("rows", "time")),
    7: (2, ("rows", "weights", "time")),
    8: (2, tuple(CHANNELS)),
    9: (3, ("rows", "weights", "time")),
    10: (3, tuple(CHANNELS)),
}
HINTS = {
    "end": "Read the last lines of each log. Which rank has a reason of its own, or no last word at all?",
    "rows": "Compare the rows of two ranks in one epoch, then those of one rank in two epochs.",
    "weights": "In every step all ranks should have the same weights. From which step on do they differ, and whose?",
    "time": "Compare `own`, the time that a rank computes before it communicates.",
}
Faults = dict[str, int | None]  # fault -> the rank to blame, None if it is all ranks


def drawn(level: int, seed: int) -> Faults:
    """Return the faults of an incident.

    Raises:
        ValueError: there is no such level.
    """
    if level not in LEVELS:
        raise ValueError(f"there is no level {level}: levels are 1 to {max(LEVELS)}")
    choose = random.Random(f"{level}/{seed}")
    count, channels = LEVELS[level]
    faults = set(HIDDEN)
    while faults >= HIDDEN:
        faults = {
            choose.choice(sorted(CHANNELS[channel])) for channel in sorted(choose.sample(sorted(channels), count))
        }
    return {fault: choose.randrange(RANKS) if BLAMED[fault] else None for fault in sorted(faults)}


def happen(level: int, seed: int, folder: Path) -> None:
    """Run the incident, and leave `rank0.log` to `rank2.log` in `folder`.

    Collective: of its own ranks, in processes of their own.
    """
    when = random.Random(f"when {level}/{seed}").randrange(STEPS // 2, STEPS - 1)
    faults, meeting = drawn(level, seed), folder / "meeting"
    cold = (faults.get("straggler", -1) + random.Random(f"cold {level}/{seed}").choice((1, 2))) % RANKS
    try:
        launch(_rank, RANKS, (str(folder), faults, when, cold), init=False, start_method="forkserver", quiet=True,
               timeout_s=2 * PATIENCE_S, limit_s=120)  # fmt: skip
    except RankError:
        pass  # it is in the logs
    finally:
        meeting.unlink(missing_ok=True)


def _rank(rank: int, world_size: int, folder: str, faults: Faults, when: int, cold: int) -> None:
    torch.set_num_threads(1)
    with open(f"{folder}/rank{rank}.log", "w", buffering=1) as log:
        try:
            store = dist.FileStore(f"{folder}/meeting", world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=PATIENCE_S)
            )
            _train(rank, world_size, faults, when, rank == cold, log)
            log.write("done\n")
        except Exception as error:
            log.write(f"{type(error).__name__}: {error}\n")


def _train(rank: int, world_size: int, faults: Faults, when: int, cold: bool, log) -> None:
    generator = torch.Generator().manual_seed(0)
    x_NF, y_N1 = torch.randn(ROWS, 4, generator=generator), torch.randn(ROWS, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    sampler = DistributedSampler(range(ROWS), world_size, 0 if "same-rows" in faults else rank)
    step = calls = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(0 if "no-set-epoch" in faults else epoch)
        order = list(sampler)
        for start in range(0, len(order), BATCH):
            rows, began = order[start : start + BATCH], time.perf_counter()
            if faults.get("one-rank-raises") == rank and step == when:
                raise ValueError(f"row {rows[0]} has no label")
            if faults.get("killed") == rank and step == when:
                os.kill(os.getpid(), signal.SIGKILL)
            if faults.get("straggler") == rank:
                time.sleep(SLOW_S)
            if cold and step == 0:
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
                    parameter.grad = total / world_size
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                    if faults.get("drift") == rank and step == when // 2:
                        parameter += 0.01
            checksum = sum(parameter.double().sum().item() for parameter in model.parameters())
            log.write(f"step {step} epoch {epoch} rows {','.join(map(str, rows))} loss {loss.item():.4f} ")
            log.write(f"weights {checksum:.6f} own {1e3 * own_s:.1f} ms calls {calls}\n")
            step += 1
    dist.barrier()


# --- The proof that it can be solved ---------------------------------------------------------------

_LINE = re.compile(r"step (\d+) epoch (\d+) rows ([\d,]+) loss \S+ weights (\S+) own (\S+) ms calls (\d+)")


def solve(folder: Path) -> Faults:
    """Return the faults that the logs show; nothing but the logs is looked at."""
    texts = [(folder / f"rank{rank}.log").read_text() for rank in range(RANKS)]
    steps = [[_LINE.fullmatch(line) for line in text.splitlines()] for text in texts]
    steps = [[found for found in of_rank if found] for of_rank in steps]
    return {**_end(texts, steps), **_rows(steps), **_weights(steps), **_time(steps)}


def _end(texts: list[str], steps: list[list[re.Match]]) -> Faults:
    for rank, text in enumerate(texts):
        if "ValueError" in text:
            return {"one-rank-raises": rank}
    for rank, text in enumerate(texts):
        if text and _LINE.fullmatch(text.splitlines()[-1]):
            return {"killed": rank}
    # The one that skipped a call made fewer of them in the same step.
    for here in zip(*steps, strict=False):
        calls = [int(found[6]) for found in here]
        if len(set(calls)) > 1:
            return {"skipped-collective": calls.index(min(calls))}
    return {}


def _rows(steps: list[list[re.Match]]) -> Faults:
    orders = [
        {epoch: [found[3] for found in of_rank if int(found[2]) == epoch] for epoch in (0, 1)} for of_rank in steps
    ]
    if orders[0][0] == orders[1][0]:
        return {"same-rows": None}
    shared = min(len(orders[0][0]), len(orders[0][1]))
    return {"no-set-epoch": None} if orders[0][0][:shared] == orders[0][1][:shared] else {}


def _weights(steps: list[list[re.Match]]) -> Faults:
    for here in zip(*steps, strict=False):
        if len({int(found[6]) for found in here}) > 1:
            return {}  # what follows a skipped call follows from it
        sums = [found[4] for found in here]
        if len(set(sums)) == RANKS:
            return {"not-averaged": None}
        if len(set(sums)) == 2:
            return {"drift": next(rank for rank, each in enumerate(sums) if sums.count(each) == 1)}
    return {}


def _time(steps: list[list[re.Match]]) -> Faults:
    own = [median(float(found[5]) for found in of_rank) for of_rank in steps]
    slowest = own.index(max(own))
    others = [each for rank, each in enumerate(own) if rank != slowest]
    return {"straggler": slowest} if own[slowest] >= 1e3 * SLOW_S and own[slowest] > 3 * max(others) else {}
