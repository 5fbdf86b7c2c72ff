"""How do several ranks learn one policy, each in games of its own?

    launch(train_policy, 2, args=(PolicyConfig(),))

There is no dataset to divide. Each rank makes its own rows by playing (`rollouts.py`), with seeds of its own, and
DistributedDataParallel averages the gradients of the policy. Ranks seldom have equally many rows, since those that only
begin an episode are left out. So each rank divides its sum by the number of rows of *all* ranks, and the averaged
gradient is that of one process with all rows. The advantages are normalised over all ranks for the same reason.

The objective is the clipped one of PPO: several passes over the same rows, which may not move the policy far.

Left out on purpose: checkpoints. Weights and optimizer are saved as in lesson 10, but the games themselves, the state
of each cart and of the dice, would have to be saved too; a resumed run begins new games instead.
Read next: `beyond/`, for models that are too large for this.

Shapes: R rows of this rank (steps times environments), S = 4 numbers of a state, H hidden units.
Source: Schulman et al. 2017 (arXiv 1707.06347).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checkpoint.state import checksum
from ddp_course.groups import my_device
from ddp_course.train.rollouts import SOLVED, Player, Rollout, advantages, log_probability, mean_return

ENOUGH = 495.0  # mean return in the games of a look; more than SOLVED, since other games come after

__all__ = ["ActorCritic", "PolicyConfig", "PolicyResult", "learn", "train_policy"]


@dataclass(frozen=True)
class PolicyConfig:
    """How to learn CartPole."""

    iterations: int = 300  # times to play and then learn, at most
    num_envs: int = 8  # environments of each rank
    horizon: int = 32  # steps of each environment between two updates
    epochs: int = 16  # passes over the rows of an iteration, one optimizer step each
    hidden: int = 64  # width of the two hidden layers, of actor and of critic
    lr: float = 2e-3  # learning rate at the start; falls to 0 evenly
    clip: float = 0.2  # how far a probability may move, as a share; falls with the learning rate
    gamma: float = 0.98  # weight of a reward one step later
    lam: float = 0.8  # weight of a surprise one step later, beside gamma
    value_weight: float = 0.5  # weight of the critic's loss
    max_norm: float = 0.5  # the gradient's norm is clipped to this, after the averaging
    check_every: int = 10  # iterations between two looks whether the game is solved (0: play them all)
    episodes: int = 128  # episodes of each look and of the evaluation at the end, over all ranks
    seed: int = 0  # chooses the first weights, the games and the actions
    same_seed: bool = False  # give every rank rank 0's games: a mistake, to see what it costs


@dataclass(frozen=True)
class PolicyResult:
    """What one rank returns. Lists have one entry for each iteration."""

    rank: int
    world_size: int
    steps: list[int]  # of all ranks' environments so far
    returns: list[float | None]  # mean of the episodes that ended, over all ranks; None if none did
    own_returns: list[float | None]  # the same for this rank's episodes
    evaluation: float  # mean return of new episodes, over all ranks
    seconds: float  # spent on playing and learning
    checksum: str  # of the weights; equal on every rank if the replicas are

    @property
    def solved(self) -> bool:
        """Whether the evaluation reaches what gymnasium asks for."""
        return self.evaluation >= SOLVED


class ActorCritic(nn.Module):
    """Two small networks beside each other: one chooses an action, one says what a state is worth."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
            for _ in range(2)
        )
        with torch.no_grad():
            self.actor[-1].weight.mul_(0.01)  # begin with both actions about equally probable

    def forward(self, state_RS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each state the logit of action 1 and the value."""
        return self.actor(state_RS).squeeze(-1), self.critic(state_RS).squeeze(-1)


def train_policy(rank: int, world_size: int, config: PolicyConfig) -> PolicyResult:
    """Play and learn in turn, and return what came of it.

    Collective: those of `learn`.
    """
    return learn(rank, world_size, config)[1]


def learn(rank: int, world_size: int, config: PolicyConfig) -> tuple[ActorCritic, PolicyResult]:
    """Play and learn in turn; every rank of the default group must call it. Returns the model, too.

    The same seed and world size give the same bits on the CPU; it sets torch's threads to one for that.

    Collective: DDP's own at construction; in each iteration one all_reduce of five numbers, and DDP's all_reduces in
        each epoch; one all_reduce for each look whether the game is solved, and one at the end.
    """
    device = my_device()
    torch.set_num_threads(1)  # the tensors are tiny; also, the bits do not depend on the number of threads then
    torch.manual_seed(config.seed)
    model = ActorCritic(config.hidden).to(device)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), config.lr, eps=1e-5, fused=True)
    player = Player(config.num_envs, config.seed, 0 if config.same_seed else rank)
    steps, returns, own_returns = [], [], []
    started = time.perf_counter()
    for iteration in range(config.iterations):
        left = 1 - iteration / config.iterations
        optimizer.param_groups[0]["lr"] = config.lr * left
        rollout = player.collect(model, config.horizon)
        batch, totals = make_batch(rollout, config, device)
        for _ in range(config.epochs):
            optimizer.zero_grad()
            policy_loss(replica, batch, config.clip * left, config.value_weight).backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
            optimizer.step()
        steps.append(totals.rows + (steps[-1] if steps else 0))
        returns.append(mean(totals.return_sum, totals.episodes))
        own_returns.append(mean(sum(rollout.returns), len(rollout.returns)))
        look = config.check_every and (iteration + 1) % config.check_every == 0
        # In games that are none of the evaluation's: a policy chosen by those would look better than it is.
        if look and mean_return(model, config.episodes, config.seed, rank, world_size, "validation") >= ENOUGH:
            break
    seconds = time.perf_counter() - started
    evaluation = mean_return(model, config.episodes, config.seed, rank, world_size)
    result = PolicyResult(rank, world_size, steps, returns, own_returns, evaluation, seconds, checksum(model))
    return model.cpu(), result


def mean(total: float, count: float) -> float | None:
    return total / count if count else None


# --- The rows of one iteration ---------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The rows of one rank that count, and what a row's share in the mean over all ranks is."""

    state_RS: torch.Tensor
    action_R: torch.Tensor
    log_prob_R: torch.Tensor  # for the policy that played
    advantage_R: torch.Tensor  # normalised: over the rows of all ranks, mean 0 and deviation 1
    target_R: torch.Tensor  # what the critic should say
    share: float  # world size / rows of all ranks


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks; equal on every rank."""

    rows: int
    advantage_sum: float
    advantage_squares: float
    return_sum: float
    episodes: int


def make_batch(rollout: Rollout, config: PolicyConfig, device: torch.device) -> tuple[Batch, Totals]:
    """Take the rows that count, and normalise their advantages over all ranks.

    Collective: one all_reduce, every rank of the default group.
    """
    plays_TN = rollout.plays_TN
    advantage_R = advantages(rollout, config.gamma, config.lam)[plays_TN]
    totals = add_up(advantage_R, rollout.returns, device)
    average = totals.advantage_sum / totals.rows
    variance = max(0.0, totals.advantage_squares / totals.rows - average**2)
    batch = Batch(
        rollout.state_TNS[plays_TN].to(device),
        rollout.action_TN[plays_TN].to(device),
        rollout.log_prob_TN[plays_TN].to(device),
        ((advantage_R - average) / (variance**0.5 + 1e-8)).to(device),
        (advantage_R + rollout.value_TN[plays_TN]).to(device),
        dist.get_world_size() / totals.rows,
    )
    return batch, totals


def add_up(advantage_R: torch.Tensor, returns: list[float], device: torch.device) -> Totals:
    """Return counts and sums over all ranks. Means of means would be wrong: ranks have unequal numbers of rows.

    Collective: one all_reduce of five numbers, every rank of the default group.
    """
    own_R = advantage_R.double()
    own = [len(own_R), own_R.sum().item(), own_R.square().sum().item(), sum(returns), len(returns)]
    numbers = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(numbers)
    rows, advantage_sum, squares, return_sum, episodes = numbers.tolist()
    return Totals(int(rows), advantage_sum, squares, return_sum, int(episodes))


def policy_loss(replica: nn.Module, batch: Batch, clip: float, value_weight: float) -> torch.Tensor:
    """Return this rank's part of the loss; the mean of the parts over the ranks is the loss of all rows.

    PPO's objective: the advantage times the ratio of the action's probability now to that when it was played. Once
    the ratio has left 1 +- clip in the direction that the advantage asks for, the row asks for nothing more.
    """
    logit_R, value_R = replica(batch.state_RS)
    ratio_R = torch.exp(log_probability(logit_R, batch.action_R) - batch.log_prob_R)
    clipped_R = ratio_R.clamp(1 - clip, 1 + clip)
    gain_R = torch.minimum(ratio_R * batch.advantage_R, clipped_R * batch.advantage_R)
    row_loss_R = value_weight * (value_R - batch.target_R).square() - gain_R
    # DDP divides the sum over the ranks by the world size. A mean over this rank's rows would let
    # a rank with few rows give each of them more weight.
    return batch.share * row_loss_R.sum()
