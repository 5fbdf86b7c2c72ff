"""What goes wrong, in silence, between the ranks and a checkpoint?

A checkpoint is a file that all ranks share. Written by several, it may be a mixture that loads without an error.
Read without a word about where to, it puts every rank's tensors onto the GPU of the rank that wrote it. And a model
that was wrapped when it was saved has other names than one that is not.

Two of these programs need GPUs. Where there are too few, they use torch's fake tensors, which have a shape and a
device and no memory. torch's own code then decides where each tensor goes, as on GPUs. What such a run cannot show
is what it costs: GPU 0 runs out of memory, or its work slows down for all.

Read next: `silent_model.py`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from ddp_course.diagnose.faults.fault import Diagnosis, Fault
from ddp_course.diagnose.faults.tiny_training import build, healthy, train, watch_training
from ddp_course.diagnose.observer import TrainingObserver
from ddp_course.diagnose.training_facts import Finding


def save_on_every_rank() -> Diagnosis:
    def save(replica, path, observer):
        with observer.writing(path):
            torch.save(replica.module.state_dict(), path)

    return watch_training(partial(train, save=save), harm=mixed_file)


def mixed_file(rank: int, world_size: int, folder: Path) -> str:
    """Let ranks 0 and 1 write one file in turns, by halves, and say what it holds in the end.

    In a real run the disk takes turns as it likes; here two barriers decide, so that it comes out the same each time.

    Collective: four barriers.
    """
    path, data = folder / "mixed.pt", io.BytesIO()
    torch.save({"w": torch.full((1000,), float(rank))}, data)
    half = len(data.getvalue()) // 2
    with open(path if rank < 2 else "/dev/null", "wb", buffering=0) as file:
        dist.barrier()
        if rank == 0:
            file.write(data.getvalue()[:half])
        dist.barrier()
        if rank == 1:
            file.write(data.getvalue())
        dist.barrier()
        if rank == 0:
            file.write(data.getvalue()[half:])
    dist.barrier()
    w = torch.load(path, weights_only=True)["w"]
    return (
        f"What it can cost: two ranks wrote one file in turns. It loaded without an error, and of {len(w)} weights "
        f"{int((w == 0).sum())} were rank 0's and {int((w == 1).sum())} were rank 1's."
    )


def load_where_it_was_saved() -> Diagnosis:
    def load(path, own):
        return torch.load(path, weights_only=True)

    return watch_training(partial(save_and_load_on_gpus, load), harm=devices_in_the_file)


def load_onto_own_gpu() -> Diagnosis:
    def load(path, own):
        return torch.load(path, map_location=own, weights_only=True)

    return watch_training(partial(save_and_load_on_gpus, load))


def save_and_load_on_gpus(load: Callable, rank: int, world_size: int, folder: Path) -> list[Finding]:
    """Let rank 0 save a model from its GPU, and an observer look at what `load(path, own device)` gives to each rank.

    Collective: one barrier; `TrainingObserver.look`.
    """
    path, own = folder / "model.pt", f"cuda:{rank}"
    if rank == 0:
        with gpus(world_size), torch.device("cuda:0"):
            torch.save(build().state_dict(), path)
    dist.barrier()
    with gpus(world_size):
        state = load(path, own)
    torch.manual_seed(0)
    model = build()  # it stays on the CPU
    observer = TrainingObserver(model, device=own)
    observer.loaded(state, model)
    return observer.look()


@contextmanager
def gpus(world_size: int) -> Iterator[None]:
    """Within the block, there is a GPU for each rank: the real ones, or fake tensors that have a device."""
    if torch.cuda.device_count() >= world_size:
        yield
        return
    # Where there is a GPU, torch would start each device that a fake tensor names, and there are too few.
    no_start = mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None)
    with no_start, FakeTensorMode(), skip_data(materialize_fake_tensors=True):
        yield


def devices_in(path: Path) -> list[str]:
    """Return the devices from which the tensors of a file were saved. Needs none of them.

    Collective: none.
    """
    seen = set()

    def stay_on_the_cpu(storage, device):
        seen.add(device)
        return storage

    torch.load(path, map_location=stay_on_the_cpu, weights_only=True)
    return sorted(seen)


def devices_in_the_file(rank: int, world_size: int, folder: Path) -> str:
    real = torch.cuda.device_count() >= world_size
    how = "real GPUs" if real else "fake tensors, since there are too few GPUs here: the memory was not seen"
    return f"The file names {', '.join(devices_in(folder / 'model.pt'))}, where it was saved from. Loaded with {how}."


def load_wrapped_names() -> Diagnosis:
    def save(replica, path, observer):
        if dist.get_rank() == 0:
            with observer.writing(path):
                torch.save(replica.state_dict(), path)  # names such as module.0.weight

    def load(path, observer):
        model, state = build(), torch.load(path, map_location="cpu", weights_only=True)
        observer.loaded(state, model)
        model.load_state_dict(state, strict=False)  # "it complained about some keys"

    return watch_training(partial(train, save=save, load=load))


FAULTS = (
    Fault(
        name="several-writers",
        title="Several ranks write the same checkpoint",
        symptom="None while training. Now and then a checkpoint cannot be read, or it reads and the model is bad.",
        cause="Every rank saves, or the first one of each host does, into the same file at the same time. Each cuts "
        "the file to nothing when it opens it, and writes over what the other has written.",
        cure="Let global rank 0 write, under another name, and rename the file when it is whole: `Checkpointer` does. "
        "The others wait before they read.",
        met_at="https://github.com/NVIDIA/apex/issues/886",
        provoke=save_on_every_rank,
        fix=healthy("save"),
    ),
    Fault(
        name="all-on-gpu-0",
        title="Every rank loads the checkpoint onto GPU 0",
        symptom="nvidia-smi lists all processes on GPU 0. It is full before the others, or the resumed run ends there "
        "with an out-of-memory error that the first run did not have.",
        cause="A file of torch.save names the device of each tensor, and rank 0 saved it. torch.load puts them back "
        "there, on every rank.",
        cure='Pass map_location=f"cuda:{local_rank}", or "cpu". And call torch.cuda.set_device before anything else '
        "touches a GPU.",
        met_at="https://github.com/pytorch/pytorch/issues/23138",
        provoke=load_where_it_was_saved,
        fix=load_onto_own_gpu,
    ),
    Fault(
        name="module-prefix",
        title="The saved names begin with module.",
        symptom="With strict=True an error about missing and unexpected keys. With strict=False none, and the model "
        "guesses as if it had never been trained.",
        cause="DDP holds the model under the name `module`, so the wrapper's state has names such as module.0.weight. "
        "The bare model knows none of them.",
        cure="Save replica.module.state_dict(), and load strictly. For a file that exists there is "
        "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present.",
        met_at="https://github.com/pytorch/examples/issues/1029",
        provoke=load_wrapped_names,
        fix=healthy("save"),
    ),
)
