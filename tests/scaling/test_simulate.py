"""Does the simulation play the events of a step as one would on paper? All timelines here are worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from ddp_course.models import resnet18_small
from ddp_course.parallel.bucketing import plan_buckets
from ddp_course.scaling import simulate
from ddp_course.scaling.link import LINKS, Link
from ddp_course.scaling.simulate import Gradient, Profile, predict
from ddp_course.scaling.spans import exposed_seconds

# Forward 2 s; four gradients of 100 bytes, 1 s apart in backward; then 1 s of optimizer.
FOUR = Profile(2.0, tuple(Gradient(name, 100, ready) for ready, name in enumerate("dcba", start=1)), 4.0, 1.0)
EACH = [["d"], ["c"], ["b"], ["a"]]


def of(seconds: float) -> Link:
    """A link on which two ranks' all_reduce of 100 bytes takes `seconds`: 2 (W - 1) / W of the payload is sent."""
    return Link("test", 0.0, 100 / seconds)


def talk(prediction):
    return [(span.start_s, span.end_s) for span in prediction.spans if span.lane == "all-reduce"]


LONGER = dataclasses.replace(FOUR, backward_s=5.0)
COSTLY = dataclasses.replace(FOUR, launch_s=0.25, busy_s_per_byte=0.0025)
LATER = dataclasses.replace(FOUR, finish_s=0.25)
FROZEN = Profile(2.0, (), 4.0, 1.0)


@pytest.mark.parametrize("profile, plan, seconds, talking, sums", [
    pytest.param(FOUR, EACH, 0.5, [(3.0, 3.5), (4.0, 4.5), (5.0, 5.5), (6.0, 6.5)], (7.5, 0.5, 1.5), id="quick link"),
    pytest.param(FOUR, EACH, 2.0, [(3.0, 5.0), (5.0, 7.0), (7.0, 9.0), (9.0, 11.0)], (12.0, 5.0, 3.0), id="slow link"),
    pytest.param(FOUR, [list("dcba")], 0.5, [(6.0, 8.0)], (9.0, 2.0, 0.0), id="one bucket"),
    pytest.param(FOUR, 400, 0.5, [(6.0, 8.0)], (9.0, 2.0, 0.0), id="one bucket by its cap"),
    pytest.param(LONGER, EACH, 1.0, [(3.0, 4.0), (4.0, 5.0), (5.0, 6.0), (6.0, 7.0)], (8.0, 0.0, 4.0), id="hidden"),
    pytest.param(FROZEN, [], 1.0, [], (7.0, 0.0, 0.0), id="frozen"),
    # "a" is there last, and the second bucket waits for the first.
    pytest.param(FOUR, [["d", "a"], ["c", "b"]], 0.25, [(6.0, 6.5), (6.5, 7.0)], (8.0, 1.0, 0.0), id="by the plan"),
    # Each of the first three delays all that comes later by half a second; after the last nothing comes.
    pytest.param(COSTLY, EACH, 0.5, [(3.0, 3.5), (4.5, 5.0), (6.0, 6.5), (7.5, 8.0)], (9.0, 0.5, 1.5), id="processor"),
    pytest.param(LATER, EACH, 0.5, [(3.0, 3.5), (4.0, 4.5), (5.0, 5.5), (6.0, 6.5)], (7.75, 0.5, 1.5), id="finish"),
])  # fmt: skip
def test_a_step_of_two_ranks(profile, plan, seconds, talking, sums):
    found = predict(profile, plan, 2, of(seconds), first_cap_bytes=1e9)
    assert talk(found) == talking
    assert (found.step_s, found.exposed_s, found.hidden_s) == sums


@pytest.mark.parametrize("profile", [dataclasses.replace(FOUR, launch_s=1.0), LATER, FROZEN])
def test_one_rank_sends_nothing(profile):
    found = predict(profile, EACH if profile.gradients else [], 1, of(1.0))
    assert (found.step_s, found.exposed_s, found.hidden_s, talk(found)) == (7.0, 0.0, 0.0, [])
    assert profile is FROZEN or "one rank has nobody to talk to" in found.bound


def test_what_comes_after_the_last_arrival_is_waiting():
    found = predict(LATER, EACH, 2, of(0.5))
    assert [(s.start_s, s.end_s) for s in found.spans if s.lane == "waiting"] == [(6.0, 6.75)]


def test_accumulation_communicates_in_the_last_pass_only():
    found = predict(FOUR, EACH, 2, of(0.5), accumulation=3)
    assert talk(found)[0] == (15.0, 15.5) and len(talk(found)) == 4
    assert (found.step_s, found.exposed_s) == (3 * 6 + 0.5 + 1, 0.5)
    assert [span.start_s for span in found.spans if span.lane == "backward"] == [2.0, 8.0, 14.0]


def test_a_bucket_takes_the_longer_of_the_links_time_and_the_machines_own():
    profile = dataclasses.replace(FOUR, own_s=1.5, own_s_per_byte=0.005)  # 2 s for 100 bytes, 2.5 s for 200
    found = predict(profile, [["d", "c"], ["b"], ["a"]], 2, of(2.25))
    assert talk(found) == [(4.0, 8.5), (8.5, 10.75), (10.75, 13.0)] and found.own == (False, False, False)
    found = predict(profile, [["d", "c"], ["b"], ["a"]], 2, of(1.5))
    assert talk(found) == [(4.0, 7.0), (7.0, 9.0), (9.0, 11.0)] and found.own == (False, True, True)
    assert found.step_s == 12.0 and "own all_reduce bounds the step" in found.bound
    assert predict(profile, EACH, 1, of(1.5)).step_s == 7.0


def test_ring_and_tree_cost_what_they_cost_elsewhere():
    link = Link("test", 0.125, 100.0)
    ring, tree = (predict(FOUR, [list("dcba")], 4, link, algorithm) for algorithm in ("ring", "tree"))
    assert ring.exposed_s == pytest.approx(6 * (0.125 + 1.0))
    assert tree.exposed_s == pytest.approx(4 * (0.125 + 4.0))


def one_bucket(link: Link):
    return predict(FOUR, 1e9, 2, link, first_cap_bytes=1e9).bound


def test_what_bounds_the_step_is_named():
    assert "The last bucket bounds the step" in predict(FOUR, EACH, 2, of(0.5)).bound
    assert "bandwidth bounds the step" in predict(FOUR, EACH, 2, of(2.0)).bound
    hidden = "Computing bounds the step: 100% of the communication is hidden behind it."
    assert predict(LONGER, EACH, 2, of(1.0)).bound == hidden
    far = Link("far", 5.0, 1e9)
    often = "Latency bounds the step: 4 buckets pay it one by one; larger buckets pay it less often."
    assert predict(FOUR, EACH, 2, far).bound == often
    assert one_bucket(far) == "Latency bounds the step, though one bucket pays it only once: send it in fewer rounds."
    assert "takes longer than backward" in one_bucket(of(4.0))
    assert "The last bucket bounds the step" in one_bucket(of(0.5))


def test_spans_say_simulated_and_agree_with_the_sums():
    found = predict(FOUR, EACH, 2, of(2.0), accumulation=2)
    assert all("simulated" in span.name for span in found.spans if span.lane == "all-reduce")
    assert exposed_seconds(found.spans) == pytest.approx(found.exposed_s)
    assert found.spans[-1].lane == "optimizer" and found.spans[-1].end_s == pytest.approx(found.step_s)
    assert found.talking_s == pytest.approx(8.0)


def test_a_cap_gives_the_buckets_that_the_replica_would_make():
    named = list(resnet18_small(10).named_parameters())
    gradients = tuple(Gradient(name, param.nbytes, float(place)) for place, (name, param) in enumerate(reversed(named)))
    profile = Profile(1.0, gradients, float(len(gradients)), 1.0)
    for cap in (100_000, 5_000_000, 25 * 2**20):
        ours = [[gradient.name for gradient in bucket] for bucket in simulate.plan_of(profile, cap)]
        plan = plan_buckets(named, cap, min(cap, 2**20))
        assert ours == [list(bucket.names) for bucket in plan]
        assert predict(profile, plan, 4, LINKS["1gbe"]) == predict(profile, cap, 4, LINKS["1gbe"])


def test_another_model_s_plan_is_refused():
    with pytest.raises(ValueError, match="plan and profile differ in a, z; take both from the same model"):
        predict(FOUR, [["d", "c", "b", "z"]], 2, of(1.0))
    with pytest.raises(ValueError, match="plan and profile differ in d"):
        predict(FOUR, [["d", "d", "c", "b", "a"]], 2, of(1.0))
    with pytest.raises(ValueError, match="at least 1 rank and 1 pass, found 0 and 1"):
        predict(FOUR, EACH, 0, of(1.0))


def test_the_best_bucket_is_neither_the_smallest_nor_the_largest():
    # 0.5 s of latency a bucket: four buckets queue, one hides nothing, two of 200 bytes are best.
    link = Link("test", 0.25, 200.0)
    caps = (100, 200, 400)
    steps = {cap: found.step_s for cap, found in simulate.sweep_buckets(FOUR, 2, link, caps).items()}
    assert steps == {100: 2 + 5 + 1, 200: 2 + 5.5 + 1, 400: 2 + 6.5 + 1}
    slower = Link("test", 0.75, 200.0)
    steps = {cap: found.step_s for cap, found in simulate.sweep_buckets(FOUR, 2, slower, caps).items()}
    assert steps == {100: 2 + 9 + 1, 200: 2 + 7 + 1, 400: 2 + 7.5 + 1}
    assert simulate.best_bucket(FOUR, 2, slower, caps) == 200
    assert simulate.best_bucket(FOUR, 1, slower, caps) == 400  # all the same: the largest


def test_a_ring_of_1024_pays_its_latency_and_hardly_more_bytes():
    link = Link("test", 0.001, 1000.0)
    found = simulate.sweep_ranks(FOUR, 1e9, link, (1, 2, 4, 8, 64, 1024), first_cap_bytes=1e9)
    assert list(found) == [1, 2, 4, 8, 64, 1024]
    assert [prediction.exposed_s for prediction in found.values()] == pytest.approx(
        [2 * (ranks - 1) * (0.001 + 0.4 / ranks) for ranks in found]
    )
    assert found[1024].step_s > 2 * 1023 * 0.001 + 7 > found[64].step_s
