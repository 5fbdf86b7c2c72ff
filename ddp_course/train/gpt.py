"""How is a GPT trained on several ranks, with batches larger than the memory and a number for its speed?

    launch(train_gpt, 2, args=(GPTConfig(),))                            # from a cell
    ddp-course train gpt --world-size 2                                  # from a terminal; starts the ranks itself
    torchrun --nproc-per-node 2 -m ddp_course.train gpt                  # the ranks are there already; joins them

A step takes several small batches, one after the other. Their gradients add up on each rank, in silence; only the last
backward pass lets DDP average them. Then every rank has the whole batch's gradient, cuts it to the same length, and
takes the same step. Data, schedule and optimizer know their place by the step, so a killed run goes on with its bits.

The speed is given as tokens per second of all ranks, and as a utilisation (`mfu`): the arithmetic that the model
needs, over what this machine reaches in a plain matrix product, measured by all ranks at the same time. (A paper's MFU
divides by the peak of the data sheet.)

Left out on purpose: packing by document, gradient checkpointing, and models that one rank cannot hold (`beyond/`).
Read next: `tokens.py`, what is noted and saved of it.

Shapes: A micro-batches in a step, N rows of one of them on this rank, T tokens in a row, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checkpoint.state import checksum
from ddp_course.data.text import VOCABULARY, Text, TokenStream, decode, encode, exact_windows, library_text, windows
from ddp_course.gpt import GPT, SIZES, flops_per_token, generate, weight_decay_groups
from ddp_course.groups import my_device
from ddp_course.logs import progress_bar
from ddp_course.metrics import each_rank, mean_over_ranks
from ddp_course.train.config import Saving, option
from ddp_course.train.run import Run, settle_buckets
from ddp_course.train.schedule import share_of_rate
from ddp_course.train.tokens import StepCurves, clock

PRECISIONS = ("float32", "bf16")


@dataclass(frozen=True)
class GPTConfig(Saving):
    """How to train a GPT on text. Each field is also an option of the command line."""

    text: str | None = option(None, "a folder of Python files (default: Python's standard library)", free=True)
    size: str = option("mini", "how large the model is", tuple(SIZES))
    steps: int = option(400, "updates of the weights, those of a resumed run included", least=1)
    until: int = option(0, "save and leave after this step, to be resumed (0: the last one)", saves=True)
    local_batch: int = option(8, "windows of one micro-batch on one rank", least=1)
    accumulation: int = option(2, "micro-batches in a step", least=1)
    lr: float = option(5e-3, "learning rate at the end of the warm-up")
    warmup: int = option(40, "steps in which the learning rate rises")
    weight_decay: float = option(0.1, "AdamW's, for matrices only")
    clip: float = option(1.0, "the largest norm of the gradient; inf clips nothing", above=0)
    precision: str = option("float32", "number format of the matrix products", PRECISIONS)
    held_out: int = option(512, "windows of held-out text for a loss (0: all of them)", free=True)
    held_out_every: int = option(0, "take the held-out loss after so many steps, too (0: only at the end)", free=True)
    sample: int = option(400, "bytes that rank 0 writes at the end", free=True)
    seed: int = option(0, "chooses the first weights and the order of the windows")

    @property
    def last(self) -> int:
        """The step after which this part of the run ends."""
        return min(self.until or self.steps, self.steps)


@dataclass(frozen=True)
class GPTResult:
    """What one rank brings home. Lists have one entry a step, those before a resume too."""

    rank: int
    world_size: int
    device: str
    parameters: int
    first_step: int  # 0, or the steps that a resumed run had behind it
    steps: int  # behind the run now
    stopped: bool  # before the last step, by a signal or by `until`
    losses: list[float]  # nats per byte over the rows of all ranks; equal on every rank
    norms: list[float]  # of the averaged gradient, before clipping
    held_out: list[tuple[int, float]]  # step, and nats per byte of held-out text over all ranks; the last is the end
    tokens_per_s: float  # of all ranks together
    flops_per_token: int
    peak_flops: float  # of all ranks together, in a plain matrix product
    mfu: float  # model FLOPs utilisation: flops_per_token * tokens_per_s / peak_flops
    seconds: float  # spent on the steps
    sample: str  # written by rank 0 at the end
    checksum: str  # of the parameters; equal on every rank if the replicas are
    notes: list[str]


def train_gpt(rank: int, world_size: int, config: GPTConfig) -> GPTResult:
    """Train one replica on this rank's windows of the text; every rank of the default group must call it.

    Returns:
        This rank's result.
    Raises:
        DatasetError: there is no text.
        CheckpointError: a checkpoint cannot be written or used, or is of another run.
    Collective: DDP's own at construction; in each step its all_reduces in the last micro-batch, and one for the loss;
        those of `Run`, `held_out_loss` and `measure_peak`.
    """
    device, text = my_device(), library_text(config.text)
    replica, optimizer = build_replica(config, device)
    model = replica.module
    context, curves = model.shape.context, StepCurves()
    stream = TokenStream(text.train, context, config.local_batch, world_size, rank, seed=config.seed)

    with Run(config, model, optimizer, stream, curves) as run:
        if config.resume:
            run.resume()
        run.bar = progress_bar(config.steps, initial=run.step, shown=config.progress)
        while run.step < config.last and not run.stopping:
            curves.before_step()
            run.after_step(*take_step(replica, optimizer, stream, run.step, config))
            run.bar.set_postfix_str(f"loss {curves.losses[-1]:.3f}")
            if config.held_out_every and run.step % config.held_out_every == 0 and run.step < config.last:
                curves.note_held_out(held_out_loss(model, text, config.held_out))
        curves.note_held_out(held_out_loss(model, text, config.held_out))
        run.finish()

    tokens_per_s = curves.tokens_per_s(config.accumulation * config.local_batch * context)
    peak, need = measure_peak(config.precision), flops_per_token(model)
    return GPTResult(
        rank=rank,
        world_size=world_size,
        device=str(device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        first_step=run.first_step,
        steps=run.step,
        stopped=run.step < config.steps,
        losses=curves.losses,
        norms=curves.norms,
        held_out=curves.held_out,
        tokens_per_s=tokens_per_s,
        flops_per_token=need,
        peak_flops=peak,
        mfu=need * tokens_per_s / peak,
        seconds=sum(curves.times),
        sample=sample(model, config.sample, config.seed) if rank == 0 else "",
        checksum=checksum(model),
        notes=run.notes,
    )


def build_replica(config: GPTConfig, device: torch.device) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Return the wrapped model, its buckets settled, and its optimizer.

    Collective: DDP's own at construction, and those of `settle_buckets`; every rank.
    """
    torch.manual_seed(config.seed)
    model = GPT(replace(SIZES[config.size], vocabulary=VOCABULARY)).to(device)
    optimizer = torch.optim.AdamW(
        weight_decay_groups(model, config.weight_decay), lr=config.lr, betas=(0.9, 0.95), fused=True
    )
    replica = DistributedDataParallel(model)
    settle_buckets(replica, torch.zeros(1, model.shape.context, dtype=torch.int64, device=device))
    return replica, optimizer


# --- One step --------------------------------------------------------------------------------------


def take_step(
    replica: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    stream: TokenStream,
    step: int,
    config: GPTConfig,
) -> tuple[float, torch.Tensor]:
    """Return this rank's mean loss, and the norm of the averaged gradient before clipping.

    Collective: that of `accumulate`; every rank.
    """
    replica.train()
    for group in optimizer.param_groups:
        group["lr"] = config.lr * share_of_rate("cosine", step, config.steps, config.warmup)
    loss = accumulate(replica, [stream.next_batch() for _ in range(config.accumulation)], config.precision)
    norm = nn.utils.clip_grad_norm_(replica.parameters(), config.clip)  # averaged already: the same everywhere
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def accumulate(
    replica: DistributedDataParallel, batches: list[tuple[torch.Tensor, torch.Tensor]], precision: str = "float32"
) -> float:
    """Leave in every `grad` the mean over all micro-batches of all ranks.

    Each loss is divided by A, for gradients add up. All backward passes but the last are in `no_sync`: averaging is
    linear, so one average of the sum is the sum of the averages, for an A-th of the traffic. `no_sync` must hold the
    forward pass, too: there DDP decides whether this pass will be averaged.

    Args:
        batches: A pairs of tokens and next tokens, each (N, T), of one size on all ranks.
    Returns:
        This rank's mean loss, nats per token.
    Collective: DDP's all_reduce of each bucket, once, in the last backward pass; every rank.
    """
    device, last = next(replica.parameters()).device, len(batches) - 1
    total = 0.0
    for number, (token_NT, next_NT) in enumerate(batches):
        with nullcontext() if number == last else replica.no_sync():
            loss = loss_of(replica, token_NT.to(device), next_NT.to(device), precision) / len(batches)
            loss.backward()
        total += loss.detach()
    return float(total)


def loss_of(
    model: nn.Module, token_NT: torch.Tensor, next_NT: torch.Tensor, precision: str = "float32", reduction: str = "mean"
) -> torch.Tensor:
    """Return the cross-entropy in nats. In bf16 only the layers' products are short; weights and loss are not."""
    with torch.autocast(token_NT.device.type, torch.bfloat16, enabled=precision == "bf16"):
        score_NTV = model(token_NT)
    if precision == "bf16":
        score_NTV = score_NTV.float()
    return F.cross_entropy(score_NTV.flatten(0, 1), next_NT.flatten(), reduction=reduction)


# --- How good, how fast ----------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(model: GPT, text: Text, most: int = 0, batch: int = 16) -> float:
    """Return the mean loss over held-out windows, nats per token; each window is seen by exactly one rank.

    Args:
        model: bare: ranks may have different numbers of batches.
        most: windows, evenly spread over the held-out files; 0 is all.
    Collective: one all_reduce, every rank.
    """
    device = my_device()
    mine = exact_windows(text.held_out, model.shape.context, most, dist.get_world_size(), dist.get_rank())
    total, tokens = 0.0, 0
    model.eval()
    for start in range(0, len(mine), batch):
        token_NT, next_NT = windows(text.held_out, model.shape.context, mine[start : start + batch])
        total += loss_of(model, token_NT.to(device), next_NT.to(device), reduction="sum").item()
        tokens += next_NT.numel()
    return mean_over_ranks(total, tokens, device)


def measure_peak(precision: str = "float32", width: int | None = None, repeats: int = 5) -> float:
    """Return the floating point operations per second of all ranks together, in products of square matrices.

    All ranks multiply at the same time, so those that share a machine share its cores, as in training. The best of
    some repeats counts. This is what *this* machine did a moment ago, not what its maker promises: a utilisation
    relative to it says how far the model is from a plain product here, and must not be set beside one from a data
    sheet.

    Args:
        width: of the matrices; None is 1024 on a CPU, and 8192 on a GPU, which less does not fill.
    Collective: one barrier, one all_gather; every rank.
    """
    device, dtype = my_device(), torch.bfloat16 if precision == "bf16" else torch.float32
    width = width or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(width, width, generator=torch.Generator().manual_seed(i)).to(device, dtype) for i in (0, 1))
    dist.barrier()
    times = []
    for _ in range(repeats + 1):
        started = clock(device)
        a @ b
        times.append(clock(device) - started)
    return sum(each_rank(2 * width**3 / min(times[1:])))


def sample(model: GPT, count: int, seed: int, prompt: str = "import os\n\n\ndef main(") -> str:
    """Return `count` bytes that the model writes after a prompt. Talks to nobody: one rank may do it alone.

    At lower temperatures a small model falls into long rows of spaces, the likeliest byte of all.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = generate(model.cpu(), encode(prompt), count, temperature=0.9, generator=generator)
    return decode(tokens)
