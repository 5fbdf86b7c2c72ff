"""Does a step over the simulated link take as long as the simulation predicts, and does overlap hide what it can?

Three questions, on real ranks with real gradients; only the link is simulated. (1) For each network, link, bucket size
and number of ranks: how far is the predicted step from the measured one? (2) Over a sweep of bucket sizes: is the size
predicted to be best next to the measured best? (3) On a link that is busy for as long as backward takes: how much of
the communication that can be hidden is hidden, by BucketedDDP and by torch's DDP? All buckets can be hidden but the
last, which holds the gradient that is there last.

How noise is kept out: one thread a rank; a block is one step of each case, in an order drawn again, with a step that
communicates nothing among them, of which the profile is made; a step lasts from the first rank's begin to the last
one's end, and medians are taken over the blocks. What communication adds beside the link is found with a link that is
no obstacle and that no case has: by how much the last gradient is late, for two bucket sizes, and how long backward
goes on after the last bucket; and how long the all_reduce that really runs takes, for two sizes of bucket. The
prediction is made of nothing else. A bucket takes the longer of the link's time and the machine's own; the table says
which.

Left out on purpose: real networks, where nobody could say what the link did.
Read next: `ddp_course/scaling/simulate.py`, the prediction; `measure.py`, what is made of the samples.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import Plan, Result, Row, Target, attempt, show_progress
from benchmarks.turns import run_on_ranks
from ddp_course.parallel import BucketedDDP
from ddp_course.parallel.bucketing import MIB
from ddp_course.scaling.link import LINKS, Link, SimulatedLink
from ddp_course.scaling.simulate import Prediction, predict
from ddp_course.scaling.step_profile import Profile, median_profile, profile_step, with_overheads

TITLE = "A training step over the simulated link: predicted and measured"
NOTES = [
    "Seconds from the first rank's begin to the last one's end, medians over blocks; one thread a rank.",
    "Error: predicted / measured - 1. A bucket of n layers; the first is as large as the others.",
    "Hidden: of the link's busy time but the last bucket's, the part before the last gradient was there on all ranks.",
]
BLOCKS, QUICK_BLOCKS, WARM_UP = 21, 3, 2
ERROR_LIMIT, UNHIDDEN_LIMIT, STEPS_LIMIT = 10.0, 10.0, 1  # per cent, per cent, steps of the sweep
LIMIT_S = 300.0  # for all blocks of one network on one number of ranks

LAYERS = 12


def network(make: Callable[[], tuple[nn.Module, nn.Module]]) -> nn.Sequential:
    """Build a network of `LAYERS` layers that have parameters, each followed by one that has none."""
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in make()))


class Wait(torch.autograd.Function):
    """The identity, that takes its time and no processor's: what a rank sees of an accelerator that computes."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.002)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.004)
        return grad


class Waits(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Wait.apply(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: network(lambda: (nn.Linear(256, 256), nn.Tanh())), (768, 256)),
    "conv": (lambda: network(lambda: (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())), (8, 32, 24, 24)),
    # Computes by waiting: as many ranks as you like on as few cores as there are.
    "waits": (lambda: network(lambda: (nn.Linear(256, 256), Waits())), (8, 256)),
}
MADE_UP = {rate: Link(f"{rate} Mbit/s", 1e-4, rate * 1e6 / 8) for rate in (50, 100, 400)}
FAR = Link("150 Mbit/s, 4 ms away", 4e-3, 150e6 / 8)  # of a latency that makes small buckets dear
NO_OBSTACLE = Link("no obstacle", 0.0, 1e15)


@dataclass(frozen=True)
class Case:
    """One way to take a step."""

    link: Link
    layers: float  # in a bucket
    kind: str = "bucketed"  # or "torch"

    def cap_bytes(self, model: nn.Module) -> float:
        return self.layers * sum(param.nbytes for param in model.parameters()) / LAYERS


CASES = {
    name: [Case(link, layers) for link in links for layers in (1, 4)]
    for name, links in {
        "mlp": (LINKS["1gbe"], MADE_UP[400]),
        "conv": (MADE_UP[100], MADE_UP[50]),
        "waits": (LINKS["1gbe"], MADE_UP[400]),
    }.items()
}
SWEEP = [1, 2, 3, 4, 6, 12]  # layers a bucket
OVERHEADS = [Case(NO_OBSTACLE, 6), Case(NO_OBSTACLE, 1)]


@dataclass(frozen=True)
class Step:
    """What one rank saw of one step; times from its begin, but for the last three."""

    seconds: float
    last_launch_s: float  # when the last rank launched the last bucket: all gradients are there
    busy_s: tuple[float, ...]  # of the link, for each bucket
    hidden_s: float  # of that, before the last launch
    finish_s: float  # from the last bucket's arrival to the step's end
    launches_s: tuple[float, ...] = ()  # on the machine's clock, as the next two: of each bucket, by the last rank
    real_ends_s: tuple[float, ...] = ()  # of the all_reduces that really ran
    begin_s: float = 0.0

    @property
    def end_s(self) -> float:
        return self.begin_s + self.seconds


@dataclass
class Found:
    """What one rank measured; one entry a block."""

    profiles: list[Profile] = field(default_factory=list)  # the slowest rank's moments, so the same on all ranks
    steps: dict[Case, list[Step]] = field(default_factory=dict)


def measured(rank: int, world_size: int, name: str, cases: list[Case], blocks: int, tuned: bool = False) -> Found:
    """Take all cases' steps in turns, and steps without communication among them.

    Args:
        tuned: give the cases a link that is busy for as long as backward takes, whatever link they name.
    Collective: what the replicas and links do at construction and in a step; two barriers per case and block.
    """
    torch.set_num_threads(1)
    build, shape = MODELS[name]
    # As if more layers came before: all layers then compute the gradient of their input, and take the same time.
    batch = (torch.randn(shape, generator=torch.Generator().manual_seed(rank)).requires_grad_(),)
    plain = BucketedDDP(build())
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)

    def profiled() -> Profile:
        return profile_step(plain, batch, loss_of, plain_optimizer, all_ranks=True)

    first = median_profile([profiled() for _ in range(WARM_UP + 9)][WARM_UP:])
    found, links, replicas = Found(), {}, {}
    try:
        for case in cases:
            links[case] = SimulatedLink(as_long_as_backward(first, world_size) if tuned else case.link)
            replica = links[case].attach(wrapped(case, build()))
            replicas[case] = replica, torch.optim.SGD(replica.parameters(), lr=1e-3)
            for _ in range(WARM_UP):
                timed_step(links[case], *replicas[case], batch)
            found.steps[case] = []
        rng = random.Random(name)  # the same order on every rank
        for _ in range(blocks):
            for case in rng.sample([None, *cases], 1 + len(cases)):
                if case is None:
                    found.profiles.append(profiled())
                else:
                    found.steps[case].append(timed_step(links[case], *replicas[case], batch))
    finally:
        for link in links.values():
            link.close()
    return found


def wrapped(case: Case, model: nn.Module) -> nn.Module:
    cap_mb = case.cap_bytes(model) / MIB
    if case.kind == "torch":
        return DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
    return BucketedDDP(model, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb)


def as_long_as_backward(profile: Profile, world_size: int) -> Link:
    """Return a link without latency that carries all gradients of `profile` in the time of its backward."""
    sent = Link("1 byte/s", 0.0, 1.0).all_reduce_seconds(profile.nbytes, world_size)
    return Link("as busy as backward is long", 0.0, sent / profile.backward_s)


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, torch.zeros_like(outputs))


def timed_step(
    link: SimulatedLink, replica: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]
) -> Step:
    """Collective: one barrier, and what the replica does in a step."""
    dist.barrier()
    link.clear()
    start_s = time.monotonic()
    replica.zero_grad(set_to_none=True)
    loss_of(replica(*batch)).backward()
    optimizer.step()
    end_s, spans, last_s = time.monotonic(), link.spans(), link.launches()[-1]
    arrived_s = max(span.end_s + late_s for span, late_s in zip(spans, link.late_s(), strict=True))
    hidden_s = sum(max(0.0, min(span.end_s, last_s) - span.start_s) for span in spans)
    busy_s = tuple(span.end_s - span.start_s for span in spans)
    return Step(end_s - start_s, last_s - start_s, busy_s, hidden_s, end_s - arrived_s, tuple(link.launches()),
                tuple(link.real_ends()), start_s)  # fmt: skip


# --- What is made of it ----------------------------------------------------------------------------


def blocks_of(by_rank: list[Found], case: Case) -> list[tuple[Step, ...]]:
    """Each block's step, as all ranks saw it."""
    return list(zip(*(found.steps[case] for found in by_rank), strict=True))


def slowest_of(by_rank: list[Found], case: Case) -> list[float]:
    """The seconds from the first rank's begin to the last one's end, by block."""
    return [max(step.end_s for step in block) - begun_s(block) for block in blocks_of(by_rank, case)]


def begun_s(block: tuple[Step, ...]) -> float:
    return min(step.begin_s for step in block)


def plain_s(profile: Profile) -> float:
    return profile.forward_s + profile.backward_s + profile.optimizer_s


def with_measured_overheads(by_rank: list[Found]) -> list[Profile]:
    """Return the blocks' profiles, each with the overheads that the cases without an obstacle show over all blocks.

    But with its own block's all_reduces: where they take about as long as the link, now one is the longer and now the
    other, which their medians would hide.
    """
    profiles, late_s, ends_s, own_s = by_rank[0].profiles, {}, [], [{} for _ in by_rank[0].profiles]
    for case in OVERHEADS:
        blocks = blocks_of(by_rank, case)
        buckets = len(blocks[0][0].busy_s) - 1  # after the last launch nothing of backward is left to be late
        late_s[buckets] = statistics.median(
            block[0].begin_s + block[0].last_launch_s - begun_s(block) - profile.forward_s - profile.backward_s
            for block, profile in zip(blocks, profiles, strict=True)
        )
        slowest = (max(block, key=lambda step: step.end_s) for block in blocks)
        for found, block in zip(own_s, blocks, strict=True):
            found[case.layers * profiles[0].nbytes / LAYERS] = own_seconds(block)
        ends_s += [step.finish_s - profile.optimizer_s for step, profile in zip(slowest, profiles, strict=True)]
    finish_s = max(0.0, statistics.median(ends_s))
    return [with_overheads(profile, late_s, finish_s, own) for profile, own in zip(profiles, own_s, strict=True)]


def own_seconds(block: tuple[Step, ...]) -> float:
    """The mean time of a block's real all_reduces, each since its last launch or since the one before it was done.

    Done is what all ranks have. The mean, not the median: they wait for each other, so that their times add up.
    """
    taken_s, free_s = [], 0.0
    for launch_s, *ends_s in zip(block[0].launches_s, *(step.real_ends_s for step in block), strict=True):
        done_s = max(*ends_s, free_s)
        taken_s.append(done_s - max(launch_s, free_s))
        free_s = done_s
    return statistics.fmean(taken_s)


def predictions(profiles: list[Profile], case: Case, world_size: int) -> list[Prediction]:
    """Predict the step of each block: a prediction of the median would miss what noise adds to a maximum."""
    cap = case.layers * profiles[0].nbytes / LAYERS
    return [predict(profile, cap, world_size, case.link, first_cap_bytes=cap) for profile in profiles]


def step_rows(name: str, by_rank: list[Found], world_size: int) -> list[Row]:
    """For each case the measured and the predicted step, and by how many per cent the prediction is off."""
    profiles, rows = with_measured_overheads(by_rank), []
    for case in CASES[name]:
        seconds, found = slowest_of(by_rank, case), predictions(profiles, case, world_size)
        predicted, own = [each.step_s for each in found], sum(found[0].own)
        bound = "the link" if not own else f"the machine in {own} of {len(found[0].own)} buckets"
        error = 100 * (statistics.median(predicted) / statistics.median(seconds) - 1)
        what = f"{name}, simulated {case.link.name}, {case.layers} layers a bucket, bounded by {bound}"
        key = f"{name}_{case.link.name.replace(' ', '').replace('/', '').lower()}_{case.layers}"
        rows += [
            Row(f"measured_{key}", f"{what}: measured", world_size, samples=seconds),
            Row(f"predicted_{key}", f"{what}: predicted", world_size, samples=predicted),
            Row(f"error_{key}", f"{what}: error", world_size, unit="%", samples=[error]),
        ]
    return rows


def sweep_rows(by_rank: list[Found], world_size: int) -> list[Row]:
    """The sweep's measured and predicted steps, and how many sizes the predicted best is from the measured best."""
    profiles, rows = with_measured_overheads(by_rank), []
    for layers in SWEEP:
        case = Case(FAR, layers)
        what = f"sweep, simulated {FAR.name}, {layers:g} layers a bucket"
        predicted = [each.step_s for each in predictions(profiles, case, world_size)]
        for which, samples in (("measured", slowest_of(by_rank, case)), ("predicted", predicted)):
            rows.append(Row(f"{which}_sweep_{layers:g}", f"{what}: {which}", world_size, samples=samples))
    best = [min(range(len(SWEEP)), key=lambda place: rows[2 * place + which].median) for which in (0, 1)]
    what = f"sweep: best {SWEEP[best[0]]:g} layers a bucket measured, {SWEEP[best[1]]:g} predicted; sizes apart"
    return [*rows, Row("sweep_apart", what, world_size, unit="", samples=[float(abs(best[0] - best[1]))])]


OVERLAP = {kind: Case(NO_OBSTACLE, 1, kind) for kind in ("bucketed", "torch")}
KINDS = {"bucketed": "BucketedDDP", "torch": "torch's DDP"}


def overlap_rows(name: str, by_rank: list[Found], world_size: int) -> list[Row]:
    """Of what can be hidden, how many per cent are not, by kind of replica."""
    profiles, what = by_rank[0].profiles, f"overlap, {name}"
    backward_s = [profile.backward_s for profile in profiles]
    rows = [Row(f"overlap_backward_{name}", f"{what}: backward", world_size, samples=backward_s)]
    for kind, case in OVERLAP.items():
        steps, seconds = by_rank[0].steps[case], slowest_of(by_rank, case)
        for key, which, unit, samples in (
            ("busy", "link busy", "s", [sum(step.busy_s) for step in steps[:1]]),
            ("last", "link busy with the last bucket", "s", [step.busy_s[-1] for step in steps[:1]]),
            ("hidden", "link busy before the last gradient", "s", [step.hidden_s for step in steps]),
            ("longer", "step beyond computing", "s", [s - plain_s(p) for s, p in zip(seconds, profiles, strict=True)]),
            ("unhidden", "not hidden though it could be", "%", [100 * unhidden(step) for step in steps]),
        ):
            label = f"{what}, {KINDS[kind]}: {which}"
            rows.append(Row(f"overlap_{key}_{kind}_{name}", label, world_size, unit, samples))
    return rows


def unhidden(step: Step) -> float:
    """Return which part of the link's busy time, without the last bucket's, is after the last gradient."""
    return max(0.0, 1 - step.hidden_s / sum(step.busy_s[:-1]))


# --- The benchmark ---------------------------------------------------------------------------------


def measure(plan: Plan) -> Result:
    """Compare prediction and measurement on all numbers of ranks from the smallest to the largest of `plan`'s.

    A row's name of `plan` chooses its part: those of one network, the sweep, or the overlap.
    """
    blocks, rows = QUICK_BLOCKS if plan.quick else BLOCKS, []
    parts = [*MODELS, "sweep", "overlap"]
    if plan.only and not (wanted := [part for part in parts if any(part in key.split("_") for key in plan.only)]):
        sys.exit(f"simulation has no row {', '.join(sorted(plan.only))}; their names hold one of {', '.join(parts)}")
    wanted = wanted if plan.only else parts
    fewest = min(plan.world_sizes)
    for world_size in range(fewest, max(plan.world_sizes) + 1):
        for part in wanted:
            if part in MODELS or world_size == fewest:
                show_progress(f"simulation: {world_size} ranks, {part}")
                whole = Row(f"failed_{part}", part, world_size)
                with attempt([whole], part, LIMIT_S):
                    rows += part_rows(part, world_size, blocks)
                rows += [whole] if whole.failed else []
    return Result(TITLE, rows, targets(rows), [in_short(rows), *NOTES])


def in_short(rows: list[Row]) -> str:
    """Say how many predictions keep the limit, and what their errors are."""
    errors = [abs(row.median) for row in rows if row.key.startswith("error_")]
    if not errors:
        return "No steps were predicted in this run."
    kept = sum(error <= ERROR_LIMIT for error in errors)
    return (
        f"{kept} of {len(errors)} steps are predicted within {ERROR_LIMIT:g} %: the median of the errors is "
        f"{statistics.median(errors):.1f} %, the largest {max(errors):.1f} %."
    )


def part_rows(part: str, world_size: int, blocks: int) -> list[Row]:
    if part == "sweep":
        cases = [*OVERHEADS, *(Case(FAR, layers) for layers in SWEEP)]
        return sweep_rows(run_on_ranks(measured, world_size, "mlp", cases, blocks), world_size)
    if part == "overlap":
        cases = list(OVERLAP.values())
        found = {name: run_on_ranks(measured, world_size, name, cases, blocks, True) for name in ("conv", "waits")}
        return [row for name, by_rank in found.items() for row in overlap_rows(name, by_rank, world_size)]
    return step_rows(part, run_on_ranks(measured, world_size, part, [*OVERHEADS, *CASES[part]], blocks), world_size)


def targets(rows: list[Row]) -> list[Target]:
    """Each prediction within 10 %, the best bucket within one size, and 90 % hidden of what can be."""
    found = []
    for row in rows:
        if row.key.startswith("error_"):
            found.append(Target(f"{row.way}, {row.ranks} ranks", ERROR_LIMIT, abs(row.median), "%"))
        elif row.key == "sweep_apart":
            found.append(Target(row.way, STEPS_LIMIT, row.median))
        elif row.key.startswith("overlap_unhidden_"):
            found.append(Target(row.way, UNHIDDEN_LIMIT, row.median, "%"))
    return found
