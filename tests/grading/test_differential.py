"""The form of an exercise that is judged by its solution: what is compared, what is told, and what is not judged."""

from unittest import mock

import pytest

from ddp_course.grading import differential, source
from ddp_course.grading.answer.isolated import Answer, NotJudged
from ddp_course.grading.checking import judged
from ddp_course.grading.differential import HOLDS, exercise, value
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.rounds import Round, Seen

SETUP = "import torch\nimport torch.distributed as dist"
SOLUTION = """
def total(rank, world_size, numbers):
    result = torch.tensor(float(sum(numbers)) * (rank + 1))
    dist.all_reduce(result)
    return result
"""
MISTAKES = """
rank 0's alone | sum large | the others' numbers are missing
    dist.all_reduce(result) => dist.broadcast(result, src=0)
twice | sum large | it is added twice
    dist.all_reduce(result) => dist.all_reduce(result)
    result *= 2
large ones cut | large | a small number holds no large one
    float(sum(numbers)) => float(min(sum(numbers), 99))
"""


@pytest.fixture(autouse=True)
def _texts(monkeypatch):
    monkeypatch.setattr(source, "_texts", lambda: {"99": SETUP, "99.1": SOLUTION})
    source.setup_of.cache_clear()
    differential._kept.clear()
    yield
    source.setup_of.cache_clear()
    differential._kept.clear()


def positive(seen):
    return HOLDS if isinstance(seen["value"], float) and seen["value"] > 0 else Fault("a number above 0", "none")


def spec(**more):
    return exercise(
        *("99.1", "A sum", "total", 5),
        act=lambda function, case, rank, world_size: function(rank, world_size, case),
        cases=lambda rng: [Round(2, [("small", [1, 2])]), Round(2, [("large", [100, rng.randint(1, 9)])])],
        mistakes=MISTAKES,
        checks={
            "above": ("above 0", 1, "small", positive, ""),
            "sum": ("the sum", 2, "small", value, "add"),
            "large": ("large ones", 1, "large", value, lambda seen: f"add, on rank {seen.rank}"),
        },
        **more,
    )


def causes(text, chosen=None):
    """Judge an answer; return for each check the cause, or nothing."""
    chosen = chosen or spec()
    function = source.function_of("99.1", "total", text)
    found, _ = judged(chosen, lambda: Answer(function, chosen, 5), seed=0)
    return [(v.fault.cause if v.fault else "") if v.reached else "not reached" for v in found]


def edited(old, new):
    assert old in SOLUTION
    return SOLUTION.replace(old, new)


def test_a_right_answer_passes_however_it_is_written():
    assert (
        causes(edited("dist.all_reduce(result)", "dist.reduce(result, 1)\n    dist.broadcast(result, 1)")) == [""] * 3
    )


def test_the_mistake_that_has_the_same_outcome_is_told_in_other_words_too():
    assert causes(edited("dist.all_reduce(result)", "dist.all_reduce(result); result += result")) == [
        *("", "it is added twice", "it is added twice")
    ]
    cut = edited("float(sum(numbers))", "float(sum(numbers) if sum(numbers) < 99 else 99)")
    assert causes(cut) == ["", "", "a small number holds no large one"]


def test_what_no_mistake_does_is_told_by_the_check():
    assert causes(edited("    return result", "    return result + 1")) == ["", "add", "add, on rank 0"]
    below = edited("    return result", "    return -result")
    assert causes(below)[0] == "" and causes(below)[1] == "add"  # a fault of the view's own, which has no cause


def test_a_fault_of_a_view_costs_its_check():
    chosen = spec()
    function = source.function_of("99.1", "total", edited("    return result", "    return -result"))
    found, _ = judged(chosen, lambda: Answer(function, chosen, 5), seed=0)
    assert [v.points for v in found] == [0, 0, 0] and found[0].fault.expected == "a number above 0"


@pytest.mark.parametrize(
    "question, told", [("too large:", ("too large: no", "yes")), ("large", ("large False", "True"))]
)
def test_the_question_of_a_view_is_answered_in_words(question, told):
    views = {question: True}, {question: False}
    fault = differential._told(Seen("", 0, [{}]), *views, "", "", lambda seen: "", 1e-6)
    assert (fault.expected, fault.found) == told


def test_an_error_costs_what_looks_at_its_run():
    raising = edited("    result =", "    if sum(numbers) > 99:\n        raise RuntimeError('a slip')\n    result =")
    assert causes(raising)[:2] == ["", ""]
    chosen = spec()
    found, _ = judged(chosen, lambda: Answer(source.function_of("99.1", "total", raising), chosen, 5), seed=0)
    assert [v.points for v in found] == [1, 2, 0] and "a slip" in found[2].fault.report


def test_a_changed_argument_is_told_once():
    assert [bool(cause) for cause in causes(edited("    result =", "    numbers.reverse()\n    result ="))] == [
        *(True, False, False)
    ]


def test_a_reference_beside_the_solution_is_right_too():
    also = "half\n    return result => return result / 2"
    assert causes(edited("return result", "return result * 0.5"), spec(also=also)) == [""] * 3


def test_a_second_check_runs_the_answer_alone():
    ran = []
    real = differential._Outcomes._runner
    with mock.patch.object(differential._Outcomes, "_runner", lambda self, who: ran.append(who) or real(self, who)):
        causes(edited("return result", "return result + 1"))
        first = len(ran)
        causes(edited("return result", "return result + 2"))
    assert first > 1 and len(ran) == first


def test_where_what_it_is_compared_with_fails_nothing_is_judged():
    also = "half\n    return result => raise RuntimeError"
    with pytest.raises(NotJudged, match="what this is compared with failed"):
        causes(edited("return result", "return result + 1"), spec(also=also))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("a slip | sum | why\n    reduce_all => all_reduce", "a slip .*: there is no 'reduce_all' to edit"),
        ("a slip | sum | why\n    dist.all_reduce(result) => dist.all_reduce(", "a slip .*was never closed"),
        ("a slip | sum | why | now and then\n    result) => -result)", "99.1, a slip: expected a name"),
    ],
)
def test_a_table_that_cannot_be_meant_names_its_entry(table, said):
    with pytest.raises(ValueError, match=said):
        source.mistakes_of("99.1", table, ("sum",))


def test_further_lines_of_an_edit_begin_where_the_line_begins():
    (mistake,) = source.mistakes_of("99.1", MISTAKES.split("\n", 3)[3].split("large ones")[0], ("sum", "large"))
    assert "    dist.all_reduce(result)\n    result *= 2\n    return" in mistake.source
