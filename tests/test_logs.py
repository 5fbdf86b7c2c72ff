"""One rank speaks, and the others are quiet."""

import io
import sys

import pytest

from ddp_course import launch
from ddp_course.logs import my_rank, progress_bar, rank0_print

pytestmark = pytest.mark.timeout(120)


def test_the_rank_is_the_launchers_while_there_is_no_group(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert my_rank() == 0
    monkeypatch.setenv("RANK", "3")
    assert my_rank() == 3
    rank0_print("not said")
    monkeypatch.setenv("RANK", "0")
    rank0_print("said", 1, sep="-")
    assert capsys.readouterr().out == "said-1\n"


def speak(rank: int, world_size: int) -> dict:
    rank0_print("once per job")
    bar = progress_bar(2, shown=True)
    shown = not bar.disable
    bar.update(2)
    bar.close()
    return {"rank": my_rank(), "bar": shown, "unasked": not progress_bar(2).disable}


def test_on_ranks_one_speaks_and_one_bar_is_shown(capsys):
    reports = launch(speak, 2, start_method="forkserver", limit_s=60)
    out = capsys.readouterr().out
    assert [report["rank"] for report in reports] == [0, 1]
    assert [report["bar"] for report in reports] == [True, False]
    assert [report["unasked"] for report in reports] == [False, False]  # a rank's stderr is no terminal
    assert out.count("once per job") == 1 and "rank 0 | once per job" in out
    assert out.count("2/2") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_for_terminals_unless_asked_for(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert [bool(progress_bar(3, rank=rank).disable) for rank in (0, 1)] == [False, True]
    assert progress_bar(3, shown=False, rank=0).disable
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert progress_bar(3, rank=0).disable and not progress_bar(3, shown=True, rank=0).disable
