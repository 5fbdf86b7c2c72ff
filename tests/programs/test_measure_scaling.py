"""`measure_scaling.py`, lesson 14's program: its loss is that of one process, and its shares follow from its times.

What it measures varies, and so nothing here compares two times.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy

from ddp_course import RankError
from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "measure_scaling.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def rows(said: str, world_size: int, scaling: str = "weak") -> dict[int, float]:
    """The loss of each number of tokens, from a table whose columns agree with each other."""
    title, columns, *lines = said.strip().splitlines()
    assert title == f"{world_size} ranks, gloo, 1710848 parameters"
    assert columns.split() == ["kind", "tokens", "alone", "without", "DDP", "exposed", "effic.", "tokens/s", "loss"]
    losses, strong = {}, scaling == "strong"
    for kind, tokens, *words in (line.replace("%", "").split() for line in lines):
        alone, without, ddp, exposed, efficiency, rate, loss = map(float, words)
        assert kind == scaling
        assert exposed == pytest.approx(100 * (1 - without / ddp), abs=2)
        assert efficiency == pytest.approx(100 * alone / ddp / (world_size if strong else 1), rel=0.02, abs=2)
        assert rate == pytest.approx(1e3 * int(tokens) * (1 if strong else world_size) / ddp, rel=0.02)
        losses[int(tokens)] = loss
    return losses


def of_one_process(sequences: int) -> float:
    """The loss of step 7 of a loop without ranks, on the global batches."""
    module = {"__name__": "measure_scaling"}
    exec(compile(PROGRAM.read_text(), PROGRAM.name, "exec"), module)
    torch.manual_seed(0)
    model = module["Model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(7):
        batch = torch.randint(256, (sequences, 65), generator=torch.Generator().manual_seed(number))
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("world_size", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_the_loss_is_that_of_one_process(world_size):
    first, *others = on_ranks(PROGRAM, world_size, "--tokens", "64", "128")
    expected = {tokens: of_one_process(tokens // 64 * world_size) for tokens in (64, 128)}
    assert rows(first, world_size) == pytest.approx(expected, abs=2e-4)
    assert abs(expected[64] - expected[128]) > 0.01 and others == [""] * (world_size - 1)


def test_without_averaging_the_loss_is_another(tmp_path):
    edit = ("timed_step(replica, its_optimizer, mine)", "timed_step(bare, its_optimizer, mine)")
    found = rows(on_ranks(edited(PROGRAM, tmp_path, edit), 2, "--tokens", "64")[0], 2)
    assert abs(found[64] - of_one_process(2)) > 0.01


def test_torchrun_divides_one_batch():
    found = rows(by_torchrun(PROGRAM, 2, "--tokens", "--strong", "256"), 2, "strong")
    assert found == pytest.approx({256: of_one_process(4)}, abs=2e-4)


def test_tokens_that_the_ranks_cannot_share_are_refused():
    with pytest.raises(RankError, match="2 ranks can't share 64 tokens evenly"):
        on_ranks(PROGRAM, 2, "--tokens", "--strong", "64")
