"""What a check says about things that are no answers, and that the same seed gives the same verdict."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ddp_course.grading import check, checking
from ddp_course.grading.registry import find_exercise
from ddp_course.grading.source import function_of, solution_of
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.launcher import launch

JOIN, PLACE = solution_of("03.2"), solution_of("03.1")


def test_an_unknown_exercise_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="no exercise '03.9'; there are 03.1, 03.2, 03.3, 03.4"):
        check("03.9", print)
    with pytest.raises(ValueError, match="lesson '99' has no exercises; there are exercises for 00, 01, 02"):
        check("99.1", print)


def test_a_value_instead_of_the_function_scores_nothing_and_is_named(capsys):
    assert check("03.1", (0, 0, 0, "cpu")) == 0
    said = capsys.readouterr().out
    assert "found: tuple (0, 0, 0, 'cpu')" in said and 'check("03.1", place)' in said


def test_a_function_that_cannot_leave_the_notebook_scores_nothing_and_is_told_why(tmp_path, capsys):
    with (tmp_path / "log").open("w") as log:

        def place(environ, gpus):
            log.write("here")

        place.__module__ = "__main__"
        assert check("03.1", place) == 0
    assert "cannot leave the notebook" in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_what_an_answer_prints_is_shown_by_rank(capsys):
    talkative = function_of("03.2", "join_and_sum", JOIN.replace("total =", "print('my value is', value)\n    total ="))
    assert check("03.2", talkative) == 5
    lines = capsys.readouterr().out.splitlines()
    shown = [line.strip() for line in lines if "my value is" in line]
    assert shown[0].startswith("rank 0 | my value is ") and shown[1].startswith("rank 1 | my value is ")


@pytest.mark.timeout(120)
def test_the_same_seed_gives_the_same_words_and_another_seed_other_values(capsys):
    wrong, said = function_of("03.1", "place", PLACE.replace("rank // local_world_size", "rank")), []
    for seed in (3, 3, 4):
        check("03.1", wrong, seed=seed)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_results_that_a_judge_cannot_read_cost_no_points(monkeypatch, capsys):
    exercise = find_exercise("03.1")

    def lost_in(answer, rng):
        yield "rank", None
        raise ValueError("11 is not in list")

    monkeypatch.setattr(checking, "find_exercise", lambda name: replace(exercise, judge=lost_in))
    assert check("03.1", print) == 0
    said = capsys.readouterr().out
    assert "not checked, and no points lost: the check of 03.1 could not read the results (ValueError: 11 is" in said


def talk(rank: int, world_size: int) -> list:
    pair = dist.new_group([0, 1])
    with Collectives() as seen:
        dist.all_reduce(torch.zeros(3))
        dist.broadcast(torch.zeros(5, dtype=torch.float64), 0, async_op=True).wait()
        if rank < 2:
            dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.zeros(2), group=pair)
        functional.all_reduce(torch.zeros(7), "sum", dist.group.WORLD).wait()
        functional.all_gather_tensor(torch.zeros(2), 0, dist.group.WORLD).wait()
        dist.all_gather_into_tensor(torch.zeros(6), torch.zeros(2))
        dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(6))
        dist.all_to_all_single(torch.zeros(3), torch.zeros(3))
        dist.gather(torch.zeros(2), [torch.zeros(2)] * 3 if rank == 0 else None, dst=0)
        if rank == 1:
            dist.send(torch.zeros(4), 2)
        if rank == 2:
            dist.recv(torch.zeros(4), 1)
        dist.monitored_barrier()
    dist.all_reduce(torch.zeros(3))
    return [(call.op, call.ranks, call.n_bytes) for call in seen.calls], seen.calls[0].timeout_s, seen.talks[-1].peer


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_way_to_call_a_collective_is_noted_by_one_name_with_what_this_rank_gives():
    notes = launch(talk, 3, start_method="forkserver", timeout_s=20, limit_s=60, quiet=True)
    world = (0, 1, 2)
    for rank, (calls, timeout_s, peer) in enumerate(notes):
        names = ("all_reduce", "all_gather", "all_gather", "reduce_scatter", "all_to_all", "gather")
        sizes = (28, 8, 8, 24, 12, 8)
        assert calls == [
            ("all_reduce", world, 12),
            ("broadcast", world, 40),
            *([("all_gather", (0, 1), 8)] if rank < 2 else []),
            *((name, world, n_bytes) for name, n_bytes in zip(names, sizes, strict=True)),
            *[[], [("send", world, 16)], [("recv", world, 0)]][rank],
            ("barrier", world, 0),
        ]
        assert (timeout_s, peer) == (20, [None, 2, 1][rank])
