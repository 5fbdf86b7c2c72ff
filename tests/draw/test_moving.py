"""The pictures that move say what the course's own model of a step and of memory says."""

import re

import pytest

from ddp_course.draw import bucket_sizes, gpu_memory, moving


def test_a_bucket_can_be_too_small_and_too_large():
    """Each all-reduce takes 8 ms and its bytes at 50 MB/s; the last gradient is there after 160 ms of backward."""
    seconds = [step.step_s for step in moving.steps().values()]
    megabytes = 4 * 513 * 512 / 1e6
    assert seconds[0] == pytest.approx(0.020 + 16 * 0.008 + 8 * megabytes / 50)  # the link is busy from then on
    assert seconds[-1] == pytest.approx(0.160 + 0.008 + 8 * megabytes / 50)
    assert min(seconds) == seconds[2] < seconds[1] < seconds[0] and seconds[2] < seconds[3]


def test_each_frame_says_what_is_predicted():
    said = repr(bucket_sizes()).splitlines()
    found = [float(re.search(r"a step of ([\d.]+) s", words)[1]) for words in said]
    assert found == pytest.approx([step.step_s for step in moving.steps().values()], abs=5e-4)


def test_only_what_is_divided_shrinks_with_more_gpus():
    held = moving.memories()
    assert held[2]["DDP"] == held[64]["DDP"]
    assert held[2]["ZeRO-1"]["state"] / held[64]["ZeRO-1"]["state"] == pytest.approx(24.5, abs=0.1)  # whole tensors
    assert held[64]["FSDP"]["parameters"] == pytest.approx(held[2]["FSDP"]["parameters"] / 32, rel=0.01)
    words = "2 GPUs: DDP 145 GB, ZeRO-1 92 GB, ZeRO-2 69 GB, FSDP 66 GB; what fits into 80 GB: ZeRO-2, FSDP"
    assert words in repr(gpu_memory())


def test_one_frame_is_shown_before_the_slider_is_moved():
    page = gpu_memory()._repr_html_()
    assert page.count("<svg") == page.count("<p") == 7
    assert page.count("<svg") - len(re.findall(r"<svg[^>]* hidden", page)) == 1
