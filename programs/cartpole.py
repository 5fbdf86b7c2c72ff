"""A rank's games of CartPole, and what an action was worth; for `train_policy.py`.

Shapes: T steps, N games of a rank.
"""

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import logsigmoid

# For `advantages`: one step later a reward weighs GAMMA, a surprise GAMMA * LAMBDA.
GAMMA, LAMBDA = 0.98, 0.8


def network():
    hidden = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, 1))


class ActorCritic(nn.Module):
    """Return the logit of a push to the right, and the value of the state."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = network(), network()

    def forward(self, state):
        return self.actor(state)[..., 0], self.critic(state)[..., 0]


def log_prob(logit, action):
    # The probability of a push to the left is 1 - sigmoid(logit) = sigmoid(-logit).
    return logsigmoid(torch.where(action, logit, -logit))


def make_env(games):
    how = "vector_entry_point"  # all games in one NumPy operation
    return gymnasium.make_vec("CartPole-v1", games, vectorization_mode=how)


def play(model, games, steps, seeds, returns):
    """Play T steps at each `next`; yield nine tensors, (T, N) if no shape is given.

    - state before each step, (T, N, 4)
    - action: True is a push to the right; and the log-probability of the action
    - value: the critic's estimate for the state
    - reward, terminated, truncated: what came of the step
    - plays: False where the step only began an episode
    - last, (N,): the values of the states after the T steps
    """
    # Two seeds: for the games' starts, and for the dice that choose the actions.
    env, dice = make_env(games), np.random.default_rng(seeds[1])
    state, _ = env.reset(seed=seeds[0])
    begins, collected = np.zeros(games, bool), np.zeros(games)
    while True:  # a turn: up to the yield
        rows = []
        for _ in range(steps):
            before, plays = torch.from_numpy(state), torch.from_numpy(~begins)
            with torch.no_grad():
                logit, value = model(before)
            action = torch.from_numpy(dice.random(games)) < logit.sigmoid()
            # came: reward, terminated, truncated.
            state, *came, _ = env.step(action.numpy().astype(int))
            noted = before, action, log_prob(logit, action), value
            rows.append((*noted, *map(torch.tensor, came), plays))
            reward, terminated, truncated = came
            begins = terminated | truncated  # there the next step plays nothing
            collected += reward
            returns.extend(collected[begins].tolist())
            collected[begins] = 0
        with torch.no_grad():
            last = model(torch.from_numpy(state))[1]
        # zip turns T rows into eight columns; each becomes one tensor (T, N, ...).
        yield *map(torch.stack, zip(*rows, strict=True)), last


# From here on: explained later in the lesson.


def advantages(value, last, reward, terminated, truncated):
    """How much better each action was than the critic expected, (T, N)."""
    following = torch.cat([value[1:], last[None]])
    found, later = torch.zeros_like(value), torch.zeros_like(last)
    for t in reversed(range(len(value))):  # a step needs the surprises after it
        surprise = reward[t] + GAMMA * following[t] * ~terminated[t] - value[t]
        later = surprise + GAMMA * LAMBDA * later * ~(terminated[t] | truncated[t])
        found[t] = later
    return found


def evaluate(model, episodes, rank, world_size):
    """Mean return of test episodes, each counted once: the ranks share them."""
    mine = len(range(rank, episodes, world_size))  # one game for each of its episodes
    env, total = make_env(mine), torch.zeros((), dtype=torch.float64)
    # Test games: the same in each run with as many ranks.
    state, _ = env.reset(seed=1_000_000 + rank)
    running = np.ones(mine, bool)
    while running.any():
        with torch.no_grad():
            right = model(torch.from_numpy(state))[0] > 0  # the more probable action
        action = right.numpy().astype(int)
        state, reward, terminated, truncated, _ = env.step(action)
        total += reward[running].sum()
        running &= ~(terminated | truncated)
    dist.all_reduce(total)
    return total.item() / episodes
