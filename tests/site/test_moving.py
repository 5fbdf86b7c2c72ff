"""The pictures that move say what the course's own model of a step and of memory says."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import moving  # noqa: E402

from ddp_course.scaling.simulate import predict  # noqa: E402


def test_a_bucket_can_be_too_small_and_too_large():
    seconds = [step.step_s for step in moving.steps().values()]
    assert seconds == pytest.approx([0.5441, 0.4481, 0.4121, 0.4246, 0.4726], abs=1e-4)
    assert min(seconds) == seconds[2]


def test_each_frame_says_what_is_predicted():
    page = moving.buckets()
    assert page.count("<svg") == page.count("<p") == len(moving.CAPS)
    for cap, said in zip(moving.CAPS, re.findall(r"a step of ([\d.]+) s", page), strict=True):
        assert float(said) == pytest.approx(predict(moving.profile(), cap, 4, moving.LINK).step_s, abs=5e-4)


def test_only_what_is_divided_shrinks_with_more_gpus():
    held = moving.memories()
    assert held[2]["DDP"] == held[64]["DDP"]
    assert held[2]["ZeRO-1"]["state"] / held[64]["ZeRO-1"]["state"] == pytest.approx(24.5, abs=0.1)  # whole tensors
    assert held[64]["FSDP"]["parameters"] == pytest.approx(held[2]["FSDP"]["parameters"] / 32, rel=0.01)
    assert (
        "2 GPUs: DDP 145 GB, ZeRO-1 92 GB, ZeRO-2 69 GB, FSDP 66 GB; what fits into 80 GB: ZeRO-2, FSDP"
        in moving.memory()
    )


def test_one_frame_is_shown_before_the_slider_is_moved():
    page = moving.memory()
    assert page.count("<svg") - len(re.findall(r"<svg[^>]* hidden", page)) == 1
