"""Are the published networks written out rightly, and does the discussion say what the numbers say?"""

from __future__ import annotations

import pytest

from ddp_course.scaling import published


@pytest.fixture(scope="module")
def savings():
    return {(row.network, row.backend): row for row in published.savings()}


def test_the_networks_have_the_parameters_and_the_work_that_they_are_known_for():
    assert sum(layer.params for layer in published.resnet50()) == 25_557_032  # torchvision's resnet50
    assert sum(layer.work for layer in published.resnet50()) == pytest.approx(4.09e9, rel=0.005)
    assert sum(layer.params for layer in published.bert_large()) == 334_092_288  # BertModel, large, without pooler


def test_a_profile_shares_out_the_published_step():
    for network, (layers, step_s) in published.NETWORKS.items():
        profile = published.profile_of(network)
        assert profile.forward_s + profile.backward_s + profile.optimizer_s == pytest.approx(step_s)
        assert profile.backward_s == pytest.approx(2 * profile.forward_s)
        assert [gradient.name for gradient in profile.gradients] == [layer.name for layer in reversed(layers)]
        ready = [gradient.ready_s for gradient in profile.gradients]
        assert ready == sorted(ready) and ready[-1] == pytest.approx(profile.backward_s)


def test_what_is_saved_is_the_hidden_part_of_the_step_without_overlap(savings):
    row = savings["BERT", "gloo"]
    profile = published.profile_of("BERT")
    talking_s = 2 * 31 / 32 * profile.nbytes / published.BACKENDS["gloo"].bytes_per_s
    apart_s = published.NETWORKS["BERT"][1] + row.prediction.talking_s
    assert row.prediction.talking_s == pytest.approx(talking_s, rel=0.05)  # and some latency
    assert 1 - row.prediction.step_s / apart_s == pytest.approx(row.predicted)


def test_the_published_figures_are_the_paper_s(savings):
    assert [round(100 * row.published, 1) for row in savings.values()] == [38.0, 35.2, 26.8, 21.5]


def test_the_discussion_says_what_the_numbers_say(savings):
    for (_, backend), row in savings.items():
        if backend == "gloo":
            assert abs(row.predicted - row.published) < 0.05  # "a few points"
        else:
            assert 1.5 < row.published / row.predicted < 2.6  # "about twice"
            assert row.published < row.most < 0.4  # "no network lets overlap save more than two fifths"
    assert savings["ResNet-50", "NCCL"].bytes_per_s_for_published == pytest.approx(2.9e9, rel=0.1)
    assert savings["BERT", "NCCL"].bytes_per_s_for_published == pytest.approx(4.5e9, rel=0.1)
    for gpus, step_s in published.PUBLISHED_STEPS_S.items():
        assert 1.045 < step_s / (0.097 * published.slowdown("ResNet-50", gpus)) < 1.065  # "5 to 6 % above"
    assert 1.03 < published.slowdown("BERT", 256) < published.slowdown("ResNet-50", 256) < 1.1  # "a tenth"


def test_the_report_has_every_assumption_and_says_simulated():
    text = published.report()
    assert "all links simulated" in text and published.DISCUSSION in text
    for one in published.ASSUMPTIONS:
        assert one.what in text and one.why in text
    assert max(map(len, text.splitlines())) < 200
