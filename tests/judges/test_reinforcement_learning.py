"""The solutions of lesson 19 are held to the sums written out, and to one process of torch."""

import torch

from ddp_course.grading.source import function_of, solution_of

GAMMA, LAM = 0.5, 0.25


def normalised(rank: int, world_size: int) -> list[torch.Tensor]:
    """One game: two steps and a fall, a row that nobody played, a step, a time limit, its row, a step."""
    yes, no = True, False
    rollout = {
        "reward": torch.tensor([[1.0], [2], [0], [3], [4], [0], [5 + rank]]),
        "value": torch.tensor([[0.1], [0.2], [0.3], [0.4], [0.5], [0.6], [0.7]]),
        "last_value": torch.tensor([0.8]),
        "terminated": torch.tensor([[no], [yes], [no], [no], [no], [no], [no]]),
        "truncated": torch.tensor([[no], [no], [no], [no], [yes], [no], [no]]),
        "begins": torch.tensor([no]),
    }
    return list(
        function_of("19.2", "normalised_advantages", solution_of("19.2"))(rank, world_size, rollout, GAMMA, LAM)
    )


def test_19_2_is_the_sums_written_out(ranks):
    weight, found = GAMMA * LAM, ranks(2).run(normalised)
    fell, late = 2 - 0.2, 4 + GAMMA * 0.6 - 0.5
    first, third = 1 + GAMMA * 0.2 - 0.1 + weight * fell, 3 + GAMMA * 0.5 - 0.4 + weight * late
    for rank in range(2):
        right = torch.tensor([first, fell, 0, third, late, 0, 5 + rank + GAMMA * 0.8 - 0.7])
        torch.testing.assert_close(found[rank][0][:, 0], right)
    plays = [0, 1, 3, 4, 6]
    rows, ours = (torch.cat([part[which][plays, 0] for part in found]) for which in (0, 1))
    torch.testing.assert_close(ours, (rows - rows.mean()) / rows.std(correction=0))


def shard(rank: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(rank)
    state, advantage = torch.randn(3 * rank, 4, generator=chance), torch.randn(3 * rank, generator=chance)
    return [state, torch.arange(3 * rank) % 3, advantage]


def stepped(rank: int, world_size: int) -> tuple[torch.Tensor, float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if world_size > 1:
        policy_step = function_of("19.3", "policy_step", solution_of("19.3"))
        loss = policy_step(rank, world_size, model, optimizer, shard(rank), 0.1)
    else:
        state, action, advantage = map(torch.cat, zip(*map(shard, range(3)), strict=True))
        loss = -(advantage * torch.distributions.Categorical(logits=model(state)).log_prob(action)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.weight.detach(), loss.item()


def test_19_3_is_the_step_of_one_process_with_a_rank_that_has_no_rows(ranks):
    for weight, loss in ranks(3).run(stepped):
        right, its_loss = stepped(0, 1)
        torch.testing.assert_close(weight, right)
        assert abs(loss - its_loss) < 1e-6
