"""What the notes of all ranks say together, from notes that are written by hand: each answer could be wrong."""

import pytest

from ddp_course.rehearsal import run_of_files, run_of_rows, run_of_weights, two_runs
from ddp_course.rehearsal.notes import RIGHT, Notes


def notes(*ranks: list[dict], draws: list[dict] = ()) -> Notes:
    return Notes([[{"line": 7, **fact} for fact in facts] for facts in ranks], list(draws))


def gradient(found: float, local: float) -> dict:
    return {"what": "gradients", "found": [found] * 3, "local": [local] * 3, "count": 1, "idle": 0}


@pytest.mark.parametrize(
    ("found", "fault"),
    [((2, 2), RIGHT), ((1, 3), "not-averaged"), ((1, 1), "averaged-twice"), ((4, 4), "summed"), ((9, 9), None)],
)
def test_gradients_are_compared_with_the_mean_of_what_the_ranks_computed(found, fault):
    seen = run_of_weights.gradients(notes(*[[gradient(f, local)] for f, local in zip(found, (1, 3), strict=True)]))
    assert getattr(seen, "fault", seen) == fault


def test_gradients_that_are_divided_after_they_were_clipped_are_seen():
    clipped = [gradient(2, 1), gradient(1, 2)], [gradient(2, 3), gradient(1, 2)]
    assert run_of_weights.gradients(notes(*clipped)).fault == "averaged-twice"
    clipped = [gradient(2, 1), gradient(2, 2)], [gradient(2, 3), gradient(2, 2)]
    assert run_of_weights.gradients(notes(*clipped)) == RIGHT


def forward(*rows: float) -> dict:
    return {"what": "forward", "training": True, "rows": list(rows), "module": "Linear"}


def test_rows_are_compared_up_to_the_first_that_comes_again():
    assert run_of_rows.same_rows(notes([forward(1, 2), forward(2, 3)], [forward(4, 5), forward(1, 2)])) == RIGHT
    shared = [forward(1, 2, 3, 4, 5, 6)], [forward(4, 5, 6, 1, 2, 3)]
    assert run_of_rows.same_rows(notes(*shared)).evidence == "6 of the first 6 rows of each rank are the same"
    assert run_of_rows.same_rows(notes([forward(1, 2)], [])) is None


def test_data_that_holds_equal_rows_tells_only_by_its_order():
    begin, rows = {"what": "pass"}, [1, 2, 1, 3, 2, 1, 4, 1]
    alike = [begin, forward(*rows)]
    assert run_of_rows.same_rows(notes(alike, alike)).fault == "same-rows"
    assert run_of_rows.same_rows(notes(alike, [begin, forward(*reversed(rows))])) is None


def drew(rank: int, *states: str) -> list[dict]:
    return [{"rank": rank, "worker": None, "drawn": {"rng": state}, "line": 5} for state in states]


def test_a_generator_that_each_row_seeds_again_is_no_shared_augmentation():
    def fault(*draws):
        return getattr(run_of_rows.same_augmentation(notes([], [], draws=[*draws[0], *draws[1]])), "fault", RIGHT)

    assert fault(drew(0, "a", "b", "c"), drew(1, "a", "b", "d")) == "same-augmentation"
    assert fault(drew(0, "a", "b", "c"), drew(1, "a", "d", "e")) == RIGHT


def test_uneven_batches_leave_a_mean_of_means_open():
    begin = {"what": "pass"}
    assert run_of_rows.mean_of_means(notes([begin, forward(1, 2)], [begin, forward(3, 4)])) == RIGHT
    assert run_of_rows.mean_of_means(notes([begin, forward(1, 2)], [begin, forward(3)])) is None


def first_step(found: float, *rows: float) -> list[dict]:
    return [forward(*rows), gradient(found, found), *weights(1)]


@pytest.mark.parametrize(("found", "fault"), [(1, "averaged-twice"), (4, "summed"), (2, RIGHT), (3, None)])
def test_a_step_is_compared_with_one_rank_on_the_same_rows(found, fault):
    seen = two_runs.same_step(notes(first_step(2, 1, 2)), notes(first_step(found, 2), first_step(found, 1)))
    assert getattr(seen, "fault", seen) == fault
    assert two_runs.same_step(notes(first_step(2, 1, 3)), notes(first_step(1, 2), first_step(1, 1))) is None


def test_a_gradient_that_is_a_mean_already_is_not_reduced_again():
    right = [gradient(2, 1)], [gradient(2, 3), {"what": "reduced again"}]
    assert run_of_weights.gradients(notes(*right)).fault == "averaged-twice"


def test_a_backward_inside_no_sync_whose_forward_was_outside_is_told_at_no_sync():
    late = [{"what": "no_sync"}, {"what": "late no_sync"}]
    assert run_of_weights.no_sync(notes(late)).fault == "forward-outside-no-sync"
    assert run_of_weights.no_sync(notes(late[:1])) == RIGHT


def weights(*sketches: float) -> list[dict]:
    return [
        {"what": "weights", "which": 1, "step": n, "at": "after", "sketch": [s] * 3} for n, s in enumerate(sketches)
    ]


def test_a_start_that_differs_is_no_drift():
    assert run_of_weights.different_start(notes(weights(1), weights(1.1))).fault == "different-start"
    assert run_of_weights.drift(notes(weights(1), weights(1.1))) is None
    assert (
        run_of_weights.drift(notes(weights(1, 2, 3), weights(1, 2, 3.1))).evidence
        == "the ranks' weights differ after step 2"
    )
    assert run_of_weights.drift(notes(weights(1, 2), weights(1, 2))) == RIGHT
    one, other = ([{**fact, "still": [["codebook", 31, x]]} for fact in weights(1, 2)] for x in (5.0, 5.1))
    seen = run_of_weights.drift(notes(one, other))
    assert (seen.line, seen.evidence) == (31, "codebook, which no gradient changes, differs after step 0")


def test_a_resume_is_exact_if_it_goes_through_the_weights_of_the_run_that_was_not_killed():
    whole = notes(weights(0, 1, 1, 2, 2, 3))
    assert two_runs.resumed(whole, notes(weights(0, 1)), notes(weights(1, 2, 2, 3))) == RIGHT
    late = two_runs.resumed(whole, notes(weights(0, 1)), notes(weights(1, 2, 2, 3.5)))
    assert late.evidence.startswith("2 steps after it resumed, the weights differ")
    assert "never had" in two_runs.resumed(whole, notes(weights(0, 1)), notes(weights(1.5, 2))).evidence
    assert two_runs.resumed(whole, notes(weights(0, 1)), notes(weights(0, 1))) is None  # it began again
    restored = [*weights(1, 2, 2, 3.5), {"what": "restored", "of": "optimizer"}, {"what": "schedule"}]
    assert two_runs.resumed(whole, notes(weights(0, 1)), notes(restored)).evidence.endswith(
        "no load_state_dict of the schedule was called"
    )
    assert two_runs.resumed(whole, notes(weights(0, 1.5)), notes(weights(1, 2))) is None  # no two runs are alike


def test_what_every_rank_prints_is_one_line_unless_it_names_the_rank():
    def said(text):
        return {"what": "prints", "text": text}

    assert run_of_files.prints(notes([said("loss 0.5")], [said("loss 0.7")])).line == 7
    assert run_of_files.prints(notes([said("rank 0: loss")], [said("rank 1: loss")])) == RIGHT
    assert run_of_files.prints(notes([said("loss 0.5")], [])) == RIGHT
    assert run_of_files.prints(notes([said("[0/2] loss")], [said("[1/2] loss")])) == RIGHT
    assert run_of_files.prints(notes([said("step 1/10 loss")], [said("step 1/10 loss")])).line == 7


def test_a_file_opened_while_it_is_written_is_loaded_too_early():
    saving = [{"what": "saving", "path": "a.pt", "clock": 1.0}, {"what": "saved", "path": "a.pt", "clock": 2.0}]

    def load(clock, there=True):
        return [{"what": "loading", "path": "a.pt", "clock": clock, "there": there}]

    assert run_of_files.early_load(notes(saving, load(1.5))).fault == "early-load"
    assert run_of_files.early_load(notes(saving, load(0.5, there=False))).fault == "early-load"
    assert run_of_files.early_load(notes(saving, load(2.5))) == RIGHT
    assert run_of_files.early_load(notes(saving, load(0.5))) == RIGHT  # a file of an earlier run


def test_a_file_that_is_there_for_one_rank_only_is_looked_for_too_early():
    saving = [{"what": "saving", "path": "a.pt", "clock": 1.0}, {"what": "saved", "path": "a.pt", "clock": 2.0}]

    def look(*there):
        return [{"what": "looked", "path": "a.pt", "there": each} for each in there]

    assert run_of_files.early_load(notes([*saving, *look(True)], look(False))).line == 7
    assert run_of_files.early_load(notes([*saving, *look(True)], look(True))) is None
    assert run_of_files.early_load(notes([*saving, *look(True)], look(False, True))) is None  # it waits


def test_notes_of_a_rank_that_was_ended_while_it_wrote_are_read(tmp_path):
    (tmp_path / "rank0.jsonl").write_text('{"what": "group", "line": 1}\n{"what": "for')
    assert Notes.read(tmp_path, 2).ranks == [[{"what": "group", "line": 1}], []]
