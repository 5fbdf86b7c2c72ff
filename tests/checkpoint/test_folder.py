"""One rank writes, all read the same, the last few stay, and a kill or a damaged file costs at most one of them."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ddp_course.checkpoint.folder import Checkpointer, CheckpointError, save_checkpoint
from tests.checkpoint import folder_on_ranks as on_ranks
from tests.checkpoint.folder_on_ranks import state_at, tear

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def three(tmp_path):
    """A folder with steps 10, 20 and 30."""
    with Checkpointer(tmp_path, keep=3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(state_at(step), step)
    return tmp_path


# --- One process -----------------------------------------------------------------------------------


def test_the_last_k_are_kept_and_the_latest_is_by_number_not_by_spelling(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 9_999_999_999, 10_000_000_000):
            checkpoints.save(state_at(step), step)
        assert checkpoints.steps() == [9_999_999_999, 10_000_000_000]
        assert checkpoints.load_latest().step == 10_000_000_000
    with pytest.raises(ValueError, match="keep=0: at least the last"):
        Checkpointer(tmp_path, keep=0)


def test_an_old_one_is_removed_only_after_the_new_one_is_whole(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state_at(1), 1)
        seen, unlink = [], type(tmp_path).unlink

        def watched(path, *args, **options):
            seen.append((path.name, checkpoints.load_latest().step))
            unlink(path, *args, **options)

        monkeypatch.setattr(type(tmp_path), "unlink", watched)
        checkpoints.save(state_at(2), 2)
    assert seen == [("step-0000000001.pt", 2)]


def test_an_empty_or_missing_folder_has_nothing_and_is_no_error(tmp_path):
    assert Checkpointer(tmp_path).load_latest() is None
    assert Checkpointer(tmp_path / "not there").load_latest() is None
    assert not (tmp_path / "not there").exists()


def test_foreign_files_are_left_alone_and_own_leftovers_removed(tmp_path):
    foreign = ["step-7.pt", "last.pt", ".other.unfinished", ".step-1.pt.unfinished", "notes.txt"]
    own = ".step-0000000003.pt.unfinished"
    for name in [*foreign, own]:
        (tmp_path / name).write_text("x")
    checkpoints = Checkpointer(tmp_path, keep=1)
    assert checkpoints.load_latest() is None
    assert (tmp_path / own).exists()  # a reader removes nothing
    checkpoints.save(state_at(4), 4)
    assert sorted(os.listdir(tmp_path)) == sorted([*foreign, ".writer", "step-0000000004.pt"])


def test_a_run_that_goes_back_sets_the_later_ones_aside(three):
    tear(three / "step-0000000030.pt")
    with Checkpointer(three) as checkpoints:
        with pytest.warns(UserWarning, match="passed over"):
            assert checkpoints.load_latest().step == 20
        with pytest.warns(UserWarning, match=r"step-0000000030\.pt is later than step 25, just saved"):
            checkpoints.save(state_at(25), 25)
        assert checkpoints.load_latest().step == 25
        assert checkpoints.steps() == [10, 20, 25]
    assert (three / "step-0000000030.pt.set-aside").exists()


def test_saving_a_step_again_replaces_it(three):
    with Checkpointer(three) as checkpoints:
        checkpoints.save(state_at(30) | {"again": True}, 30)
        assert checkpoints.steps() == [10, 20, 30] and checkpoints.load_latest().state["again"]


WRITE_AND_WAIT = """
import sys
from ddp_course.checkpoint.folder import Checkpointer
checkpoints = Checkpointer(sys.argv[1])
checkpoints.save({"step": 1}, 1)
print("writing", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused_until_the_first_is_gone(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", WRITE_AND_WAIT, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "writing\n"
        second = Checkpointer(tmp_path)
        with pytest.raises(CheckpointError, match=rf"another run \(process {first.pid} on .*\) is writing into"):
            second.save(state_at(2), 2)
        assert second.load_latest().step == 1  # reading is free
    finally:
        first.kill()
        first.communicate()
    second.save(state_at(2), 2)  # a killed run holds nothing
    assert second.steps() == [1, 2]


def test_two_writers_of_one_program_refuse_each_other(tmp_path):
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    first.save({"step": 1}, 1)
    with pytest.raises(
        CheckpointError, match=r"another Checkpointer of this program is writing into .*; close\(\) that"
    ):
        second.save({"step": 2}, 2)
    first.save({"step": 3}, 3)  # its lock still holds
    assert first.steps() == [1, 3]
    first.close()
    second.save({"step": 4}, 4)
    del second  # a cell that is run again leaves one behind, unclosed
    third = Checkpointer(tmp_path, keep=1)
    third.save({"step": 5}, 5)
    assert third.steps() == [5]


def test_a_folder_that_is_called_as_a_checkpoint_is_passed_over(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=1)
    checkpoints.path_of(7).mkdir()
    with pytest.warns(UserWarning, match="set-aside"):  # it is later
        checkpoints.save({"step": 3}, 3)
    checkpoints.path_of(2).mkdir()
    checkpoints.save({"step": 4}, 4)
    os.mkfifo(checkpoints.path_of(9))
    with pytest.warns(UserWarning, match="no file but a folder, a pipe or a device"):
        assert checkpoints.load_latest().step == 4
    assert checkpoints.path_of(2).is_dir() and not checkpoints.path_of(3).exists()


def test_several_ranks_without_a_group_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(CheckpointError, match="rank 1: 2 ranks were started, but no process group is open"):
        Checkpointer(tmp_path)


# --- A hundred kills -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_writer_killed_at_100_random_moments_always_leaves_the_newest_whole(tmp_path):
    seed = int.from_bytes(os.urandom(4))
    command = [sys.executable, "-m", "tests.checkpoint.kill_writers", tmp_path, "100", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(f"seed {seed}: {report}")  # shown if it fails
    assert (report["bad"], report["back"]) == ([], 0)
    assert report["unfinished"] >= 10  # so many kills fell into the middle of a write
    assert sum(name.endswith(".unfinished") for name in report["left"]) <= 1  # each writer clears up after the last
    last = report["last"]
    assert report["files"] == [".writer", f"step-{last:010d}.pt", f"step-{last + 1:010d}.pt"]


# --- Two ranks -------------------------------------------------------------------------------------


def test_rank_0_writes_and_every_rank_finds_it_at_once(two_ranks, tmp_path):
    expected = [
        ("step-0000000005.pt", True, [5]),
        ("step-0000000010.pt", True, [5, 10]),
        ("step-0000000015.pt", True, [10, 15]),
        *(15, [15.0], []),
    ]
    assert two_ranks.run(on_ranks.save_then_look, args=(tmp_path,)) == [expected] * 2


def test_damaged_files_are_passed_over_by_all_ranks_and_rank_0_says_so(two_ranks, three):
    tear(three / "step-0000000030.pt")
    (three / "step-0000000020.pt").write_bytes(b"foreign")
    (outcome, said), other = two_ranks.run(on_ranks.load_with_warnings, args=([three] * 2,))
    step, in_it, passed_over = outcome
    assert (step, in_it, len(passed_over)) == (10, 10, 2)
    assert "step-0000000030.pt is not a whole checkpoint: it breaks off after" in passed_over[0]
    assert "step-0000000020.pt is not a whole checkpoint: it does not begin" in passed_over[1]
    assert said == [f"checkpoint passed over: {each}" for each in passed_over]
    assert other == (outcome, [])


def test_a_rank_that_reads_something_else_stops_all_of_them(two_ranks, three, tmp_path):
    empty, alike = tmp_path / "empty", tmp_path / "alike"
    empty.mkdir()
    save_checkpoint(alike / "step-0000000030.pt", state_at(31))  # a host's own disk, with an older run on it
    for folder, reason in ((empty, "there is no checkpoint at"), (alike, "is another file than rank 0's")):
        one, two = two_ranks.run(on_ranks.load_with_warnings, args=([three, folder],))
        assert one == two
        assert one[0].startswith("not every rank can read what rank 0 reads, step 30:\nrank 1: ")
        assert reason in one[0] and "rank 0: " not in one[0]


def test_no_rank_begins_anew_when_all_are_damaged(two_ranks, three):
    for path in three.glob("step-*.pt"):
        tear(path)
    outcomes = [outcome for outcome, _ in two_ranks.run(on_ranks.load_with_warnings, args=([three] * 2,))]
    assert outcomes[0] == outcomes[1] and outcomes[0].startswith(f"no checkpoint in {three} can be used:\n")
    assert all(step in outcomes[0] for step in ("0010.pt", "0020.pt", "0030.pt"))


def test_a_failed_save_is_known_to_every_rank_and_harms_nothing(two_ranks, tmp_path):
    (full_0, code_0, step_0), (full_1, code_1, step_1) = two_ranks.run(on_ranks.save_with_an_error, args=(tmp_path,))
    assert "step-0000000002.pt cannot be written: No space left on device. The state needs 4,000 bytes" in full_0
    assert full_1 == f"CheckpointError: rank 0 could not save step 2: {full_0}"
    assert "load_with_warnings" in code_0 and code_1.endswith(code_0)
    assert (step_0, step_1) == ("3", "3")
    assert sorted(os.listdir(tmp_path)) == [".writer", "step-0000000001.pt", "step-0000000003.pt"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_without_a_group_tensors_of_a_gpu_come_to_the_cpu(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save({"w": torch.ones(3, device="cuda")}, 1)
        assert checkpoints.load_latest().state["w"].device.type == "cpu"
        assert checkpoints.load_latest(torch.device("cuda")).state["w"].device.type == "cuda"
