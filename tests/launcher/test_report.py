"""The report from planted whereabouts: no process is started here."""

from __future__ import annotations

import re

import pytest

from ddp_course.launcher import failure_report, hang_report
from ddp_course.launcher.compare_calls import Disagreement
from ddp_course.launcher.failure import describe
from ddp_course.launcher.lines import Line, own_line, shown_name
from ddp_course.launcher.rank_status import Collective, Whereabouts, listed_ranks
from ddp_course.launcher.relay import MOST_BYTES, Relay
from ddp_course.launcher.wait_graph import find_uneven

HERE = Line("/tmp/ipykernel_12/345.py", 7, "train", "dist.all_reduce(x)")


def call(seq, op="all_reduce", sizes=((2,),), dtype="float32", finished=True, group="", members=(0, 1, 2), **more):
    return Collective(seq, seq, op, dtype, sizes, group, members, finished, entered_ns=seq, line=HERE, **more)


def waits(seq, *args, **more):
    return call(seq, *args, finished=False, **more)


def rank(number, *calls, status="running", **more):
    entered = {each.channel: each.seq for each in calls}
    return Whereabouts(number, status, HERE, list(calls), entered=entered, **more)


def test_the_missing_rank_is_the_one_that_is_behind():
    error = hang_report.explain(3, [rank(0, call(1), waits(2)), rank(1, call(1)), rank(2, call(1), waits(2))])
    assert (error.code, error.rank) == ("absent", 1)
    assert str(error).startswith("rank 1 never entered all_reduce #2 (float32 [2], 8 B); the others waited 3 s\n")
    assert "rank 1 was at the cell, line 7, in train: dist.all_reduce(x)" in str(error)


def test_of_several_missing_ranks_those_that_have_not_returned_are_blamed():
    ranks = [rank(0, waits(1)), rank(1), rank(2, status="returned")]
    assert hang_report.explain(3, ranks).rank == 1
    assert str(hang_report.explain(3, ranks)).startswith("rank 1 never entered all_reduce #1")


def test_of_two_ranks_neither_is_blamed_if_one_has_returned():
    error = hang_report.explain(3, [rank(0, call(1), waits(2)), rank(1, call(1), status="returned")])
    assert error.rank is None
    assert "rank 1 never entered all_reduce #2 (float32 [2], 8 B); rank 0 waited 3 s\n  rank 1 had returned" in str(
        error
    )
    assert "rank 1 left one out, or rank 0 made one too many" in " ".join(str(error).split())


def test_one_that_waits_alone_for_ranks_that_have_returned_has_made_a_call_too_many():
    done = [rank(number, call(3), status="returned") for number in (0, 1, 2)]
    error = hang_report.explain(3, [*done, rank(3, call(3), waits(4, members=(0, 1, 2, 3)))])
    assert error.rank == 3
    assert "rank 3 waited 3 s alone in all_reduce #4" in str(error) and "Look at rank 3 first" in str(error)


def test_a_rank_outside_the_group_is_not_blamed():
    ranks = [rank(0, waits(1, group="subgroup 1", members=(0, 1))), rank(1), rank(2)]
    assert hang_report.explain(3, ranks).rank == 1


def test_a_rank_that_waits_elsewhere_is_not_to_blame_but_whom_it_waits_for():
    ranks = [rank(0, waits(1, members=(0, 1))), rank(1, waits(1, group="subgroup 1", members=(1, 2))), rank(2)]
    error = hang_report.explain(3, ranks)
    assert error.rank == 2 and "rank 2 never entered all_reduce #1 (float32 [2], 8 B) on subgroup 1" in str(error)


def test_a_circle_is_named_and_nobody_is_blamed():
    groups = {"subgroup 1": (0, 1), "subgroup 2": (1, 2), "subgroup 3": (0, 2)}
    ranks = [rank(n, waits(1, group=group, members=groups[group])) for n, group in enumerate(groups)]
    error = hang_report.explain(3, ranks)
    assert error.rank is None
    for step in ("rank 0 waits for rank 1 in all_reduce #1", "rank 1 waits for rank 2", "rank 2 waits for rank 0"):
        assert step in str(error)


def test_messages_are_matched_by_peer_and_tag():
    sent = waits(2, "send", members=(0, 1), root=1)
    assert hang_report.explain(3, [rank(0, sent), rank(1, call(1, "recv", members=(0, 1), root=0))]).rank == 1
    text = str(hang_report.explain(3, [rank(0, sent), rank(1)]))
    assert text.startswith("rank 1 never posted the recv for send #2 to rank 1 (float32 [2], 8 B); rank 0 waited 3 s")
    crossed = waits(1, "recv", members=(0, 1), root=0, tag=7)
    assert "circle" in str(
        hang_report.explain(3, [rank(0, waits(1, "send", members=(0, 1), root=1)), rank(1, crossed)])
    )


def test_a_key_that_nobody_sets_is_named():
    error = hang_report.explain(3, [rank(number, key="go") for number in (0, 1)])
    assert error.rank is None
    assert "ranks 0 and 1 waited 3 s at the store for a key that no rank has set: go" in str(error)
    error = hang_report.explain(3, [rank(0, waits(1)), rank(1, key="go"), rank(2, waits(1))])
    assert error.rank == 1 and "rank 1 waits at the store for the key 'go', was at the cell" in str(error)


def test_a_rank_that_did_something_odd_is_blamed_and_told_where():
    odd = [("called all_reduce on a group that it is not in", HERE)]
    error = hang_report.explain(3, [rank(0, waits(1)), rank(1, status="returned", oddities=odd)])
    assert error.rank == 1 and "rank 1 called all_reduce on a group that it is not in: the cell, line 7" in str(error)


def test_the_first_disagreement_is_shown_not_the_last():
    ranks = [rank(0, call(1), call(2, "broadcast"), call(3)), rank(1, call(1), call(2), call(3, "barrier", ()))]
    text = str(hang_report.explain(3, ranks))
    assert text.startswith("ranks disagree about collective #2:\n  rank 0 called broadcast #2")


def test_a_chain_of_calls_without_end_is_shown_at_its_ends_only():
    def even(number):
        return odd(number + 1)

    def odd(number):
        return even(number + 1)

    try:
        even(0)
    except RecursionError as error:
        story = describe(error, 0).story.splitlines()
    assert len(story) < 30 and "RecursionError: maximum recursion depth exceeded" in story[-1]
    assert re.fullmatch(r"  \.\.\. \d{3,} calls more, of the same functions \.\.\.", story[10])


@pytest.mark.parametrize(
    "other", [{"sizes": ((3,),)}, {"dtype": "int32"}, {"op": "reduce"}, {"reduce": "max"}, {"root": 1}]
)
def test_the_rank_that_stands_alone_is_blamed(other):
    ranks = [rank(0, call(1)), rank(1, call(1, **other)), rank(2, call(1))]
    assert "ranks disagree about collective #1" in str(hang_report.explain(3, ranks))
    assert hang_report.explain(3, ranks).rank == 1
    assert hang_report.explain(3, ranks[:2]).rank is None
    ranks[2] = rank(2, status="running")
    assert hang_report.explain(3, ranks).rank is None and "do not tell who is wrong" in str(
        hang_report.explain(3, ranks)
    )


def test_a_rank_that_finds_a_disagreement_is_not_the_one_to_blame():
    """Two ranks may find it at once, each the other; which of them is wrong is seen from the third."""
    found = [describe(Disagreement(f"rank {a} calls this, where rank {b} calls that"), a) for a, b in ((0, 1), (1, 0))]
    one, two = (rank(a, call(1, "reduce_scatter", ((2,),) * (3 - a)), status="raised") for a in (0, 1))
    assert hang_report.explain(3, [one, two, rank(2, waits(1, "reduce_scatter", ((2,),) * 3))], found).rank == 1
    ranks = [rank(a, call(1, "gather", ((2 + a,),)), status="raised") for a in (0, 1)]
    assert hang_report.explain(3, ranks, found).rank is None
    assert "The calls alone do not tell who is wrong" in str(hang_report.explain(3, ranks, found))


def test_the_shape_may_differ_if_the_number_of_elements_does_not():
    assert "disagree" not in str(hang_report.explain(3, [rank(0, call(1)), rank(1, call(1, sizes=((2, 1),)))]))


def test_a_scatter_may_bring_tensors_on_one_rank_only():
    ranks = [rank(0, call(1, "scatter", ((2,), (2,)))), rank(1, waits(1, "scatter", ()))]
    assert "disagree" not in str(hang_report.explain(3, ranks))


def test_everybody_came_and_still_nothing():
    ranks = [rank(r, waits(1, members=(0, 1))) for r in range(2)]
    assert "which all entered: look at the network" in str(hang_report.explain(3, ranks))


def test_calls_left_over_when_all_have_returned_are_named():
    members = {"": (0, 1)}
    more, fewer = [call(1, members=(0, 1)), call(2, members=(0, 1))], [call(1, members=(0, 1))]
    ranks = [rank(0, *more, members=members), rank(1, *fewer, members=members)]
    assert find_uneven(ranks) == {0: 2, 1: 1}
    text = "rank 0 made 1 call more than rank 1, and all have returned:\n  rank 0 called all_reduce #2"
    assert str(hang_report.uneven({0: 2, 1: 1}, ranks)).startswith(text)
    assert find_uneven([rank(0, *more, members=members), rank(1, *more, members=members)]) is None
    assert find_uneven([rank(0, *more, members=members), rank(1, *fewer, members=members, ended=[""])]) is None


def test_a_message_that_nobody_received_is_left_over_too():
    sent = call(1, "send", members=(0, 1), root=1)
    ranks = [rank(0, sent, members={sent.channel: (0, 1)}), rank(1)]
    assert find_uneven(ranks) == {0: 1, 1: 0}
    assert "rank 0 called send #1 to rank 1" in str(hang_report.uneven({0: 1, 1: 0}, ranks))


def test_a_message_sent_to_the_wrong_rank_is_its_senders_fault():
    sent, expected = waits(1, "send", members=(0, 2), root=2), waits(1, "recv", members=(0, 1), root=0)
    ranks = [rank(0, sent), rank(1, expected), rank(2, status="returned")]
    assert hang_report.explain(3, ranks).rank == 0


def test_a_rank_that_gave_up_on_a_message_names_no_collective():
    text = failure_report.where_all_were([rank(0, status="raised")])
    assert text.endswith("  rank 0  gave up in a message\n          the cell, line 7, in train: dist.all_reduce(x)")


def test_no_line_is_longer_than_jupyterlab_shows():
    long = Line("/tmp/ipykernel_12/345.py", 7, "train", "x = " + "very_long_name + " * 30)
    ranks = [Whereabouts(0, "running", long, [waits(1, sizes=((2,),) * 30)], entered={"": 1}), rank(1)]
    error = hang_report.explain(3, ranks)
    assert max(map(len, error.report.splitlines())) <= 100


def test_ipython_shows_the_report_alone():
    error = hang_report.explain(3, [rank(0, waits(1)), rank(1)])
    (text,) = error._render_traceback_()
    assert text.startswith("RankError: rank 1 never entered") and "Where the ranks were:\n  rank 0  waited in" in text


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-9, "killed by SIGKILL"),
        (-6, "killed by SIGABRT"),
        (-11, "killed by SIGSEGV"),
        (-15, "killed by SIGTERM"),
        (3, "exit status 3"),
        (0, "exit status 0"),
    ],
)
def test_exit_codes_are_explained(code, says):
    assert says in failure_report.why_died(code)
    assert ("memory" in failure_report.why_died(code)) == (code == -9)


def test_bytes_are_counted_from_shape_and_dtype():
    assert call(1, sizes=((10, 3), (5,)), dtype="float64").n_bytes == 35 * 8
    assert str(call(1, sizes=((1000, 1000),))) == "all_reduce #1 (float32 [1000, 1000], 4.0 MB)"
    assert str(call(2, "barrier", (), "")) == "barrier #2"


def test_ranks_are_listed_as_a_person_would():
    assert [listed_ranks(some) for some in ([3], [2, 0], [2, 1, 0])] == ["rank 3", "ranks 0 and 2", "ranks 0, 1 and 2"]


def test_the_learners_line_wins_over_torch_and_the_course():
    import traceback

    import torch

    def frame(name):
        return traceback.FrameSummary(name, 3, "f", line="code")

    stack = [frame("/home/me/train.py"), frame(failure_report.__file__), frame(torch.__file__)]
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


def test_a_loader_that_loses_its_worker_is_no_lost_peer():
    text = "def read():\n    raise ConnectionResetError(104, 'Connection reset by peer')\n"
    scope = {}
    exec(compile(text, "/lib/site-packages/torch/utils/data/dataloader.py", "exec"), scope)
    with pytest.raises(ConnectionResetError) as raised:
        scope["read"]()
    failure = describe(raised.value, 0)
    assert "a DataLoader worker of this rank has died" in failure.story and not failure.lost_peer
    assert "DataLoader" not in describe(ConnectionResetError("Connection reset by peer"), 0).story
