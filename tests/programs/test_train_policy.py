"""`train_policy.py`: ranks with games of their own take the steps of one process that plays all of them."""

import itertools
import re

import numpy as np
import pytest
import torch
from torch import nn

from tests.programs.running import PROGRAMS, RANKS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "train_policy.py"
TURNS, GAMES, STEPS, PASSES = 3, 4, 64, 2
SHORT = ("= 8, 32, 80, 16  #", f"= {GAMES}, {STEPS}, {TURNS}, {PASSES}  #")
TOLD = (
    "    dist.barrier()\n",
    "    for name, one in model.named_parameters():\n"
    '        print(name, f"{one.double().sum():.9f}", f"{one.double().abs().sum():.9f}")\n    dist.barrier()\n',
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def cartpole(monkeypatch):
    monkeypatch.syspath_prepend(PROGRAMS)
    import cartpole

    return cartpole


def weights(folder, world_size: int, *edits: tuple[str, str]) -> dict[str, list[float]]:
    (folder / "cartpole.py").write_text((PROGRAMS / "cartpole.py").read_text())
    said = on_ranks(edited(PROGRAM, folder, SHORT, TOLD, *edits), world_size, folder=folder)
    assert len(set(said)) == 1  # replicas are equal
    return {name: [float(total), float(size)] for name, total, size in re.findall(r"(\S+) (\S+) (\S+)\n", said[0])}


def alone(cartpole, seeds: list[list[int]]) -> dict[str, list[float]]:
    """One process plays the games of all ranks, and takes the mean over all samples."""
    torch.manual_seed(0)
    model = cartpole.ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-5)
    players = [cartpole.play(model, GAMES, STEPS, each, []) for each in seeds]
    for turn in range(TURNS):
        columns = []
        for state, action, old, value, *ends, plays, last in map(next, players):
            advantage = cartpole.advantages(value, last, *ends)
            columns.append([one[plays] for one in (state, action, old, advantage, advantage + value)])
        state, action, old, advantage, target = map(torch.cat, zip(*columns, strict=True))
        advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
        left = 1 - turn / TURNS
        optimizer.param_groups[0]["lr"] = 2e-3 * left
        for _ in range(PASSES):
            logit, value = model(state)
            probability = torch.where(action, logit.sigmoid(), 1 - logit.sigmoid())
            ratio = probability / old.exp()
            gain = torch.min(ratio * advantage, torch.clip(ratio, 1 - 0.2 * left, 1 + 0.2 * left) * advantage)
            optimizer.zero_grad()
            (0.5 * nn.functional.mse_loss(value, target) - gain.mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return {
        name: [one.double().sum().item(), one.double().abs().sum().item()] for name, one in model.named_parameters()
    }


def near(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(found[n] == pytest.approx(expected[n], abs=1e-5) for n in expected)


@pytest.mark.parametrize("world_size", RANKS)
def test_ranks_take_the_steps_of_one_process_with_all_their_games(world_size, tmp_path, cartpole):
    seeds = [np.random.SeedSequence((0, rank)).generate_state(2).tolist() for rank in range(world_size)]
    expected = alone(cartpole, seeds)
    found = weights(tmp_path, world_size)
    assert near(found, expected)
    of_means = weights(tmp_path, world_size, ("world_size / sums[0].item()", "1 / len(action)"))
    assert near(of_means, expected) == (world_size == 1)


def test_two_ranks_with_the_games_of_one_learn_what_one_learns(tmp_path):
    same = ("SeedSequence((RUN, rank))", "SeedSequence((RUN, 0))")
    one, two = weights(tmp_path, 1, same), weights(tmp_path, 2, same)
    assert all(one[name] == pytest.approx(two[name], abs=1e-4) for name in one)


def test_an_advantage_is_the_sum_of_the_surprises_to_the_end(cartpole):
    generator = torch.Generator().manual_seed(0)
    value, reward = torch.randn(9, 3, generator=generator), torch.rand(9, 3, generator=generator)
    last, ends = torch.randn(3, generator=generator), torch.zeros(2, 9, 3, dtype=torch.bool)
    ends[0, 4, 0] = ends[1, 6, 1] = True  # the pole of game 0 falls, the time of game 1 is up
    found = cartpole.advantages(value, last, reward, *ends)
    following = torch.cat([value[1:], last[None]])
    for t, game in itertools.product(range(9), range(3)):
        expected, weight = 0.0, 1.0
        for later in range(t, 9):
            goes_on = 0.0 if ends[0, later, game] else 0.98 * following[later, game]
            expected += weight * (reward[later, game] + goes_on - value[later, game])
            if ends[:, later, game].any():
                break
            weight *= 0.98 * 0.8
        assert found[t, game].item() == pytest.approx(float(expected), abs=1e-4)


def test_it_learns_under_torchrun(tmp_path):
    (tmp_path / "cartpole.py").write_text((PROGRAMS / "cartpole.py").read_text())
    said = by_torchrun(edited(PROGRAM, tmp_path, ("32, 80, 16", "32, 20, 16")), 2, folder=tmp_path)
    (found,) = re.findall(r"^turn 20: mean return (\d+\.\d)$", said, re.MULTILINE)
    assert float(found) > 50  # untrained, it is below 25
