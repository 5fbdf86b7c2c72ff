"""How do ranks share a model that is too deep, and why do they wait?

Each rank holds a stage: some layers in a row. Activations go from stage to stage, gradients come back. With one batch,
a single rank would work at a time. So the batch is cut into micro-batches, and while a stage computes the second, the
next one computes the first. At the beginning and the end stages still stand idle: that is the bubble.

Which pass comes when is the schedule's affair: `schedules.py`. A stage here follows any order. Messages are small, a
layer's activations or their gradients, and go between neighbours only. So slow links will do.

Left out on purpose: several stages on a rank (interleaving), recomputed activations, a backward cut in two.
Read next: `memory.py` and `plan.py`, which strategy fits; torch/distributed/pipelining/schedules.py.
"""

from __future__ import annotations

import copy
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_course.beyond.one_process import Trained, bytes_held, whole_parameters
from ddp_course.beyond.schedules import ORDERS, Pass, bubble, gpipe_order, most_kept, one_f_one_b_order, timetable
from ddp_course.groups import my_device

__all__ = [
    "ORDERS",
    "Pass",
    "Stage",
    "bubble",
    "cut",
    "gpipe_order",
    "most_kept",
    "one_f_one_b_order",
    "timetable",
    "train_steps",
]

TIMEOUT_S = 60.0  # for a message from stage to stage; a new group does not inherit it

# --- Pure: which stage has which layers ------------------------------------------------------------------


def cut(model: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """Cut a model into stages of neighbouring layers, with about as many parameters in each.

    Layers without parameters stay with the layer before them. The names stay those of the whole model.

    Raises:
        ValueError: no Sequential, or fewer layers with parameters than stages.
    """
    if not isinstance(model, nn.Sequential):
        raise ValueError(f"a pipeline cuts an nn.Sequential, found {type(model).__name__}: list its layers in one")
    sizes = {name: sum(p.numel() for p in layer.parameters()) for name, layer in model.named_children()}
    full = [name for name, size in sizes.items() if size]
    if len(full) < stages:
        raise ValueError(f"{stages} stages need as many layers with parameters, found {len(full)}: take fewer ranks")
    starts = starts_of_stages([sizes[name] for name in full], stages)
    first_names = [full[start] for start in starts[1:]]
    parts: list[nn.Sequential] = [nn.Sequential()]
    for name, layer in model.named_children():
        if name in first_names:
            parts.append(nn.Sequential())
        parts[-1].add_module(name, layer)
    return parts


def starts_of_stages(sizes: list[int], stages: int) -> list[int]:
    """Return where each stage starts: as soon as those before it have their share, and with enough left over."""
    starts, before = [0], 0
    for index, size in enumerate(sizes):
        left_over = len(sizes) - index  # each of the stages still to come needs a layer
        due = before + size / 2 >= sum(sizes) * len(starts) / stages
        if index and len(starts) < stages and (due or left_over == stages - len(starts)):
            starts.append(index)
        before += size
    return starts


# --- On ranks ------------------------------------------------------------------------------------------


class Stage:
    """This rank's layers, and what it exchanges with its neighbours.

    Args:
        parts: all stages, as `cut` returns them; this rank trains its own.
        x: one micro-batch. From its shape every rank works out the shape that it will be sent.
        down, up: groups for activations and for gradients; None is the default group. Within a group NCCL carries the
            messages of two ranks one after the other: in 1F1B, neighbours that both send would wait for each other.
    """

    def __init__(
        self, parts: list[nn.Sequential], x: torch.Tensor, down: dist.ProcessGroup | None, up: dist.ProcessGroup | None
    ) -> None:
        self.rank, self.stages, self.down, self.up = dist.get_rank(), len(parts), down, up
        self.layers = parts[self.rank]
        self.is_first, self.is_last = self.rank == 0, self.rank == self.stages - 1
        shape = torch.empty_like(x, device="meta")  # has a shape and no memory
        for part in parts[: self.rank]:
            shape = copy.deepcopy(part).to("meta")(shape)
        self.x_like = shape.detach()
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by micro-batch: input, output
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []  # the tensor must live until it has left

    def forward(self, micro: int, x: torch.Tensor | None, y: torch.Tensor, share: float) -> float:
        """Compute one micro-batch, pass it on, and return its part of the loss on the last stage, else 0.

        Collective: one recv from the stage before, one isend to the stage after; none at the ends.
        """
        if not self.is_first:
            x = torch.empty_like(self.x_like, device=my_device())
            dist.recv(x, self.rank - 1, group=self.down)
            x.requires_grad_()
        output = self.layers(x)
        if self.is_last:
            output = F.cross_entropy(output, y) * share
        else:
            self._send(output.detach(), self.rank + 1, self.down)
        self._kept[micro] = x, output
        return output.item() if self.is_last else 0.0

    def backward(self, micro: int) -> None:
        """Add one micro-batch's gradients, and pass the gradient of its input back.

        Collective: one recv from the stage after, one isend to the stage before; none at the ends.
        """
        x, output = self._kept.pop(micro)
        grad = None
        if not self.is_last:
            grad = torch.empty_like(output)
            dist.recv(grad, self.rank + 1, group=self.up)
        output.backward(grad)
        if not self.is_first:
            self._send(x.grad, self.rank - 1, self.up)

    def _send(self, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        # Not waited for: in 1F1B two neighbours send to each other at the same moment.
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, peer, group=group), tensor))

    def finish(self) -> None:
        """Wait until all has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def train_steps(
    rank: int,
    world_size: int,
    model: nn.Sequential,
    x_NF: torch.Tensor,
    y_N: torch.Tensor,
    steps: int = 5,
    lr: float = 0.01,
    micro_batches: int = 4,
    schedule: str = "gpipe",
    by: str = "course",
) -> Trained:
    """Train a copy of `model` cut into one stage per rank; rank 0 reads the rows, the last rank the classes.

    Args:
        schedule: "gpipe" or "1f1b".
        by: "course" for this file's stages, "torch" for `torch.distributed.pipelining`.
    Raises:
        ValueError: the rows cannot be cut into equal micro-batches, or the model into stages.
    Collective: in each step and for each micro-batch one message from every stage to the next, and one back; at the end
        one broadcast of the losses and one per parameter; every rank.
    """
    if len(x_NF) % micro_batches:
        raise ValueError(
            f"rank {rank}: {len(x_NF)} rows cannot be cut into {micro_batches} equal micro-batches; choose a number "
            "that divides them, for the mean of their losses to be the mean over all rows"
        )
    device = my_device()
    model, x_NF, y_N = copy.deepcopy(model).to(device), x_NF.to(device), y_N.to(device)
    parts = cut(model, world_size)
    optimizer = torch.optim.Adam(parts[rank].parameters(), lr=lr)
    run = (_our_step if by == "course" else _torch_step)(parts, x_NF, y_N, micro_batches, schedule)
    losses = torch.zeros(steps, dtype=x_NF.dtype, device=device)
    for step in range(steps):
        optimizer.zero_grad()
        losses[step] = run()
        optimizer.step()
    held = bytes_held(parts[rank].parameters(), optimizer)
    _tell_all(parts, losses)
    return Trained(tuple(losses.tolist()), whole_parameters(model), held)


def _tell_all(parts: list[nn.Sequential], losses: torch.Tensor) -> None:
    """Give every rank the losses, which the last one has, and the parameters of each stage."""
    dist.broadcast(losses, src=len(parts) - 1)
    for stage, part in enumerate(parts):
        for param in part.parameters():
            dist.broadcast(param.detach(), src=stage)


def _our_step(parts: list[nn.Sequential], x_NF: torch.Tensor, y_N: torch.Tensor, micro_batches: int, schedule: str):
    x_micro, y_micro = x_NF.chunk(micro_batches), y_N.chunk(micro_batches)
    stage = Stage(parts, x_micro[0], *_directions())
    order = ORDERS[schedule](stage.rank, stage.stages, micro_batches)

    def run() -> float:
        loss = 0.0
        for kind, micro in order:
            if kind == "forward":
                loss += stage.forward(micro, x_micro[micro], y_micro[micro], 1 / micro_batches)
            else:
                stage.backward(micro)
        stage.finish()
        return loss

    return run


def _directions() -> list[dist.ProcessGroup | None]:
    """Return the groups for activations and for gradients; gloo's messages do not wait for each other in one.

    Collective: under NCCL, two new_groups of all ranks.
    """
    if dist.get_backend() != "nccl":
        return [None, None]
    return [dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)) for _ in range(2)]


def _torch_step(parts: list[nn.Sequential], x_NF: torch.Tensor, y_N: torch.Tensor, micro_batches: int, schedule: str):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # slow to import

    rank, stages = dist.get_rank(), len(parts)
    stage = PipelineStage(parts[rank], rank, stages, x_NF.device)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    torch_schedule = kind(stage, micro_batches, loss_fn=F.cross_entropy)

    def run() -> float:
        losses: list[torch.Tensor] = []
        inputs = (x_NF,) if rank == 0 else ()
        is_last = rank == stages - 1
        torch_schedule.step(*inputs, target=y_N if is_last else None, losses=losses if is_last else None)
        return sum(loss.item() for loss in losses) / micro_batches

    return run
