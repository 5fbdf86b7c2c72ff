"""Do the pictures of bucketing show the plan that they were given?"""

import re
from dataclasses import dataclass

import pytest
import torch

from ddp_course.draw.buckets import bucket_plan, size_text
from tests.draw.readable import text_problems, texts_of


@dataclass
class Plan:
    names: list[str]
    numels: list[int]
    dtype: torch.dtype = torch.float32


PLANS = [
    [Plan(["bias"], [1])],
    [Plan(["2.bias", "2.weight"], [256, 65536]), Plan(["1.bias"], [256]), Plan(["0.weight"], [2**20])],
    [Plan([f"transformer.block{b}.attention.layer{n}.weight" for n in range(40)], [1000] * 40) for b in range(8)],
    [Plan(["half"], [1024], torch.float16), Plan(["double"], [1024], torch.float64)],
]


@pytest.mark.parametrize("buckets", PLANS, ids=["tiny", "uneven", "long names", "dtypes"])
def test_the_plan_names_each_bucket_its_size_and_its_ends(buckets):
    figure = bucket_plan(buckets)
    assert text_problems(figure) == []
    texts = texts_of(figure)
    assert [text for text in texts if text.startswith("bucket")] == [f"bucket {n}" for n in range(len(buckets))]
    assert re.match(rf"{sum(len(b.names) for b in buckets)} gradients? in {len(buckets)} messages?: ", texts[0])
    # A frame for each bucket and a piece for each gradient.
    assert len(figure.axes[0].patches) == 1 + len(buckets) + sum(len(bucket.names) for bucket in buckets)


def test_sizes_follow_the_dtype_and_bars_the_sizes():
    figure = bucket_plan(PLANS[3])
    assert {"2.0 KiB in 1 gradient", "8.0 KiB in 1 gradient"} <= set(texts_of(figure))
    half, double = (patch.get_width() for patch in figure.axes[0].patches[2::2])
    assert double == pytest.approx(4 * half)


def test_both_ends_of_a_bucket_are_named_and_long_names_keep_their_ends():
    assert "2.bias to 2.weight" in texts_of(bucket_plan(PLANS[1]))
    assert "…n.layer0.weight to ….layer39.weight" in texts_of(bucket_plan(PLANS[2]))


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * 2**20, "1.5 MiB"), (2**31, "2.0 GiB")]
)
def test_size_text(size, text):
    assert size_text(size) == text
