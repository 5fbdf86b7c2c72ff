"""Do the pictures of lesson 06 show the numbers they were given, and stay readable?"""

from ddp_course import draw
from ddp_course.draw.replicas import conditions, drift, three_conditions

RUNS = {"as it should be": [0.0, 0.0, 0.0, 0.0], "another seed each": [0.24999, 0.0, 0.0, 0.25]}


def test_no_text_collides_and_every_picture_fits_a_notebook(readable):
    many = {f"a run with a name {number}": [1.2345e-17, 0.0, 123.0, 0.0] for number in range(6)}
    curves = {name: [0.0, 1e-16, 0.3, 200.0] for name in many}
    drifts = drift(curves, curves), drift({"equal": [0.0]}, {"equal": [0.0]})
    pictures = three_conditions(), three_conditions(4), conditions(RUNS), conditions(many), *drifts
    readable(pictures)


def test_only_an_exact_zero_is_called_equal():
    texts = draw.texts_of(conditions(RUNS))
    assert texts.count("equal") == 6 and texts.count("0.25 apart") == 2
    assert "1e-17 apart" in draw.texts_of(conditions({"nearly": [1e-17]}, columns=["start"]))


def test_curves_are_drawn_as_measured_and_zeros_at_the_lowest_tick():
    left, right = drift({"a": [0.0, 0.5]}, {"a": [1e-15, 2.0]}).axes
    assert list(left.lines[0].get_ydata()) == [0.0, 0.5]
    assert list(right.lines[0].get_ydata()) == [1e-15, 2.0]
    assert left.get_yticklabels()[0].get_text() == "0" and left.get_yticks()[0] == 0
    assert [ax.get_title() for ax in (left, right)] == ["from each other", "from one process"]
