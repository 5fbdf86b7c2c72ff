"""Learn CartPole by PPO, on one rank or on many: each rank plays games of its own.

    torchrun --standalone --nproc-per-node 2 train_policy.py

Shapes: T steps of a turn, N games of a rank, R rows: the steps that the policy played.
"""

import os

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import logsigmoid
from torch.nn.parallel import DistributedDataParallel

GAMES, STEPS, TURNS, PASSES, RUN = 8, 32, 60, 16, 0  # games of each rank; RUN is the seed
GAMMA, LAMBDA, CLIP = 0.98, 0.8, 0.2


class ActorCritic(nn.Module):
    """Return the logit of a push to the right, and the value of the state."""

    def __init__(self):
        super().__init__()
        sizes = [(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
                 for _ in range(2)]  # fmt: skip
        self.actor, self.critic = (nn.Sequential(*layers) for layers in sizes)

    def forward(self, state):
        return self.actor(state)[..., 0], self.critic(state)[..., 0]


def log_prob(logit, action):
    return logsigmoid(torch.where(action, logit, -logit))


def make_env(games):
    return gymnasium.make_vec("CartPole-v1", games, vectorization_mode="vector_entry_point")


def play(model, games, seeds, returns):
    """Yield the columns of T steps of N games, and the value of the state after them."""
    env, dice = make_env(games), np.random.default_rng(seeds[1])
    state, _ = env.reset(seed=seeds[0])
    begins, collected = np.zeros(games, bool), np.zeros(games)
    while True:
        rows = []
        for _ in range(STEPS):
            before, plays = torch.from_numpy(state), torch.from_numpy(~begins)
            with torch.no_grad():
                logit, value = model(before)
            action = torch.from_numpy(dice.random(games)) < logit.sigmoid()
            state, reward, terminated, truncated, _ = env.step(action.numpy().astype(int))
            ends = map(torch.tensor, (reward, terminated, truncated))
            rows.append((before, action, log_prob(logit, action), value, *ends, plays))
            begins = terminated | truncated
            collected += reward
            returns.extend(collected[begins].tolist())
            collected[begins] = 0
        with torch.no_grad():
            last = model(torch.from_numpy(state))[1]
        yield *map(torch.stack, zip(*rows, strict=True)), last


def advantages(value, last, reward, terminated, truncated):
    """How much better each action was than the critic expected, (T, N)."""
    following = torch.cat([value[1:], last[None]])
    found, later = torch.zeros_like(value), torch.zeros_like(last)
    for t in reversed(range(len(value))):
        surprise = reward[t] + GAMMA * following[t] * ~terminated[t] - value[t]
        later = surprise + GAMMA * LAMBDA * later * ~(terminated[t] | truncated[t])
        found[t] = later
    return found


def evaluate(model, episodes, rank, world_size):
    """Mean return of new episodes, each counted once: they are divided among the ranks."""
    mine = len(range(rank, episodes, world_size))
    env, total = make_env(mine), torch.zeros((), dtype=torch.float64)
    state, _ = env.reset(seed=1_000_000 + rank)  # games that nobody trained on
    running = np.ones(mine, bool)
    while running.any():
        with torch.no_grad():
            right = model(torch.from_numpy(state))[0] > 0  # the more probable action
        state, reward, terminated, truncated, _ = env.step(right.numpy().astype(int))
        total += reward[running].sum()
        running &= ~(terminated | truncated)
    dist.all_reduce(total)
    return total.item() / episodes


def main():
    dist.init_process_group("gloo")  # the games and so small a network are on the CPU
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(RUN)
    torch.set_num_threads(1)
    model = ActorCritic()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-5)
    returns = []  # of this rank's episodes that ended
    seeds = np.random.SeedSequence((RUN, rank)).generate_state(2).tolist()
    turns = play(model, GAMES, seeds, returns)
    for turn in range(TURNS):
        state, action, old, value, reward, terminated, truncated, plays, last = next(turns)
        advantage = advantages(value, last, reward, terminated, truncated)
        target = (advantage + value)[plays]
        state, action, old, advantage = (one[plays] for one in (state, action, old, advantage))
        count = torch.tensor(len(action))
        sums = torch.stack([count, advantage.sum(), advantage.square().sum()]).double()
        dist.all_reduce(sums)
        mean, squares = (sums[1:] / sums[0]).float()
        advantage = (advantage - mean) / (squares - mean**2).sqrt()
        share = world_size / sums[0].item()  # DDP divides by the ranks, not by the rows
        for _ in range(PASSES):
            logit, value = replica(state)
            ratio = (log_prob(logit, action) - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            loss = share * (0.5 * (value - target).square() - gain).sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if (turn + 1) % 20 == 0:
            found = evaluate(model, 64, rank, world_size)
            if rank == 0:
                print(f"turn {turn + 1}: mean return {found:.1f}, {sums[0].item():.0f} rows")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
