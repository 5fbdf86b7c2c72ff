"""The answer bank of lesson 15: right answers written differently, and wrong ones that people really give.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import right, wrong
from tests.grading.bank import wrong as strangers
from tests.grading.submissions import solutions

IMPORTS = """
import copy
import math
import os
import queue
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.utils.data import DataLoader, DistributedSampler
"""

_, RESUME, *_ = solutions("15").values()


# --- 15.2 ------------------------------------------------------------------------------------------

RESUME_RIGHT = r"""
no DataLoader, an order of its own, rank 0 reads
    def batches_of(rank, world_size, run, epoch):
        order = torch.randperm(len(run.dataset), generator=torch.Generator().manual_seed(99 + epoch))
        return order.view(-1, world_size, run.local_batch)[:, rank]

    def newest(folder):
        for path in reversed(sorted(folder.iterdir())):
            if path.suffix != ".pt":
                continue
            try:
                return torch.load(path, weights_only=True)
            except (RuntimeError, EOFError, OSError):
                print("torn", path.name)

    def train_resumable(rank, world_size, run, steps, every, folder):
        box = [newest(folder) if rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        step = 0
        if box[0] is not None:
            model, optimizer, generators, step = box[0]
            run.model.load_state_dict(model)
            run.optimizer.load_state_dict(optimizer)
            torch.set_rng_state(generators[rank])
        for step in range(step, steps):
            count = len(run.dataset) // world_size // run.local_batch
            rows = batches_of(rank, world_size, run, step // count)[step % count]
            x, y = zip(*[run.dataset[row] for row in rows.tolist()])
            run.train_on(torch.stack(x), torch.stack(y))
            if (step + 1) % every == 0:
                mine = torch.get_rng_state()
                all_of_them = [torch.empty_like(mine) for _ in range(world_size)]
                dist.all_gather(all_of_them, mine)
                if rank == 0:
                    path = folder / f"step-{step + 1:06d}.pt"
                    parts = [run.model.state_dict(), run.optimizer.state_dict(), all_of_them, step + 1]
                    torch.save(parts, path.with_suffix(".new"))
                    os.replace(path.with_suffix(".new"), path)
                dist.barrier()
a sampler that knows its position
    from ddp_course.data.sampler import ShardSampler

    def train_resumable(rank, world_size, run, steps, every, folder):
        sampler, step, mine = ShardSampler(run.dataset, mode="streaming", drop_last=True), 0, None
        for path in sorted(folder.glob("*.pt"))[::-1]:
            try:
                saved = torch.load(path, weights_only=True)
                break
            except Exception as error:
                print(error)
                saved = None
        else:
            saved = None
        if saved:
            run.model.module.load_state_dict(saved["model"])
            run.optimizer.load_state_dict(saved["optimizer"])
            sampler.load_state_dict(saved["sampler"])
            step, mine = saved["step"], saved[f"generator{rank}"]
        while step < steps:
            if sampler.consumed == len(run.dataset):
                sampler.set_epoch(sampler.epoch + 1)
            loader = iter(DataLoader(run.dataset, run.local_batch, sampler=sampler, generator=torch.Generator()))
            if mine is not None:
                torch.set_rng_state(mine)
                mine = None
            for x, y in loader:
                run.train_on(x, y)
                sampler.advance(len(x))
                step += 1
                if step % every == 0:
                    states = [None] * world_size if rank == 0 else None
                    dist.gather_object(torch.get_rng_state(), states)
                    if rank == 0:
                        saved = {f"generator{r}": state for r, state in enumerate(states)}
                        saved.update(model=run.model.module.state_dict(), optimizer=run.optimizer.state_dict())
                        saved.update(sampler=sampler.state_dict(), step=step)
                        torch.save(saved, folder / f"step-{step:06d}.pt")
                if step == steps:
                    return
generators gathered into one tensor
    generators = [None] * world_size => generators = torch.get_rng_state().repeat(world_size, 1)
    dist.all_gather_object(generators, torch.get_rng_state()) => dist.all_gather_into_tensor(
                    generators, torch.get_rng_state()[None])
    ["generators"][rank] => ["generators"][rank].clone()
generators gathered by a functional collective
    generators = [None] * world_size => mine = torch.get_rng_state()[None]
    dist.all_gather_object(generators, torch.get_rng_state()) => generators = funcol.all_gather_tensor(
                    mine, 0, dist.group.WORLD).clone()
    ["generators"][rank] => ["generators"][rank].clone()
"""

RESUME_WRONG = r"""
always from the beginning | position bits torn | the run begins again
    folder.glob("step-*.pt") => []
the epoch is repeated | position bits torn | the epoch is repeated from its start
    list(sampler)[done * run.local_batch :] => list(sampler)
the batches that are done are read and thrown away | position | leave their indices out
    list(sampler)[done * run.local_batch :] => list(sampler)
            for x, y in DataLoader( =>         for number, (x, y) in enumerate(DataLoader(
    generator=torch.Generator()):\n => generator=torch.Generator())):
                if number < done:
                    continue\n
as many batches are skipped as rows should be | position bits torn | done * run.local_batch
    [done * run.local_batch :] => [done:]
without set_epoch | straight | sampler.set_epoch(epoch)
            sampler.set_epoch(epoch)\n =>
the optimizer is forgotten | bits | save and load run.optimizer.state_dict()
            run.optimizer.load_state_dict(state["optimizer"])\n =>
the generators are forgotten | bits | save torch.get_rng_state() of each rank
            torch.set_rng_state(state["generators"][rank])\n =>
all ranks get rank 0's generator | bits | each rank draws its own dropout
    ["generators"][rank] => ["generators"][0]
the DataLoader draws from torch's generator | bits | A DataLoader without a generator of its own draws
    , generator=torch.Generator()) => )
only the weights | bits | load the model's state_dict
            run.model.module.load_state_dict(state["model"])\n =>
the newest file or none | torn | one torn file is no reason to begin again
    continue => break
saved before the step is trained | bits | save after run.train_on
                run.train_on(x, y)\n =>
                if step == steps: =>             run.train_on(x, y)\n            if step == steps:
the newest file torn, then `steps` more | torn | to `steps` and not `steps` more
    continue => torn = True\n            continue
    step = 0 => step, torn = 0, False
    step = state["step"] => step = state["step"]\n        steps += torn * step
old files are deleted | files torn | keep all files
    if rank == 0: => if rank == 0:
                        for old in folder.iterdir():
                            old.unlink()
a RuntimeError alone | torn | catch what torch.load raises for a torn file
    except Exception => except RuntimeError
the last step is not saved | files position | save after every `every` steps
    % every == 0: => % every == 0 and step < steps:
a torn file is an error | torn | catch what torch.load raises for a torn file
    except Exception => except FileNotFoundError
every rank writes | files | let rank 0 write
    if rank == 0: => if True:
steps are counted from the restart | position bits torn | to `steps` and not `steps` more
    step = state["step"] => step = state["step"]\n        steps += step
gathered on rank 0 alone | all | a collective that not every rank calls | 3
    dist.all_gather_object( => rank or dist.all_gather_object(
the last rank never leaves the loop | all | a collective that not every rank calls | 3
    if step == steps: => if step == steps + (rank == world_size - 1):
the course's own | all | a call of ddp_course.checkpoint.folder.Checkpointer
    step = 0\n => from ddp_course.checkpoint.folder import Checkpointer
        step = 0
        Checkpointer(folder)\n
"""

RIGHT = [
    *right("15.2", RESUME, RESUME_RIGHT),
]
WRONG = [
    *wrong("15.2", RESUME, RESUME_WRONG),
]

# --- From strangers, who had seen the texts alone -------------------------------------------------

WRONG += strangers(
    "15.2",
    "",
    r"""
the generator comes back after the loader has begun, too late where a file ends an epoch | bits | torch.get_rng_state
    def train_resumable(rank, world_size, run, steps, every, folder):
        step, rng = 0, None
        for path in sorted(folder.glob("step-*.pt"), reverse=True):
            try:
                saved = torch.load(path, weights_only=True)
            except Exception:
                continue
            run.model.load_state_dict(saved["model"])
            run.optimizer.load_state_dict(saved["optimizer"])
            step, rng = saved["step"], saved["rng"][rank]
            break
        sampler = DistributedSampler(run.dataset, world_size, rank)
        per_epoch = len(sampler) // run.local_batch
        while step < steps:
            epoch, done = divmod(step, per_epoch)
            sampler.set_epoch(epoch)
            rest = list(sampler)[done * run.local_batch :]
            batches = iter(DataLoader(run.dataset, run.local_batch, sampler=rest))
            if rng is not None:  # the loader has drawn its number
                torch.set_rng_state(rng)
                rng = None
            for x, y in batches:
                run.train_on(x, y)
                step += 1
                if step % every == 0:
                    states = [torch.empty_like(torch.get_rng_state()) for _ in range(world_size)]
                    dist.all_gather(states, torch.get_rng_state())
                    if rank == 0:
                        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(),
                                 "rng": states, "step": step}  # fmt: skip
                        torch.save(state, folder / f"step-{step:06d}.pt")
                if step == steps:
                    return
""",
)
