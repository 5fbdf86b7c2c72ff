"""Several ranks and micro-batches take the steps of one process on the whole batch, and a resumed run the same bits."""

import functools
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import RankError
from ddp_course.data.text import library_text, windows
from ddp_course.gpt import GPT, SIZES, weight_decay_groups
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.train.gpt import GPTConfig, GPTResult, accumulate, held_out_loss, measure_peak, train_gpt

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]

SHAPE = SIZES["tiny"]
QUICK = GPTConfig(size="tiny", steps=6, warmup=2, local_batch=2, held_out=7, sample=20, progress=False)
ROWS = 24  # of a global batch
CLIP = 0.2


@pytest.fixture(scope="module")
def run(ranks):
    """A function that trains on two ranks, or as many as it is told."""
    return lambda config, world_size=2: ranks(world_size).run(train_gpt, args=(config,), limit_s=120)


@pytest.fixture(scope="module")
def straight(run, tmp_path_factory):
    """A function that returns what so many ranks bring that nobody interrupts, and where they have saved."""

    @functools.cache
    def of(world_size: int) -> tuple[list[GPTResult], Path]:
        folder = tmp_path_factory.mktemp("straight")
        return run(replace(QUICK, checkpoint=str(folder), save_every=2), world_size), folder

    return of


# --- Parity with one process on the whole batch ----------------------------------------------------


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step, ROWS rows; without the text, which differs between versions of Python."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(256, (ROWS, SHAPE.context + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def new_model(seed: int = 0) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = GPT(SHAPE).double()
    return model, torch.optim.AdamW(weight_decay_groups(model, 0.1), lr=1e-2, betas=(0.9, 0.95))


def whole_batch(steps: int, clip: float) -> dict:
    model, optimizer = new_model()
    found = {"norms": [], "losses": [], "grads": []}
    for step in range(steps):
        x, y = batch_of(step)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        found["grads"].append({name: p.grad.clone() for name, p in model.named_parameters()})
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        found["losses"].append(loss.item())
        optimizer.step()
    return found | {"model": model.state_dict()}


def on_ranks(rank: int, world_size: int, steps: int, accumulation: int, clip: float) -> dict:
    """The same steps, each rank on its rows; with the collectives noted that each micro-batch has started."""
    model, optimizer = new_model(seed=rank)  # DDP makes them rank 0's
    replica = DistributedDataParallel(model)
    found = {"norms": [], "losses": [], "grads": [], "counts": [], "bytes": []}
    for step in range(steps):
        mine = [part[rank::world_size].chunk(accumulation) for part in batch_of(step)]
        with Collectives() as seen:
            noted = NotedBatches(list(zip(*mine, strict=True)), seen)
            found["losses"].append(accumulate(replica, noted))
        found["counts"].append([*noted.counts, len(seen.calls)])
        found["bytes"].append(sum(call.n_bytes for call in seen.calls if call.op == "all_reduce"))
        found["grads"].append({name: p.grad.clone() for name, p in model.named_parameters()})
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return found | {"model": model.state_dict(), "parameters": sum(p.numel() for p in model.parameters())}


class NotedBatches(list):
    """Micro-batches that note, whenever the next one is asked for, how many collectives there have been."""

    def __init__(self, batches, seen):
        super().__init__(batches)
        self.seen, self.counts = seen, []

    def __iter__(self):
        for batch in super().__iter__():
            self.counts.append(len(self.seen.calls))
            yield batch


@pytest.fixture(scope="module")
def whole() -> dict:
    return whole_batch(3, CLIP)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (2, 3), (3, 4), (1, 2)])
def test_ranks_with_accumulation_take_the_steps_of_one_process_on_the_whole_batch(
    ranks, whole, world_size, accumulation
):
    results = ranks(world_size).run(on_ranks, args=(3, accumulation, CLIP), limit_s=90)
    assert min(whole["norms"]) > CLIP  # every step is clipped
    for result in results:
        assert result["norms"] == pytest.approx(whole["norms"], rel=1e-10)
        for mine, expected in zip(result["grads"], whole["grads"], strict=True):
            for name in expected:
                torch.testing.assert_close(mine[name], expected[name], rtol=1e-9, atol=1e-12, msg=name)
        for name, expected in whole["model"].items():
            torch.testing.assert_close(result["model"][name], expected, rtol=1e-9, atol=1e-10, msg=name)
    means = [sum(result["losses"][step] for result in results) / world_size for step in range(3)]
    assert means == pytest.approx(whole["losses"], rel=1e-12)

    for result in results:
        for counts in result["counts"][2:]:  # as the second step begins, DDP shares its new plan
            assert counts[:-1] == [0] * accumulation  # nothing was sent until the last micro-batch
            assert counts[-1] >= 1 or world_size == 1
        # The tied matrix is one parameter and travels once.
        assert result["bytes"][1:] == [8 * result["parameters"]] * 2


def test_a_step_clipped_by_each_ranks_own_norm_would_be_another(whole):
    """The comparison above would notice: the mean of the clipped gradients is not the clipped mean."""
    own = []
    for rank in range(2):
        model, _ = new_model()
        x, y = (part[rank::2] for part in batch_of(0))
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        own.append(model.token.weight.grad)
    clipped = whole["grads"][0]["token.weight"] * CLIP / whole["norms"][0]
    assert ((own[0] + own[1]) / 2 - clipped).abs().max() > 1e-3


# --- bf16 ------------------------------------------------------------------------------------------


def in_bf16(rank: int, world_size: int) -> tuple:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    replica = DistributedDataParallel(model)
    kinds, grads, losses = [], [], []
    model.blocks[0].up.register_forward_hook(lambda layer, inputs, output: kinds.append(str(output.dtype)))
    for precision in ("float32", "bf16"):
        model.zero_grad()
        losses.append(accumulate(replica, [batch_of(0), batch_of(1)], precision))
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    near = torch.cosine_similarity(grads[0], grads[1], dim=0).item()
    return kinds, losses, near, torch.equal(grads[0], grads[1])


def test_bf16_shortens_the_products_only(ranks):
    for kinds, losses, near, equal in ranks(2).run(in_bf16, limit_s=60):
        assert kinds == ["torch.float32"] * 2 + ["torch.bfloat16"] * 2
        assert losses[1] == pytest.approx(losses[0], rel=1e-2)
        assert near > 0.99 and not equal


# --- The whole program -----------------------------------------------------------------------------


def same(result: GPTResult) -> tuple:
    """What must not depend on whether the run was interrupted."""
    return result.checksum, result.losses, result.norms, result.held_out[-1], result.steps, result.sample


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_resumed_run_ends_with_the_bits_of_the_straight_one(run, straight, tmp_path, world_size):
    results, folder = straight(world_size)
    assert not results[0].stopped
    assert len({result.checksum for result in results}) == 1
    assert sorted(path.name for path in folder.glob("*.pt")) == [f"step-{step:010d}.pt" for step in (2, 4, 6)]
    shutil.copy(folder / "step-0000000002.pt", tmp_path)  # as if it had been killed after step 3
    go_on = replace(QUICK, checkpoint=str(tmp_path), resume=True)
    resumed = run(replace(go_on, held_out_every=1), world_size)
    assert [result.first_step for result in resumed] == [2] * world_size
    assert [step for step, _ in resumed[0].held_out] == [3, 4, 5, 6]
    finished = run(go_on, world_size)  # nothing is left to do
    assert finished[0].tokens_per_s == finished[0].mfu == 0
    for again in (resumed, finished):
        assert [same(result) for result in again] == [same(result) for result in results]


def test_a_run_in_two_parts_is_the_run_in_one(run, straight, tmp_path):
    whole, _ = straight(2)
    first = run(replace(QUICK, checkpoint=str(tmp_path), until=4, held_out_every=2))
    assert [(result.steps, result.stopped) for result in first] == [(4, True)] * 2
    assert first[0].losses == whole[0].losses[:4]
    second = run(replace(QUICK, checkpoint=str(tmp_path), resume=True))
    assert [same(result) for result in second] == [same(result) for result in whole]
    assert [step for step, _ in second[0].held_out] == [2, 4, 6]


def test_what_each_rank_brings_home(run, tmp_path):
    config = replace(QUICK, steps=3, checkpoint=str(tmp_path), resume=True)
    one, two = run(config)
    assert one.notes == [f"{tmp_path} has no checkpoint yet, so the run begins"]
    assert (one.losses, one.norms, one.held_out) == (two.losses, two.norms, two.held_out)
    assert one.checksum == two.checksum and len(one.sample) > 25 and two.sample == ""
    assert one.losses[0] > one.losses[-1]
    for result in (one, two):
        assert result.mfu == pytest.approx(result.flops_per_token * result.tokens_per_s / result.peak_flops)
        assert result.tokens_per_s > 0 and result.peak_flops > 1e6

    with pytest.raises(RankError) as caught:
        run(replace(config, lr=0.5))
    assert caught.value.error_type == "CheckpointError"
    assert "was written with lr=0.005, this run has 0.5" in caught.value.message

    folder = tmp_path / "library"
    folder.mkdir()
    for number in range(10):
        (folder / f"m{number}.py").write_text("x = 1\n" * 300)
    with pytest.raises(RankError) as caught:
        run(replace(config, text=str(folder)))
    assert caught.value.error_type == "CheckpointError" and "the saved place has length=" in caught.value.message

    (alone,) = run(config, 1)
    assert alone.notes[0].startswith("saved by 2 ranks, resumed by 1") and alone.checksum == one.checksum


def judged(rank: int, world_size: int) -> tuple[float, float]:
    torch.manual_seed(0)
    return held_out_loss(GPT(SHAPE), library_text(), most=37, batch=4), measure_peak(width=64)


def test_the_held_out_loss_is_exact_and_the_peak_is_of_all_ranks(ranks):
    torch.manual_seed(0)
    model, text = GPT(SHAPE), library_text()
    total = (len(text.held_out) - 1) // SHAPE.context
    x, y = windows(text.held_out, SHAPE.context, np.array([number * total // 37 for number in range(37)]))
    with torch.no_grad():
        expected = F.cross_entropy(model(x).flatten(0, 1).double(), y.flatten()).item()
    for world_size in (2, 3):
        found = ranks(world_size).run(judged)
        assert [loss for loss, _ in found] == pytest.approx([expected] * world_size, rel=1e-6)
        assert len({peak for _, peak in found}) == 1 and found[0][1] > 0
