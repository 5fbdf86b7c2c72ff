"""`train_check.py`, lesson 13's program: it has the losses of one process, and names what is planted in it."""

import re

import pytest

from tests.programs.running import PROGRAMS, RANKS, by_torchrun, edited, losses_in, losses_of_one_process, on_ranks

PROGRAM = PROGRAMS / "train_check.py"
SAMPLES, ORDER, GRADIENT, WEIGHTS = (
    "samples twice in a step",
    "steps that came before",
    "gradient off, relatively",
    "weights apart",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def verdicts(said: str) -> dict[str, tuple[str, float, str]]:
    """What the report says of each comparison: ok or WRONG, the number, where first."""
    found = re.findall(r"^(ok|WRONG) +(.*): ([\d.e+-]+|nan)(?:, first in (.*))?$", said, re.MULTILINE)
    return {what: (verdict, float(number), where) for verdict, what, number, where in found}


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("words", [(), ("--check",)])
def test_it_has_the_losses_of_one_process_and_finds_nothing(world_size, words):
    first, *others = on_ranks(PROGRAM, world_size, *words)
    assert others == [""] * (world_size - 1)
    assert losses_in(first, "01") == pytest.approx(losses_of_one_process(2), abs=2e-4)
    found = verdicts(first)
    assert set(found) == ({SAMPLES, ORDER, GRADIENT, WEIGHTS} if words else set())
    assert all(verdict == "ok" for verdict, *_ in found.values())
    if words:
        assert found[WEIGHTS][1] == found[SAMPLES][1] == found[ORDER][1] == 0 and found[GRADIENT][1] < 1e-12


WRAP, STEP, MAKE = "    replica = DDP(", "            optimizer.step()\n", "    optimizer ="
BACKWARD = "            if check:\n                check.after_backward"
RATE = "            optimizer.param_groups[0]['lr'] = loss.item() / 10\n"
STEPPED = "            if check:\n                check.after_step"
WHOLE = """            loss = cross_entropy(replica(x[indices]), y[indices])
            optimizer.zero_grad()
            loss.backward()
"""
HALVES = """            optimizer.zero_grad()
            for n, half in enumerate(indices.chunk(2)):
                replica.require_backward_grad_sync = n == {averaged}  # what no_sync sets
                loss = cross_entropy(replica(x[half]), y[half])
                (loss / 2).backward()
"""
NEW_HEAD = "    model[2] = nn.Linear(32, 10).to(device, dtype)\n"
PLANTED = {  # edits, and what is found where
    "no sampler": ([("sampler=sampler)", "shuffle=True)")], {SAMPLES: "step 0"}),
    "no set_epoch": ([("sampler.set_epoch(epoch)", "pass")], {ORDER: "step 45"}),
    "called directly": ([("replica(x", "model(x")], {GRADIENT: "step 0: 0.weight", WEIGHTS: "step 0: 0.weight"}),
    "divided again": ([(BACKWARD, f"            model[2].bias.grad /= 2\n{BACKWARD}")], {GRADIENT: "step 0: 2.bias"}),
    "unfrozen": (
        [
            (WRAP, f"    model[2].requires_grad_(False)\n{WRAP}"),
            (MAKE, f"    model[2].requires_grad_(True)\n{MAKE}"),
        ],
        {GRADIENT: "step 0: 2.weight", WEIGHTS: "step 0: 2.weight"},
    ),
    "unfrozen in step 20": (  # the first layer has no gradient before
        [
            (WRAP, f"    model[0].requires_grad_(False)\n{WRAP}"),
            (STEPPED, f"            check.step == 19 and model[0].requires_grad_(True)\n{STEPPED}"),
        ],
        {GRADIENT: "step 20: 0.weight", WEIGHTS: "step 20: 0.weight"},
    ),
    "head replaced": (  # the sums of its weights, and of its bias, stay equal: its gradients sum to 0 over the classes
        [("replica = DDP(model,", "replica = DDP(model, find_unused_parameters=True,"), (MAKE, NEW_HEAD + MAKE)],
        {GRADIENT: "step 0: 2.weight", WEIGHTS: "step 0: 2.weight"},
    ),
    "no_sync around the wrong half": (
        [(WHOLE, HALVES.format(averaged=0))],
        {GRADIENT: "step 0: 0.weight", WEIGHTS: "step 0: 0.weight"},
    ),
    "no_sync around the right half": ([(WHOLE, HALVES.format(averaged=1))], {}),
    "own rate": ([(STEP, RATE + STEP)], {WEIGHTS: "step 0: 0.weight", GRADIENT: "step 1: 0.weight"}),
    "NaN on rank 1": (
        [(STEP, "            model[2].bias.grad[dist.get_rank() :] *= torch.nan if dist.get_rank() else 1\n" + STEP)],
        {WEIGHTS: "step 0: 2.bias", GRADIENT: "step 1: 0.weight"},
    ),
    "a bit": (  # far below nine decimals
        [(STEPPED, f"            model[2].bias.data[3] = dist.get_rank() * 1e-300\n{STEPPED}")],
        {WEIGHTS: "step 0: 2.bias"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_it_names_a_planted_fault_and_where_it_began(name, tmp_path):
    edits, expected = PLANTED[name]
    found = verdicts(on_ranks(edited(PROGRAM, tmp_path, *edits), 2, "--check")[0])
    assert {what: where for what, (verdict, _, where) in found.items() if verdict == "WRONG"} == expected
    assert all(number != 0 for verdict, number, _ in found.values() if verdict == "WRONG")


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it():
    said = by_torchrun(PROGRAM, 2, "--check")
    assert losses_in(said, "01") == pytest.approx(losses_of_one_process(2), abs=2e-4)
    assert len(verdicts(said)) == 4
