"""How is a GPT trained on several ranks, with batches larger than the memory and a number for its speed?

    launch(train_gpt, 2, args=(GPTConfig(),))                            # from a cell
    python -m ddp_course.train.gpt --world-size 2                        # from a terminal; starts the ranks itself
    torchrun --nproc-per-node 2 -m ddp_course.train.gpt                  # the ranks are there already; joins them

A step takes several small batches, one after the other. Their gradients add up on each rank, in silence; only the last
backward pass lets DDP average them. Then every rank has the whole batch's gradient, cuts it to the same length, and
takes the same step. Data, schedule and optimizer know their place by the step, so a killed run goes on with its bits.

The speed is given as tokens per second of all ranks, and as model FLOPs utilisation (MFU): the arithmetic that the
model needs, over what this machine reaches in a plain matrix product, measured by all ranks at the same time.

Left out on purpose: packing by document, gradient checkpointing, and models that one rank cannot hold (`beyond/`).
Read next: `gpt_run.py`, which saves and resumes; `gpt_terminal.py`, the program around it.

Shapes: A micro-batches in a step, N rows of one of them on this rank, T tokens in a row, V vocabulary.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.data.text import VOCABULARY, Text, TokenStream, decode, encode, exact_windows, library_text, windows
from ddp_course.gpt import GPT, SIZES, flops_per_token, generate, weight_decay_groups
from ddp_course.groups import my_device
from ddp_course.metrics import each_rank, mean_over_ranks
from ddp_course.train.gpt_run import GPTConfig, Progress, clock
from ddp_course.train.images import checksum
from ddp_course.train.schedule import share_of_rate

__all__ = ["GPTConfig", "GPTResult", "accumulate", "held_out_loss", "measure_peak", "train_gpt"]


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
        those of `Progress`, `held_out_loss` and `measure_peak`.
    """
    device, text = my_device(), library_text(config.text)
    torch.manual_seed(config.seed)
    model = GPT(replace(SIZES[config.size], vocabulary=VOCABULARY)).to(device)
    optimizer = torch.optim.AdamW(
        weight_decay_groups(model, config.weight_decay), lr=config.lr, betas=(0.9, 0.95), fused=True
    )
    context = model.shape.context
    stream = TokenStream(text.train, context, config.local_batch, world_size, rank, seed=config.seed)
    replica = DistributedDataParallel(model)
    settle(replica, context)

    with Progress(config, model, optimizer, stream) as progress:
        if config.resume:
            progress.resume()
        for step in progress.steps():
            model.train()
            set_lr(optimizer, config.lr * share_of_rate("cosine", step, config.steps, config.warmup))
            batches = [stream.next_batch() for _ in range(config.accumulation)]
            loss = accumulate(replica, batches, config.precision)
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)  # averaged already: the same everywhere
            optimizer.step()
            optimizer.zero_grad()
            progress.after_step(loss, norm)
            if config.held_out_every and progress.step % config.held_out_every == 0 and progress.step < progress.last:
                progress.note_held_out(held_out_loss(model, text, config.held_out))
        progress.note_held_out(held_out_loss(model, text, config.held_out))
        progress.finish()

    tokens_per_s = progress.tokens_per_s(config.accumulation * config.local_batch * context)
    peak, need = measure_peak(config.precision), flops_per_token(model)
    return GPTResult(
        rank=rank,
        world_size=world_size,
        device=str(device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        first_step=progress.first_step,
        steps=progress.step,
        stopped=progress.step < config.steps,
        losses=progress.losses,
        norms=progress.norms,
        held_out=progress.held_out,
        tokens_per_s=tokens_per_s,
        flops_per_token=need,
        peak_flops=peak,
        mfu=need * tokens_per_s / peak,
        seconds=sum(progress.times),
        sample=sample(model, config.sample, config.seed) if rank == 0 else "",
        checksum=checksum(model),
        notes=progress.notes,
    )


# --- One step --------------------------------------------------------------------------------------


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


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def settle(replica: DistributedDataParallel, context: int) -> None:
    """Have DDP make its last plan of the buckets before step one; see `run.settle_buckets`.

    Collective: DDP's own of one forward and backward pass, every rank.
    """
    replica(torch.zeros(1, context, dtype=torch.int64, device=my_device())).sum().backward()
    replica.zero_grad()


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


def main(argv: list[str] | None = None) -> int:
    """Train from a terminal, or as one of the ranks that torchrun has started; see `gpt_terminal.py`."""
    from ddp_course.commands import train_gpt as terminal

    return terminal.main(argv)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # in the interpreter's own teardown, DDP's last threads may abort the process
