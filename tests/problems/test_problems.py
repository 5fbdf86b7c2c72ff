"""Is what is counted what a formula says, and is each slip told from the right answer and from the other slips?"""

from __future__ import annotations

from random import Random

import pytest

from ddp_course.problems.problem import ROUNDED, Problem
from ddp_course.problems.sheet import LESSONS, problems, problems_of
from ddp_course.problems.units import said
from tests.problems.formulas import FORMULAS

PROBLEMS = {problem.name: problem for lesson in LESSONS for problem in problems_of(lesson)}
by_problem = pytest.mark.parametrize("name", FORMULAS)


def test_there_are_sixty_and_none_is_left_out():
    assert [len(problems_of(lesson)) for lesson in LESSONS] == [12] * 5
    assert list(PROBLEMS) == list(FORMULAS)
    assert len({problem.title for problem in PROBLEMS.values()}) == len({p.text for p in PROBLEMS.values()}) == 60


@by_problem
def test_what_is_counted_is_what_the_formula_says(name):
    agree(PROBLEMS[name], 20)


@pytest.mark.nightly
@by_problem
def test_a_thousand_times(name):
    agree(PROBLEMS[name], 1000)


def agree(problem: Problem, instances: int) -> None:
    texts, told = set(), set()
    for seed in range(instances):
        instance = problem.drawn(Random(f"{seed} {problem.name}"))
        texts.add(instance.text)
        told |= set(instance.wrong)
        # A slice or a rounded chunk may take a thousandth; best_interval's formula is itself approximate.
        near = max(problem.tolerance, 0) if problem.tolerance != ROUNDED else 0.002
        assert instance.true == pytest.approx(FORMULAS[problem.name](instance.numbers), rel=near), instance.text
        assert instance.judged(instance.answer)[0], instance.text
        named = 0
        for sentence, value in instance.wrong.items():
            if value > 0:
                answer = said(value, problem.unit, exact=not problem.tolerance)
                if problem.tolerance or value == round(value):  # a slip may cut rows; an answer does not
                    assert instance.judged(answer) == (False, sentence), (instance.text, answer)
                    named += 1
        assert named >= 3, instance.text
    assert len(texts) > instances / 2
    if instances > 100:  # each sentence is needed somewhere
        assert not set(problem.slips.values()) - told, set(problem.slips.values()) - told


def test_an_answer_that_shows_no_slip_is_told_its_direction():
    (instance,) = [each for each in problems(14, 3).instances if each.problem.name == "accumulation"]
    assert instance.judged(said(1.234 * instance.true, "ms")) == (False, "Not right: that is too much.")
    assert instance.judged(said(0.987 * instance.true, "s")) == (False, "Not right: that is too little.")


def test_other_units_of_the_same_kind_are_right_too():
    for lesson in (4, 15, 17):
        for instance in problems(lesson, 5).instances:
            if instance.problem.unit in ("GB", "MB"):
                assert instance.judged(f"{instance.true * 8 / 1e9:.6g} Gbit")[0]
                assert instance.judged(f"{instance.true / 2**30:.6g} GiB")[0]
            if instance.problem.unit in ("s", "ms", "min"):
                assert instance.judged(f"{instance.true / 3600:.6g} hours")[0]


def test_problems_whose_slips_cannot_be_told_apart_are_refused():
    words = {"title": "t", "text": "{x}", "unit": "ms", "draws": {"x": "1:9:2"}, "slips": {"same": "The same."}}
    problem = Problem.made("hopeless", words, lambda n: (n.x, {"same": 1.01 * n.x}))
    assert list(problem.draws["x"]) == [1, 3, 5, 7, 9]
    with pytest.raises(RuntimeError, match="hopeless: in 2000 tries no numbers"):
        problem.drawn(Random(0))


def test_a_seed_gives_the_same_sheet_and_another_one_other_numbers():
    assert repr(problems(18, 4)) == repr(problems(18, 4)) != repr(problems(18, 5))
    assert problems(14).seed in range(1, 10000)
    for lesson in (1, 16):
        with pytest.raises(ValueError, match=f"lesson {lesson} has no problems; these have: 4, 14, 15, 17, 18"):
            problems(lesson)


def test_a_notebook_shows_the_sheet_and_judges(capsys):
    sheet = problems(4, 7)
    assert repr(sheet).startswith("Lesson 04, seed 7. ") and "\n\n12. Waiting in a barrier\n" in repr(sheet)
    sheet.answer(1, sheet.instance(1).answer)
    assert capsys.readouterr().out == f"Right: {sheet.instance(1).answer}.\n"
    with pytest.raises(ValueError, match="problems 1 to 12, not 13"):
        sheet.answer(13, "1 GB")
