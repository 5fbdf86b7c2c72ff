"""Is the averaged policy gradient that of one process with all rows, and is the game solved?"""

from dataclasses import replace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_course.train.policy import (
    ActorCritic,
    PolicyConfig,
    add_up,
    make_batch,
    policy_loss,
    train_policy,
)
from ddp_course.train.rollouts import SOLVED, Player, Rollout, advantages, make_games, mean_return, stream_seed

pytestmark = pytest.mark.timeout(240)

CPU = torch.device("cpu")
QUICK = PolicyConfig(iterations=5, num_envs=4, horizon=16, epochs=3, hidden=16, episodes=8, check_every=0)


# --- The gradient ----------------------------------------------------------------------------------


def a_model(seed: int = 5, hidden: int = 16) -> ActorCritic:
    torch.manual_seed(seed)
    model = ActorCritic(hidden)
    torch.nn.init.normal_(model.actor[-1].weight)
    return model


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([param.grad.flatten() for param in model.parameters()]).clone()


def gradients_of(rank: int, world_size: int, num_envs: list[int], config: PolicyConfig) -> dict:
    """Play, and take the gradient for a model that has moved since: this rank's own, and the averaged one."""
    rollout = Player(num_envs[rank], config.seed, rank).collect(a_model(), config.horizon)
    model = a_model(seed=6)  # another policy, so that ratios are clipped
    replica = DistributedDataParallel(model)
    batch, totals = make_batch(rollout, config, CPU)
    policy_loss(model, batch, config.clip, config.value_weight).backward()  # without DDP
    own = flat_gradient(model)
    model.zero_grad()
    policy_loss(replica, batch, config.clip, config.value_weight).backward()
    return {"rollout": rollout, "own": own, "averaged": flat_gradient(model), "totals": totals}


def one_process(rollouts: list[Rollout], config: PolicyConfig) -> torch.Tensor:
    """All rows in one process, in float64, written with torch's own distribution, mean and deviation."""
    rows = []
    for each in rollouts:
        keep = each.plays_TN
        advantage = advantages(each, config.gamma, config.lam)
        columns = (each.action_TN, each.log_prob_TN, advantage, advantage + each.value_TN)
        rows.append([each.state_TNS[keep].double(), *(column[keep].double() for column in columns)])
    state, action, old, advantage, target = map(torch.cat, zip(*rows, strict=True))
    advantage = (advantage - advantage.mean()) / advantage.std(unbiased=False)
    model = a_model(seed=6).double()
    logit, value = model(state)
    ratio = (torch.distributions.Bernoulli(logits=logit).log_prob(action) - old).exp()
    outside = ((advantage > 0) & (ratio > 1 + config.clip)) | ((advantage < 0) & (ratio < 1 - config.clip))
    assert 0.1 < outside.double().mean() < 0.9  # both branches of the objective are in play
    actor = -torch.where(outside, ratio.detach(), ratio) * advantage
    (actor.mean() + config.value_weight * torch.nn.functional.mse_loss(value, target)).backward()
    return flat_gradient(model)


@pytest.mark.parametrize("num_envs", [[4, 4, 4], [7, 1, 3]], ids=["equal", "unequal"])
def test_the_averaged_gradient_is_that_of_one_process_with_all_rows(ranks, num_envs):
    config = PolicyConfig(horizon=40)
    found = ranks(3).run(gradients_of, args=(num_envs, config), limit_s=90)
    rows = [int(rank["rollout"].plays_TN.sum()) for rank in found]
    assert len(set(num_envs)) == len(set(rows))
    assert [rank["totals"].rows for rank in found] == [sum(rows)] * 3
    expected = one_process([rank["rollout"] for rank in found], config)
    for rank in found:
        assert torch.equal(rank["averaged"], found[0]["averaged"])
        torch.testing.assert_close(rank["averaged"].double(), expected, rtol=2e-4, atol=2e-5 * expected.abs().max())
        assert not torch.equal(rank["own"], found[0]["own"]) or rank is found[0]


def add_up_on(rank: int, world_size: int) -> list:
    rows = [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([-4.0]), torch.zeros(0)][rank]
    totals = add_up(rows, [[20.0, 30.0], [], [11.0]][rank], CPU)
    return [totals.rows, totals.advantage_sum, totals.advantage_squares, totals.return_sum, totals.episodes]


def test_counts_and_sums_are_over_all_ranks_also_where_one_has_nothing(ranks):
    assert ranks(3).run(add_up_on, limit_s=60) == [[4, 5.0, 57.0, 61.0, 3]] * 3


# --- A run -----------------------------------------------------------------------------------------


def test_replicas_stay_equal_and_returns_are_those_of_all_episodes(ranks):
    first, second = ranks(2).run(train_policy, args=(QUICK,), limit_s=90)
    again = ranks(2).run(train_policy, args=(QUICK,), limit_s=90)[0]
    assert first.checksum == second.checksum == again.checksum
    assert (first.returns, first.steps) == (second.returns, second.steps) == (again.returns, again.steps)
    assert first.own_returns != second.own_returns
    for mean, one, other in zip(first.returns, first.own_returns, second.own_returns, strict=True):
        bounds = [own for own in (one, other) if own is not None]
        assert mean is None if not bounds else min(bounds) <= mean <= max(bounds)
    rows = 2 * QUICK.num_envs * QUICK.horizon
    assert all(0.8 * rows * (i + 1) < steps < rows * (i + 1) for i, steps in enumerate(first.steps))
    assert first.evaluation == second.evaluation == again.evaluation


def test_two_ranks_with_one_seed_are_one_rank_at_twice_the_price(ranks):
    same = ranks(2).run(train_policy, args=(replace(QUICK, same_seed=True, episodes=1),), limit_s=90)
    (one,) = ranks(1).run(train_policy, args=(QUICK,), limit_s=90)
    assert [result.checksum for result in same] == [one.checksum] * 2
    assert same[0].returns == one.returns
    assert same[0].steps == [2 * steps for steps in one.steps]


def mean_return_on(rank: int, world_size: int, episodes: int) -> float:
    return mean_return(a_model(), episodes, 9, rank, world_size)


def test_the_evaluation_is_divided_over_the_ranks(ranks):
    """7 episodes: 3, 2 and 2; and 2 episodes, of which rank 2 has none."""
    for episodes, shares in ((7, [3, 2, 2]), (2, [1, 1, 0])):
        lengths = [length for rank, share in enumerate(shares) if share for length in lengths_of(share, rank)]
        found = ranks(3).run(mean_return_on, args=(episodes,), limit_s=60)
        assert found == pytest.approx([sum(lengths) / episodes] * 3) and len(lengths) == episodes


def lengths_of(share: int, rank: int) -> list[int]:
    env, model = make_games(share), a_model()
    state, _ = env.reset(seed=stream_seed(9, rank, "evaluation"))
    lengths: list[int] = [0] * share
    for step in range(1, 501):
        with torch.no_grad():
            state, _, terminated, truncated, _ = env.step((model(torch.from_numpy(state))[0] > 0).long().numpy())
        for n in (terminated | truncated).nonzero()[0]:
            lengths[n] = lengths[n] or step
    return lengths


@pytest.mark.slow
def test_two_ranks_solve_the_game(ranks):
    results = ranks(2).run(train_policy, args=(PolicyConfig(seed=4),), limit_s=200)
    assert results[0].evaluation >= SOLVED == 475 and results[0].solved
    assert results[0].checksum == results[1].checksum
    assert max(value for value in results[0].returns[:3] if value is not None) < 60  # it could not at first
