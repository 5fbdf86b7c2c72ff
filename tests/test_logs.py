"""One rank speaks, the others are quiet until something is wrong."""

import io
import logging
import sys
import types
import warnings

import pytest

from ddp_course import launch
from ddp_course.logs import NoWriter, my_rank, progress_bar, rank0_print, rank_logger, summary_writer

pytestmark = pytest.mark.timeout(120)


def said_by(rank: int, **options) -> list[str]:
    """The lines of a rank that says one thing of each level, without the time."""
    stream = io.StringIO()
    logger = rank_logger("test_logs", rank=rank, stream=stream, **options)
    logger.debug("a detail")
    logger.info("epoch %d", 3)
    logger.warning("loss is nan")
    return [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]


def test_rank_0_speaks_and_the_others_only_warn():
    assert said_by(0) == ["rank 0 INFO: epoch 3", "rank 0 WARNING: loss is nan"]
    assert said_by(2) == ["rank 2 WARNING: loss is nan"]
    assert said_by(2, level=logging.ERROR) == said_by(0, level=logging.ERROR) == []


def test_every_rank_speaks_when_asked_to():
    all_of_it = ["rank 2 DEBUG: a detail", "rank 2 INFO: epoch 3", "rank 2 WARNING: loss is nan"]
    assert said_by(2, everywhere=True, level=logging.DEBUG) == all_of_it


def test_a_second_set_up_replaces_the_first_and_nothing_is_said_twice(capsys):
    first, second = io.StringIO(), io.StringIO()
    root = logging.StreamHandler(first)
    logging.getLogger().addHandler(root)
    try:
        rank_logger("test_logs", rank=0, stream=first)
        rank_logger("test_logs", rank=0, stream=second).info("once")
    finally:
        logging.getLogger().removeHandler(root)
    assert first.getvalue() == "" and second.getvalue().count("once") == 1


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
    rank_logger(stream=sys.stdout).warning("heard from every rank")
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
    assert "rank 0 WARNING: heard" in out and "rank 1 WARNING: heard" in out
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


class Recorder:
    """Stands for torch's SummaryWriter, which needs TensorBoard."""

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars = folder, []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


def test_rank_0_gets_tensorboards_writer_and_the_others_one_that_writes_nothing(monkeypatch, tmp_path):
    installed = types.ModuleType("torch.utils.tensorboard")
    installed.SummaryWriter = Recorder
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", installed)
    writers = [summary_writer(tmp_path / "runs", rank=rank) for rank in range(3)]
    for writer in writers:
        writer.add_scalar("loss", 0.5, 1)
    assert writers[0].folder == str(tmp_path / "runs") and writers[0].scalars == [("loss", 0.5, 1)]
    assert [type(writer) for writer in writers[1:]] == [NoWriter, NoWriter]


def test_without_tensorboard_rank_0_says_so_and_the_program_goes_on(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    told = rf"TensorBoard is not installed, so no event files are written to {tmp_path}: pip install tensorboard"
    with pytest.warns(UserWarning) as caught:
        writer = summary_writer(tmp_path, rank=0)
    assert [str(each.message) for each in caught] == [told]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(summary_writer(tmp_path, rank=1), NoWriter)
    with writer as same:
        same.add_scalar("loss", 0.5, 1)
        same.add_histogram("weights", [1.0], 1)
        same.flush()
    with pytest.raises(AttributeError, match="has no 'ad_scalar'"):
        same.ad_scalar("loss", 0.5, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_tensorboard_is_not_called_missing(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    broken = types.ModuleType("tensorboard")
    broken.__version__ = "1.0"  # torch wants 1.15
    monkeypatch.setitem(sys.modules, "tensorboard", broken)
    with pytest.raises(ImportError, match="1.15 or above"):
        summary_writer(tmp_path, rank=0)
