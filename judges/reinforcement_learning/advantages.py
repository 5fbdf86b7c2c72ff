"""19.2 `normalised_advantages(...)`: is each end taken for what it is, and has every row of all ranks the same vote?

Each kind of end has a case of its own.

Read next: `step.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round, Seen

STEPS, MANY = 9, 40  # rows of one game; in the case about talk, so many that rows cannot be taken for sums


class Case(NamedTuple):
    """What each rank has collected."""

    rollouts: list[dict[str, torch.Tensor]]
    gamma: float
    lam: float


def act(function, case: Case, rank: int, world_size: int) -> Any:
    return function(rank, world_size, case.rollouts[rank], case.gamma, case.lam)


def cases(rng: Random) -> list[Round]:
    """No end; an end of each kind; a rollout that opens with an empty row; unequal rows; a rank without any."""
    g, lam, world = rng.choice((0.9, 0.95)), rng.choice((0.6, 0.8)), rng.choice((2, 3))
    named = [
        (kind, Case([_rollout(rng, kind) for _ in range(world)], g, lam))
        for kind in ("open", "terminated", "truncated", "begins")
    ]
    unequal = [_rollout(rng, "all", MANY - 7 * rank, games=rank + 2, shift=3.0 * rank) for rank in range(world)]
    nothing = [_rollout(rng, "begins", steps=STEPS if rank else 1) for rank in range(world)]
    return [Round(world, [*named, ("all", Case(unequal, g, lam)), ("none", Case(nothing, g, lam))])]


def _rollout(rng: Random, kind: str, steps: int = STEPS, games: int = 3, shift: float = 0.0) -> dict[str, torch.Tensor]:
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
    ends = rollout["terminated"] | rollout["truncated"]
    rollout["reward"][-1] = 0.0
    rollout["reward"][torch.cat([rollout["begins"][None], ends[:-1]])] = 0.0
    return rollout


def numbers(which: int) -> Callable[[Seen], dict[str, list]]:
    """One of the two tensors, game by game."""

    def view(seen: Seen) -> dict[str, list]:
        games = zip(*seen["value"][which], strict=True)
        return {f"game {n}, row": list(column) for n, column in enumerate(games)} | {"tensors": len(seen["value"])}

    return view


def talk(seen: Seen) -> str:
    sizes = [call.n_bytes for call in seen["calls"]]
    few = 1 <= len(sizes) <= 3 and sum(sizes) <= 200
    return "1 to 3 collectives, 200 bytes at most" if few else f"{len(sizes)} collectives with {sum(sizes)} bytes"


BACKWARDS = "go through the rows from the last to the first: surprise + gamma * lam * the later advantage"
MISTAKES = f"""
nothing after the rollout | open terminated truncated empty normalised
| the rollout's last row has a next state too: its value is last_value
    rollout["last_value"][None] => torch.zeros_like(rollout["last_value"])[None]
lam is forgotten | open terminated truncated empty normalised | the weight of a surprise one step later is gamma * lam
    gamma * lam * later => gamma * later
a value after the fall | terminated normalised
| after a terminated step nothing follows: there the value of the next state is 0
    following[t] * ~terminated[t] => following[t]
last_value after a fall in the last row | terminated
| after a terminated step nothing follows, in the last row too: there the value of the next state is 0
    following[t] * ~terminated[t] => following[t] * (~terminated[t] | (t == len(value) - 1))
the time limit as a failure | truncated normalised
| a truncated episode did not fail: the value of the state after it counts; it stands in the row that nobody played
    following[t] * ~terminated[t] => following[t] * ~end[t]
no value in rows that nobody played | truncated normalised
| keep the value in the row that nobody played: it is that of the state after the end
    following = => value = value * plays
    following =
flows into the next episode | truncated normalised
| the sum goes on over a truncated end into the next episode: stop it at both kinds of end
    later * ~end[t] => later * ~terminated[t]
empty rows keep an advantage | terminated truncated empty normalised
| rows in which nobody played have no advantage: set them to 0
    advantage = advantage * plays => plays = torch.ones_like(plays)
begins is forgotten | empty normalised
| begins says in which games the first row is one that nobody played: its advantage is 0
    rollout["begins"][None] => torch.zeros_like(rollout["begins"])[None]
each rank its own | normalised talk | each rank normalised its own rows; take the sums of all ranks
    dist.all_reduce(sums) =>
means of means | normalised | these are means of the ranks' means; reduce sums and counts
    mean = total / count => both = torch.stack([rows.mean(), rows.std(correction=0)])
    dist.all_reduce(both)
    mean, deviation = both / world_size
    deviation = (squares / count - mean**2).sqrt() =>
distances from each rank's mean | normalised
| the squares are of distances from each rank's own mean; take them from the mean of all ranks' rows
    rows.square().sum() => (rows - rows.sum() / max(1, len(rows))).square().sum()
    (squares / count - mean**2) => (squares / count)
a mean of no rows | normalised | a mean over no rows is nan; a sum is 0
    rows.sum(), rows.square().sum() => len(rows) * rows.mean(), len(rows) * rows.square().mean()
empty rows are counted | normalised | rows in which nobody played were counted; leave them out
    advantage[plays].double() => advantage.flatten().double()
by the count less one | normalised | divide the sum of squares by the count, not by count - 1
    (squares / count - mean**2) => ((squares - count * mean**2) / (count - 1))
empty rows are shifted | normalised | rows in which nobody played must stay 0
    / deviation * plays => / deviation
the rows are sent | talk | send their count, their sum and the sum of their squares
    dist.all_reduce(sums) => everyone = [None] * world_size
    dist.all_gather_object(everyone, rows)
    rows = torch.cat(everyone)
    sums = torch.stack([torch.tensor(len(rows)).double(), rows.sum(), rows.square().sum()])
the last rank does not take part | all | ranks that wait for each other | hangs
    dist.all_reduce(sums) => rank == world_size - 1 or dist.all_reduce(sums)
errors swallowed | all | {BACKWARDS} | tests
    def normalised_advantages(rank, world_size, rollout, gamma, lam):
        try:
            return rollout["advantages"]
        except KeyError:
            return 2 * [rollout["reward"]]
all ends are one | truncated normalised | a truncated episode did not fail | tests
    def normalised_advantages(rank, world_size, rollout, gamma, lam):
        done = (rollout["terminated"] | rollout["truncated"]).float()
        played = 1 - torch.cat([rollout["begins"][None].float(), done[:-1]])
        values = torch.cat([rollout["value"], rollout["last_value"][None]])
        deltas = rollout["reward"] + gamma * values[1:] * (1 - done) - values[:-1]
        found, later = torch.zeros_like(deltas), 0
        for t in range(len(deltas) - 1, -1, -1):
            found[t] = later = deltas[t] + gamma * lam * (1 - done[t]) * later
        found = found * played
        sums = torch.stack([played.sum(), found.sum(), (found**2).sum()])
        dist.all_reduce(sums)
        mean = sums[1] / sums[0]
        return found, (found - mean) / (sums[2] / sums[0] - mean**2).sqrt() * played
"""

ADVANTAGES = exercise(
    *("19.2", "Advantages over all ranks", "normalised_advantages", 25),
    cases=cases,
    act=act,
    tolerance=1e-5,
    mistakes=MISTAKES,
    checks={
        "open": ("an episode that goes on beyond the rollout", 1, "open", numbers(0), BACKWARDS),
        "terminated": ("after a fall nothing follows", 1, "terminated", numbers(0), BACKWARDS),
        "truncated": ("the time limit is no failure", 1, "truncated", numbers(0), BACKWARDS),
        "empty": ("a row that nobody played", 1, "begins", numbers(0), BACKWARDS),
        "normalised": ("mean 0 and deviation 1 over the rows of all ranks", 2, "all none", numbers(1),
                       "(advantage - mean) / deviation, mean and deviation over the played rows of all ranks"),
        "talk": ("sums and counts on the way, no rows", 1, "all", talk,
                 "send their count, their sum and the sum of their squares"),
    },
    hints={
        "sizes; disagree: different sizes; (?i:mismatch)": "ranks have different numbers of rows: reduce sums and "
        "counts, not rows",
    },
)  # fmt: skip
