"""One rank prepares and all hear of it; what is staged appears whole or not at all."""

import os
import time
from pathlib import Path

import pytest

from ddp_course import launch
from ddp_course.data.downloads import DatasetError, once_per_host, staged

pytestmark = pytest.mark.timeout(120)


def test_without_a_group_the_process_prepares_for_itself():
    calls = []
    once_per_host(lambda: calls.append(1), limit_s=1.0)
    assert calls == [1]


def test_staged_shows_the_folder_only_when_it_is_complete(tmp_path):
    destination = tmp_path / "deep" / "set"

    def download(folder: Path) -> None:
        (folder / "set").mkdir()
        (folder / "set" / "a").write_text("whole")
        assert not destination.exists()  # nor is it there if this process is killed now
        assert len(os.listdir(destination.parent)) == 1  # the staging folder, under a hidden name that nobody reads

    staged(destination, download)
    assert (destination / "a").read_text() == "whole"
    assert os.listdir(destination.parent) == ["set"]


def test_staged_keeps_the_files_of_a_faster_run(tmp_path):
    def download(folder: Path) -> None:
        (folder / "set").mkdir()
        (folder / "set" / "a").write_text("ours")
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "a").write_text("theirs")

    staged(tmp_path / "set", download)
    assert (tmp_path / "set" / "a").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["set"]


def on_two_ranks(rank: int, world_size: int, folder: str) -> dict:
    """Several checks in one set of ranks; the last one breaks the waiting room on purpose."""
    report = {"prepared": []}
    once_per_host(lambda: report["prepared"].append(rank), limit_s=30.0)

    def fail() -> None:
        raise DatasetError("no such thing")

    for name, limit_s, prepare in (
        ("failed", 30.0, fail),
        ("late", 0.5, lambda: wait_for(Path(folder, "gave up"))),
    ):
        try:
            once_per_host(prepare, limit_s)
        except DatasetError as error:
            report[name] = str(error)
        if name == "late" and rank == 1:
            Path(folder, "gave up").touch()
    return report


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30.0
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_local_rank_0_prepares_and_every_rank_hears_of_the_failure_or_says_what_it_waited_for(tmp_path):
    reports = launch(on_two_ranks, 2, args=(str(tmp_path),), start_method="forkserver", quiet=True, limit_s=60)
    assert [report["prepared"] for report in reports] == [[0], []]
    assert [report["failed"] for report in reports] == ["no such thing"] * 2
    assert reports[1]["late"].startswith("rank 1: no word of the download within 0.5 s (")
    assert "download_limit_s" in reports[1]["late"]
