"""Are the rows what was played, and are the advantages those of each episode alone?"""

import itertools

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from ddp_course.train.policy import ActorCritic
from ddp_course.train.rollouts import (
    MAX_RANKS,
    STREAMS,
    Player,
    Rollout,
    advantages,
    mean_return,
    stream_seed,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


def a_model(bias: float = 0.0) -> ActorCritic:
    torch.manual_seed(3)
    model = ActorCritic(16)
    torch.nn.init.constant_(model.actor[-1].bias, bias)
    return model


def test_no_two_runs_ranks_or_streams_share_a_seed():
    places = list(itertools.product(range(12), range(9), STREAMS))
    assert len({stream_seed(*place) for place in places}) == len(places)
    for wrong in ((-1, 0, "actions"), (0, -1, "actions"), (0, MAX_RANKS, "actions"), (0, 0, "eval")):
        with pytest.raises(ValueError, match="no seed for"):
            stream_seed(*wrong)


def test_the_row_after_an_end_only_begins_an_episode():
    rollout = Player(4, seed=0, rank=0).collect(a_model(), 100)
    done_TN = rollout.terminated_TN | rollout.truncated_TN
    assert done_TN.sum() >= 8  # a random policy drops the pole after some 20 steps
    torch.testing.assert_close(rollout.plays_TN[1:], ~done_TN[:-1], rtol=0, atol=0)
    assert rollout.plays_TN[0].all()
    assert (rollout.reward_TN == rollout.plays_TN).all()  # 1 for each step that plays, 0 for the others
    assert len(rollout.returns) == done_TN.sum()
    begins_TNS = rollout.state_TNS[1:][~rollout.plays_TN[:-1]]
    assert (begins_TNS.abs() <= 0.05).all() and len(begins_TNS)  # after the empty row stands a fresh cart


def test_each_played_row_follows_from_the_one_before():
    """gymnasium's single environment, put into each state, answers the action with the next row's state."""
    rollout, single = Player(2, seed=1, rank=1).collect(a_model(), 60), CartPoleEnv()
    single.reset()
    played = 0
    for t, n in itertools.product(range(59), range(2)):
        if rollout.plays_TN[t, n]:
            single.state, single.steps_beyond_terminated = rollout.state_TNS[t, n].double().numpy(), None
            state_S, reward, terminated, _, _ = single.step(int(rollout.action_TN[t, n]))
            np.testing.assert_allclose(rollout.state_TNS[t + 1, n], state_S, rtol=1e-4, atol=1e-5)
            assert (reward, terminated) == (rollout.reward_TN[t, n], rollout.terminated_TN[t, n])
            played += 1
    assert played > 100


def test_episodes_go_on_over_the_border_of_two_rollouts():
    whole, halves = Player(3, seed=2, rank=0), Player(3, seed=2, rank=0)
    model = a_model()
    one, two = whole.collect(model, 80), [halves.collect(model, 40), halves.collect(model, 40)]
    for name in ("state_TNS", "action_TN", "reward_TN", "plays_TN", "next_value_TN"):
        joined = torch.cat([getattr(half, name) for half in two])
        # The last value of the first half is computed alone rather than again; the same state, so the same value.
        torch.testing.assert_close(joined, getattr(one, name), rtol=0, atol=1e-6)
    assert one.returns == two[0].returns + two[1].returns and whole.steps == halves.steps == one.plays_TN.sum()


def test_the_same_seed_plays_the_same_games_and_each_rank_its_own():
    model = a_model()
    states = [Player(4, seed, rank).collect(model, 20).state_TNS for seed, rank in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert torch.equal(states[0], states[1])
    for one, other in itertools.combinations(states[1:], 2):
        assert not (one[0] == other[0]).any()  # not a single number of the first states


def hand_made(reward, value, next_value, terminated, truncated) -> Rollout:
    """One environment; rows after an end are rows that only begin."""
    tensors = [torch.tensor(list(each)).reshape(-1, 1) for each in (reward, value, next_value)]
    ends = [torch.tensor([bool(x) for x in each]).reshape(-1, 1) for each in (terminated, truncated)]
    nothing = torch.zeros_like(tensors[0])
    plays = torch.cat([torch.ones(1, 1, dtype=torch.bool), ~(ends[0] | ends[1])[:-1]])
    reward_TN, value_TN, next_value_TN = tensors
    return Rollout(
        nothing[..., None], nothing > 0, nothing, value_TN, next_value_TN, reward_TN, ends[0], ends[1], plays, []
    )


def test_advantages_by_hand_terminated_truncated_and_cut_by_the_rollouts_end():
    gamma, lam = 0.5, 0.5
    # Two steps, the pole falls; a row that begins; one step, the time is up; a row that begins; one step, cut.
    rollout = hand_made(
        reward=[1.0, 1.0, 0.0, 1.0, 0.0, 1.0],
        value=[2.0, 4.0, 99.0, 3.0, 99.0, 6.0],
        next_value=[4.0, 77.0, 3.0, 8.0, 6.0, 10.0],
        terminated=[0, 1, 0, 0, 0, 0],
        truncated=[0, 0, 0, 1, 0, 0],
    )
    found = advantages(rollout, gamma, lam)[rollout.plays_TN].tolist()
    fallen = 1 - 4.0  # nothing follows, whatever the critic says
    first = 1 + 0.5 * 4 - 2 + 0.25 * fallen
    time_up = 1 + 0.5 * 8 - 3  # the critic's value follows, and nothing of the next episode
    assert found == [first, fallen, time_up, 1 + 0.5 * 10 - 6]


def test_what_stands_in_an_empty_row_changes_no_advantage():
    rollout = Player(4, seed=5, rank=0).collect(a_model(), 64)
    right = advantages(rollout, 0.98, 0.8)[rollout.plays_TN]
    for name in ("value_TN", "reward_TN", "next_value_TN"):
        getattr(rollout, name)[~rollout.plays_TN] = 1e6
    assert torch.equal(advantages(rollout, 0.98, 0.8)[rollout.plays_TN], right)


def test_the_time_limit_is_500_steps_and_no_failure():
    """A controller that holds the pole: its episodes are truncated, after 500 rewards."""

    class Steady(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([0.1, 0.3, 3.0, 1.0]))

        def forward(self, state_NS):
            return 1000 * state_NS @ self.weight, state_NS[:, 0]

    rollout = Player(3, seed=0, rank=0).collect(Steady(), 502)
    assert rollout.returns == [500.0] * 3
    assert rollout.truncated_TN[499].all() and rollout.truncated_TN.sum() == 3 and not rollout.terminated_TN.any()
    assert not rollout.plays_TN[500].any() and rollout.plays_TN.sum() == 3 * 501
    assert mean_return(Steady(), 5, seed=0, rank=0, world_size=1) == 500.0
