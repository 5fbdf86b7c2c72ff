"""The report from planted whereabouts: no process is started here."""

from __future__ import annotations

import pytest

from ddp_course.launch import report
from ddp_course.launch.flight import Collective, Line, Whereabouts, own_line, shown_name
from ddp_course.launch.relay import MOST_BYTES, Relay

HERE = Line("/tmp/ipykernel_12/345.py", 7, "train", "dist.all_reduce(x)")


def call(seq, op="all_reduce", sizes=((2,),), dtype="Float", finished=True, group="", members=(0, 1, 2)):
    return Collective(seq, seq, op, dtype, sizes, group, members, finished, entered_ns=0)


def rank(number, *calls, status="running"):
    return Whereabouts(number, status, HERE, list(calls))


def test_the_missing_rank_is_the_one_that_is_behind():
    ranks = [rank(0, call(1), call(2, finished=False)), rank(1, call(1)), rank(2, call(1), call(2, finished=False))]
    error = report.silent(3, ranks)
    assert error.rank == 1
    assert "rank 1 never entered all_reduce #2 (float [2], 8 B)" in str(error)
    assert "rank 1 was at the cell, line 7, in train: dist.all_reduce(x)" in str(error)


def test_several_missing_ranks_are_all_named():
    ranks = [rank(0, call(1, finished=False)), rank(1), rank(2, status="returned")]
    assert "rank 1, rank 2 never entered all_reduce #1" in str(report.silent(3, ranks))
    assert "rank 2 had returned" in str(report.silent(3, ranks))


def test_a_rank_outside_the_group_is_not_blamed():
    ranks = [rank(0, call(1, finished=False, group="subgroup 1", members=(0, 1))), rank(1), rank(2)]
    assert report.silent(3, ranks).rank == 1


def test_the_first_disagreement_is_shown_not_the_last():
    ranks = [rank(0, call(1), call(2, "broadcast"), call(3)), rank(1, call(1), call(2), call(3, "barrier", ()))]
    text = str(report.silent(3, ranks))
    assert text.startswith("ranks disagree about collective #2: rank 0 called broadcast #2")


@pytest.mark.parametrize("other", [{"sizes": ((3,),)}, {"dtype": "Double"}, {"op": "reduce"}])
def test_shape_dtype_and_operation_count(other):
    assert "disagree" in str(report.silent(3, [rank(0, call(1)), rank(1, call(1, **other))]))


def test_a_scatter_may_bring_tensors_on_one_rank_only():
    ranks = [rank(0, call(1, "scatter", ((2,), (2,)))), rank(1, call(1, "scatter", (), finished=False))]
    assert "disagree" not in str(report.silent(3, ranks))


def test_everybody_came_and_still_nothing():
    ranks = [rank(r, call(1, finished=False, members=(0, 1))) for r in range(2)]
    assert "which all entered: look at the network" in str(report.silent(3, ranks))


def test_ranks_stuck_in_a_broadcast_may_name_different_sources():
    ranks = [rank(r, call(1, "broadcast", finished=False, members=(0, 1))) for r in range(2)]
    assert "and at src or dst, which must be the same rank on all ranks" in str(report.silent(3, ranks))


def test_a_rank_that_gave_up_on_a_message_names_no_collective():
    assert "rank 0  gave up in a message; the cell, line 7" in report.where_all_were([rank(0, status="raised")])


def test_ipython_shows_the_report_alone():
    error = report.silent(3, [rank(0, call(1, finished=False)), rank(1)])
    (text,) = error._render_traceback_()
    assert text.startswith("RankError: rank 1 never entered") and "Where the ranks were:\n  rank 0  waited in" in text


@pytest.mark.parametrize(
    ("code", "says"), [(-9, "killed by SIGKILL"), (-6, "killed by SIGABRT"), (3, "exit status 3"), (0, "exit status 0")]
)
def test_exit_codes_are_explained(code, says):
    assert says in report.why_died(code)


def test_bytes_are_counted_from_shape_and_dtype():
    assert call(1, sizes=((10, 3), (5,)), dtype="Double").n_bytes == 35 * 8
    assert str(call(1, sizes=((1000, 1000),))) == "all_reduce #1 (float [1000, 1000], 4.0 MB)"
    assert str(call(2, "barrier", (), "")) == "barrier #2"


def test_the_learners_line_wins_over_torch_and_the_course():
    import traceback

    import torch

    def frame(name):
        return traceback.FrameSummary(name, 3, "f", line="code")

    stack = [frame("/home/me/train.py"), frame(report.__file__), frame(torch.__file__)]
    assert own_line(traceback.StackSummary.from_list(stack)).filename == "/home/me/train.py"
    from ddp_course import groups

    stack = [frame(groups.__file__), frame(torch.__file__)]
    assert own_line(traceback.StackSummary.from_list(stack)).filename == groups.__file__
    assert shown_name(groups.__file__) == "ddp_course/groups.py"
    assert own_line(traceback.StackSummary.from_list([frame(torch.__file__)])) is None


# --- relay -----------------------------------------------------------------------------------------


def test_the_lowest_unfinished_rank_is_live_and_the_rest_follows_in_order(tmp_path, capsys):
    relay = Relay(tmp_path, 3, quiet=False)
    relay.begin()
    write(tmp_path, 1, "one\n")
    write(tmp_path, 0, "zero ")
    relay.show(set())
    assert capsys.readouterr().out == "rank 0 | zero "
    write(tmp_path, 0, "more\n")
    relay.show({1})
    assert capsys.readouterr().out == "more\n"
    relay.show({0, 1})
    assert capsys.readouterr().out == "rank 1 | one\n"
    write(tmp_path, 2, "open end")
    assert relay.finish() == ["zero more\n", "one\n", "open end"]
    assert capsys.readouterr().out == "rank 2 | open end\n"


def test_a_progress_bar_keeps_its_line(tmp_path, capsys):
    relay = Relay(tmp_path, 1, quiet=False)
    write(tmp_path, 0, "\r10%\r20%\nnext\n")
    relay.finish()
    assert capsys.readouterr().out == "\rrank 0 | 10%\rrank 0 | 20%\nrank 0 | next\n"


def test_a_letter_cut_in_two_is_not_lost(tmp_path, capsys):
    relay = Relay(tmp_path, 1, quiet=False)
    first, second = "é".encode()[:1], "é".encode()[1:]
    write(tmp_path, 0, first)
    relay.show(set())
    write(tmp_path, 0, second)
    assert relay.finish() == ["é"]


def test_endless_output_is_cut_and_the_rest_counted(tmp_path, capsys):
    relay = Relay(tmp_path, 1, quiet=False)
    write(tmp_path, 0, "x" * (MOST_BYTES + 12))
    assert len(relay.finish()[0]) == MOST_BYTES
    assert capsys.readouterr().out.endswith("\nrank 0 | … and 12 more bytes, not shown\n")


def write(folder, number, text):
    with (folder / f"rank{number}.out").open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
