"""19.2 `normalised_advantages(...)`: is each end taken for what it is, and has every row of all ranks the same vote?

Each kind of end has a case of its own, and each typical slip lands on numbers of its own, which the judge computes.

Read next: `step.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import close, short
from ddp_course.grading.vocabulary.expect import Expect, equals, exercise, turned
from ddp_course.grading.vocabulary.play import Round, Seen

Rollout = dict[str, torch.Tensor]
SAME = 1e-5
STEPS, MANY = 9, 40  # rows of one game; in the case about talk, so many that rows cannot be taken for sums


@dataclass(frozen=True)
class Case:
    """What each rank has collected."""

    rollouts: list[Rollout]
    gamma: float
    lam: float


def act(function, case: Case, rank: int, world_size: int) -> Any:
    """A rank gets its own rollout."""
    return function(rank, world_size, case.rollouts[rank], case.gamma, case.lam)


def rounds(rng: Random) -> list[Round]:
    """No end; an end of each kind; a rollout that opens with an empty row; unequal rows; a rank without any."""
    g, lam, world = rng.choice((0.9, 0.95)), rng.choice((0.6, 0.8)), rng.choice((2, 3))
    cases = [
        (kind, Case([_rollout(rng, kind) for _ in range(world)], g, lam))
        for kind in ("open", "terminated", "truncated", "begins")
    ]
    unequal = [_rollout(rng, "all", MANY - 7 * rank, games=rank + 2, shift=3.0 * rank) for rank in range(world)]
    nothing = [_rollout(rng, "begins", steps=STEPS if rank else 1) for rank in range(world)]
    return [Round(world, [*cases, ("all", Case(unequal, g, lam)), ("none", Case(nothing, g, lam))])]


def _rollout(rng: Random, kind: str, steps: int = STEPS, games: int = 3, shift: float = 0.0) -> Rollout:
    """Values and rewards of some steps; ends in the middle, in the first row and in the last, and a reward of 0."""

    def some(*shape: int) -> torch.Tensor:
        return torch.tensor([rng.uniform(1, 5) for _ in range(torch.Size(shape).numel())]).reshape(shape)

    nothing = torch.zeros(steps, games, dtype=torch.bool)
    rollout = {"reward": some(steps, games) + shift, "value": some(steps, games), "last_value": some(games),
               "terminated": nothing.clone(), "truncated": nothing.clone(), "begins": nothing[0].clone()}  # fmt: skip
    for game in range(games):
        if kind in ("terminated", "all"):
            rollout["terminated"][rng.randint(2, 3), game] = True
        if kind in ("truncated", "all"):
            rollout["truncated"][rng.randint(5, 6), game] = True
        rollout["begins"][game] = kind == "begins" or (kind == "all" and game == 0)
    if kind in ("terminated", "truncated"):
        rollout[kind][0, 1] = rollout[kind][-1, 2] = True
    rollout["reward"][-1] = 0.0
    rollout["reward"][~_plays(rollout)] = 0.0
    return rollout


def _plays(rollout: Rollout) -> torch.Tensor:
    ends = rollout["terminated"] | rollout["truncated"]
    return ~torch.cat([rollout["begins"][None], ends[:-1]])


# --- What is right, with knobs for what is not -----------------------------------------------------


def advantages(seen: Seen, slip: str = "") -> torch.Tensor:
    """Return this rank's advantages in float64, or those of a known slip."""
    rollout, g, lam = seen.case.rollouts[seen.rank], seen.case.gamma, seen.case.lam
    reward, value = rollout["reward"].double(), rollout["value"].double()
    following = torch.cat([value[1:], rollout["last_value"].double()[None]])
    if slip == "last":
        following[-1] = 0
    if slip == "hidden":
        following[:-1] *= _plays(rollout)[1:]
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


RAW_MISTAKES = {
    "the rollout's last row has a next state too: its value is last_value": {"slip": "last"},
    "a truncated episode did not fail: the value of the state after it counts; it stands in the row that nobody played":
        {"slip": "failure"},
    "keep the value in the row that nobody played: it is that of the state after the end": {"slip": "hidden"},
    "after a terminated step nothing follows: there the value of the next state is 0": {"slip": "promise"},
    "the sum goes on over a truncated end into the next episode: stop it at both kinds of end": {"slip": "flows"},
    "rows in which nobody played have no advantage: set them to 0": {"slip": "kept"},
    "the weight of a surprise one step later is gamma * lam": {"slip": "lambda"},
}  # fmt: skip


def normal(seen: Seen, of: str = "played", correction: int = 0, mask: bool = True, divide: bool = True) -> torch.Tensor:
    """Return this rank's normalised advantages; `of` says whose mean and deviation are taken."""
    raws = [advantages(seen.of(rank)) for rank in range(seen.world_size)]
    plays = [_plays(rollout) for rollout in seen.case.rollouts]
    rows = [part[keep] for part, keep in zip(raws, plays, strict=True)]
    one = {"played": torch.cat(rows), "own": rows[seen.rank], "all": torch.cat([part.flatten() for part in raws])}
    some = rows if of == "ranks" else [one[of]]
    mean = sum(part.mean() for part in some) / len(some)
    squares = ((part - part.mean()).square().sum() / (len(part) - correction) for part in some)  # nan of no rows
    deviation = sum(square.sqrt() for square in squares) / len(some) if divide else 1
    return (raws[seen.rank] - mean) / deviation * (plays[seen.rank] if mask else 1)


NORMAL_MISTAKES = {
    "each rank normalised its own rows; take the sums of all ranks": {"of": "own"},
    "each rank normalised its own rows, by count - 1; take the sums of all ranks": {"of": "own", "correction": 1},
    "these are means of the ranks' means; reduce sums and counts": {"of": "ranks"},
    "rows in which nobody played were counted; leave them out": {"of": "all"},
    "divide the sum of squares by the count, not by count - 1": {"correction": 1},
    "rows in which nobody played must stay 0": {"mask": False},
    "the mean is taken off; divide by the standard deviation too": {"divide": False},
}


# --- What is expected ------------------------------------------------------------------------------


def part(index: int, right: Callable, mistakes: dict[str, dict], otherwise: Callable[[Seen, Any], str]) -> Expect:
    """Expect one of the two tensors; what is told is the number that is furthest off."""
    one = equals("", right, turned(right, mistakes), otherwise, of=lambda seen: seen["value"][index], tolerance=SAME)

    def expect(seen: Seen) -> Fault | None:
        shape = list(seen.case.rollouts[seen.rank]["value"].shape)
        if not isinstance(seen["value"], list) or [_shape(part) for part in seen["value"]] != [shape, shape]:
            cause = "return two tensors of the shape of value: the advantages, and the normalised ones"
            return Fault(f"two tensors of shape {shape}", short(seen["value"], 2)[:80], cause=cause)
        if (fault := one(seen)) is None:
            return None
        found, wanted = torch.tensor(seen["value"][index], dtype=torch.float64), right(seen)
        t, n = divmod((found - wanted).abs().nan_to_num(torch.inf).argmax().item(), shape[1])
        return replace(fault, expected=f"{wanted[t, n]:.4g} in row {t} of game {n}", found=f"{found[t, n]:.4g}")

    return expect


def _shape(found: Any) -> list[int]:
    return [len(found), *_shape(found[0])] if isinstance(found, list) and found else []


raw = part(
    0,
    advantages,
    RAW_MISTAKES,
    lambda seen, found: "go through the rows from the last to the first: surprise + gamma * lam * the later advantage",
)
begins = part(
    0,
    advantages,
    {cause: knobs for cause, knobs in RAW_MISTAKES.items() if knobs["slip"] != "kept"},
    lambda seen, found: "begins says in which games the first row is one that nobody played: its advantage is 0",
)
both = part(
    1,
    normal,
    NORMAL_MISTAKES,
    lambda seen, found: (
        "(advantage - mean) / deviation, mean and deviation over the played rows of all ranks"
        if close(seen["value"][0], advantages(seen), SAME)
        else "it follows from the advantages, which are not right yet"
    ),
)


def talk(seen: Seen) -> Fault | None:
    """A few numbers travel."""
    sizes = [call.n_bytes for call in seen["calls"]]
    if 1 <= len(sizes) <= 3 and sum(sizes) <= 200:
        return None
    found = f"{len(sizes)} collectives with {sum(sizes)} bytes"
    cause = "rank by rank the rows stay where they are: send their count, their sum and the sum of their squares"
    return Fault("1 to 3 collectives, 200 bytes at most", found, seen.rank, cause)


ADVANTAGES = exercise(
    "19.2",
    "Advantages over all ranks",
    "normalised_advantages",
    25,
    act=act,
    rounds=rounds,
    checks={
        "open": ("an episode that goes on beyond the rollout", 1, raw, "open"),
        "terminated": ("after a fall nothing follows", 1, raw, "terminated"),
        "truncated": ("the time limit is no failure", 1, raw, "truncated"),
        "empty": ("a row that nobody played", 1, begins, "begins"),
        "normalised": ("mean 0 and deviation 1 over the rows of all ranks", 2, both, "all none"),
        "talk": ("sums and counts on the way, no rows", 1, talk, "all"),
    },
    refused=("ddp_course.train.rollouts.advantages",),
    hints={
        "sizes; disagree: different sizes; (?i:mismatch)": "ranks have different numbers of rows: reduce sums and "
        "counts, not rows",
    },
)
