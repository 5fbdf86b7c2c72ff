"""The answer bank of lesson 14: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong

IMPORTS = """
import copy
import math
import os
import queue
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
"""


def spoilt(source: str, *changes: tuple[str, str]) -> str:
    """Put mistakes into a right answer; each text to be replaced must be there."""
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return source


# --- 14.1 ------------------------------------------------------------------------------------------

LEAVE = """
def train_until_told(rank, world_size, run):
    told = False

    def handler(number, frame):
        nonlocal told
        told = True

    signal.signal(signal.SIGTERM, handler)
    while run.step < run.steps:
        run.train_step()
        flag = torch.tensor([float(told)])
        dist.all_reduce(flag)
        if flag.item() > 0:
            run.save()
            return 143
    run.save()
    return 0
"""

LEAVE_BY_OBJECTS = """
class Told:
    yes = 0
    def __call__(self, *event):
        self.yes += 1

def train_until_told(rank, world_size, run):
    told = Told()
    signal.signal(signal.SIGTERM, told)
    all_told = [0]
    for _ in range(run.steps):
        run.train_step()
        all_told = [None] * world_size
        dist.all_gather_object(all_told, told.yes)
        if any(all_told):
            break
    run.save()
    return 128 + signal.SIGTERM if any(all_told) else 0
"""

LEAVE_ASKED_BEFORE = """
def train_until_told(rank, world_size, run):
    event = threading.Event()
    signal.signal(signal.SIGTERM, lambda *args: event.set())

    def anybody():
        box = [event.is_set()]
        gathered = [None] * world_size if rank == 0 else None
        dist.gather_object(event.is_set(), gathered, dst=0)
        if rank == 0:
            box = [any(gathered)]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    stopped = False
    while run.step < run.steps and not (stopped := anybody()):
        run.train_step()
    run.save()
    return torch.tensor(143 if stopped else 0)
"""

LEAVE_ASKED_AHEAD = """
def train_until_told(rank, world_size, run):
    told = []
    signal.signal(signal.SIGTERM, lambda *event: told.append(event))

    def ask():
        flag = torch.tensor([len(told)])
        return flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)

    flag, work = ask()
    while run.step < run.steps:
        run.train_step()
        work.wait()
        if flag.item():
            break
        flag, work = ask()
    work.wait()
    run.save()
    return 143 if flag.item() else 0
"""

# --- 14.2 ------------------------------------------------------------------------------------------

RESUME = """
def train_resumable(rank, world_size, run, steps, every, folder):
    step = 0
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:
            continue
        run.model.module.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generators"][rank])
        step = state["step"]
        break
    sampler = DistributedSampler(run.dataset, world_size, rank)
    per_epoch = len(sampler) // run.local_batch
    while step < steps:
        epoch, done = divmod(step, per_epoch)
        sampler.set_epoch(epoch)
        rest = list(sampler)[done * run.local_batch :]
        for x, y in DataLoader(run.dataset, run.local_batch, sampler=rest, generator=torch.Generator()):
            run.train_on(x, y)
            step += 1
            if step % every == 0:
                generators = [None] * world_size
                dist.all_gather_object(generators, torch.get_rng_state())
                state = {"model": run.model.module.state_dict(), "optimizer": run.optimizer.state_dict()}
                if rank == 0:
                    torch.save({**state, "generators": generators, "step": step}, folder / f"step-{step:06d}.pt")
            if step == steps:
                break
"""

RESUME_WITHOUT_LOADER = """
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
"""

RESUME_WITH_SHARD_SAMPLER = """
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
"""

# --- 14.3 ------------------------------------------------------------------------------------------

PLAN = """
def plan_saves(step_s, save_s, node_mtbf_s, nodes, restart_s):
    mtbf_s = node_mtbf_s / nodes
    def share(every):
        return save_s / (every * step_s) + (every * step_s / 2 + restart_s) / mtbf_s
    below = max(1, int(math.sqrt(2 * save_s * mtbf_s) / step_s))
    every = min((below, below + 1), key=share)
    return every, share(every)
"""

PLAN_BY_STEPPING = """
def plan_saves(step_s, save_s, node_mtbf_s, nodes, restart_s):
    saving, failing = save_s / step_s, nodes * step_s / (2 * node_mtbf_s)
    every, step = 1, 1 << 20
    while step:
        while (every + step) * (every + step - 1) < saving / failing:
            every += step
        step >>= 1
    share = saving / every + failing * every + restart_s * nodes / node_mtbf_s
    return [torch.tensor(every), torch.tensor(share, dtype=torch.float64)]
"""

PLAN_BY_THE_GEOMETRIC_MEAN = """
def plan_saves(step_s, save_s, node_mtbf_s, nodes, restart_s):
    real = (2 * save_s * node_mtbf_s / nodes) ** 0.5 / step_s
    every = math.floor(real)
    if real * real > every * (every + 1):
        every += 1
    every = float(max(every, 1))
    a = every * step_s
    return every, save_s / a + nodes * (0.5 * a + restart_s) / node_mtbf_s
"""

# --- 14.4 ------------------------------------------------------------------------------------------

SAVER = """
class BackgroundSaver:
    def __init__(self, write):
        self.write, self.thread, self.error = write, None, None

    def save(self, state, step):
        self.finish()
        self.thread = threading.Thread(target=self.work, args=(copy.deepcopy(state), step))
        self.thread.start()

    def work(self, state, step):
        try:
            self.write(state, step)
        except Exception as error:
            self.error = error

    def finish(self):
        if self.thread:
            self.thread.join()
        self.thread, error, self.error = None, self.error, None
        if error:
            raise error
"""

SAVER_WITH_A_POOL = """
def copied(part):
    if isinstance(part, torch.Tensor):
        return part.detach().clone()
    if isinstance(part, dict):
        return {key: copied(value) for key, value in part.items()}
    if isinstance(part, list):
        return [copied(value) for value in part]
    return part

class BackgroundSaver:
    def __init__(self, write):
        self.write, self.pool, self.pending = write, ThreadPoolExecutor(1), []

    def save(self, state, step):
        state = copied(state)
        while self.pending and self.pending[0].done():
            self.pending.pop(0).result()
        self.pending.append(self.pool.submit(self.write, state, step))

    def finish(self):
        while self.pending:
            self.pending.pop(0).result()
"""

SAVER_WITH_A_QUEUE = """
import io

class BackgroundSaver:
    def __init__(self, write):
        self.jobs, self.errors = queue.Queue(), []
        threading.Thread(target=self.serve, args=(write,), daemon=True).start()

    def serve(self, write):
        while True:
            data, step = self.jobs.get()
            try:
                write(torch.load(io.BytesIO(data), weights_only=True), step)
            except BaseException as error:
                self.errors.append(error)
            self.jobs.task_done()

    def save(self, state, step):
        memory = io.BytesIO()
        torch.save(state, memory)
        self.jobs.put((memory.getvalue(), step))
        self.complain()

    def finish(self):
        self.jobs.join()
        self.complain()

    def complain(self):
        if self.errors:
            raise self.errors.pop()
"""

SAVER_THAT_TELLS_AFTER_SUBMITTING = """
class BackgroundSaver:
    def __init__(self, write):
        self.write, self.pool, self.jobs = write, ThreadPoolExecutor(1), []

    def save(self, state, step):
        self.jobs.append(self.pool.submit(self.write, copy.deepcopy(state), step))
        while self.jobs and self.jobs[0].done():
            self.jobs.pop(0).result()

    def finish(self):
        while self.jobs:
            self.jobs.pop(0).result()
"""

RIGHT = [
    Right("14.1", "a sum of flags, two returns", LEAVE),
    Right("14.1", "an object as handler, gathered objects", LEAVE_BY_OBJECTS),
    Right("14.1", "an event, asked before each step, rank 0 decides", LEAVE_ASKED_BEFORE),
    Right("14.1", "asked during the step, answered one step later", LEAVE_ASKED_AHEAD),
    Right("14.2", "the sampler's list, cut", RESUME),
    Right("14.2", "no DataLoader, an order of its own, rank 0 reads", RESUME_WITHOUT_LOADER),
    Right("14.2", "a sampler that knows its position", RESUME_WITH_SHARD_SAMPLER),
    Right("14.3", "Young's root, and the better neighbour", PLAN),
    Right("14.3", "no root, by stepping, in a list of tensors", PLAN_BY_STEPPING),
    Right("14.3", "the geometric mean decides", PLAN_BY_THE_GEOMETRIC_MEAN),
    Right("14.4", "one thread for each save", SAVER),
    Right("14.4", "a pool of one thread, tensors cloned", SAVER_WITH_A_POOL),
    Right("14.4", "one thread for all, bytes in a queue", SAVER_WITH_A_QUEUE),
    Right("14.4", "submits, then tells", SAVER_THAT_TELLS_AFTER_SUBMITTING),
]

FLAG = "        flag = torch.tensor([float(told)])\n        dist.all_reduce(flag)\n        if flag.item() > 0:\n"

WRONG = [
    Wrong(
        "14.1",
        "no handler at all",
        """
def train_until_told(rank, world_size, run):
    while run.step < run.steps:
        run.train_step()
    run.save()
    return 0
""",
        ("handler", "agree", "between", "save"),
        "the rank died of the signal",
    ),
    Wrong(
        "14.1",
        "the handler saves",
        spoilt(LEAVE, ("        told = True\n", "        told = True\n        run.save()\n")),
        ("handler", "agree", "between", "save"),
        "run.save() is called in the handler",
    ),
    Wrong(
        "14.1",
        "the handler exits",
        spoilt(LEAVE, ("        told = True\n", "        sys.exit(143)\n")),
        ("handler", "agree", "between", "save"),
        "the handler raises SystemExit",
    ),
    Wrong(
        "14.1",
        "an exception out of the handler, swallowed by the loop",
        spoilt(
            LEAVE,
            ("        told = True\n", "        told = True\n        raise InterruptedError\n"),
            ("        run.train_step()\n", "        try:\n            run.train_step()\n        except Exception:\n"
             "            pass\n"),
        ),
        ("handler", "agree", "between", "save"),
        "an exception comes out of the handler: InterruptedError",
    ),
    Wrong(
        "14.1",
        "the handler tells the others by a collective",
        spoilt(LEAVE, ("        told = True\n", "        told = True\n        dist.all_reduce(torch.ones(1))\n")),
        ("handler", "agree", "between", "save"),
        "a collective is called in the handler",
    ),
    Wrong(
        "14.1",
        "each rank looks at its own flag",
        spoilt(LEAVE, (FLAG, "        if told:\n")),
        ("agree", "between", "save"),
        "each rank looks at its own flag",
    ),
    Wrong(
        "14.1",
        "the agreed flag or its own",
        spoilt(LEAVE, ("        if flag.item() > 0:", "        if told or flag.item() > 0:")),
        ("between",),
        "a rank decides by its own flag, which may have changed",
    ),
    Wrong(
        "14.1",
        "only rank 0 is asked",
        spoilt(LEAVE, ("dist.all_reduce(flag)", "dist.broadcast(flag, src=0)")),
        ("agree", "between"),
        "one rank's flag must count for all",
    ),
    Wrong(
        "14.1",
        "all must have been told",
        spoilt(LEAVE, ("dist.all_reduce(flag)", "dist.all_reduce(flag, op=dist.ReduceOp.MIN)")),
        ("agree", "between"),
        "the signal is not heard",
    ),
    Wrong(
        "14.1",
        "they agree every eight steps",
        spoilt(LEAVE, ("        flag = torch", "        if run.step % 8:\n            continue\n        flag = torch")),
        ("agree", "between"),
        "who sends SIGTERM may send SIGKILL soon",
    ),
    Wrong(
        "14.1",
        "it saves twice",
        spoilt(LEAVE, ("            run.save()\n            return 143", "            run.save()\n            break")),
        ("save",),
        "save once, after the ranks have agreed",
    ),
    Wrong("14.1", "status 0 in any case", spoilt(LEAVE, ("return 143", "return 0")), ("save",), "return 143"),
    Wrong(
        "14.1",
        "the number of the signal as status",
        spoilt(LEAVE, ("return 143", "return 15")),
        ("save",),
        "status 15",
    ),
    Wrong(
        "14.1",
        "the second SIGTERM kills",
        spoilt(LEAVE, ("        told = True\n", "        told = bool(signal.signal(number, signal.SIG_DFL))\n")),
        ("save",),
        "a second SIGTERM must not break the save",
    ),
    Wrong(
        "14.1",
        "rank 0 alone saves",
        spoilt(LEAVE, ("            run.save()\n ", "            rank or run.save()\n ")),
        ("agree", "between", "save"),
        "call run.save() on every rank",
    ),
    Wrong(
        "14.1",
        "the last rank does not take part in the agreement",
        spoilt(
            LEAVE,
            ("        dist.all_reduce(flag)\n", "        rank == world_size - 1 or dist.all_reduce(flag)\n"),
        ),
        ALL,
        "every rank must take part when the ranks agree",
        limit_s=3.0,
    ),
    Wrong(
        "14.1",
        "the process ends itself",
        spoilt(LEAVE, ("            return 143", "            os._exit(143)")),
        ("handler", "agree", "between", "save"),
        "return the status instead of leaving",
    ),
    Wrong(
        "14.1",
        "it waits for a signal that never comes",
        spoilt(LEAVE, ("    run.save()\n    return 0", "    while not told:\n        pass\n    return 143")),
        ALL,
        "an endless loop ends nothing either",
        limit_s=1.0,
    ),
    Wrong(
        "14.1",
        "the number of steps of the visible check",
        spoilt(LEAVE, ("while run.step < run.steps:", "while run.step < 8:")),
        ("finish",),
        "train until run.step reaches run.steps",
    ),
    # --- 14.2
    Wrong(
        "14.2",
        "always from the beginning",
        spoilt(RESUME, ('folder.glob("step-*.pt")', "[]")),
        ("position", "bits", "torn"),
        "the run begins anew",
    ),
    Wrong(
        "14.2",
        "the epoch is repeated",
        spoilt(RESUME, ("list(sampler)[done * run.local_batch :]", "list(sampler)")),
        ("position", "bits", "torn"),
        "the epoch is repeated from its start",
    ),
    Wrong(
        "14.2",
        "the batches that are done are read and thrown away",
        spoilt(
            RESUME,
            ("list(sampler)[done * run.local_batch :]", "list(sampler)"),
            ("        for x, y in DataLoader(", "        for number, (x, y) in enumerate(DataLoader("),
            ("generator=torch.Generator()):\n", "generator=torch.Generator())):\n            if number < done:\n"
             "                continue\n"),
        ),
        ("position",),
        "leave their indices out",
    ),
    Wrong(
        "14.2",
        "as many batches are skipped as rows should be",
        spoilt(RESUME, ("[done * run.local_batch :]", "[done:]")),
        ("position", "bits", "torn"),
        "done * run.local_batch",
    ),
    Wrong(
        "14.2",
        "without set_epoch",
        spoilt(RESUME, ("        sampler.set_epoch(epoch)\n", "")),
        ("straight",),
        "sampler.set_epoch(epoch)",
    ),
    Wrong(
        "14.2",
        "the optimizer is forgotten",
        spoilt(RESUME, ('        run.optimizer.load_state_dict(state["optimizer"])\n', "")),
        ("bits",),
        "save and load run.optimizer.state_dict()",
    ),
    Wrong(
        "14.2",
        "the generators are forgotten",
        spoilt(RESUME, ('        torch.set_rng_state(state["generators"][rank])\n', "")),
        ("bits",),
        "save torch.get_rng_state() of each rank",
    ),
    Wrong(
        "14.2",
        "all ranks get rank 0's generator",
        spoilt(RESUME, ('["generators"][rank]', '["generators"][0]')),
        ("bits",),
        "each rank draws its own dropout",
    ),
    Wrong(
        "14.2",
        "the DataLoader draws from torch's generator",
        spoilt(RESUME, (", generator=torch.Generator())", ")")),
        ("bits",),
        "A DataLoader without a generator of its own draws",
    ),
    Wrong(
        "14.2",
        "only the weights",
        spoilt(RESUME, ('        run.model.module.load_state_dict(state["model"])\n', "")),
        ("bits",),
        "load the model's state_dict",
    ),
    Wrong(
        "14.2",
        "the newest file or none",
        spoilt(RESUME, ("            continue\n", "            break\n")),
        ("torn",),
        "one torn file is no reason to begin anew",
    ),
    Wrong(
        "14.2",
        "saved before the step is trained",
        spoilt(
            RESUME,
            ("            run.train_on(x, y)\n", ""),
            ("            if step == steps:", "            run.train_on(x, y)\n            if step == steps:"),
        ),
        ("bits",),
        "save after run.train_on",
    ),
    Wrong(
        "14.2",
        "the newest file torn, then `steps` more",
        spoilt(
            RESUME,
            ("            continue\n", "            torn = True\n            continue\n"),
            ("    step = 0\n", "    step, torn = 0, False\n"),
            ('        step = state["step"]\n', '        step = state["step"]\n        steps += torn * step\n'),
        ),
        ("torn",),
        "to `steps` and not `steps` more",
    ),
    Wrong(
        "14.2",
        "old files are deleted",
        spoilt(
            RESUME,
            ("                if rank == 0:\n", "                if rank == 0:\n                    for old in "
             "folder.iterdir():\n                        old.unlink()\n"),
        ),
        ("files", "torn"),
        "keep all files",
    ),
    Wrong(
        "14.2",
        "a torn file is an error",
        spoilt(RESUME, ("except Exception:\n            continue", "except FileNotFoundError:\n            continue")),
        ("torn",),
        "catch what torch.load raises for a torn file",
    ),
    Wrong(
        "14.2",
        "every rank writes",
        spoilt(RESUME, ("                if rank == 0:\n", "                if True:\n")),
        ("files",),
        "let rank 0 write",
    ),
    Wrong(
        "14.2",
        "steps are counted from the restart",
        spoilt(RESUME, ('        step = state["step"]\n', '        step = state["step"]\n        steps += step\n')),
        ("position", "bits", "torn"),
        "to `steps` and not `steps` more",
    ),
    Wrong(
        "14.2",
        "gathered on rank 0 alone",
        spoilt(
            RESUME,
            ("                dist.all_gather_object(", "                rank or dist.all_gather_object("),
        ),
        ALL,
        "a collective that not every rank calls",
        limit_s=3.0,
    ),
    Wrong(
        "14.2",
        "the last rank never leaves the loop",
        spoilt(RESUME, ("if step == steps:", "if step == steps + (rank == world_size - 1):")),
        ALL,
        "a collective that not every rank calls",
        limit_s=3.0,
    ),
    Wrong(
        "14.2",
        "the course's own",
        spoilt(RESUME, ("    step = 0\n", "    from ddp_course.checkpoint.folder import Checkpointer\n    step = 0\n"
                        "    Checkpointer(folder)\n")),
        ALL,
        "a call of ddp_course.checkpoint.folder.Checkpointer",
    ),
    # --- 14.3
    Wrong(
        "14.3",
        "the factor 2 is forgotten",
        spoilt(PLAN, ("math.sqrt(2 * save_s", "math.sqrt(save_s")),
        ("best", "nodes", "whole"),
        "a factor of 2 is missing under the root",
    ),
    Wrong(
        "14.3",
        "seconds instead of steps",
        spoilt(PLAN, (" / step_s))", "))")),
        ("best", "nodes", "whole"),
        "divide by step_s",
    ),
    Wrong(
        "14.3",
        "one node's failures for all",
        spoilt(PLAN, ("mtbf_s = node_mtbf_s / nodes", "mtbf_s = node_mtbf_s")),
        ("nodes",),
        "some node fails more often",
    ),
    Wrong(
        "14.3",
        "more nodes fail less often",
        spoilt(PLAN, ("node_mtbf_s / nodes", "node_mtbf_s * nodes")),
        ("nodes",),
        "more nodes fail more often",
    ),
    Wrong(
        "14.3",
        "the restart is forgotten",
        spoilt(PLAN, (" + restart_s)", ")")),
        ("share", "nodes"),
        "the restart is forgotten",
    ),
    Wrong(
        "14.3",
        "the whole distance is lost",
        spoilt(PLAN, ("every * step_s / 2 + restart_s", "every * step_s + restart_s")),
        ("share", "nodes", "whole"),
        "half the distance is done again",
    ),
    Wrong(
        "14.3",
        "rounded",
        spoilt(PLAN, ("max(1, int(", "max(1, round("), ("min((below, below + 1), key=share)", "below")),
        ("whole",),
        "rounding is not enough",
    ),
    Wrong(
        "14.3",
        "the share at the root",
        spoilt(PLAN, ("return every, share(every)",
                      "return every, share(math.sqrt(2 * save_s * mtbf_s) / step_s)")),
        ("whole",),
        "that is what is lost at the root",
    ),
    Wrong(
        "14.3",
        "no step between two saves",
        spoilt(PLAN, ("max(1, int(math.sqrt(2 * save_s * mtbf_s) / step_s))",
                      "math.floor(math.sqrt(2 * save_s * mtbf_s) / step_s)")),
        ALL,
        "there is at least one step between two saves",
    ),
    Wrong(
        "14.3",
        "in percent",
        spoilt(PLAN, ("return every, share(every)", "return every, 100 * share(every)")),
        ("share", "nodes"),
        "a share is no percentage",
    ),
    Wrong(
        "14.3",
        "the share alone",
        spoilt(PLAN, ("return every, share(every)", "return share(every)")),
        ALL,
        "return the number of steps and the share",
    ),
    Wrong(
        "14.3",
        "all numbers are tried",
        spoilt(PLAN, ("min((below, below + 1), key=share)", "min(range(1, 10**12), key=share)")),
        ALL,
        "a root says where to look",
        limit_s=1.0,
    ),
    Wrong("14.3", "the numbers of the visible check", "\ndef plan_saves(*args):\n    return 3000, 0.0121\n",
          ("share", "best", "nodes", "whole"), "saves in one second of steps"),
    # --- 14.4
    Wrong(
        "14.4",
        "it writes at once",
        spoilt(SAVER, ("        self.thread.start()\n", "        self.thread.run()\n        self.thread = None\n")),
        ("wait",),
        "write is called by save itself",
    ),
    Wrong(
        "14.4",
        "it joins at once",
        spoilt(SAVER, ("        self.thread.start()\n", "        self.thread.start()\n        self.thread.join()\n")),
        ("wait",),
        "save starts a thread and waits for its end",
    ),
    Wrong(
        "14.4",
        "no copy",
        spoilt(SAVER, ("copy.deepcopy(state)", "state")),
        ("values", "order"),
        "nothing was copied before save returned",
    ),
    Wrong(
        "14.4",
        "a shallow copy",
        spoilt(SAVER, ("copy.deepcopy(state)", "copy.copy(state)")),
        ("values", "order"),
        "dict(), detach() and .cpu() copy no values on a CPU",
    ),
    Wrong(
        "14.4",
        "the copy is made in the thread",
        spoilt(
            SAVER,
            ("args=(copy.deepcopy(state), step)", "args=(state, step)"),
            ("            self.write(state, step)", "            self.write(copy.deepcopy(state), step)"),
        ),
        ("values", "order"),
        "a copy in the thread comes too late",
    ),
    Wrong(
        "14.4",
        "only the model is cloned",
        spoilt(
            SAVER,
            (
                "copy.deepcopy(state)",
                '{**state, "model": {k: v.clone() for k, v in state["model"].items()}}',
            ),
        ),
        ("values", "order"),
        "the copy is not deep",
    ),
    Wrong(
        "14.4",
        "finish does not wait",
        spoilt(
            SAVER,
            ("        self.finish()\n", "        self.wait()\n"),
            ("    def finish(self):\n", "    def finish(self):\n        pass\n\n    def wait(self):\n"),
        ),
        ("content", "error"),
        "finish() waits for the thread",
    ),
    Wrong(
        "14.4",
        "a thread for each, all at a time",
        """
class BackgroundSaver:
    def __init__(self, write):
        self.pool, self.write, self.jobs = ThreadPoolExecutor(8), write, []

    def save(self, state, step):
        self.jobs.append(self.pool.submit(self.write, copy.deepcopy(state), step))

    def finish(self):
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job.result()
""",
        ("order",),
        "two writes at a time mix in one file",
    ),
    Wrong(
        "14.4",
        "a save is left out while the disk is busy",
        spoilt(
            SAVER,
            ("        self.finish()\n", "        if self.thread and self.thread.is_alive():\n            return\n"
             "        self.finish()\n"),
        ),
        ("order",),
        "each save is written",
    ),
    Wrong(
        "14.4",
        "finish shuts the pool down",
        SAVER_WITH_A_POOL + "        self.pool.shutdown()\n",
        ("order",),
        "finish waits for the writes, and is not the end",
    ),
    Wrong(
        "14.4",
        "the error is swallowed",
        spoilt(SAVER, ("            self.error = error\n", "            print(error)\n")),
        ("error",),
        "nobody hears of it",
    ),
    Wrong(
        "14.4",
        "a thread whose exception nobody keeps",
        spoilt(SAVER, ("target=self.work", "target=self.write")),
        ("error",),
        "nobody hears of it",
    ),
    Wrong(
        "14.4",
        "the error is another",
        spoilt(SAVER, ("            raise error\n", '            raise RuntimeError("the save failed")\n')),
        ("error",),
        "raise the error that write raised",
    ),
    Wrong(
        "14.4",
        "the error is never forgotten",
        spoilt(SAVER, ("error, self.error = None, self.error, None", "error = None, self.error")),
        ("error",),
        "forget it when it is raised",
    ),
    Wrong(
        "14.4",
        "finish waits for a queue that nobody empties",
        SAVER_WITH_A_QUEUE.replace("            self.jobs.task_done()\n", ""),
        ALL,
        "a wait that never ends",
        limit_s=2.0,
    ),
    Wrong(
        "14.4",
        "write without the step",
        spoilt(SAVER, ("            self.write(state, step)", "            self.write(state)")),
        ALL,
        "write takes two arguments",
    ),
]  # fmt: skip
