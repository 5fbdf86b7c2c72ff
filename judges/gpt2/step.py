"""16.2 `train_step(replica, optimizer, loss_function, micro_batches, max_norm)`: is it one step on the whole batch?

The judge takes the same steps in one process, rightly and with each known mistake. Where the answer's weights are those
of a mistake, its name is told. Read next: `utilisation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading import observe
from ddp_course.grading.compare import close, is_factor, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer

WIDTH, LAYERS, ROWS, RATE = 5, 3, 2, 0.5
TOLERANCE = 1e-5  # clip_grad_norm_ adds 1e-6 to the norm
SETTLE = 3  # ordinary steps after which DDP has its buckets
Rows = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """Some steps in a row, of so many micro-batches each."""

    count: int
    steps: int
    max_norm: float
    seed: int

    def rows(self, rank: int, step: int) -> Rows:
        """Return one rank's micro-batches of one step: inputs and targets."""
        generator = torch.Generator().manual_seed(self.seed + 97 * step + rank)
        xs = torch.randn(self.count, ROWS, WIDTH, generator=generator, dtype=torch.float64)
        # Ranks and micro-batches have gradients of different lengths, so that it matters where one clips.
        return [(x, x.flip(1) * 2 + 3 * rank + number) for number, x in enumerate(xs)]

    def model(self) -> nn.Sequential:
        """Return the same model on every rank, in float64."""
        torch.manual_seed(self.seed)
        layers = (m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).double()


def step_driver(rank: int, world_size: int, function: Callable, cases: list[Case]) -> list[dict]:
    """Call the function for the steps of each case; note weights, returned norms and collectives."""
    return [_played(rank, function, case) for case in cases]


def _played(rank: int, function: Callable, case: Case) -> dict:
    model = case.model()
    replica = DistributedDataParallel(model, bucket_cap_mb=8 * WIDTH * WIDTH / 2**20)
    ordinary = [_ordinary(replica, case.rows(rank, 0)[0]) for _ in range(SETTLE)][-1]
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    forwards, waiting, updates, note = [], [], [], {"ordinary": ordinary, "steps": []}
    _note_graphs(model, waiting)
    model.register_forward_pre_hook(lambda module, inputs: forwards.append(len(inputs[0])))
    optimizer.register_step_pre_hook(lambda *args: updates.append(len(forwards)))
    for step in range(case.steps):
        for seen_before in (forwards, waiting, updates):
            seen_before.clear()
        state: list[tuple[int, bool]] = []
        with observe.Collectives() as seen:
            seen.on_call = lambda state=state: state.append((len(forwards), len(updates) > 0))
            norm = function(replica, optimizer, nn.functional.mse_loss, case.rows(rank, step), case.max_norm)
        calls = [(call.op, call.in_backward, *at) for call, at in zip(seen.calls, state, strict=True)]
        facts = {"forwards": forwards[:], "held": max(waiting, default=0), "updates": updates[:], "calls": calls}
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
        note["steps"].append({**facts, "weights": weights, "norm": _number(norm)})
    return note


def _note_graphs(model: nn.Module, waiting: list[int]) -> None:
    """At each forward and each backward pass, note how many forward passes wait for theirs."""

    def note(change: int) -> None:
        waiting.append((waiting[-1] if waiting else 0) + change)

    def forward(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        note(1)
        output.register_hook(lambda gradient: note(-1))

    model.register_forward_hook(forward)


def _number(norm: object) -> float | str:
    if isinstance(norm, torch.Tensor) and norm.numel() == 1:
        return float(norm)
    return float(norm) if isinstance(norm, int | float) else type(norm).__name__


def _ordinary(replica: nn.Module, rows: tuple[torch.Tensor, torch.Tensor]) -> int:
    with observe.Collectives() as seen:
        nn.functional.mse_loss(replica(rows[0]), rows[1]).backward()
    return len(seen.calls)


# --- One process, rightly and wrongly --------------------------------------------------------------

MISTAKES = {
    "sum": "the micro-batches' means are added: divide each loss by the number of micro-batches",
    "twice": "it is divided by the number of micro-batches twice",
    "world": "it is divided by the world size twice; torch's DDP averages over the ranks already",
    "unclipped": "the gradient is not clipped, or clipped after the update",
    "clipped early": "it is clipped before the last backward pass, so each rank cuts a part of its own gradient",
    "clipped each": "it is clipped after every micro-batch: clip once, after the last backward pass",
    "clipped own": "each rank clips its own gradient, so what is averaged is another one; clip after DDP's average",
    "clipped values": "single numbers are clipped (clip_grad_value_); cut by the norm of all gradients together",
    "clipped apart": "each parameter is clipped by its own norm: the norm is that of all gradients together",
    "always": "a gradient that is short enough must stay as it is; do not make it longer",
    "own": "this is the rank's own gradient: the last micro-batch must be outside no_sync, forward and backward",
    "last": "one micro-batch only is in it; leave .grad alone between them, so that gradients add up",
    "kept": "the gradients of the step before are still there: call optimizer.zero_grad() before or after each step",
}


def one_process(case: Case, world_size: int, mistake: str = "", me: int = 0) -> dict:
    """Take the steps of a case on all ranks' rows, with a mistake if one is named; return weights and norms."""
    model = case.model()
    weights, norms, kept = [], [], 0.0
    for step in range(case.steps):
        parts = [_gradients(model, case.rows(rank, step)) for rank in range(world_size)]
        gradient, norm = _combined(parts, case, mistake, me)
        if mistake == "kept":
            gradient = gradient + kept
            norm = gradient.norm().item()
        if mistake not in (
            "unclipped",
            "clipped early",
            "clipped each",
            "clipped own",
            "clipped values",
            "clipped apart",
        ):
            gradient = gradient * (case.max_norm / norm if norm > case.max_norm or mistake == "always" else 1.0)
        kept = gradient  # clip_grad_norm_ has cut .grad itself
        vector = nn.utils.parameters_to_vector(model.parameters()).detach() - RATE * gradient
        nn.utils.vector_to_parameters(vector, model.parameters())
        weights.append(vector.tolist())
        norms.append(norm)
    return {"weights": weights, "norms": norms}


def _gradients(model: nn.Module, rows: Rows) -> torch.Tensor:
    """Return the gradient of each micro-batch, (A, all parameters)."""
    found = []
    for x, y in rows:
        grads = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
        found.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(found)


def _combined(parts: list[torch.Tensor], case: Case, mistake: str, me: int) -> tuple[torch.Tensor, float]:
    """Put the ranks' micro-batches together, with the mistake if it is one that happens here."""
    count, limit = case.count, case.max_norm
    if mistake == "clipped each":
        sums = []
        for part in parts:
            total = torch.zeros_like(part[0])
            for each in part[:-1]:
                total = _cut(total + each / count, limit)
            sums.append(total + part[-1] / count)
        return _cut(torch.stack(sums).mean(0), limit), torch.stack(sums).mean(0).norm().item()
    if mistake == "clipped early":
        sums = [_cut(part[:-1].sum(0) / count, limit) + part[-1] / count for part in parts]
        return torch.stack(sums).mean(0), torch.stack(sums).mean(0).norm().item()
    if mistake == "clipped own":
        return torch.stack([_cut(part.mean(0), limit) for part in parts]).mean(0), parts[me].mean(0).norm().item()
    if mistake == "own":
        parts = [parts[me]]
    if mistake == "last":
        parts = [part[-1:] / count for part in parts]
    mean = torch.stack([part.mean(0) for part in parts]).mean(0)
    mean = mean * {"sum": count, "twice": 1 / count, "world": 1 / len(parts)}.get(mistake, 1.0)
    norm = mean.norm().item()
    if mistake == "clipped values":
        mean = mean.clamp(-limit, limit)
    if mistake == "clipped apart":
        sizes = [p.numel() for p in case.model().parameters()]
        mean = torch.cat([_cut(piece, limit) for piece in mean.split(sizes)])
    return mean, norm


def _cut(gradient: torch.Tensor, limit: float) -> torch.Tensor:
    return gradient * min(1.0, limit / (gradient.norm().item() or limit))


# --- Judging ---------------------------------------------------------------------------------------


def step_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Steps with a gradient too long, steps with one short enough, and a single micro-batch."""
    world_size, count = rng.choice((2, 3)), rng.choice((3, 4))
    cases = [
        Case(count, 2, rng.choice((0.3, 0.4)), rng.randint(1, 10**6)),
        Case(rng.choice((2, 3)), 3, 1e6, rng.randint(1, 10**6)),
        Case(1, 2, 0.5, rng.randint(1, 10**6)),
    ]
    notes = answer.run(step_driver, world_size, cases, init=True)

    def first_fault(fault_of: Callable, *indices: int) -> Fault | None:
        found = (fault_of(cases[i], rank, note[i], world_size) for i in indices for rank, note in enumerate(notes))
        return next(filter(None, found), None)

    yield "clipped", first_fault(_weights_fault, 0)
    yield "short", first_fault(_weights_fault, 1)
    yield "norm", first_fault(_norm_fault, 0, 1)
    yield "silent", first_fault(_silent_fault, 0, 1)
    yield "once", first_fault(_once_fault, 0, 1)
    yield "one", first_fault(_weights_fault, 2) or first_fault(_once_fault, 2)


def _weights_fault(case: Case, rank: int, note: dict, world_size: int) -> Fault | None:
    found, right = [step["weights"] for step in note["steps"]], one_process(case, world_size)["weights"]
    if close(found, right, TOLERANCE):
        return None
    step = next(number for number in range(case.steps) if not close(found[number], right[number], TOLERANCE))
    expected = f"after step {step} of {case.count} micro-batches, the last weight {short(right[step][-1])}"
    return Fault(expected, short(found[step][-1]), rank, _weights_cause(case, rank, note, world_size, step))


def _weights_cause(case: Case, rank: int, note: dict, world_size: int, step: int) -> str:
    updates = note["steps"][0]["updates"]
    if not updates:
        return "optimizer.step() was not called"
    if updates != [case.count]:
        return f"the optimizer steps {len(updates)} times, after micro-batches {updates}: step once, after the last"
    for mistake, cause in MISTAKES.items():
        wrong = one_process(case, world_size, mistake, rank)["weights"]
        if close(note["steps"][step]["weights"], wrong[step], TOLERANCE):
            return cause
    return "each loss divided by their number, all added up in .grad, averaged by DDP, clipped once, then the update"


def _norm_fault(case: Case, rank: int, note: dict, world_size: int) -> Fault | None:
    right = one_process(case, world_size)["norms"][0]
    found = note["steps"][0]["norm"]
    expected = f"the norm of the averaged gradient before clipping, {short(right)}"
    if isinstance(found, str):
        return Fault(expected, f"a value of type {found}", rank, "return what clip_grad_norm_ returns, as a number")
    if close(found, right, 1e-6):
        return None
    if close(found, min(right, case.max_norm), 1e-4):
        cause = "this is the norm after clipping; take it before"
    elif close(found, one_process(case, world_size, "clipped own", rank)["norms"][0]):
        cause = "this is the norm of the rank's own gradient; clip after the last backward pass, when DDP has averaged"
    elif is_factor(found, right, case.count):
        cause = MISTAKES["sum"]
    elif is_factor(found, right, 1 / case.count):
        cause = MISTAKES["twice"]
    elif is_factor(found, right, 1 / world_size):
        cause = MISTAKES["world"]
    else:
        cause = "return what clip_grad_norm_ returns after the last backward pass"
    return Fault(expected, short(found), rank, cause)


def _silent_fault(case: Case, rank: int, note: dict, world_size: int) -> Fault | None:
    facts = note["steps"][-1]
    expected = f"{case.count} micro-batches, one after the other; nothing sent before the last"
    if facts["forwards"] != [ROWS] * case.count:
        cause = "call the replica once for each micro-batch; all at once need the memory that accumulation saves"
        return Fault(expected, f"forward passes of {facts['forwards']} rows", rank, cause)
    if facts["held"] > 1:
        cause = "call backward after each forward pass; until then its graph stays in memory, which accumulation saves"
        return Fault(expected, f"{facts['held']} forward passes before a backward pass", rank, cause)
    early = [call for call in facts["calls"] if call[2] < case.count]
    if not early:
        return None
    cause = "all micro-batches but the last belong inside replica.no_sync(), forward and backward"
    return Fault(expected, f"{len(early)} collectives before the last", rank, cause)


def _once_fault(case: Case, rank: int, note: dict, world_size: int) -> Fault | None:
    facts = note["steps"][-1]
    last = [call for call in facts["calls"] if call[2] == case.count]
    expected = f"{note['ordinary']} collectives in the last of {case.count} backward passes, none after it"
    outside = [call for call in last if not call[1]]
    if outside:
        cause = "DDP has averaged when backward returns, so every rank finds the same norm by itself: send nothing more"
        return Fault(expected, f"{len(outside)} outside backward", rank, cause)
    if len(last) == note["ordinary"]:
        return None
    cause = "the last micro-batch must be outside no_sync, forward and backward: there DDP sends each bucket once"
    return Fault(expected, f"{len(last)} collectives", rank, cause)


STEP = Exercise(
    "16.2",
    "One step of several small batches",
    "train_step",
    20,
    (
        Check("clipped", "the weights are those of one process on the whole batch, clipped", 2),
        Check("short", "a gradient that is short enough is not changed, step after step", 1),
        Check("norm", "the returned norm is that of the whole batch's gradient", 1),
        Check("silent", "one micro-batch at a time, and nothing is sent before the last", 1),
        Check("once", "the last backward pass sends each bucket once, and nothing follows", 1),
        Check("one", "a single micro-batch works, too", 1),
    ),
    step_judge,
    refused=(
        "ddp_course.train.gpt.accumulate",
        "ddp_course.parallel.ddp.BucketedDDP",
        "ddp_course.parallel.naive.NaiveDDP",
    ),
    hints=(
        (r"'Sequential' object has no attribute 'no_sync'", "no_sync belongs to the replica, not to its module"),
        (r"context manager protocol", "use it as `with replica.no_sync():`, with the brackets"),
        (r"backward through the graph a second time", "call backward once for each micro-batch's own loss"),
        (
            r"(?s)no result after.*waited in (all_reduce|barrier|broadcast)",
            "some ranks wait in a collective that another one skips; look for a branch on the rank",
        ),
    ),
)
