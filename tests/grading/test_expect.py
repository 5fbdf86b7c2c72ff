"""The words of judges: rounds run when they are needed, the first fault is told, and slips have their names."""

from random import Random

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.grading.answer.isolated import Answer
from ddp_course.grading.checking import judged
from ddp_course.grading.vocabulary.expect import (
    alike,
    equals,
    exercise,
    follows,
    nothing,
    one_number,
    refuses,
    talks,
    turned,
)
from ddp_course.grading.vocabulary.observe import Log
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from ddp_course.grading.vocabulary.provenance import counts, stakes, whose


def act(function, case, rank, world_size):
    return function(case, rank)


def rounds(rng):
    return [Round(2, [("sum", 1), ("sum", 10)]), Round(2, [("none", 0)], raises=(ValueError, ArithmeticError))]


def total(seen, ranks=slice(None), times=1):
    return sum([seen.case, 2 * seen.case][ranks]) * times


SUM = exercise(
    "99.1",
    "A sum",
    "total",
    5,
    act=act,
    rounds=rounds,
    checks={
        "sum": (
            "every rank has the sum",
            1,
            equals("the sum", total, turned(total, {"rank 0's alone": {"ranks": slice(1)}}), "add", form=one_number()),
            "sum",
        ),
        "talk": ("one collective", 1, talks(1, "numbers", lambda seen: 100), "sum"),
        "none": ("nothing is refused", 1, refuses("ValueError", "for 0", "look at it first", str), "none"),
    },
)


def verdicts(function):
    """Return the cause, or nothing, of each check."""
    found, _ = judged(SUM, lambda: Answer(function, SUM, 5), seed=0)
    return [(v.fault.cause if v.fault else "") if v.reached else "not reached" for v in found]


def right(case, rank):
    if not case:
        raise ValueError("no case")
    number = torch.tensor(float(case * (1 + rank)))
    dist.all_reduce(number)
    return number


def test_a_right_answer_passes():
    assert verdicts(right) == ["", "", ""]


def test_an_error_costs_what_looks_at_its_run_and_earns_nothing_where_one_is_due():
    def slips(case, rank):
        if case == 1:
            raise RuntimeError("a slip")
        return case

    def always(case, rank):
        raise ValueError("no case")

    two = exercise("99.3", "Two runs", "total", 2, act=act, checks={
        "one": ("of one", 1, alike("one"), "one"), "ten": ("of ten", 1, alike("ten"), "ten"),
    }, rounds=lambda rng: [Round(2, [("one", 1)]), Round(2, [("ten", 10)])])  # fmt: skip
    found, _ = judged(two, lambda: Answer(slips, two, 5), seed=0)
    assert [v.points for v in found] == [0, 1] and "a slip" in found[0].fault.report
    found, _ = judged(SUM, lambda: Answer(always, SUM, 5), seed=0)
    assert [v.points for v in found] == [0, 0, 0]


def test_a_slip_is_named_and_the_rank_that_never_talked_is_found():
    own, _, none = verdicts(lambda case, rank: case)
    assert (own, none) == ("rank 0's alone", "0")
    assert verdicts(lambda case, rank: case * 7 if case else 1 / 0)[::2] == ["add", "look at it first"]
    assert "never talked" in verdicts(lambda case, rank: case * 3)[1]


def test_a_rank_that_skips_a_collective_does_not_meet_the_next_case():
    def skipping(case, rank):
        return right(case, rank) if case == 10 or rank else case

    assert "one rank skips a collective" in verdicts(skipping)[0]


def test_values_are_compared_over_the_ranks():
    seen = Seen(None, 1, [Note(value=1.0), Note(value=2.0)])
    assert alike("differs")(seen).cause == "differs"
    assert alike("differs")(Seen(None, 0, seen.everyone)) is None


def test_a_note_that_must_be_empty_tells_what_was_found():
    clean, dirty = Seen(None, 0, [Note(trouble="")]), Seen(None, 0, [Note(trouble="a crumb")])
    expect = nothing("trouble", "a clean table", "wipe it")
    assert expect(clean) is None
    assert (expect(dirty).expected, expect(dirty).found, expect(dirty).cause) == ("a clean table", "a crumb", "wipe it")


def test_a_log_is_matched_rule_by_rule():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Log(model, optimizer) as log:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert log.text == "FBFBU"
    order = follows(("(FB)*U", "%(n)s passes", "pairs"), ("(.*F){%(n)s}[^F]*", "%(n)s forward passes", "not %(n)s"))
    assert order(Seen(None, 0, [Note(logs=[log.text], n=2)])) is None
    fault = order(Seen(None, 0, [Note(logs=[log.text], n=3)]))
    assert (fault.expected, fault.cause) == ("3 forward passes", "not 3")


def test_a_sum_tells_whose_numbers_are_in_it():
    brought = [column[0] for column in stakes(Random(0), 3, 1)]
    assert counts(sum(brought), brought) == [1, 1, 1] and not whose(sum(brought), brought)
    assert whose(brought[0] + 2 * brought[1], brought) == "rank 1's number is in it 2 times, rank 2's number is missing"
    assert counts(sum(brought) + 0.5, brought) is None
