"""What goes wrong in silence: nothing stops, the loss falls, and the result is worse or later than it should be?

Eight faults are an edit of a healthy program (old text, new text), and `ddp-course rehearse` finds them. Two it cannot
see, because its ranks have no GPUs and one thread each. They have a few lines of their own, and the property that is
wrong is compared over the ranks.

Left out on purpose: what a full GPU costs, and how much slower too many threads are.
Read next: `rehearsed.py`, the program; lesson 13, which compares ranks with one process.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch.serialization import skip_data

from ddp_course.diagnose.faults.fault import Diagnosis, Fault, watch
from ddp_course.diagnose.faults.rehearsed import HEALTHY, edited
from ddp_course.groups import usable_cores


def _loaded(onto_own: bool) -> Callable:
    """Load a file that was saved from GPU 0. Its tensors are torch's fake ones: they have a device, and no memory."""

    def program(rank, world_size):
        own, file = f"cuda:{rank}", io.BytesIO()
        # Where there is a GPU, torch would start each device that a fake tensor names, and there may be too few.
        no_start = mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None)
        with no_start, fake_tensor.FakeTensorMode(), skip_data(materialize_fake_tensors=True):
            torch.save({"weight": torch.ones(3, device="cuda:0")}, file)
            file.seek(0)
            state = torch.load(file, map_location=own if onto_own else None, weights_only=True)
        return own, str(state["weight"].device)

    return program


def _on_own_device(found: list[tuple[str, str]]) -> Diagnosis:
    astray = [rank for rank, (own, device) in enumerate(found) if own != device]
    said = "; ".join(f"rank {rank} has {own}, its weights lie on {device}" for rank, (own, device) in enumerate(found))
    return Diagnosis("all-on-gpu-0" if astray else None, astray[0] if astray else None, f"{said} (fake tensors)")


def load_where_it_was_saved() -> Diagnosis:
    return watch(_loaded(False), world_size=2, check=_on_own_device)


def load_onto_own_gpu() -> Diagnosis:
    return watch(_loaded(True), world_size=2, check=_on_own_device)


def _computing(threads: Callable[[int], int]) -> Callable:
    def program(rank, world_size):
        torch.set_num_threads(threads(world_size))
        return torch.get_num_threads()

    return program


def _fit_on_cores(threads: list[int]) -> Diagnosis:
    """One thread a rank is the least there is, and never a fault."""
    cores = usable_cores()
    said = f"{len(threads)} ranks compute with {sum(threads)} threads, and have {cores} cores"
    return Diagnosis("too-many-threads" if sum(threads) > cores and max(threads) > 1 else None, None, said)


def take_all_cores_on_every_rank() -> Diagnosis:
    every = max(2, usable_cores())  # what torch does by itself in a process alone
    return watch(_computing(lambda world_size: every), world_size=2, check=_fit_on_cores)


def take_a_share_of_the_cores() -> Diagnosis:
    share = _computing(lambda world_size: max(1, usable_cores() // world_size))
    return watch(share, world_size=2, check=_fit_on_cores)


FAULTS = (
    Fault(
        name="missing-sampler",
        title="Every rank trains on all rows",
        symptom="With W ranks an epoch takes as long as with one. The loss falls as usual.",
        cause="The loader has no DistributedSampler, so each rank draws every row. With one seed the ranks even draw "
        "the same batches, and their averaged gradient is the one that each had by itself.",
        cure="Give the loader a DistributedSampler, and leave shuffle out: the sampler shuffles.",
        met_at="https://github.com/innnky/so-vits-svc/issues/70",
        provoke=edited(("batch_size=8, sampler=sampler", "batch_size=8, shuffle=True")),
        fix=HEALTHY,
    ),
    Fault(
        name="missing-set-epoch",
        title="Every epoch has the same order",
        symptom="None in the first epoch. Later the loss repeats its bumps at the same steps, and the model may end "
        "a little worse.",
        cause="DistributedSampler shuffles by seed and epoch. It is not told the epoch, so it shuffles as in epoch 0.",
        cure="Call sampler.set_epoch(epoch) before each epoch, on every rank.",
        met_at="https://github.com/pytorch/pytorch/issues/31771",
        provoke=edited(("        sampler.set_epoch(epoch)\n", "")),
        fix=HEALTHY,
    ),
    Fault(
        name="padded-evaluation",
        title="The evaluation counts some rows twice",
        symptom="The accuracy changes a little with the number of ranks, though the model is the same.",
        cause="DistributedSampler makes all shards equally long by repeating rows, or with drop_last by leaving some "
        "out. In training that does no harm; here these rows count double, or not at all.",
        cure="Give each rank an exact shard, also if one is a row longer, and evaluate the bare model: DDP's forward "
        "would wait for a rank that has no batch left.",
        met_at="https://github.com/pytorch/pytorch/issues/25162",
        provoke=edited(
            (
                "DataLoader(Subset(test, range(rank, len(test), world_size)), batch_size=16)",
                "DataLoader(test, batch_size=16, sampler=DistributedSampler(test, shuffle=False))",
            )
        ),
        fix=HEALTHY,
    ),
    Fault(
        name="mean-of-means",
        title="The loss is the mean of the ranks' means",
        symptom="The reported loss is near the true one, and changes with the number of ranks and the batch size.",
        cause="Each rank, or each batch, counts the same, whether it has many rows or few.",
        cure="Add up sums and counts over the ranks, and divide once, at the end.",
        met_at="https://github.com/pytorch/torchtitan/pull/4167",
        provoke=edited(
            ("both = torch.tensor([loss_sum, count])", "mean = torch.tensor(loss_sum / count)"),
            ("dist.all_reduce(both)", "dist.all_reduce(mean)"),
            ("(both[0] / both[1]).item()", "mean.item() / dist.get_world_size()"),
        ),
        fix=HEALTHY,
    ),
    Fault(
        name="several-writers",
        title="Several ranks write the same checkpoint",
        symptom="None while training. Now and then a checkpoint cannot be read, or it reads and the model is bad.",
        cause="Every rank saves, or the first one of each host does, into the same file at the same time. Each cuts "
        "the file to nothing when it opens it, and writes over what the other has written.",
        cure="Let global rank 0 write, under another name, and rename the file when it is whole: `Checkpointer` does. "
        "The others wait before they read.",
        met_at="https://github.com/NVIDIA/apex/issues/886",
        provoke=edited(("    if rank == 0:\n        torch.save(", "    torch.save(")),
        fix=HEALTHY,
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
        provoke=edited(
            ("torch.save(model.state_dict()", "torch.save(replica.state_dict()"),  # names such as module.0.weight
            ("weights_only=True))", "weights_only=True), strict=False)"),  # "it complained about some keys"
        ),
        fix=HEALTHY,
    ),
    Fault(
        name="too-many-threads",
        title="Every rank takes all cores",
        symptom="Two ranks on one host are slower than one. All cores are busy, and much of it is waiting.",
        cause="torch computes with one thread for each core. W ranks on a host then have W times as many threads as "
        "there are cores, and the threads of an operation wait for the one that was put aside.",
        cure="torch.set_num_threads(cores // ranks on this host), or OMP_NUM_THREADS before the ranks start. torchrun "
        "sets it to 1 when nobody has.",
        met_at="https://github.com/pytorch/pytorch/issues/22260",
        provoke=take_all_cores_on_every_rank,
        fix=take_a_share_of_the_cores,
    ),
    Fault(
        name="batchnorm-drift",
        title="BatchNorm follows each rank's own rows",
        symptom="The ranks disagree about the accuracy of what should be one model, and it is lower with small local "
        "batches.",
        cause="A plain BatchNorm takes mean and variance of the local batch. DDP copies rank 0's running statistics to "
        "all before each forward pass, so the file holds those of 1/W of the rows, and after the last step each rank "
        "has its own.",
        cure="Convert the model to SyncBatchNorm before DDP wraps it. Where local batches are large, plain BatchNorm "
        "may stay: then share the statistics before evaluating.",
        met_at="https://github.com/pytorch/pytorch/issues/13711",
        provoke=edited(("SyncBatchNorm.convert(make_model())", "make_model()")),
        fix=HEALTHY,
    ),
    Fault(
        name="lr-not-scaled",
        title="More ranks, the same learning rate",
        symptom="Each epoch is faster, and learns less: after as many epochs the loss is higher than one process had.",
        cause="With the same local batch, W ranks have W times the global batch and take 1/W of the steps. The "
        "averaged gradient is not larger, only less noisy. At the same rate the weights come about 1/W as far.",
        cure="As a rule of thumb W times the rate, for SGD, with a warm-up, and not without end: from some batch on it "
        "fails, and for Adam many take the square root. Or keep the global batch. Either way compare with the "
        "reference.",
        met_at="https://github.com/Lightning-AI/pytorch-lightning/issues/3706",
        provoke=edited(("lr=0.05 * world_size", "lr=0.05")),
        fix=HEALTHY,
    ),
)
