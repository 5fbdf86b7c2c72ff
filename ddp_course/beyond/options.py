"""Which strategies are there for so many GPUs, and which of them fit?

A `Question` says what is to be trained on what. Its `options` are strategies with their memory and their messages,
the simplest first: one wrapper around the model, then a divided optimizer, then divided layers. Of tensor and
pipeline parallel, the smallest degree that fits is taken; where none fits, the largest.

Left out on purpose: sequence and expert parallel, and offloading to the CPU's memory.
Read next: `plan.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ddp_course.beyond.activations import Unit, checkpointed, shape_of, transformer
from ddp_course.beyond.memory import LOOPS, OPTIMIZERS, PRECISIONS, Memory, Strategy, communication, memory_of

__all__ = ["FREE", "MICROBATCHES", "Option", "Question", "options"]

FREE = 0.1  # of a GPU's memory
MICROBATCHES = 4  # for each stage of a pipeline: then less than a fifth of the time is bubble
POSITIVE = ("params", "gpus", "gpu_memory", "nodes", "sequence", "local_batch", "vocabulary", "layers", "hidden")


@dataclass(frozen=True)
class Question:
    """What is to be trained, and on what; the fields are the arguments of `plan`."""

    params: float | None
    gpus: int
    gpu_memory: float  # bytes
    layers: int | None = None
    hidden: int | None = None
    sequence: int = 1024
    local_batch: int = 1
    vocabulary: int = 50257
    precision: str = "autocast"
    optimizer: str = "adamw"
    loop: str = "foreach"
    checkpointing: bool = False
    bucket_view: bool = False
    nodes: int = 1
    given: tuple[Unit, ...] | None = None  # units of a counted model

    def __post_init__(self) -> None:
        for name in (
            "params",
            "gpus",
            "gpu_memory",
            "nodes",
            "sequence",
            "local_batch",
            "vocabulary",
            "layers",
            "hidden",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name.replace('_', '-')} is {value:g}; it must be 1 or more")
        if self.gpus % self.nodes:
            raise ValueError(
                f"{self.gpus} GPUs cannot be spread evenly over {self.nodes} nodes; "
                f"give a multiple of {self.nodes}, or another --nodes"
            )
        for name, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS), ("loop", LOOPS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not known; there are {', '.join(known)}")

    @property
    def usable(self) -> float:
        """Bytes of a GPU that may be filled."""
        return self.gpu_memory * (1 - FREE)

    def shape(self) -> tuple[int, int]:
        """Layers and width, given or guessed."""
        if self.layers and self.hidden:
            return self.layers, self.hidden
        if self.layers or self.hidden:
            raise ValueError("give both layers and hidden, or neither: then the shape is guessed from the parameters")
        if self.params is None:
            raise ValueError("give the parameters, as --params 7e9, or the shape, as --layers 32 --hidden 4096")
        if self.params < 1e6:
            few = f"{self.params:g} parameters are too few to guess a transformer's shape"
            raise ValueError(f"{few}; give --layers and --hidden, or say 7e9 for seven billion")
        return shape_of(self.params, self.vocabulary)

    def units(self) -> tuple[Unit, ...]:
        """The model's parts with the rows of one micro-batch."""
        if self.given is not None:
            return self.given
        kind = PRECISIONS[self.precision]
        shape = (*self.shape(), self.sequence, self.local_batch, self.vocabulary)
        units = transformer(*shape, element=kind.compute, stream=kind.stream or None)
        return checkpointed(units) if self.checkpointing else units


@dataclass(frozen=True)
class Option:
    """One strategy: what it needs, whether that fits, what it sends."""

    strategy: Strategy
    memory: Memory
    fits: bool
    sends: dict[str, float]  # bytes of one rank in a step, by purpose
    rows: int  # of all ranks together, in a step
    bubble: float  # share of the time that a pipeline's stage waits

    @property
    def name(self) -> str:
        """As in the table."""
        return self.strategy.name


def options(question: Question) -> list[Option]:
    """Return the strategies for the question, the simplest first."""
    units = question.units()

    def option(strategy: Strategy) -> Option:
        memory = memory_of(
            units,
            strategy,
            question.precision,
            question.optimizer,
            loop=question.loop,
            bucket_view=question.bucket_view,
        )
        sends = communication(units, strategy, question.precision, recompute=question.checkpointing)
        bubble = (strategy.stages - 1) / (strategy.microbatches + strategy.stages - 1)
        rows = strategy.data * strategy.microbatches * question.local_batch
        return Option(strategy, memory, memory.total <= question.usable, sends, rows, bubble)

    return list(_candidates(option, units, question.gpus, question.nodes))


def _candidates(option: Callable[[Strategy], Option], units: Sequence[Unit], gpus: int, nodes: int) -> Iterator[Option]:
    if gpus == 1:
        yield option(Strategy())
        return
    if nodes == 1:
        yield option(Strategy(data=gpus, replicas_in_one_process=True))
    for divided in (0, 1, 2, 3):
        yield option(Strategy(data=gpus, divided=divided))
    for family in _families(units, gpus, nodes):
        tried = [option(strategy) for strategy in family]
        yield from [each for each in tried if each.fits][:1] or tried[-1:]


def _families(units: Sequence[Unit], gpus: int, nodes: int) -> list[list[Strategy]]:
    """Tensor, FSDP with tensor, pipeline, tensor with pipeline; each with growing degrees."""
    divisible = any(unit.reduced for unit in units)
    # Tensor parallel sends in every layer. So it stays inside a node, where the links are fast.
    tensors = _powers(gpus // nodes) if divisible else []
    stages = [count for count in _powers(gpus) if count <= len(units) - 2]

    def pipeline(count: int, tensor: int = 1) -> Strategy:
        return Strategy(gpus // count // tensor, tensor, count, microbatches=MICROBATCHES * count)

    whole_node = tensors[-1:]
    return [
        [Strategy(gpus // count, count) for count in tensors],
        [Strategy(gpus // count, count, divided=3) for count in tensors if count < gpus],
        [pipeline(count) for count in stages],
        [pipeline(count, tensor) for tensor in whole_node for count in stages if gpus % (count * tensor) == 0],
    ]


def _powers(most: int) -> list[int]:
    """2, 4, 8 and so on, as far as they divide `most`."""
    return [2**i for i in range(1, most.bit_length()) if most % 2**i == 0]
