"""What the notes of all ranks say together, from notes that are written by hand: each answer could be wrong."""

import pytest

from ddp_course.rehearsal import compare
from ddp_course.rehearsal.compare import RIGHT, Notes


def notes(*ranks: list[dict], draws: list[dict] = ()) -> Notes:
    return Notes([[{"line": 7, **fact} for fact in facts] for facts in ranks], list(draws))


def gradient(found: float, local: float) -> dict:
    return {"what": "gradients", "found": [found] * 3, "local": [local] * 3, "count": 1, "idle": 0}


@pytest.mark.parametrize(
    ("found", "fault"),
    [((2, 2), RIGHT), ((1, 3), "not-averaged"), ((1, 1), "averaged-twice"), ((4, 4), "summed"), ((9, 9), None)],
)
def test_gradients_are_compared_with_the_mean_of_what_the_ranks_computed(found, fault):
    seen = compare.gradients(notes(*[[gradient(f, local)] for f, local in zip(found, (1, 3), strict=True)]))
    assert getattr(seen, "fault", seen) == fault


def test_gradients_that_are_divided_after_they_were_clipped_are_seen():
    clipped = [gradient(2, 1), gradient(1, 2)], [gradient(2, 3), gradient(1, 2)]
    assert compare.gradients(notes(*clipped)).fault == "averaged-twice"
    clipped = [gradient(2, 1), gradient(2, 2)], [gradient(2, 3), gradient(2, 2)]
    assert compare.gradients(notes(*clipped)) == RIGHT


def forward(*rows: float) -> dict:
    return {"what": "forward", "training": True, "rows": list(rows), "module": "Linear"}


def test_rows_are_compared_up_to_the_first_that_comes_again():
    assert compare.same_rows(notes([forward(1, 2), forward(2, 3)], [forward(4, 5), forward(1, 2)])) == RIGHT
    shared = [forward(1, 2, 3, 4, 5, 6)], [forward(4, 5, 6, 1, 2, 3)]
    assert compare.same_rows(notes(*shared)).evidence == "6 of the first 6 rows of each rank are the same"
    assert compare.same_rows(notes([forward(1, 2)], [])) is None


def weights(*sketches: float) -> list[dict]:
    return [
        {"what": "weights", "which": 1, "step": n, "at": "after", "sketch": [s] * 3} for n, s in enumerate(sketches)
    ]


def test_a_start_that_differs_is_no_drift():
    assert compare.different_start(notes(weights(1), weights(1.1))).fault == "different-start"
    assert compare.drift(notes(weights(1), weights(1.1))) is None
    assert (
        compare.drift(notes(weights(1, 2, 3), weights(1, 2, 3.1))).evidence == "the ranks' weights differ after step 2"
    )
    assert compare.drift(notes(weights(1, 2), weights(1, 2))) == RIGHT


def test_a_resume_is_exact_if_it_goes_through_the_weights_of_the_run_that_was_not_killed():
    whole = notes(weights(0, 1, 1, 2, 2, 3))
    assert compare.resumed(whole, notes(weights(0, 1)), notes(weights(1, 2, 2, 3))) == RIGHT
    late = compare.resumed(whole, notes(weights(0, 1)), notes(weights(1, 2, 2, 3.5)))
    assert late.evidence == "2 steps after it resumed, the weights differ"
    assert "never had" in compare.resumed(whole, notes(weights(0, 1)), notes(weights(1.5, 2))).evidence
    assert compare.resumed(whole, notes(weights(0, 1)), notes(weights(0, 1))) is None  # it began again
    assert compare.resumed(whole, notes(weights(0, 1.5)), notes(weights(1, 2))) is None  # no two runs are alike


def test_what_every_rank_prints_is_one_line_unless_it_names_the_rank():
    def said(text):
        return {"what": "prints", "text": text}

    assert compare.prints(notes([said("loss 0.5")], [said("loss 0.7")])).line == 7
    assert compare.prints(notes([said("rank 0: loss")], [said("rank 1: loss")])) == RIGHT
    assert compare.prints(notes([said("loss 0.5")], [])) == RIGHT


def test_a_file_opened_while_it_is_written_is_loaded_too_early():
    saving = [{"what": "saving", "path": "a.pt", "clock": 1.0}, {"what": "saved", "path": "a.pt", "clock": 2.0}]

    def load(clock, there=True):
        return [{"what": "loading", "path": "a.pt", "clock": clock, "there": there}]

    assert compare.early_load(notes(saving, load(1.5))).fault == "early-load"
    assert compare.early_load(notes(saving, load(0.5, there=False))).fault == "early-load"
    assert compare.early_load(notes(saving, load(2.5))) == RIGHT
    assert compare.early_load(notes(saving, load(0.5))) == RIGHT  # a file of an earlier run


def test_notes_of_a_rank_that_was_ended_while_it_wrote_are_read(tmp_path):
    (tmp_path / "rank0.jsonl").write_text('{"what": "group", "line": 1}\n{"what": "for')
    assert Notes.read(tmp_path, 2).ranks == [[{"what": "group", "line": 1}], []]
