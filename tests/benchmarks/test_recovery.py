"""Are the table's numbers made rightly of the seconds and the moments? Planted numbers; no time is asserted."""

import pytest
import torch

from benchmarks import recovery, restarted
from ddp_course.checkpoint.folder import Checkpointer


@pytest.fixture
def rows() -> dict:
    return {row.key: row for row in recovery.empty_rows(2)}


def test_a_block_takes_as_long_as_its_slowest_rank_and_ratios_are_formed_within_blocks(rows):
    zero = {way: [(1.0, 0.5), (2.0, 0.1)] for way in recovery.WAYS}
    one = {way: [(0.5, 0.7), (4.0, 0.0)] for way in recovery.WAYS} | {"waiting": [(3.0, 0.2), (1.0, 0.9)]}
    recovery.fill_saving(rows, [zero, one])
    assert rows["saving_none"].samples == [1.0, 4.0]
    assert rows["saving_waiting"].samples == [3.0, 2.0]
    assert rows["saving_waiting_ratio"].samples == [3.0, 0.5]
    assert rows["saving_waiting_held_up"].samples == [0.5, 0.9]
    recovery.fill_agreeing(rows, [{"alone": [1.0], "agreed": [1.5]}, {"alone": [2.0], "agreed": [1.0]}])
    assert rows["agreeing_ratio"].samples == [0.75]


def test_the_parts_after_a_kill_add_up_to_the_whole(rows, tmp_path):
    for what in ("killed", *recovery.PARTS["launch"]):
        restarted.stamp(tmp_path, what)
    recovery.fill_kill(rows, "launch", restarted.moments(tmp_path))
    parts = [rows[f"launch_{part}"].samples[0] for part in recovery.PARTS["launch"]]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(rows["launch_whole"].samples[0])
    with pytest.raises(RuntimeError, match="did not go on from the last checkpoint"):
        recovery.checked({}, wrong=True)


@pytest.mark.timeout(60)
def test_every_way_to_save_holds_what_was_trained_and_every_block_is_timed(two_ranks, tmp_path):
    by_rank = two_ranks.run(every_way, args=(tmp_path,))
    for saved, seconds in by_rank:
        assert saved == dict.fromkeys(recovery.SAVING, True)
        assert {way: len(blocks) for way, blocks in seconds.items()} == dict.fromkeys(recovery.AGREE, 2)


def every_way(rank: int, world_size: int, folder) -> tuple[dict[str, bool], dict]:
    import torch.distributed.checkpoint as dcp

    training, ways = recovery.Training(8, 4, 2), recovery.Ways(folder)
    training.step()
    saved = {}
    for number, way in enumerate(recovery.SAVING, start=1):
        getattr(ways, way)(training.state(), number)()
        expected = training.model.module.state_dict()
        if way.startswith("dcp"):
            found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
            dcp.load({"model": found}, checkpoint_id=folder / f"dcp{number}")
        else:
            found = Checkpointer(folder / "ours").load_latest().state["model"]
        saved[way] = all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        training.step()
    ways.checkpoints.close()
    return saved, recovery.timed_agreement(rank, world_size, blocks=2)
