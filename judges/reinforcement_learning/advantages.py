"""15.2 `normalised_advantages(...)`: is each end taken for what it is, and has every row of all ranks the same vote?

Each kind of end has a case of its own, and each typical slip lands on numbers of its own, which the judge computes.

Read next: `step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from ddp_course.grading import observe
from ddp_course.grading.compare import close, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

Rollout = dict[str, torch.Tensor]
SAME = 1e-5
STEPS, MANY = 9, 40  # rows of one game; in the case about talk, so many that rows cannot be taken for sums


def advantages_driver(rank: int, world_size: int, function: Callable, cases: list[list[Rollout]], g: float, lam: float):
    """Call the function for each case with this rank's rollout; note both results and the collectives."""
    notes = []
    for rollouts in cases:
        mine = {name: tensor.clone() for name, tensor in rollouts[rank].items()}
        with observe.Collectives() as seen:
            result = function(rank, world_size, mine, g, lam)
        notes.append({"result": plain(result), "bytes": [c.n_bytes for c in seen.calls if c.op != "barrier"]})
    return notes


def advantages_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """No end; an end of each kind; a rollout that opens with an empty row; unequal rows on the ranks."""
    g, lam, world = rng.choice((0.9, 0.95)), rng.choice((0.6, 0.8)), rng.choice((2, 3))
    cases = [[_rollout(rng, kind) for _ in range(world)] for kind in ("", "terminated", "truncated", "begins")]
    cases.append([_rollout(rng, "both", MANY - 7 * rank, games=rank + 2, shift=3.0 * rank) for rank in range(world)])
    ranks = answer.run(advantages_driver, world, cases, g, lam, init=True)
    for i, key in enumerate(("open", "terminated", "truncated", "empty")):
        faults = (_raw_fault(cases[i][r], notes[i]["result"], g, lam, r, key) for r, notes in enumerate(ranks))
        yield key, next(filter(None, faults), None)
    last = [notes[-1] for notes in ranks]
    yield (
        "normalised",
        next(filter(None, (_normal_fault(cases[-1], n["result"], r, g, lam) for r, n in enumerate(last))), None),
    )
    yield "talk", next(filter(None, (_talk_fault(n["bytes"], r) for r, n in enumerate(last))), None)


def _rollout(rng: Random, kind: str, steps: int = STEPS, games: int = 2, shift: float = 0.0) -> Rollout:
    """Values and rewards of some steps; ends in the middle, not in the last row, and the empty row after each."""

    def some(*shape: int) -> torch.Tensor:
        return torch.tensor([rng.uniform(1, 5) for _ in range(torch.Size(shape).numel())]).reshape(shape)

    nothing = torch.zeros(steps, games, dtype=torch.bool)
    rollout = {"reward": some(steps, games) + shift, "value": some(steps, games), "last_value": some(games),
               "terminated": nothing.clone(), "truncated": nothing.clone(), "begins": nothing[0].clone()}  # fmt: skip
    for game in range(games):
        if kind in ("terminated", "both"):
            rollout["terminated"][rng.randint(2, 3), game] = True
        if kind in ("truncated", "both"):
            rollout["truncated"][rng.randint(5, 6), game] = True
        rollout["begins"][game] = kind == "begins" or (kind == "both" and game == 0)
    rollout["reward"][~_plays(rollout)] = 0.0
    return rollout


def _plays(rollout: Rollout) -> torch.Tensor:
    ends = rollout["terminated"] | rollout["truncated"]
    return ~torch.cat([rollout["begins"][None], ends[:-1]])


def raw_advantages(rollout: Rollout, g: float, lam: float, slip: str = "") -> torch.Tensor:
    """The right advantages in float64, or those of a known slip."""
    reward, value = rollout["reward"].double(), rollout["value"].double()
    following = torch.cat([value[1:], rollout["last_value"].double()[None]])
    if slip == "last":
        following[-1] = 0
    found, later = torch.zeros_like(value), torch.zeros_like(value[0])
    for t in reversed(range(len(value))):
        end, fell = (rollout["terminated"] | rollout["truncated"])[t], rollout["terminated"][t]
        no_value = {"failure": end, "promise": torch.zeros_like(end)}.get(slip, fell)
        surprise = reward[t] + g * ~no_value * following[t] - value[t]
        later = surprise + g * lam * ~(fell if slip == "flows" else end) * later
        found[t] = later
        if slip == "lambda":
            later = later / lam
    return found if slip == "kept" else found * _plays(rollout)


_SLIPS = {
    "last": "the rollout's last row has a next state too: its value is last_value",
    "failure": "a truncated episode did not fail: the value of the state after it counts; it stands in the row that "
    "nobody played",
    "promise": "after a terminated step nothing follows: there the value of the next state is 0",
    "flows": "the sum goes on over a truncated end into the next episode: stop it at both kinds of end",
    "kept": "rows in which nobody played have no advantage: set them to 0",
    "lambda": "the weight of a surprise one step later is gamma * lam",
}


def _pair(result: Any, rollout: Rollout) -> Fault | None:
    shape = list(rollout["value"].shape)
    if isinstance(result, list) and len(result) == 2 and all(_shape(part) == shape for part in result):
        return None
    cause = "return two tensors of the shape of value: the advantages, and the normalised ones"
    return Fault(f"two tensors of shape {shape}", short(result, 2)[:80], cause=cause)


def _shape(found: Any) -> list[int]:
    return [len(found), *_shape(found[0])] if isinstance(found, list) and found else []


def _raw_fault(rollout: Rollout, result: Any, g: float, lam: float, rank: int, key: str) -> Fault | None:
    if fault := _pair(result, rollout):
        return fault
    right, found = raw_advantages(rollout, g, lam), result[0]
    if close(found, right.tolist(), SAME):
        return None
    off = (torch.tensor(found, dtype=torch.float64) - right).abs() > 1e-4
    t, n = (off if off.any() else right.isnan() == 0).nonzero()[0].tolist()
    slip = next((s for s in _SLIPS if close(found, raw_advantages(rollout, g, lam, s).tolist(), SAME)), "")
    cause = _SLIPS.get(
        slip, "go through the rows from the last to the first: surprise + gamma * lam * the later advantage"
    )
    if key == "empty" and slip in ("", "kept"):
        cause = "begins says in which games the first row is one that nobody played: its advantage is 0"
    return Fault(f"{right[t, n].item():.4g} in row {t} of game {n}", f"{found[t][n]:.4g}", rank, cause)


def _normal_fault(rollouts: list[Rollout], result: Any, rank: int, g: float, lam: float) -> Fault | None:
    if fault := _pair(result, rollouts[rank]):
        return fault
    raws, plays = [raw_advantages(each, g, lam) for each in rollouts], [_plays(each) for each in rollouts]
    rows = [raw[keep] for raw, keep in zip(raws, plays, strict=True)]
    everything, own = torch.cat(rows), rows[rank]
    padded = torch.cat([raw.flatten() for raw in raws])
    raw, keep, found = raws[rank], plays[rank], result[1]

    def normal(mean: Any, deviation: Any, mask: Any = keep) -> list:
        return ((raw - mean) / deviation * mask).tolist()

    right = normal(everything.mean(), everything.std(correction=0))
    if close(found, right, SAME):
        return None
    means, deviations = torch.stack([r.mean() for r in rows]), torch.stack([r.std(correction=0) for r in rows])
    guesses = [
        (normal(own.mean(), own.std(correction=0)), "each rank normalised its own rows; take the sums of all ranks"),
        (normal(own.mean(), own.std()), "each rank normalised its own rows; take the sums of all ranks"),
        (normal(means.mean(), deviations.mean()), "these are means of the ranks' means; reduce sums and counts"),
        (normal(padded.mean(), padded.std(correction=0)), "rows in which nobody played were counted; leave them out"),
        (normal(everything.mean(), everything.std()), "divide the sum of squares by the count, not by count - 1"),
        (normal(everything.mean(), everything.std(correction=0), 1), "rows in which nobody played must stay 0"),
        (normal(everything.mean(), 1), "the mean is taken off; divide by the standard deviation too"),
    ]  # fmt: skip
    cause = next((c for guess, c in guesses if close(found, guess, SAME)), "")
    t, n = keep.nonzero()[0].tolist()
    otherwise = "(advantage - mean) / deviation, mean and deviation over the played rows of all ranks"
    if not close(result[0], raw.tolist(), SAME):
        otherwise = "it follows from the advantages, which are not right yet"
    return Fault(f"{right[t][n]:.4g} in row {t} of game {n}", short(found[t][n]), rank, cause or otherwise)


def _talk_fault(sizes: list[int], rank: int) -> Fault | None:
    if sizes and len(sizes) <= 3 and sum(sizes) <= 200:
        return None
    found = f"{len(sizes)} collectives with {sum(sizes)} bytes"
    cause = "rank by rank the rows stay where they are: send their count, their sum and the sum of their squares"
    return Fault("1 to 3 collectives, 200 bytes at most", found, rank, cause)


ADVANTAGES = Exercise(
    "15.2",
    "Advantages over all ranks",
    "normalised_advantages",
    25,
    (
        Check("open", "an episode that goes on beyond the rollout", 1),
        Check("terminated", "after a fall nothing follows", 1),
        Check("truncated", "the time limit is no failure", 1),
        Check("empty", "a row that nobody played", 1),
        Check("normalised", "mean 0 and deviation 1 over the rows of all ranks", 2),
        Check("talk", "sums and counts on the way, no rows", 1),
    ),
    advantages_judge,
    refused=("ddp_course.train.rollouts.advantages",),
    hints=(
        (r"different sizes|(?i:mismatch)", "ranks have different numbers of rows: reduce sums and counts, not rows"),
    ),
)
