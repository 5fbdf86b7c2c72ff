"""Does the picture of lesson 06 show the numbers it was given, and stay readable?"""

from ddp_course.draw.replicas import conditions
from ddp_course.draw.words import described
from tests.draw.readable import texts_of

RUNS = {"as it should be": [0.0, 0.0, 0.0, 0.0, 4e-15], "another seed each": [0.24999, 0.0, 0.0, 0.25, 0.5]}


def test_no_text_collides_and_the_picture_fits_a_notebook(readable):
    many = {f"a run with a name {number}": [1.2345e-17, 1.2345e-5, 123.4, 0.0, 0.01234] for number in range(6)}
    readable((conditions(RUNS), conditions(many)), most_bytes=70_000)  # 30 boxes; stored, they take half of that


def test_only_an_exact_zero_is_called_equal():
    texts = texts_of(conditions(RUNS))
    assert texts.count("equal") == 6 and texts.count("0.25 apart") == 2
    assert texts.count("rounding") == 1 and texts.count("0.5 apart") == 1
    others = texts_of(conditions({"a run": [1.2345e-5, 123.4, 0.01234]}))
    assert {"1e-05 apart", "123 apart", "0.012 apart"} <= set(others)
    assert "1e-11 apart" in texts_of(conditions({"nearly": [1e-11, 0.0]}, columns=["start", "end"]))


def test_its_description_names_the_red_boxes():
    said = described(conditions(RUNS))
    assert "as it should be: no red box." in said
    assert "another seed each: same start 0.25 apart, replicas 0.25 apart, one process 0.5 apart." in said
