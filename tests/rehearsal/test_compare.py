"""What the notes of all ranks say together, from notes that are written by hand: each answer could be wrong."""

import pytest

from ddp_course.rehearsal import rehearse_calls, rehearse_files, rehearse_sampling, rehearse_weights, two_runs
from ddp_course.rehearsal.notes import RIGHT, Notes
from ddp_course.rehearsal.source import Source
from ddp_course.rehearsal.watch_calls import DEEP


def notes(*ranks: list[dict], draws: list[dict] = ()) -> Notes:
    return Notes([[{"line": 7, **fact} for fact in facts] for facts in ranks], list(draws))


def gradient(found: float, local: float) -> dict:
    return {"what": "gradients", "found": [found] * 3, "local": [local] * 3, "count": 1, "idle": 0}


@pytest.mark.parametrize(
    ("found", "fault"),
    [((2, 2), RIGHT), ((1, 3), "not-averaged"), ((1, 1), "averaged-twice"), ((4, 4), "summed"), ((9, 9), None)],
)
def test_gradients_are_compared_with_the_mean_of_what_the_ranks_computed(found, fault):
    seen = rehearse_weights.not_averaged(notes(*[[gradient(f, local)] for f, local in zip(found, (1, 3), strict=True)]))
    assert getattr(seen, "fault", seen) == fault


def test_gradients_that_are_divided_after_they_were_clipped_are_seen():
    clipped = [gradient(2, 1), gradient(1, 2)], [gradient(2, 3), gradient(1, 2)]
    assert rehearse_weights.not_averaged(notes(*clipped)).fault == "averaged-twice"
    clipped = [gradient(2, 1), gradient(2, 2)], [gradient(2, 3), gradient(2, 2)]
    assert rehearse_weights.not_averaged(notes(*clipped)) == RIGHT


def forward(*rows: float) -> dict:
    return {"what": "forward", "training": True, "rows": list(rows), "module": "Linear"}


def test_rows_are_compared_up_to_the_first_that_comes_again():
    assert rehearse_sampling.same_rows(notes([forward(1, 2), forward(2, 3)], [forward(4, 5), forward(1, 2)])) == RIGHT
    shared = [forward(1, 2, 3, 4, 5, 6)], [forward(4, 5, 6, 1, 2, 3)]
    assert rehearse_sampling.same_rows(notes(*shared)).evidence == "6 of the first 6 samples of each rank are the same"
    assert rehearse_sampling.same_rows(notes([forward(1, 2)], [])) is None


def test_data_that_holds_equal_rows_tells_only_by_its_order():
    begin, rows = {"what": "pass"}, [1, 2, 1, 3, 2, 1, 4, 1]
    alike = [begin, forward(*rows)]
    assert rehearse_sampling.same_rows(notes(alike, alike)).fault == "same-rows"
    assert rehearse_sampling.same_rows(notes(alike, [begin, forward(*reversed(rows))])) is None


def drew(rank: int, *states: str) -> list[dict]:
    return [{"rank": rank, "worker": None, "drawn": {"rng": state}, "line": 5} for state in states]


def test_a_generator_that_each_row_seeds_again_is_no_shared_augmentation():
    def fault(*draws):
        return getattr(rehearse_sampling.same_augmentation(notes([], [], draws=[*draws[0], *draws[1]])), "fault", RIGHT)

    assert fault(drew(0, "a", "b", "c"), drew(1, "a", "b", "d")) == "same-augmentation"
    assert fault(drew(0, "a", "b", "c"), drew(1, "a", "d", "e")) == RIGHT


def test_uneven_batches_leave_a_mean_of_means_open():
    begin = {"what": "pass"}
    assert rehearse_sampling.mean_of_means(notes([begin, forward(1, 2)], [begin, forward(3, 4)])) == RIGHT
    assert rehearse_sampling.mean_of_means(notes([begin, forward(1, 2)], [begin, forward(3)])) is None


def first_step(found: float, *rows: float) -> list[dict]:
    return [forward(*rows), gradient(found, found), *weights(1)]


@pytest.mark.parametrize(("found", "fault"), [(1, "averaged-twice"), (4, "summed"), (2, RIGHT), (3, None)])
def test_a_step_is_compared_with_one_rank_on_the_same_rows(found, fault):
    seen = two_runs.same_step(notes(first_step(2, 1, 2)), notes(first_step(found, 2), first_step(found, 1)))
    assert getattr(seen, "fault", seen) == fault
    assert two_runs.same_step(notes(first_step(2, 1, 3)), notes(first_step(1, 2), first_step(1, 1))) is None


def test_a_gradient_that_is_a_mean_already_is_not_reduced_again():
    right = [gradient(2, 1)], [gradient(2, 3), {"what": "reduced again"}]
    assert rehearse_weights.not_averaged(notes(*right)).fault == "averaged-twice"


def test_a_backward_inside_no_sync_whose_forward_was_outside_is_told_at_no_sync():
    late = [{"what": "no_sync"}, {"what": "late no_sync"}]
    assert rehearse_weights.forward_outside_no_sync(notes(late)).fault == "forward-outside-no-sync"
    assert rehearse_weights.forward_outside_no_sync(notes(late[:1])) == RIGHT


def weights(*sketches: float, end: float | None = None) -> list[dict]:
    facts = [
        {"what": "weights", "which": 1, "step": n, "at": "after", "sketch": [s] * 3} for n, s in enumerate(sketches)
    ]
    return facts if end is None else [*facts, {"what": "end", "final": [[[1], [end] * 3]]}]


def test_a_start_that_differs_is_no_drift():
    assert rehearse_weights.different_start(notes(weights(1), weights(1.1))).fault == "different-start"
    assert rehearse_weights.drift(notes(weights(1), weights(1.1))) is None
    assert (
        rehearse_weights.drift(notes(weights(1, 2, 3), weights(1, 2, 3.1))).evidence
        == "the ranks' weights differ after step 2"
    )
    assert rehearse_weights.drift(notes(weights(1, 2, end=2), weights(1, 2, end=2))) == RIGHT
    assert rehearse_weights.drift(notes(weights(1, 2), weights(1, 2))) is None  # it did not come to its end
    one, other = ([{**fact, "still": [["codebook", 31, x]]} for fact in weights(1, 2)] for x in (5.0, 5.1))
    seen = rehearse_weights.drift(notes(one, other))
    assert (seen.line, seen.evidence) == (31, "codebook, which no gradient changes, differs after step 1")


def test_weights_that_part_and_meet_again_are_no_drift():
    """As under join(), or where weights are averaged now and then."""
    assert rehearse_weights.drift(notes(weights(1, 2, 3, end=5), weights(1, 2.5, 3.5, end=5))) == RIGHT
    local = [gradient(1, 1)], [gradient(3, 3)]
    assert rehearse_weights.not_averaged(notes(*local)).fault == "not-averaged"
    assert rehearse_weights.not_averaged(notes(*([*each, *weights(1, end=5)] for each in local))) == RIGHT


CHANGES = [
    ({"what": "converted", "to": "float64", "line": 33}, "changed-after-wrapping", 33),
    ({"what": "replaced", "name": "head.weight", "line": 21, "at": 18}, "changed-after-wrapping", 18),
    ({"what": "thawed", "name": "trunk.0.weight", "at": [12, 40, 60]}, "thawed-after-wrapping", 40),  # 12 is a helper's
    ({"what": "thawed", "name": "trunk.0.weight", "at": [40, 60]}, "thawed-after-wrapping", 40),
    ({"what": "unsent step", "forward": 9, "line": 11}, "step-without-sync", 11),
    ({"what": "forward", "training": True, "rows": [1], "replica": False, "line": 5}, "past-the-replica", 5),
]


@pytest.mark.parametrize(("change", "fault", "line"), CHANGES, ids=[row[1] for row in CHANGES])
def test_what_parted_the_weights_is_named(change, fault, line):
    wrapped = {"what": "wrapped", "unused": False}
    found = rehearse_weights.drift(notes([wrapped, change, *weights(1, 2, end=2)], [wrapped, *weights(1, 3, end=3)]))
    assert (found.fault, found.line) == (fault, line)
    assert rehearse_weights.drift(notes([change, *weights(1, 2, end=2)], weights(1, 2, end=2))) == RIGHT


def test_rates_that_differ_are_told_with_what_the_schedule_was_given():
    def rank(rate, metric):
        return [
            {"what": "metric", "value": metric, "line": 40},
            {**weights(1)[0], "rates": [rate]},
            *weights(rate, end=rate),
        ]

    found = rehearse_weights.drift(notes(rank(0.1, 0.5), rank(0.03, 0.7)))
    assert (found.fault, found.line) == ("rates-differ", 40) and "0.5 on rank 0, 0.7 on rank 1" in found.evidence


PART = """
for x in loader:
    if bad(x):
        continue
    step(x)
    if stop(x):
        break
reduce()
if rank == 0:
    show()
"""


def call(op: str, line: int, *path: int, **facts) -> dict:
    seen = {"size": None, "dtype": None, "joined": 0, "names": [], "whole": True, "turns": []}
    return {"what": "call", "op": op, "line": line, "path": [DEEP + each for each in path], **seen, **facts}


PARTINGS = [
    (call("backward", 5, 2, 3, 5), call("all_reduce", 8, 2, 8), "uneven-inputs", 2),
    (call("backward", 5, 6, 2, 3, 5), call("all_reduce", 8, 6, 7, 8), "decided-by-one-rank", 6),
    (call("backward", 5, 2, 3, 5), call("all_reduce", 8, 2, 8, turns=[[4, 3]]), "decided-by-one-rank", 3),
    (call("barrier", 10, 9, 10), call("end", 11, 9) | {"what": "end"}, "collective-under-rank-0", 10),
    (call("forward", 10, 9, 10), call("end", 11, 9) | {"what": "end"}, "forward-on-one-rank", 10),
    (call("all_reduce", 8, 8, size=3), call("all_reduce", 8, 8, size=4), "collective-order", 8),
    # A library's function comes back into the program on one rank, and makes a call there.
    (
        call("all_reduce", 4) | {"path": [DEEP + 8, 2 * DEEP + 4]},
        call("barrier", 10, 8, 9, 10),
        "collective-under-rank-0",
        8,
    ),
]


@pytest.mark.parametrize(("one", "other", "fault", "line"), PARTINGS, ids=[f"{row[2]} {row[3]}" for row in PARTINGS])
def test_ranks_are_followed_back_to_where_they_parted(one, other, fault, line):
    for pair in ((one, other), (other, one)):
        found = rehearse_calls.calls(notes(*([each] for each in pair)), PART, failed=True)
        assert (found.fault, found.line) == (fault, line)
    assert rehearse_calls.calls(notes([one], [one]), PART, failed=False) == RIGHT


def test_calls_inside_a_call_are_stepped_over():
    """A helper decides differently on each rank and returns the same: it has not parted them."""
    one, other = [DEEP + 6, 2 * DEEP + 30, 2 * DEEP + 31, DEEP + 7], [DEEP + 6, 2 * DEEP + 30, 2 * DEEP + 33, DEEP + 2]
    assert rehearse_calls.parting(one, other) == (6, (7, 2))
    assert rehearse_calls.parting(one, one) is None


def test_samples_that_several_ranks_together_leave_out_are_named():
    def rank(*rows):
        return [{"what": "loader", "line": 5, "draws": 1}, {"what": "batch", "rows": list(rows)},
                {**forward(*rows), "training": True}]  # fmt: skip

    whole = [float(n) for n in range(20)]
    source = Source("def __iter__(self):\n    own = 1\n    yield own\n")
    found = rehearse_sampling.unread_samples(notes(rank(*whole)), notes(rank(*whole[:5]), rank(*whole[5:10])), source)
    assert (found.fault, found.line) == ("unread-samples", 3) and "10 of the 20 samples" in found.evidence
    halves = notes(rank(*whole[:10]), rank(*whole[10:]))
    assert rehearse_sampling.unread_samples(notes(rank(*whole)), halves, source) == RIGHT
    others = notes(rank(*(n + 0.5 for n in whole)))  # augmented
    assert rehearse_sampling.unread_samples(others, halves, source) is None


def test_names_reduced_in_another_order_are_seen_and_names_of_other_things_are_not():
    def rank(*names):
        return [call("all_reduce", 8, names=[name], size=1) for name in names]

    assert rehearse_calls.calls(notes(rank("a", "b"), rank("b", "a")), PART, False).fault == "set-order"
    assert rehearse_calls.calls(notes(rank("a", "b"), rank("a", "b")), PART, False) == RIGHT
    assert rehearse_calls.calls(notes(rank("a.txt", "b.txt"), rank("c.txt", "d.txt")), PART, False) == RIGHT


def test_calls_under_join_may_differ_in_number_unless_they_are_the_programs_own():
    inside = [call("backward", 5, joined=1)]
    assert rehearse_calls.calls(notes(inside * 3, inside * 2), PART, False) == RIGHT
    own = [*inside, call("all_reduce", 6, joined=1, own=True)]
    assert rehearse_calls.calls(notes(own * 3, own * 2), PART, False).fault == "collective-under-join"


def whole_batch(alone: list[float], *ranks: list[float]) -> tuple[Notes, Notes]:
    """First steps of one rank and of several: gradients of single parameters, averaged with equal weights."""
    mean = [sum(each) / len(ranks) for each in zip(*ranks, strict=True)]

    def step(found, local):
        each = [[[f] * 3, [own] * 3] for f, own in zip(found, local, strict=True)]
        return [*weights(1), {**gradient(0, 0), "each": each}]

    many = notes(*(step(mean, own) for own in ranks))
    return notes([{"what": "replayed", "whole": True}, *step(alone, alone)]), many


@pytest.mark.parametrize(
    ("alone", "fault"),
    [([2.0, 2.0, 5.0], RIGHT), ([1.5, 2.5, 5.0], "loss-of-unequal-counts"), ([1.5, 2.0, 9.0], "loss-of-whole-batch")],
)
def test_a_step_is_compared_with_one_process_on_the_joined_batch(alone, fault):
    """Of ranks with gradients (1, 3, 5) and (3, 1, 5), three quarters of the first are (1.5, 2.5, 5)."""
    seen = two_runs.same_batch(*whole_batch(alone, [1.0, 3.0, 5.0], [3.0, 1.0, 5.0]))
    assert getattr(seen, "fault", seen) == fault
    if fault == "loss-of-unequal-counts":
        assert "0.75 × rank 0's + 0.25 × rank 1's" in seen.evidence


def batches(*passes: list[float], stay: bool = True, counts: tuple = (0, 1)) -> list[dict]:
    facts = [{"what": "loader", "loader": 0, "line": 31, "sampler": "SequentialSampler"}]
    for count, rows in zip(counts, passes, strict=True):
        facts.append({"what": "pass", "loader": 0, "stay": stay, "counts": {"Stream.epoch": count}})
        facts.append({"what": "batch", "loader": 0, "rows": rows})
    return facts


def test_workers_that_stay_and_do_not_see_the_epoch_are_named():
    rows = [float(n) for n in range(10)]
    found = rehearse_sampling.stale_workers(notes(batches(rows, rows)))
    assert (found.fault, found.line) == ("stale-workers", 31) and "Stream.epoch goes from 0 to 1" in found.evidence
    assert rehearse_sampling.stale_workers(notes(batches(rows, rows[::-1]))) == RIGHT
    assert rehearse_sampling.stale_workers(notes(batches(rows, rows, counts=(0, 0)))) is None
    assert rehearse_sampling.stale_workers(notes(batches(rows, rows, stay=False))) is None


def test_samples_that_one_rank_trains_on_and_another_evaluates_are_a_leak():
    def rank(trained, held):
        used = ((trained, True), (held, False))
        return [fact for rows, training in used for fact in (
            {"what": "batch", "loader": 0, "rows": rows}, {**forward(*rows), "training": training})]  # fmt: skip

    source = Source("train, val = random_split(data, [8, 2])")
    whole = [float(n) for n in range(20)]
    leak = notes(rank(whole[:16], whole[16:]), rank(whole[4:], whole[:4]))
    assert (found := rehearse_sampling.split_leak(leak, source)).fault == "split-leak" and found.line == 1
    assert (
        rehearse_sampling.split_leak(notes(rank(whole[:8], whole[16:]), rank(whole[8:16], whole[16:])), source) == RIGHT
    )
    assert rehearse_sampling.split_leak(notes(rank(whole, whole), rank(whole, whole)), source) is None  # as it means to


def test_samplers_that_do_not_divide_the_data_are_named():
    def sampler(**facts):
        return [
            {
                "what": "sampler",
                "shuffle": True,
                "seed": 0,
                "rank": 0,
                "num_replicas": 2,
                "epoch": 0,
                "made": 9,
                **facts,
            }
        ]

    assert "seeds 0, 1" in rehearse_sampling.same_rows(notes(sampler(), sampler(rank=1, seed=1))).evidence
    assert "takes share 0 of 2" in rehearse_sampling.same_rows(notes(sampler(), sampler())).evidence
    assert rehearse_sampling.same_rows(notes(sampler(), sampler(rank=1))) is None


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

    assert rehearse_files.prints_by_every_rank(notes([said("loss 0.5")], [said("loss 0.7")])).line == 7
    assert rehearse_files.prints_by_every_rank(notes([said("rank 0: loss")], [said("rank 1: loss")])) == RIGHT
    assert rehearse_files.prints_by_every_rank(notes([said("loss 0.5")], [])) == RIGHT
    assert rehearse_files.prints_by_every_rank(notes([said("[0/2] loss")], [said("[1/2] loss")])) == RIGHT
    assert rehearse_files.prints_by_every_rank(notes([said("step 1/10 loss")], [said("step 1/10 loss")])).line == 7


def test_a_file_opened_while_it_is_written_is_loaded_too_early():
    saving = [{"what": "saving", "path": "a.pt", "clock": 1.0}, {"what": "saved", "path": "a.pt", "clock": 2.0}]

    def load(clock, there=True):
        return [{"what": "loading", "path": "a.pt", "clock": clock, "there": there}]

    assert rehearse_files.early_load(notes(saving, load(1.5))).fault == "early-load"
    assert rehearse_files.early_load(notes(saving, load(0.5, there=False))).fault == "early-load"
    assert rehearse_files.early_load(notes(saving, load(2.5))) == RIGHT
    assert rehearse_files.early_load(notes(saving, load(0.5))) == RIGHT  # a file of an earlier run


def test_a_file_that_is_there_for_one_rank_only_is_looked_for_too_early():
    saving = [{"what": "saving", "path": "a.pt", "clock": 1.0}, {"what": "saved", "path": "a.pt", "clock": 2.0}]

    def look(*there):
        return [{"what": "looked", "path": "a.pt", "there": each} for each in there]

    assert rehearse_files.early_load(notes([*saving, *look(True)], look(False))).line == 7
    assert rehearse_files.early_load(notes([*saving, *look(True)], look(True))) is None
    assert rehearse_files.early_load(notes([*saving, *look(True)], look(False, True))) is None  # it waits


def test_notes_of_a_rank_that_was_ended_while_it_wrote_are_read(tmp_path):
    (tmp_path / "rank0.jsonl").write_text('{"what": "group", "line": 1}\n{"what": "for')
    assert Notes.read(tmp_path, 2).ranks == [[{"what": "group", "line": 1}], []]
