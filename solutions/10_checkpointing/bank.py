"""The answer bank of lesson 10: right answers written differently, and wrong ones that people really give.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import Right, right, wrong
from tests.grading.bank import wrong as strangers
from tests.grading.submissions import solutions

IMPORTS = """
import os
import random
import tempfile
from pathlib import Path
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
"""

SAVE, LOAD, RESUME = solutions("10").values()

# --- 10.1 ------------------------------------------------------------------------------------------

SAVE_RIGHT = r"""
from memory, mkstemp, broadcast instead of a barrier
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
synced through a second handle, the error told to all ranks
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
                outcome, first = [repr(error)], error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[0]:
            raise OSError(outcome[0]) from (first if rank == 0 else None)
a functional all_reduce instead of a barrier
    dist.barrier() => funcol.wait_tensor(funcol.all_reduce(torch.zeros(1), "sum", dist.group.WORLD))
"""

SAVE_WRONG = r"""
the lesson's first try: torch.save in place, then a barrier | writer fsync failed killed
| this writes in place: from the first moment on, the old file is gone
    def save_atomically(rank, world_size, state, path):
        if rank == 0:
            torch.save(state, path)
        dist.barrier()
in place, but with fsync | writer failed killed | with the first byte of the new one
    with open(unfinished, => with open(path,
                os.replace(unfinished, path)\n =>
every rank writes, under a name of its own | writer | two writers mix: if rank == 0
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
the temporary file lies in the system's folder | writer | a rename is atomic within one file system only
    path.with_name(f".{path.name}.unfinished") => Path(tempfile.mkdtemp()) / "new.pt"
removed, then renamed | writer | os.replace replaces it in one step
    os.replace(unfinished, path) => path.unlink(missing_ok=True); unfinished.rename(path)
no barrier | wait | nobody waits
        dist.barrier()\n =>
the barrier comes before the writing | wait | the ranks meet before the file is there
        dist.barrier()\n =>
        if rank == 0:\n =>     dist.barrier()\n    if rank == 0:\n
the barrier is rank 0's alone | all | a barrier that not every rank enters | 2
        dist.barrier()\n =>         dist.barrier()\n
the last rank waits for nobody | all | a barrier that not every rank enters | 2
        dist.barrier()\n =>     if rank < world_size - 1:\n        dist.barrier()\n
the error is swallowed | failed | the exception is swallowed
                raise\n =>             print("could not save")\n
another error is raised, which hides the first | failed | let the exception out as it is
                raise\n =>             raise OSError("nothing was saved") from None\n
only a full disk is foreseen, not a state that torch refuses | failed | half a file stays behind
    except BaseException => except OSError
half a file stays behind | failed | half a file stays behind
                unfinished.unlink(missing_ok=True)\n =>
no fsync | fsync | after a power cut the new name may be there and the bytes not
                    file.flush()\n                os.fsync(file.fileno())\n =>
fsync without flush | fsync | file.flush() before os.fsync
                    file.flush()\n =>
    torch.save(state, file) => import io
                    content = io.BytesIO()
                    torch.save(state, content)
                    file.write(content.getvalue())
the old file is removed first | writer failed killed | the old file is removed before the new one is there
            try:\n =>         path.unlink(missing_ok=True)\n        try:\n
the name is taken for text | all | path is a pathlib.Path
    path.with_name(f".{path.name}.unfinished") => Path(path + ".tmp")
the course's own | all | a call of ddp_course.checkpoint.file.save_checkpoint
    from ddp_course.checkpoint.folder import save_checkpoint

    def save_atomically(rank, world_size, state, path):
        if rank == 0:
            save_checkpoint(path, state)
        dist.barrier()
it ends its process | all | os._exit()
        dist.barrier()\n =>     os._exit(0)\n
"""

# --- 10.2 ------------------------------------------------------------------------------------------

LOAD_RIGHT = r"""
the prefix added where it is wanted, onto the CPU
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
torch's own cutting, copied by hand
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

LOAD_WRONG = r"""
no map_location | device | every rank loads onto the first GPU
    map_location=device,  =>
the rank's number for the device | device | the device is not the rank's number
    map_location=device => map_location=f"cuda:{dist.get_rank()}"
everything that pickle offers | code | torch.load(weights_only=True)
    weights_only=True => weights_only=False
strict=False instead of names | names strict | strict=False says nothing
    def load_onto(path, model, device):
        saved = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"], strict=False)
        return saved["step"]
the names fit, but the rest is let through | strict | a model that is loaded in part
    .items()}) => .items()}, strict=False)
names are counted, not compared | strict | a model that is loaded in part
    .items()}) => .items()}, strict=len(saved["model"]) != len(bare.state_dict()))
the names of parameters are compared, not those of buffers | strict | a model that is loaded in part
    bare.load_state_dict({name.removeprefix("module."): value for name, value in saved["model"].items()}) => new = {
            name.removeprefix("module."): value for name, value in saved["model"].items()}
        if bare.load_state_dict(new, strict=False).unexpected_keys or dict(bare.named_parameters()).keys() - new.keys():
            raise KeyError("other names")
letters of the prefix are cut off the model's names, too | strict | a model that is loaded in part
    def load_onto(path, model, device):
        saved = torch.load(path, map_location=device, weights_only=True)
        own, new = ({n.lstrip("module."): v for n, v in s.items()} for s in (model.state_dict(), saved["model"]))
        assert own.keys() == new.keys()
        for name in own:
            own[name].copy_(new[name])
        return saved["step"]
the model goes to the CPU | plain names | the model is on its device already
    return saved => bare.cpu()\n    return saved
module. is cut out everywhere | plain names | only at its beginning it is DDP's
    name.removeprefix("module.") => name.replace("module.", "")
lstrip for removeprefix | plain names | a set of letters
    removeprefix => lstrip
the model is always taken for DDP | plain names | a model without DDP has no .module
    model.module if isinstance(model, DistributedDataParallel) else model => model.module
the names of the file as they are | names | cut the prefix module. off
    name.removeprefix("module.") => name
every exception is swallowed | strict code | let the error of torch.load out
    def load_onto(path, model, device):
        try:
            saved = torch.load(path, map_location=device, weights_only=True)
            target = getattr(model, "module", model)
            target.load_state_dict({name.removeprefix("module."): value for name, value in saved["model"].items()})
            return saved["step"]
        except Exception:
            return 0
the step is forgotten | plain names | return what is in the file
        return saved["step"]\n =>
the course's own | all | a call of ddp_course.checkpoint.state.load_model
    from ddp_course.checkpoint.state import load_model

    def load_onto(path, model, device):
        saved = torch.load(path, map_location=device, weights_only=True)
        load_model(model, saved["model"])
        return saved["step"]
"""

# --- 10.3 ------------------------------------------------------------------------------------------

RESUME_RIGHT = r"""
the bare model's names
    state.update( => state.update(model=run.model.module.state_dict(), 
    getattr(run, part).load => (run.model.module if part == "model" else getattr(run, part)).load
gathered and sent by rank 0, in a list
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

RESUME_TENSORS = """
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

RESUME_TENSORS_RIGHT = r"""
gathered into one tensor each
    [torch.empty_like(mine) for _ in range(dist.get_world_size())] => mine.repeat(dist.get_world_size(), 1)
    dist.all_gather(everyone, mine) => dist.all_gather_into_tensor(everyone, mine[None])
    [torch.empty(len(numbers), dtype=torch.int64) for _ in everyone] => torch.empty(len(everyone), len(numbers)).long()
    dist.all_gather(others, torch.tensor(numbers)) => dist.all_gather_into_tensor(others, torch.tensor([numbers]))
    state["torch"][dist.get_rank()] => state["torch"][dist.get_rank()].clone()
gathered by functional collectives
    [torch.empty_like(mine) for _ in range(dist.get_world_size())] => mine[None]
    dist.all_gather(everyone, mine) => everyone = funcol.all_gather_tensor(everyone, 0, dist.group.WORLD).clone()
    [torch.empty(len(numbers), dtype=torch.int64) for _ in everyone] => torch.tensor([numbers])
    dist.all_gather(others, torch.tensor(numbers)) => others = funcol.all_gather_tensor(others, 0, dist.group.WORLD)
    "random": others => "random": others.clone()
    state["torch"][dist.get_rank()] => state["torch"][dist.get_rank()].clone()
gathered by coalesced calls
            dist.all_gather(everyone, mine)\n =>
    [torch.empty_like(mine) for _ in range(dist.get_world_size())] => mine.repeat(dist.get_world_size(), 1).long()
    [torch.empty(len(numbers), dtype=torch.int64) for _ in everyone] => torch.empty(len(everyone), len(numbers)).long()
    dist.all_gather(others, torch.tensor(numbers)) => with dist._coalescing_manager():
                dist.all_gather_into_tensor(everyone, mine.long()[None])
                dist.all_gather_into_tensor(others, torch.tensor([numbers]))
    "torch": everyone => "torch": everyone.byte()
    state["torch"][dist.get_rank()] => state["torch"][dist.get_rank()].clone()
"""

RESUME_WRONG = r"""
every rank writes | file | gather on rank 0 what differs between the ranks
            if dist.get_rank() == 0:\n            torch.save =>         if True:\n            torch.save
the optimizer is forgotten | optimizer bits | momentum begins at zero
    ("model", "optimizer", "scheduler"):\n => ("model", "scheduler"):\n
the schedule is forgotten | optimizer bits | the schedule counts from the start
    ("model", "optimizer", "scheduler"):\n => ("model", "optimizer"):\n
the generators are forgotten | generators bits | save torch.get_rng_state()
            torch.set_rng_state(of_torch)\n        random.setstate(of_python)\n =>
Python's generator is forgotten | generators bits | save random.getstate()
            random.setstate(of_python)\n =>
all ranks get rank 0's generators | generators bits | give each its own back
    ["generators"][dist.get_rank()] => ["generators"][0]
the epoch is repeated | position bits | the epoch is repeated from its start
    run.epoch, run.batch = state["epoch"], state["batch"] => run.epoch = state["epoch"]
the run begins with epoch 0 | position bits | the run begins again
            run.epoch, run.batch = state["epoch"], state["batch"]\n =>
only parameters, no buffers | weights bits | parameters and buffers
    state.update( => state.update(model=dict(run.model.named_parameters()), 
    getattr(run, part).load_state_dict(state[part]) => strict = {"strict": False} if part == "model" else {}
                getattr(run, part).load_state_dict(state[part], **strict)
save seeds the generators, for a resume that repeats | generators bits | save must leave the run as it is
            generators = [None] =>         torch.manual_seed(run.epoch)\n        generators = [None]
whole objects in the file | file | no objects
    state.update( => state.update(again=run.scheduler, 
    weights_only=True => weights_only=False
gathered on rank 0 alone | all | every rank must take part in a gather | 2
            dist.all_gather_object( =>         if dist.get_rank() == 0:\n            dist.all_gather_object(
load is not written | weights optimizer position generators bits | this is not written yet
            state = torch.load( =>         raise NotImplementedError()\n        state = torch.load(
it trains on until the file is good | weights optimizer position generators bits | no result after | 2
            run.epoch, run.batch = =>         while run.epoch < 10**9:
                pass
            run.epoch, run.batch =
"""

RIGHT = [
    *right("10.1", SAVE, SAVE_RIGHT),
    *right("10.2", LOAD, LOAD_RIGHT),
    *right("10.3", RESUME, RESUME_RIGHT),
    Right("10.3", "gathered tensors, DDP's names", RESUME_TENSORS),
    *right("10.3", RESUME_TENSORS, RESUME_TENSORS_RIGHT),
]
WRONG = [
    *wrong("10.1", SAVE, SAVE_WRONG),
    *wrong("10.2", LOAD, LOAD_WRONG),
    *wrong("10.3", RESUME, RESUME_WRONG),
]

# --- From strangers, who had seen the texts alone -------------------------------------------------

WRONG += strangers(
    "10.2",
    "",
    r"""
moves the model to the device | plain names | the model is on its device already
    def load_onto(path, model, device):
        file = torch.load(path, map_location="cpu", weights_only=True)
        state = {name.removeprefix("module."): tensor for name, tensor in file["model"].items()}
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        bare.load_state_dict(state)
        model.to(device)
        return file["step"]
""",
)
