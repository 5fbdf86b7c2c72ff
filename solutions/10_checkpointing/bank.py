"""The answer bank of lesson 10: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong

IMPORTS = """
import os
import random
import tempfile
from pathlib import Path
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
"""

# --- 10.1 ------------------------------------------------------------------------------------------

SAVE = """
def save_atomically(rank, world_size, state, path):
    if rank == 0:
        unfinished = path.with_name(path.name + ".tmp")
        try:
            with open(unfinished, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    dist.barrier()
"""

SAVE_FROM_MEMORY = """
import io
from os import fsync

def save_atomically(rank, world_size, state, path):
    done = torch.zeros(1)
    if not rank:
        content = io.BytesIO()
        torch.save(state, content)
        number, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(number, "wb", buffering=0) as file:
                left = memoryview(content.getbuffer())
                while left:
                    left = left[file.write(left):]
                fsync(file)
            Path(name).replace(path)
        except Exception as error:
            os.remove(name)
            raise RuntimeError("nothing was saved") from error
        folder = os.open(path.parent, os.O_RDONLY)
        fsync(folder)
        os.close(folder)
    dist.broadcast(done, src=0)
    return path
"""

SAVE_AND_OPEN_AGAIN = """
def save_atomically(rank, world_size, state, path):
    outcome = [None]
    if rank == 0:
        unfinished = f"{path}.part"
        try:
            torch.save(state, unfinished)
            with open(unfinished, "rb+") as file:
                os.fsync(file.fileno())
            os.rename(unfinished, str(path))
        except Exception as error:
            if os.path.exists(unfinished):
                os.unlink(unfinished)
            outcome = [repr(error)]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0]:
        raise OSError(outcome[0])
"""

SAVE_IN_PLACE = """
def save_atomically(rank, world_size, state, path):
    if rank == 0:
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()
"""

# --- 10.2 ------------------------------------------------------------------------------------------

LOAD = """
def load_onto(path, model, device):
    saved = torch.load(path, map_location=device, weights_only=True)
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    bare.load_state_dict({name.removeprefix("module."): value for name, value in saved["model"].items()})
    return saved["step"]
"""

LOAD_ADDS_PREFIX = """
def load_onto(path, model, device):
    file = torch.load(str(path), map_location="cpu", mmap=True)
    wanted = {}
    in_ddp = next(iter(model.state_dict())).startswith("module.")
    for name, tensor in file["model"].items():
        if name.startswith("module."):
            name = name[len("module."):]
        wanted["module." + name if in_ddp else name] = tensor
    found = model.load_state_dict(wanted, strict=False)
    if found.missing_keys or found.unexpected_keys:
        raise KeyError(found)
    return torch.tensor(file["step"])
"""

LOAD_WITH_TORCHS_OWN = """
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

def load_onto(path, model, device):
    with open(path, "rb") as file:
        saved = torch.load(file, map_location={"cuda:0": str(device)}, weights_only=True)
    weights = saved["model"]
    consume_prefix_in_state_dict_if_present(weights, "module.")
    target = getattr(model, "module", model)
    with torch.no_grad():
        if target.state_dict().keys() != weights.keys():
            raise ValueError("other names")
        for name, value in target.state_dict().items():
            value.copy_(weights[name])
    return saved["step"]
"""

# --- 10.3 ------------------------------------------------------------------------------------------

RESUME = """
class RunFile:
    def __init__(self, path):
        self.path = path

    def save(self, run):
        generators = [None] * dist.get_world_size()
        dist.all_gather_object(generators, (torch.get_rng_state(), random.getstate()))
        state = {
            "model": run.model.module.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "scheduler": run.scheduler.state_dict(),
            "position": (run.epoch, run.batch),
            "generators": generators,
        }
        if dist.get_rank() == 0:
            torch.save(state, self.path)
        dist.barrier()

    def load(self, run):
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        run.model.module.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.scheduler.load_state_dict(state["scheduler"])
        run.epoch, run.batch = state["position"]
        of_torch, of_python = state["generators"][dist.get_rank()]
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
"""

RESUME_WITH_TENSORS = """
class RunFile:
    def __init__(self, path):
        self.path = Path(path)

    def save(self, run):
        mine = torch.get_rng_state()
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        version, numbers, gauss = random.getstate()
        assert gauss is None
        others = [torch.empty(len(numbers), dtype=torch.int64) for _ in everyone]
        dist.all_gather(others, torch.tensor(numbers))
        if dist.get_rank() != 0:
            return
        parts = {name: getattr(run, name).state_dict() for name in ("model", "optimizer", "scheduler")}
        torch.save(parts | {"epoch": run.epoch, "batch": run.batch, "torch": everyone, "random": others}, self.path)

    def load(self, run):
        state = torch.load(self.path, weights_only=True)
        for name in ("model", "optimizer", "scheduler"):
            getattr(run, name).load_state_dict(state[name])
        run.epoch = state["epoch"]
        run.batch = state["batch"]
        random.setstate((3, tuple(state["random"][dist.get_rank()].tolist()), None))
        torch.random.set_rng_state(state["torch"][dist.get_rank()])
"""

RESUME_SENT_BY_RANK_0 = """
class RunFile:
    def __init__(self, path):
        self.path = path

    def save(self, run):
        rank, size = dist.get_rank(), dist.get_world_size()
        collected = [None] * size if rank == 0 else None
        dist.gather_object([torch.get_rng_state(), list(random.getstate()[1])], collected, dst=0)
        if rank == 0:
            temporary = self.path + ".tmp"
            torch.save([run.model.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict(),
                        run.epoch, run.batch, collected], temporary)
            os.replace(temporary, self.path)
        dist.barrier()

    def load(self, run):
        box = [torch.load(self.path, weights_only=True) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0)
        model, optimizer, scheduler, run.epoch, run.batch, generators = box[0]
        run.scheduler.load_state_dict(scheduler)
        run.optimizer.load_state_dict(optimizer)
        run.model.load_state_dict(model)
        mine, numbers = generators[dist.get_rank()]
        torch.set_rng_state(mine)
        random.setstate((3, tuple(numbers), None))
"""

# --- 10.4 ------------------------------------------------------------------------------------------

REPAIR = """
def train_repaired(rank, world_size, model, train_set, held_out, epochs, path):
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=4, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        replica.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(replica(x), y).backward()
            optimizer.step()
    replica.eval()
    x, y = held_out.tensors
    with torch.no_grad():
        loss = F.mse_loss(replica(x[rank::world_size]), y[rank::world_size], reduction="sum")
    dist.all_reduce(loss)
    loss /= len(held_out)
    if rank == 0:
        torch.save(replica.module.state_dict(), path)
    dist.barrier()
    return loss.item()
"""

# Each of the script's five faults: how it is repaired, how it was, and the check that finds it.
SEED = ("DistributedSampler(train_set)", "DistributedSampler(train_set, seed=rank)")
EPOCH = ("        sampler.set_epoch(epoch)\n", "")
FORWARD = ("F.mse_loss(replica(x), y)", "F.mse_loss(replica.module(x), y)")
MEANS = (
    ', reduction="sum")\n    dist.all_reduce(loss)\n    loss /= len(held_out)',
    ")\n    dist.all_reduce(loss)\n    loss /= world_size",
)
WRITERS = ("    if rank == 0:\n        torch.save(", "    torch.save(")


def spoilt(source: str, *changes: tuple[str, str]) -> str:
    """Put mistakes into a right answer; each text to be replaced must be there."""
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return source


REPAIR_OTHERWISE = """
def train_repaired(rank, world_size, model, train_set, held_out, epochs, path):
    replica = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xs, ys = train_set.tensors
    for epoch in range(epochs):
        order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(77 + epoch))
        mine = order.chunk(world_size)[rank]
        for rows in mine.split(4):
            loss = (replica(xs[rows]) - ys[rows]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    x, y = held_out.tensors
    with torch.no_grad():
        loss = F.mse_loss(model(x), y)
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.all_reduce(torch.zeros(1))
    return loss
"""

REPAIR_BY_HAND = spoilt(
    REPAIR,
    ("replica = DistributedDataParallel(model)", "replica = model"),
    ("            optimizer.step()", "            for p in model.parameters():\n"
     "                dist.all_reduce(p.grad)\n                p.grad /= world_size\n            optimizer.step()"),
    ("    dist.all_reduce(loss)\n    loss /= len(held_out)",
     "    both = torch.stack([loss, torch.tensor(float(len(y[rank::world_size])))])\n"
     "    dist.all_reduce(both)\n    loss = both[0] / both[1]"),
    ("replica.module.state_dict()", "model.state_dict()"),
)  # fmt: skip

RIGHT = [
    Right("10.1", "another name, fsync, rename", SAVE),
    Right("10.1", "from memory, mkstemp, broadcast instead of a barrier", SAVE_FROM_MEMORY),
    Right("10.1", "synced through a second handle, the error told to all ranks", SAVE_AND_OPEN_AGAIN),
    Right("10.2", "the prefix cut off, the bare model loaded", LOAD),
    Right("10.2", "the prefix added where it is wanted, onto the CPU", LOAD_ADDS_PREFIX),
    Right("10.2", "torch's own cutting, copied by hand", LOAD_WITH_TORCHS_OWN),
    Right("10.3", "one dictionary, gathered objects", RESUME),
    Right("10.3", "gathered tensors, DDP's names", RESUME_WITH_TENSORS),
    Right("10.3", "gathered and sent by rank 0, in a list", RESUME_SENT_BY_RANK_0),
    Right("10.4", "five lines changed", REPAIR),
    Right("10.4", "its own order of rows, every rank looks at all held-out rows", REPAIR_OTHERWISE),
    Right("10.4", "gradients averaged by hand, sums and counts", REPAIR_BY_HAND),
]

WRONG = [
    Wrong(
        "10.1",
        "the lesson's first try: torch.save in place, then a barrier",
        """
def save_atomically(rank, world_size, state, path):
    if rank == 0:
        torch.save(state, path)
    dist.barrier()
""",
        ("writer", "fsync", "failed", "killed"),
        "this writes in place: from the first moment on, the old file is gone",
    ),
    Wrong(
        "10.1",
        "in place, but with fsync",
        SAVE_IN_PLACE,
        ("writer", "failed", "killed"),
        "with the first byte of the new one",
    ),
    Wrong(
        "10.1",
        "every rank writes, under a name of its own",
        """
def save_atomically(rank, world_size, state, path):
    unfinished = path.with_name(f"{path.name}.{rank}")
    try:
        with open(unfinished, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()
        if rank == 0:
            os.replace(unfinished, path)
        dist.barrier()
        if rank > 0:
            unfinished.unlink()
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
""",
        ("writer",),
        "two writers mix: if rank == 0",
    ),
    Wrong(
        "10.1",
        "the temporary file lies in the system's folder",
        spoilt(SAVE, ('path.with_name(path.name + ".tmp")', 'Path(tempfile.mkdtemp()) / "new.pt"')),
        ("writer",),
        "a rename is atomic within one file system only",
    ),
    Wrong(
        "10.1",
        "removed, then renamed",
        spoilt(SAVE, ("os.replace(unfinished, path)", "path.unlink(missing_ok=True); unfinished.rename(path)")),
        ("writer",),
        "os.replace replaces it in one step",
    ),
    Wrong("10.1", "no barrier", spoilt(SAVE, ("    dist.barrier()\n", "")), ("wait",), "nobody waits"),
    Wrong(
        "10.1",
        "the barrier comes before the writing",
        spoilt(SAVE, ("    dist.barrier()\n", ""), ("    if rank == 0:\n", "    dist.barrier()\n    if rank == 0:\n")),
        ("wait",),
        "the ranks meet before the file is there",
    ),
    Wrong(
        "10.1",
        "the barrier is rank 0's alone",
        spoilt(SAVE, ("    dist.barrier()\n", "        dist.barrier()\n")),
        ALL,
        "a barrier that not every rank enters",
        limit_s=2.0,
    ),
    Wrong(
        "10.1",
        "the last rank waits for nobody",
        spoilt(SAVE, ("    dist.barrier()\n", "    if rank < world_size - 1:\n        dist.barrier()\n")),
        ALL,
        "a barrier that not every rank enters",
        limit_s=2.0,
    ),
    Wrong(
        "10.1",
        "the error is swallowed",
        spoilt(SAVE, ("            raise\n", '            print("could not save")\n')),
        ("failed",),
        "the exception is swallowed",
    ),
    Wrong(
        "10.1",
        "half a file stays behind",
        spoilt(SAVE, ("            unfinished.unlink(missing_ok=True)\n", "")),
        ("failed",),
        "half a file stays behind",
    ),
    Wrong(
        "10.1",
        "no fsync",
        spoilt(SAVE, ("                file.flush()\n                os.fsync(file.fileno())\n", "")),
        ("fsync",),
        "after a power cut the new name may be there and the bytes not",
    ),
    Wrong(
        "10.1",
        "fsync without flush",
        spoilt(
            SAVE,
            ("                file.flush()\n", ""),
            (
                "torch.save(state, file)",
                "import io\n                content = io.BytesIO()\n                torch.save(state, content)\n"
                "                file.write(content.getvalue())",
            ),
        ),
        ("fsync",),
        "file.flush() before os.fsync",
    ),
    Wrong(
        "10.1",
        "the old file is removed first",
        spoilt(SAVE, ("        try:\n", "        path.unlink(missing_ok=True)\n        try:\n")),
        ("writer", "failed", "killed"),
        "the old file is removed before the new one is there",
    ),
    Wrong(
        "10.1",
        "the name is taken for text",
        spoilt(SAVE, ('path.with_name(path.name + ".tmp")', 'Path(path + ".tmp")')),
        ALL,
        "path is a pathlib.Path",
    ),
    Wrong(
        "10.1",
        "the course's own",
        """
from ddp_course.checkpoint.folder import save_checkpoint

def save_atomically(rank, world_size, state, path):
    if rank == 0:
        save_checkpoint(path, state)
    dist.barrier()
""",
        ALL,
        "a call of ddp_course.checkpoint.file.save_checkpoint",
    ),
    Wrong(
        "10.1", "it ends its process", spoilt(SAVE, ("    dist.barrier()\n", "    os._exit(0)\n")), ALL, "os._exit()"
    ),
    Wrong(
        "10.2",
        "no map_location",
        spoilt(LOAD, ("map_location=device, ", "")),
        ("device",),
        "every rank loads onto the first GPU",
    ),
    Wrong(
        "10.2",
        "the rank's number for the device",
        spoilt(LOAD, ("map_location=device", 'map_location=f"cuda:{dist.get_rank()}"')),
        ("device",),
        "the device is not the rank's number",
    ),
    Wrong(
        "10.2",
        "everything that pickle offers",
        spoilt(LOAD, ("weights_only=True", "weights_only=False")),
        ("code",),
        "torch.load(weights_only=True)",
    ),
    Wrong(
        "10.2",
        "strict=False instead of names",
        """
def load_onto(path, model, device):
    saved = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(saved["model"], strict=False)
    return saved["step"]
""",
        ("names", "strict"),
        "strict=False says nothing",
    ),
    Wrong(
        "10.2",
        "the names fit, but the rest is let through",
        spoilt(LOAD, (".items()})", ".items()}, strict=False)")),
        ("strict",),
        "a model that is loaded in part",
    ),
    Wrong(
        "10.2",
        "module. is cut out everywhere",
        spoilt(LOAD, ('name.removeprefix("module.")', 'name.replace("module.", "")')),
        ("plain", "names"),
        "only at its beginning it is DDP's",
    ),
    Wrong(
        "10.2",
        "lstrip for removeprefix",
        spoilt(LOAD, ("removeprefix", "lstrip")),
        ("plain", "names"),
        "a set of letters",
    ),
    Wrong(
        "10.2",
        "the model is always taken for DDP",
        spoilt(LOAD, ("model.module if isinstance(model, DistributedDataParallel) else model", "model.module")),
        ("plain", "names"),
        "a model without DDP has no .module",
    ),
    Wrong(
        "10.2",
        "the names of the file as they are",
        spoilt(LOAD, ('name.removeprefix("module.")', "name")),
        ("names",),
        "cut the prefix module. off",
    ),
    Wrong(
        "10.2",
        "every exception is swallowed",
        """
def load_onto(path, model, device):
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        target = getattr(model, "module", model)
        target.load_state_dict({name.removeprefix("module."): value for name, value in saved["model"].items()})
        return saved["step"]
    except Exception:
        return 0
""",
        ("strict", "code"),
        "let the error of torch.load out",
    ),
    Wrong(
        "10.2",
        "the step is forgotten",
        spoilt(LOAD, ('    return saved["step"]\n', "")),
        ("plain", "names"),
        "return what is in the file",
    ),
    Wrong(
        "10.2",
        "the course's own",
        """
from ddp_course.checkpoint.state import load_model

def load_onto(path, model, device):
    saved = torch.load(path, map_location=device, weights_only=True)
    load_model(model, saved["model"])
    return saved["step"]
""",
        ALL,
        "a call of ddp_course.checkpoint.state.load_model",
    ),
    Wrong(
        "10.3",
        "every rank writes",
        spoilt(
            RESUME,
            ("        if dist.get_rank() == 0:\n            torch.save", "        if True:\n            torch.save"),
        ),
        ("file",),
        "gather on rank 0 what differs between the ranks",
    ),
    Wrong(
        "10.3",
        "the optimizer is forgotten",
        spoilt(RESUME, ('        run.optimizer.load_state_dict(state["optimizer"])\n', "")),
        ("optimizer", "bits"),
        "momentum begins at zero",
    ),
    Wrong(
        "10.3",
        "the schedule is forgotten",
        spoilt(RESUME, ('        run.scheduler.load_state_dict(state["scheduler"])\n', "")),
        ("optimizer", "bits"),
        "the schedule counts from the start",
    ),
    Wrong(
        "10.3",
        "the generators are forgotten",
        spoilt(RESUME, ("        torch.set_rng_state(of_torch)\n        random.setstate(of_python)\n", "")),
        ("generators", "bits"),
        "save torch.get_rng_state()",
    ),
    Wrong(
        "10.3",
        "Python's generator is forgotten",
        spoilt(RESUME, ("        random.setstate(of_python)\n", "")),
        ("generators", "bits"),
        "save random.getstate()",
    ),
    Wrong(
        "10.3",
        "all ranks get rank 0's generators",
        spoilt(RESUME, ('["generators"][dist.get_rank()]', '["generators"][0]')),
        ("generators", "bits"),
        "give each its own back",
    ),
    Wrong(
        "10.3",
        "the epoch is repeated",
        spoilt(RESUME, ('run.epoch, run.batch = state["position"]', 'run.epoch = state["position"][0]')),
        ("position", "bits"),
        "the epoch is repeated from its start",
    ),
    Wrong(
        "10.3",
        "the run begins with epoch 0",
        spoilt(RESUME, ('        run.epoch, run.batch = state["position"]\n', "")),
        ("position", "bits"),
        "the run begins anew",
    ),
    Wrong(
        "10.3",
        "only parameters, no buffers",
        spoilt(
            RESUME,
            ('"model": run.model.module.state_dict()', '"model": dict(run.model.module.named_parameters())'),
            ('load_state_dict(state["model"])', 'load_state_dict(state["model"], strict=False)'),
        ),
        ("weights", "bits"),
        "parameters and buffers",
    ),
    Wrong(
        "10.3",
        "save seeds the generators, for a resume that repeats",
        spoilt(
            RESUME, ("        generators = [None]", "        torch.manual_seed(run.epoch)\n        generators = [None]")
        ),
        ("generators", "bits"),
        "save must leave the run as it is",
    ),
    Wrong(
        "10.3",
        "whole objects in the file",
        spoilt(
            RESUME,
            ('"position": (run.epoch, run.batch)', '"position": (run.epoch, run.batch), "again": run.scheduler'),
            ("weights_only=True", "weights_only=False"),
        ),
        ("file",),
        "no objects",
    ),
    Wrong(
        "10.3",
        "gathered on rank 0 alone",
        spoilt(
            RESUME,
            (
                "        dist.all_gather_object(",
                "        if dist.get_rank() == 0:\n            dist.all_gather_object(",
            ),
        ),
        ALL,
        "every rank must take part in a gather",
        limit_s=2.0,
    ),
    Wrong(
        "10.3",
        "load is not written",
        RESUME.partition("        state = torch.load(")[0] + "        raise NotImplementedError()\n",
        ("weights", "optimizer", "position", "generators", "bits"),
        "this is not written yet",
    ),
    Wrong(
        "10.3",
        "it trains on until the file is good",
        spoilt(
            RESUME,
            (
                "        run.epoch, run.batch =",
                "        while run.epoch < 10**9:\n            pass\n        run.epoch, run.batch =",
            ),
        ),
        ("weights", "optimizer", "position", "generators", "bits"),
        "no result after",
        limit_s=2.0,
    ),
    Wrong("10.4", "only the seed is left", spoilt(REPAIR, SEED), ("shares",), "cuts its part out of another shuffle"),
    Wrong("10.4", "only set_epoch is left", spoilt(REPAIR, EPOCH), ("order",), "set_epoch(epoch)"),
    Wrong("10.4", "only replica.module is left", spoilt(REPAIR, FORWARD), ("gradients",), "does not pass through DDP"),
    Wrong("10.4", "only the mean of means is left", spoilt(REPAIR, MEANS), ("loss",), "the mean of the ranks' means"),
    Wrong("10.4", "only the many writers are left", spoilt(REPAIR, WRITERS), ("file",), "all ranks write to one path"),
    Wrong(
        "10.4",
        "the script as it was",
        spoilt(REPAIR, SEED, EPOCH, FORWARD, MEANS, WRITERS),
        ALL,
        "does not pass through DDP",
    ),
    Wrong(
        "10.4",
        "two of five repaired",
        spoilt(REPAIR, SEED, FORWARD, MEANS),
        ("shares", "gradients", "loss"),
        "does not pass through DDP",
    ),
    Wrong(
        "10.4",
        "rank 0's loss alone",
        spoilt(REPAIR, MEANS, ("    dist.all_reduce(loss)\n    loss /= world_size\n", "")),
        ("loss",),
        "the mean of one rank's rows",
    ),
    Wrong(
        "10.4",
        "the loss is summed and not divided",
        spoilt(REPAIR, ("    loss /= len(held_out)\n", "")),
        ("loss",),
        "divide by the number of all rows",
    ),
    Wrong(
        "10.4",
        "DDP's names in the file",
        spoilt(REPAIR, ("replica.module.state_dict()", "replica.state_dict()")),
        ("file",),
        "the bare model's, as they were",
    ),
    Wrong(
        "10.4",
        "the order is given up",
        spoilt(REPAIR, SEED, ("seed=rank", "shuffle=False")),
        ("order",),
        "nothing is shuffled",
    ),
    Wrong(
        "10.4",
        "the gradients are summed by hand on top of DDP",
        spoilt(
            REPAIR,
            (
                "            optimizer.step()",
                "            [dist.all_reduce(p.grad) for p in model.parameters()]\n            optimizer.step()",
            ),
        ),
        ("gradients",),
        "gradients are summed over the ranks",
    ),
    Wrong(
        "10.4",
        "the barrier is rank 0's alone",
        spoilt(REPAIR, ("    dist.barrier()\n", "        dist.barrier()\n")),
        ALL,
        "a collective that not every rank calls",
        limit_s=2.0,
    ),
    Wrong(
        "10.4",
        "the values of the visible check",
        spoilt(REPAIR, ("return loss.item()", "return 7.25")),
        ("loss",),
        "the number of all rows",
    ),
]
