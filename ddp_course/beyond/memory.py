"""What does each strategy make of a model's memory, part by part?

A rank holds parameters, gradients, optimizer state, activations, and what the strategy itself needs: buckets, layers
that are gathered for a moment. A step has moments that are full in different ways: activations fall while gradients
grow, and the optimizer makes room for its own work after both. So the peak is the fullest moment of a walk through
backward, unit by unit, and not the sum of everything that exists at some time.

Left out on purpose: the libraries' own memory (CUDA's context takes about half a gigabyte, NCCL's buffers as much),
and holes between tensors, which are why a plan should leave a tenth of the GPU free.
Read next: `live_bytes.py`, which measures the same on real ranks, and `plan.py`.

Source: Rajbhandari et al. 2019 (arXiv 1910.02054), section 3, for the bytes of mixed precision and the three stages
of ZeRO; Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, for the activations of a pipeline (1F1B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ddp_course.beyond.activations import Unit

__all__ = ["LOOPS", "OPTIMIZERS", "PRECISIONS", "Memory", "Precision", "Strategy", "communication", "memory_of"]


@dataclass(frozen=True)
class Precision:
    """Bytes of one number in each role."""

    parameter: int
    gradient: int
    state: int  # one number of the optimizer's state
    compute: int  # an activation, and a parameter as it is gathered
    master: int = 0  # a float32 copy that the optimizer updates
    stream: int = 0  # a number between two blocks, if not `compute`
    cached: int = 0  # autocast keeps a cast copy of each weight from forward to backward
    says: str = ""


PRECISIONS = {
    "fp32": Precision(4, 4, 4, 4, says="everything in float32"),
    "autocast": Precision(4, 4, 4, 2, stream=4, cached=2, says="weights in float32, cast to bfloat16 for computing"),
    "master": Precision(2, 2, 4, 2, master=4, says="weights in bfloat16, a float32 copy in the optimizer"),
    "bf16": Precision(2, 2, 2, 2, says="everything in bfloat16: small updates are lost to rounding"),
}
OPTIMIZERS = {"adamw": 2, "momentum": 1, "sgd": 0}  # numbers of state for each parameter
LOOPS = ("foreach", "fused", "single")


@dataclass(frozen=True)
class Strategy:
    """How the model, its gradients and its state lie on the ranks.

    Args:
        data: ranks that each take rows of their own.
        tensor: ranks that share each layer.
        stages: ranks that each hold some of the layers.
        divided: what is divided among the data ranks: 0 nothing (DDP), 1 the state, 2 also the gradients, 3 also
            the parameters (the stages of ZeRO).
        replicas_in_one_process: torch's DataParallel; the figures are for its first GPU.
        microbatches: how many follow each other through the stages in a step; the units are for one of them.
    """

    data: int = 1
    tensor: int = 1
    stages: int = 1
    divided: int = 0
    replicas_in_one_process: bool = False
    microbatches: int = 1

    @property
    def gpus(self) -> int:
        """Ranks in all."""
        return self.data * self.tensor * self.stages

    @property
    def name(self) -> str:
        """Its name in tables: `DDP`, `ZeRO-1`, `FSDP (kept)`, `FSDP`, `tensor 8`, `FSDP 16 x tensor 4`.

        `FSDP (kept)` keeps layers whole from forward to backward (`reshard_after_forward=False`). It divides what
        ZeRO-2 divides, and between two steps the parameters as well.
        """
        if self.replicas_in_one_process:
            return "DataParallel"
        shared = [f"tensor {self.tensor}"] * (self.tensor > 1) + [f"pipeline {self.stages}"] * (self.stages > 1)
        if self.data == 1:
            return " x ".join(shared) or "one GPU"
        over = ("DDP", "ZeRO-1", "FSDP (kept)", "FSDP")[self.divided]
        return " x ".join([f"{over} {self.data}", *shared]) if shared else over


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at its fullest moment, part by part."""

    parameters: float
    gradients: float
    state: float
    activations: float
    buckets: float  # DDP's copies of the gradients
    temporary: float  # gathered layers, gradients on their way, what backward or the optimizer needs for a moment
    moment: str  # when that is

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Each part's name and bytes."""
        names = ("parameters", "gradients", "state", "activations", "buckets", "temporary")
        return {name: getattr(self, name) for name in names}


def memory_of(
    units: Sequence[Unit],
    strategy: Strategy,
    precision: str = "fp32",
    optimizer: str = "adamw",
    *,
    loop: str = "foreach",
    bucket_view: bool = False,
) -> Memory:
    """Return the memory of the rank that needs most, at its fullest moment, from the second step on.

    Args:
        units: the model with one rank's rows, as `transformer` or `counted` gives it.
        loop: how the optimizer goes over parameters: "foreach" (torch's default on a GPU), "fused", or "single"
            (torch's default on the CPU).
        bucket_view: gradients are views of DDP's buckets (`gradient_as_bucket_view=True`).
    """
    kind, states = PRECISIONS[precision], OPTIMIZERS[optimizer]
    groups = placed(units, strategy)
    entering = [0.0, *(group[-1].output for group in groups)]
    fullest = [
        _on_stage(group, stage, strategy, kind, states, entering=entering[stage], loop=loop, bucket_view=bucket_view)
        for stage, group in enumerate(groups)
    ]
    return max(fullest, key=lambda memory: memory.total)


def placed(units: Sequence[Unit], strategy: Strategy) -> list[list[Unit]]:
    """Deal the units out to the stages, with about as many parameters in each, and divide them by `tensor`.

    What has no parameters stays with the unit before it, as in `pipeline.cut`.
    """
    shared = [_shared(unit, strategy.tensor) for unit in units] if strategy.tensor > 1 else list(units)
    if strategy.stages == 1:
        return [shared]
    # The head's matrix is the embedding's. On a stage of its own it has to be there a second time.
    shared = [replace(unit, tensors=(*unit.tensors, unit.shared), shared=0) if unit.shared else unit for unit in shared]
    full = [index for index, unit in enumerate(shared) if unit.parameters]
    starts = starts_of_stages([shared[index].parameters for index in full], strategy.stages)
    cuts = [0, *(full[start] for start in starts[1:]), len(shared)]
    return [shared[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


def _shared(unit: Unit, ranks: int) -> Unit:
    return replace(
        unit,
        tensors=tuple(-(-size // ranks) for size in unit.tensors),
        shared=-(-unit.shared // ranks),
        split=unit.split / ranks,
        working=unit.working / ranks,
        scratch=unit.scratch / ranks,
    )


def _on_stage(
    units: Sequence[Unit],
    stage: int,
    strategy: Strategy,
    kind: Precision,
    states: int,
    *,
    entering: float,
    loop: str,
    bucket_view: bool,
) -> Memory:
    """The fullest moment of one rank that holds `units` and gets `entering` bytes for each micro-batch."""
    data, divided = strategy.data, strategy.divided if strategy.data > 1 else 0
    count = sum(unit.parameters for unit in units)
    sizes = sorted((size for unit in units for size in unit.tensors), reverse=True)
    share = {0: count, 1: _fullest(sizes, data)}.get(divided, count / data)
    own = count / data if divided >= 2 else count  # parameters and gradients after the step
    # DDP's buckets stay from step to step. As views they are the gradients, and those stay too.
    bucketed = divided < 2 and data > 1 and not strategy.replicas_in_one_process
    lasting = (bucketed and bucket_view) or strategy.stages > 1  # micro-batches add up in the gradients
    before = Memory(
        parameters=own * kind.parameter,
        gradients=own * kind.gradient if lasting else 0.0,
        state=share * (states * kind.state + kind.master),
        activations=0.0,
        buckets=count * kind.gradient if bucketed and not bucket_view else 0.0,
        temporary=0.0,
        moment="between two steps",
    )
    moments = _backward(units, stage, strategy, kind, before, entering)
    after = replace(before, gradients=own * kind.gradient)
    if strategy.replicas_in_one_process:
        moments.append(replace(after, temporary=after.gradients, moment="sum of the gradients"))
    largest = sizes[0] / (data if divided >= 2 else 1)
    work = {"foreach": share, "single": 2 * largest, "fused": 0}[loop] * (states == 2)
    number = kind.master or kind.parameter
    moments.append(replace(after, temporary=work * number, moment="the optimizer's step"))
    return max(moments, key=lambda memory: memory.total)


def _backward(
    units: Sequence[Unit], stage: int, strategy: Strategy, kind: Precision, before: Memory, entering: float
) -> list[Memory]:
    """One moment for each unit, the last first: activations fall, gradients grow."""
    data, divided = strategy.data, strategy.divided if strategy.data > 1 else 0
    flight = min(strategy.microbatches, strategy.stages - stage)  # a stage begins one for each stage behind it
    kept = sum(unit.saved for unit in units) * flight
    gradients = before.gradients
    # torch's PipelineStage allocates what it will receive before the step begins, for each micro-batch: the inputs, and
    # the gradients of its outputs.
    always = strategy.microbatches * entering
    if stage < strategy.stages - 1:
        always += strategy.microbatches * units[-1].output
    if strategy.replicas_in_one_process:
        always += units[-1].scratch * data  # the outputs of all replicas come to the first GPU

    moments, tied = [], 0
    sizes = [unit.parameters for unit in units]
    up_to = list(accumulate(sizes))
    for at in range(len(units) - 1, -1, -1):
        unit = units[at]
        if divided >= 2:
            # While a unit computes, the one before it is gathered already. Without resharding all before it are whole.
            previous = next((size for size in reversed(sizes[:at]) if size), 0)
            ahead = previous if divided == 3 else up_to[at] - sizes[at]
            temporary = ahead * kind.compute + _whole_unit(unit, kind, data)
        else:  # a gradient is computed beside the one it is added to, or before it takes its place
            temporary = unit.working + up_to[at] * kind.cached + max(unit.tensors, default=0) * kind.gradient
        # A tied weight's first gradient waits for the second, which comes when its owner's backward runs.
        tied += unit.shared
        temporary += tied * kind.gradient * (at > 0)
        now = {"activations": kept, "gradients": gradients, "temporary": temporary + always}
        moments.append(replace(before, **now, moment=f"backward of the {unit.name}"))
        kept -= unit.saved
        if not before.gradients:
            gradients += unit.parameters * kind.gradient / (data if divided >= 2 else 1)
    return moments


def _fullest(sizes: Sequence[int], ranks: int) -> int:
    """Elements whose state the fullest rank keeps, if whole parameters are dealt out."""
    if ranks >= len(sizes):
        return max(sizes)  # one each
    filled = [0] * ranks
    for size, owner in zip(sizes, dealt(sizes, ranks), strict=True):
        filled[owner] += size
    return max(filled)


def _whole_unit(unit: Unit, kind: Precision, data: int) -> float:
    """Bytes that a whole unit takes for a moment in FSDP's backward, its working tensors included."""
    here = unit.parameters
    computing = 2 * here * kind.compute + unit.working  # its weights and their gradient
    # Then the weights go, and the gradient is copied for its reduce_scatter, which leaves a shard. Of the working
    # tensors, the gradient of the unit's input stays.
    sending = 2 * here * kind.compute + here * kind.gradient / data + unit.working / 2
    return max(computing, sending)


def communication(
    units: Sequence[Unit], strategy: Strategy, precision: str = "fp32", *, recompute: bool = False
) -> dict[str, float]:
    """Return bytes that one rank sends in a step, by purpose, with ring collectives.

    ZeRO-2 and FSDP send gradients in the type in which the layers compute. FSDP2 does so when told by
    `MixedPrecisionPolicy(reduce_dtype=...)`; without it, since torch 2.15, it sends them in the parameters' own type.

    Source: Rajbhandari et al. 2019, section 7: stages 1 and 2 send as much as DDP, stage 3 half as much again;
    Shoeybi et al. 2019 (arXiv 1909.08053), section 3: two all-reduces in a block's forward, two in its backward.
    """
    kind, sent = PRECISIONS[precision], {}
    groups = placed(units, strategy)
    count = max(sum(unit.parameters for unit in group) for group in groups)
    ring = (strategy.data - 1) / strategy.data
    divided = strategy.divided >= 2  # then both travel in the type in which the layers compute
    reduced = count * (kind.compute if divided else kind.gradient)
    gathered = count * (kind.compute if divided else kind.parameter)
    if strategy.replicas_in_one_process:  # the first GPU sends the weights to each other one
        sent["weights to the replicas"] = (strategy.data - 1) * count * kind.parameter
    elif strategy.data > 1:
        sent["gradients"] = ring * reduced * (2 if strategy.divided < 2 else 1)
        times = {0: 0, 1: 1, 2: 1, 3: 2}[strategy.divided]
        if times:
            sent["parameters"] = ring * gathered * times
    if strategy.tensor > 1:
        passes = 3 if recompute else 2
        layers = max(sum(unit.reduced for unit in group) for group in groups)
        sent["activations, tensor"] = (
            passes * layers * 2 * (strategy.tensor - 1) / strategy.tensor * strategy.microbatches
        )
    if strategy.stages > 1:  # forward to the next stage, backward to the one before
        ways = 2 if strategy.stages > 2 else 1  # a stage in the middle sends both ways
        sent["activations, pipeline"] = ways * units[0].output * strategy.microbatches
    return sent


def dealt(sizes: Sequence[int], world_size: int) -> list[int]:
    """Return an owner for each size, so that the ranks' totals are nearly equal.

    The largest goes first, each to the rank that has least; so does torch's ZeroRedundancyOptimizer. The fullest rank
    then has at most 4/3 of the best possible.

    Args:
        sizes: elements of each parameter.
    Source: R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969.
    """
    loads, owners = [0] * world_size, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


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
