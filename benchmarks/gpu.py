"""What does a step cost on GPUs, in time and in memory?

Four comparisons: the course's replicas beside torch's DDP over NCCL; GPT-2 in float32 and in bfloat16; its peak memory
beside what `ddp-course plan` predicts; copies to the GPU from pinned and from pageable memory. Without a GPU each runs
on the CPU in a tiny size: the figures then mean nothing, but what would fail everywhere fails here already.

Left out on purpose: collectives alone, which nccl-tests measures, and more than one machine.
Read next: `gpu_run.py`, which runs these and more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import ddp
from benchmarks.measure import Plan, Result, Row, attempt
from benchmarks.turns import Comparison, Seconds, beside, clock, in_turns, run_on_ranks
from ddp_course.beyond.live_bytes import LiveBytes
from ddp_course.beyond.plan import plan
from ddp_course.gpt import GPT, SIZES
from ddp_course.groups import choose_backend, my_device

PRECISIONS = {"float32": "fp32", "bf16": "autocast"}  # the names here, and the plan's
MIB, LOCAL_BATCH = 2**20, 8


def world_sizes() -> tuple[int, ...]:
    """Return 1 and the number of GPUs; of one GPU, also 2 where NCCL lets ranks share it. Without a GPU, 2 on gloo."""
    gpus = torch.cuda.device_count()
    if not gpus:
        return (2,)
    return (1, gpus) if gpus > 1 else (1, 2) if choose_backend(2) == "nccl" else (1,)


def compare(title: str, comparison: Comparison, timed: Callable[..., Seconds], blocks: int, *notes: str) -> Result:
    """Run a comparison on each of `world_sizes`, over NCCL if there are GPUs."""
    rows = comparison.measure(
        Plan(), world_sizes(), lambda world_size, case: run_on_ranks(timed, world_size, case, blocks, backend=None)
    )
    return Result(title, rows, notes=[*notes, *about_ranks()])


def about_ranks() -> list[str]:
    if not torch.cuda.is_available():
        return ["A dry run on the CPU: these figures mean nothing."]
    shared = torch.cuda.device_count() < world_sizes()[-1]
    return ["2 ranks share the one GPU: their times say what runs, not how it scales."] if shared else []


# --- Steps -------------------------------------------------------------------------------------------


def steps(blocks: int, limit_s: float) -> Result:
    """Compare a step of each replica of `ddp.py`."""
    cases = ("deep", "wider", "resnet50") if torch.cuda.is_available() else ("deep",)
    comparison = Comparison("gpu", ddp.LABELS, beside(ddp.BASE, ddp.WAYS), cases, limit_s)
    return compare("One training step beside torch's DDP", comparison, ddp.timed_steps, blocks)


def formats(blocks: int, limit_s: float) -> Result:
    """Compare a step of GPT-2 in float32, without TF32, and in bfloat16."""
    labels = {"float32": "float32", "bf16": "bfloat16, autocast"}
    cases = ("gpt2",) if torch.cuda.is_available() else ("tiny",)
    comparison = Comparison("gpu", labels, beside("float32", labels), cases, limit_s)
    return compare(
        f"One training step of a GPT, {LOCAL_BATCH} rows a rank, fused AdamW", comparison, timed_formats, blocks
    )


def timed_formats(rank: int, world_size: int, size: str, blocks: int) -> Seconds:
    """Return this rank's seconds per step. Collective: one barrier a block and way, and DDP's own."""
    device = my_device()
    replicas = {}
    for way in PRECISIONS:
        model = GPT(SIZES[size]).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        replicas[way] = DistributedDataParallel(model), optimizer
    token_NT = torch.randint(256, (LOCAL_BATCH, SIZES[size].context), device=device)

    def take_steps(way: str, count: int = 3) -> float:
        replica, optimizer = replicas[way]
        dist.barrier()
        start = clock(device)
        for _ in range(count):
            loss_of(replica, token_NT, way).backward()
            optimizer.step()
            optimizer.zero_grad()
        return (clock(device) - start) / count

    for way in replicas:
        take_steps(way)
    return in_turns(replicas, blocks, take_steps)


def loss_of(model: nn.Module, token_NT: torch.Tensor, precision: str) -> torch.Tensor:
    """Return the cross-entropy, of the tokens themselves. In bf16 only the layers' products are short."""
    with torch.autocast(token_NT.device.type, torch.bfloat16, enabled=precision == "bf16"):
        score_NTV = model(token_NT)
    return nn.functional.cross_entropy(score_NTV.float().flatten(0, 1), token_NT.flatten())


# --- Memory ------------------------------------------------------------------------------------------


def memory(blocks: int, limit_s: float) -> Result:
    """Compare the peak of the second step with the plan's. One run is enough: it is the same each time."""
    size = "gpt2" if torch.cuda.is_available() else "mini"
    rows = []
    for world_size in world_sizes():
        for precision in PRECISIONS:
            what = f"{size}, {precision}: peak"
            measured = Row(f"measured_{precision}", f"{what} in MB, measured", world_size, unit="")
            planned = Row(f"planned_{precision}", f"{what} in MB, planned", world_size, unit="")
            ratio = Row(f"ratio_{precision}", f"{what}, measured / planned", world_size, unit="")
            rows += [measured, planned, ratio]
            with attempt(rows[-3:], what, limit_s):
                peaks = run_on_ranks(peak_bytes, world_size, size, precision, backend=None)
                expected = planned_bytes(world_size, size, precision)
                measured.samples = [peak / 1e6 for peak in peaks]
                planned.samples = [expected / 1e6]
                ratio.samples = [peak / expected for peak in peaks]
    note = "Measured: torch.cuda.max_memory_allocated, which has cuBLAS's workspace too; on a CPU, LiveBytes."
    return Result("Peak memory of a step beside `ddp-course plan`", rows, notes=[note, *about_ranks()])


def planned_bytes(world_size: int, size: str, precision: str) -> float:
    """Return what `ddp-course plan` says of this model on so many GPUs, under DDP if there are several."""
    shape = SIZES[size]
    given = {"layers": shape.layers, "hidden": shape.width, "vocabulary": shape.vocabulary, "sequence": shape.context}
    answer = plan(None, world_size, local_batch=LOCAL_BATCH, precision=PRECISIONS[precision], **given)
    return answer["DDP" if world_size > 1 else "one GPU"].memory.total


def peak_bytes(rank: int, world_size: int, size: str, precision: str) -> int:
    """Return the most bytes that this rank held in its second step. Collective: DDP's own, if there are several."""
    device, live = my_device(), LiveBytes()
    on_gpu = device.type == "cuda"
    model = GPT(SIZES[size]).to(device)
    token_NT = torch.randint(SIZES[size].vocabulary, (LOCAL_BATCH, SIZES[size].context), device=device)
    with nullcontext() if on_gpu else live:
        live.seen([*model.parameters(), token_NT])
        replica = DistributedDataParallel(model) if world_size > 1 else model
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            live.reset()
            loss_of(replica, token_NT, precision).backward()
            optimizer.step()
    return torch.cuda.max_memory_allocated(device) if on_gpu else live.peak


# --- Copies ------------------------------------------------------------------------------------------


def copies(blocks: int, limit_s: float) -> Result:
    """Compare copies to the GPU from pageable and from pinned memory; each rank makes its own at the same time."""
    labels = {"pageable": "from pageable memory", "pinned": "from pinned memory"}
    cases = ("256MiB",) if torch.cuda.is_available() else ("1MiB",)
    comparison = Comparison("gpu", labels, beside("pageable", labels), cases, limit_s)
    return compare("One copy from the CPU to the GPU", comparison, timed_copies, blocks)


def timed_copies(rank: int, world_size: int, size: str, blocks: int) -> Seconds:
    """Return this rank's seconds per copy. Collective: none."""
    device = my_device()
    pageable = torch.randint(256, (int(size.removesuffix("MiB")) * MIB,), dtype=torch.uint8)
    # Only memory that CUDA has pinned can be fetched by the GPU itself; the other is copied twice.
    sources = {"pageable": pageable, "pinned": pageable.pin_memory() if device.type == "cuda" else pageable.clone()}
    target = torch.empty_like(pageable, device=device)

    def take(name: str) -> float:
        start = clock(device)
        target.copy_(sources[name], non_blocking=True)
        return clock(device) - start

    for name in sources:
        take(name)
        if not torch.equal(target.cpu(), pageable):
            raise RuntimeError(f"rank {rank}: the copy from {name} memory is not what was sent")
    return in_turns(sources, blocks, take)


GROUPS = {"steps": steps, "formats": formats, "memory": memory, "copies": copies}
