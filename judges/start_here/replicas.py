"""00.2 `replicas_equal(rank, world_size, model)`: is a difference found wherever it is, and do all ranks agree?

The cases differ from equal replicas in one number, so small that rounding must not hide it. Read next: `step.py`.
"""

from __future__ import annotations

from random import Random

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

KINDS = {  # what differs, and the change that one rank makes
    "equal": ("equal replicas", lambda model: None),
    "last": ("the last rank differs", lambda model: model[2].weight[-1, -1].add_(1)),
    "first": ("rank 0 differs from all others", lambda model: model[2].weight[0, 0].sub_(0.5)),
    "swapped": (
        "two numbers have changed places, sums are as before",
        lambda model: swap(model[2].weight),
    ),
    "buffer": ("parameters are equal, a buffer is not", lambda model: model[1].running_mean[2].fill_(0.125)),
    "frozen": ("a parameter that is not trained differs", lambda model: model[0].bias[1].add_(1)),
    "tiny": ("the last bit of one float64 number differs", lambda model: model[2].weight[0, 1].add_(2**-52)),
    "counter": ("a whole number differs that no float32 holds", lambda model: model[1].num_batches_tracked.add_(1)),
}


def swap(weight: torch.Tensor) -> None:
    weight[0, 0], weight[1, 3] = weight[1, 3].clone(), weight[0, 0].clone()


@torch.no_grad()
def replica(kind: str, seed: int, rank: int, world_size: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[1].num_batches_tracked += 2**24
    if kind == "tiny":
        model.double()[2].weight[0, 1] = 1.5
    if rank == {"first": 0, "tiny": 1}.get(kind, world_size - 1):  # a sum over the ranks rounds a bit of rank 1's away
        KINDS[kind][1](model)
    return model


def cases(rng: Random) -> list[Round]:
    """All kinds on three ranks, then on another number."""
    seed = rng.randrange(10**6)
    sizes = (3, rng.choice((2, 4)))
    return [Round(w, [(f"{kind}-{n}", (kind, seed + n)) for kind in KINDS]) for n, w in enumerate(sizes)]


def act(function, case: tuple[str, int], rank: int, world_size: int) -> Note:
    """Note the result, and whether the model was left alone."""
    model, before = replica(*case, rank, world_size), replica(*case, rank, world_size)
    result = plain(function(rank, world_size, model))
    result = bool(result) if result in (0, 1) else result  # a tensor with one element is an answer, too
    kept = all(map(torch.equal, _tensors(model), _tensors(before))) and _modes(model) == _modes(before)
    return Note(value=result, kept=kept)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _modes(model: nn.Module) -> list:
    return [(t.dtype, t.requires_grad) for t in _tensors(model)] + [part.training for part in model.modules()]


def found(seen: Seen) -> object:
    """Who always says True is right about equal replicas, and knows nothing."""
    return seen["value"] if seen["calls"] else "no collective was called"


def kept(seen: Seen) -> str:
    return ("the model as it was" if seen["kept"] else "a changed one") if seen["calls"] else "no collective"


MISTAKES = """
sums | hidden | two numbers that change places leave a sum as it was; compare number by number
    torch.equal(mine, theirs) => torch.equal(mine.sum(), theirs.sum())
parameters only | hidden | parameters are equal, a buffer is not; model.state_dict() has both
    model.state_dict().values() => [each.detach() for each in model.parameters()]
with a tolerance | hidden | last digits differ; compare exactly, in each tensor's own dtype, without a tolerance
    torch.equal => torch.allclose
one dtype for all | hidden | a whole number differs that no float32 holds; compare each tensor in its own dtype
    torch.equal(mine, theirs) => torch.equal(mine.to(model[0].weight.dtype), theirs.to(model[0].weight.dtype))
ranks do not agree | different hidden | the ranks do not agree: each one's finding must reach all
    dist.all_reduce(differences) => pass
rank 0 is taken for all | different hidden | rank 0's finding is taken for all; a difference from it is found elsewhere
    dist.all_reduce(differences) => dist.broadcast(differences, src=0)
the number of differences | equal different hidden | return True or False on every rank
    return differences.item() == 0 => return differences.item() + 2
into the model | kept | the model's own tensors were overwritten; broadcast into a copy
    theirs = mine.clone() => mine, theirs = mine.clone(), mine
turns gradients off | kept | the model's mode has changed; leave it as it is
    differences = torch.tensor(0) => differences = torch.tensor(0)
    model.requires_grad_(False)
stops at the first difference | all | one that has found a difference must still call every collective | tests
    differences += not torch.equal(mine, theirs) => if not torch.equal(mine, theirs):
        return False
always true | all | no rank can know what the others hold | tests
    def replicas_equal(rank, world_size, model):
        return True
hashes of what is printed | hidden | compare every number of state_dict(), exactly | tests
    def replicas_equal(rank, world_size, model):
        texts = [None] * world_size
        dist.all_gather_object(texts, str(model.state_dict()))
        return len(set(texts)) == 1
"""

SILENT = "no collective was called, so no rank can know what the others hold"


def checks(*kinds: str) -> str:
    return " ".join(f"{kind}-{n}" for n in (0, 1) for kind in kinds)


REPLICAS = exercise(
    *("00.2", "Are the replicas equal?", "replicas_equal", 15),
    cases=cases,
    act=act,
    said=lambda seen: f"{KINDS[seen.case[0]][0]}, on {seen.world_size} ranks:",
    mistakes=MISTAKES,
    checks={
        "equal": ("equal replicas are told as equal", 1, checks("equal"), found, SILENT),
        "different": ("a rank that differs is found, and all ranks say so", 2, checks("last", "first"), found,
                      f"compare every number with every rank's; or {SILENT}"),
        "hidden": ("swapped numbers, any buffer, a last bit", 2,
                   checks("swapped", "buffer", "frozen", "tiny", "counter"), found,
                   "compare every number of state_dict(), exactly, in its own dtype; what any rank finds counts; or "
                   + SILENT),
        "kept": ("the model is left alone", 1, checks(*KINDS), kept, SILENT),
    },
    hints={
        "absent|disagree|cut-off": "a rank went on without the others; one that has found a difference must still "
        "call every collective",
    },
    right="""
gathered into one tensor
    def replicas_equal(rank, world_size, model):
        flat = torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])
        everyone = torch.empty(world_size * len(flat)).double()
        dist.all_gather_into_tensor(everyone, flat)
        return torch.equal(everyone, everyone[: len(flat)].repeat(world_size))
""",
)  # fmt: skip
