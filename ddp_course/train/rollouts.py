"""What does one rank play, and what is each of its steps worth?

A rank has environments of its own: several games of CartPole, played side by side by one vectorised environment of
gymnasium. `Player.collect` plays on from where it stopped and keeps what happened. `advantages` says how much better
each action was than the policy expected. `mean_return` plays new games, each counted once, divided over the ranks.

CartPole pays 1 for each step. An episode is *terminated* when the pole has fallen, and *truncated* by the time limit
of 500 steps. After its end, the vectorised environment begins the next episode by one step that plays nothing: the
action is ignored, the reward is 0, the new state comes back. That row is marked, and nobody learns from it.

Left out on purpose: environments in processes of their own. CartPole's step takes less time than a message.
Read next: `policy.py`, which learns from the rollouts.

Shapes: T steps, N environments of this rank, S = 4 numbers of a state.
Source: gymnasium/envs/classic_control/cartpole.py; Schulman et al. 2015 (arXiv 1506.02438) for the advantages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ddp_course.groups import my_device
from ddp_course.metrics import mean_over_ranks

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

GAME = "CartPole-v1"
SOLVED = 475.0  # mean return that gymnasium asks for
STREAMS = ("environments", "actions", "validation", "evaluation")
MAX_RANKS = 2**16


def stream_seed(seed: int, rank: int, stream: str) -> int:
    """Return a seed that no other run, rank or stream has: the three are digits of one number.

    The sum `seed + rank` would not do: rank 1 of run 0 would play the games of rank 0 of run 1.

    Raises:
        ValueError: one of the three is out of range.
    """
    if seed < 0 or not 0 <= rank < MAX_RANKS or stream not in STREAMS:
        possible = f"seed >= 0, rank < {MAX_RANKS}, one of {STREAMS}"
        raise ValueError(f"no seed for {seed=}, {rank=}, {stream=}: {possible}")
    return (seed * MAX_RANKS + rank) * len(STREAMS) + STREAMS.index(stream)


@dataclass(frozen=True)
class Rollout:
    """T steps of N environments of one rank; rows where `plays_TN` is False have no meaning."""

    state_TNS: torch.Tensor  # before the action
    action_TN: torch.Tensor  # 0 pushes the cart to the left, 1 to the right
    log_prob_TN: torch.Tensor  # of the action, for the policy that chose it
    value_TN: torch.Tensor  # of the state, as the policy's critic saw it
    next_value_TN: torch.Tensor  # of the state after the action, also where an episode ended
    reward_TN: torch.Tensor
    terminated_TN: torch.Tensor  # the pole fell: nothing can follow
    truncated_TN: torch.Tensor  # the time was up: more would have followed
    plays_TN: torch.Tensor  # False where the environment only began its next episode
    returns: list[float]  # of the episodes that ended in these steps


class Player:
    """One rank's environments, and the dice that choose its actions.

    Attributes:
        steps: rows played so far, without those that only began an episode.
    """

    def __init__(self, num_envs: int, seed: int, rank: int) -> None:
        self.env = make_games(num_envs)
        self.dice = np.random.default_rng(stream_seed(seed, rank, "actions"))
        self.state_NS, _ = self.env.reset(seed=stream_seed(seed, rank, "environments"))
        self.begins_N = np.zeros(num_envs, dtype=bool)  # the episode has ended, the next step only begins another
        self.return_N = np.zeros(num_envs)
        self.steps = 0

    @torch.no_grad()
    def collect(self, model: nn.Module, steps: int) -> Rollout:
        """Play `steps` steps of every environment with actions drawn from the policy; no other rank is needed.

        Args:
            model: the bare module, not DDP: maps states to (logit of action 1, value).
        """
        rows, returns = [], []
        for _ in range(steps):
            state_NS, plays_N = torch.from_numpy(self.state_NS), torch.from_numpy(~self.begins_N)
            logit_N, value_N = judged(model, state_NS)
            action_N = torch.from_numpy(self.dice.random(len(plays_N))) < torch.sigmoid(logit_N)
            log_prob_N = log_probability(logit_N, action_N)
            reward_N, terminated_N, truncated_N = self._step(action_N.numpy().astype(np.int64), returns)
            rows.append((state_NS, action_N, log_prob_N, value_N, reward_N, terminated_N, truncated_N, plays_N))
        state, action, log_prob, value, reward, terminated, truncated, plays = map(torch.stack, zip(*rows, strict=True))
        _, last_N = judged(model, torch.from_numpy(self.state_NS))
        self.steps += int(plays.sum())
        # The state after an action is the next row's. With gymnasium's NEXT_STEP mode, that holds at an end as well.
        next_value = torch.cat([value[1:], last_N[None]])
        return Rollout(state, action, log_prob, value, next_value, reward, terminated, truncated, plays, returns)

    def _step(self, action_N: np.ndarray, returns: list[float]) -> tuple[torch.Tensor, ...]:
        self.state_NS, reward_N, terminated_N, truncated_N, _ = self.env.step(action_N)
        self.begins_N = terminated_N | truncated_N
        self.return_N += reward_N
        returns += self.return_N[self.begins_N].tolist()
        self.return_N[self.begins_N] = 0.0
        return tuple(torch.from_numpy(np.array(array)) for array in (reward_N, terminated_N, truncated_N))


def make_games(num_envs: int) -> VectorEnv:
    """Return gymnasium's own vectorised CartPole, which computes all environments by one numpy operation each.

    Raises:
        RuntimeError: this gymnasium begins the next episode in another way than `Player` takes for granted.
    """
    import gymnasium  # here, since it takes half a second, and who only wants `advantages` plays nothing

    env = gymnasium.make_vec(GAME, num_envs=num_envs, vectorization_mode="vector_entry_point")
    if (mode := env.metadata.get("autoreset_mode")) != gymnasium.vector.AutoresetMode.NEXT_STEP:
        raise RuntimeError(f"{GAME}: expected autoreset mode NEXT_STEP, found {mode}; install gymnasium 1.1 to 1.4")
    return env


def judged(model: nn.Module, state_NS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logit of action 1, value) of each state, on the CPU, where the games are."""
    logit_N, value_N = model(state_NS.to(next(model.parameters()).device))
    return logit_N.cpu(), value_N.cpu()


def log_probability(logit_N: torch.Tensor, action_N: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the probability of the action taken (True: action 1)."""
    return nn.functional.logsigmoid(torch.where(action_N, logit_N, -logit_N))


def advantages(rollout: Rollout, gamma: float, lam: float) -> torch.Tensor:
    """Return how much better each action was than expected, by generalised advantage estimation, shape (T, N).

    The surprise of one step is reward + gamma * value of the next state - value of the state. An advantage is the sum
    of the surprises up to the episode's end, each step further away weighted by gamma * lam. The value after a
    terminated step is 0. After a truncated one it is the critic's: the pole stands, more would have followed.
    """
    advantage_TN = torch.zeros_like(rollout.reward_TN)
    later_N = torch.zeros_like(advantage_TN[0])
    for t in reversed(range(len(advantage_TN))):
        goes_on_N = ~rollout.terminated_TN[t]
        surprise_N = rollout.reward_TN[t] + gamma * goes_on_N * rollout.next_value_TN[t] - rollout.value_TN[t]
        same_episode_N = goes_on_N & ~rollout.truncated_TN[t]
        later_N = surprise_N + gamma * lam * same_episode_N * later_N
        advantage_TN[t] = later_N
    return advantage_TN


@torch.no_grad()
def mean_return(
    model: nn.Module, episodes: int, seed: int, rank: int, world_size: int, stream: str = "evaluation"
) -> float:
    """Return the mean return of `episodes` new episodes, the more probable action taken in each step.

    The episodes are divided over the ranks, and one environment plays one of them. Who took the first ones that end
    would take the short ones.

    Collective: one all_reduce, every rank of the default group.
    """
    mine = len(range(rank, episodes, world_size))
    total = 0.0
    if mine:
        env, open_N = make_games(mine), np.ones(mine, dtype=bool)
        state_NS, _ = env.reset(seed=stream_seed(seed, rank, stream))
        while open_N.any():
            logit_N, _ = judged(model, torch.from_numpy(state_NS))
            state_NS, reward_N, terminated_N, truncated_N, _ = env.step((logit_N > 0).numpy().astype(np.int64))
            total += float(reward_N[open_N].sum())
            open_N &= ~(terminated_N | truncated_N)
    return mean_over_ranks(total, mine, my_device()) if dist.is_initialized() else total / mine
