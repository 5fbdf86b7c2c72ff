"""Is an answer read as a person means it, and is one that is not understood told what is expected?"""

import pytest

from ddp_course.problems.units import confusions, parsed, said


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1.5 GB", "GB", 1.5e9),
        ("1.5GB", "MB", 1.5e9),
        ("1.5e9 bytes", "GB", 1.5e9),
        ("1,500,000 B", "GB", 1.5e6),
        ("≈ 2 GiB", "GB", 2 * 2**30),
        ("12 Gbit", "GB", 1.5e9),
        ("12 Gb", "GB", 1.5e9),
        ("640 KB", "kB", 640e3),
        (".5 TiB", "TB", 2**39),
        ("12 ms", "s", 0.012),
        ("0.012 s", "ms", 0.012),
        ("3 µs", "ms", 3e-6),
        ("1.5 minutes", "s", 90),
        ("2 days", "h", 172800),
        ("400 Gbit/s", "GB/s", 50e9),
        ("400 Gbps", "GB/s", 50e9),
        ("50 GB/s", "GB/s", 50e9),
        ("37 %", "%", 37),
        ("37%", "%", 37),
        ("16k", "tokens", 16000),
        ("16,000 tokens", "tokens", 16000),
        ("1.2 million tokens", "tokens", 1.2e6),
        ("1 GPU", "GPUs", 1),
        ("12", "GPUs", 12),
        ("166 GPU hours", "GPU-hours", 166),
    ],
)
def test_an_answer_is_understood(text, unit, value):
    assert parsed(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit", "words"),
    [
        ("1.5", "GB", "the unit is missing: expected a size such as 12 GB"),
        ("1.5 s", "GB", "s is a time: expected a size such as 12 GB"),
        ("1.5 GB", "ms", "GB is a size: expected a time such as 12 ms"),
        ("1.5 gb", "GB", "the unit 'gb' is not known: expected a size such as 12 GB"),
        ("1.5 GB", "GB/s", "GB is a size: expected a rate such as 12 GB/s"),
        ("1,5 GB", "GB", "has no number that is understood: expected a size such as 12 GB, or 1.5 or 1.5e9"),
        ("much", "GB", "has no number that is understood"),
        ("-3 ms", "ms", "has no number that is understood"),
        ("0.37", "%", "the unit is missing: expected a share such as 12 %"),
        ("12 rows", "GPUs", "the unit 'rows' is not known: expected a number of GPUs, such as 12"),
    ],
)
def test_what_is_not_understood_is_told_what_is_expected(text, unit, words):
    with pytest.raises(ValueError) as caught:
        parsed(text, unit)
    assert words in str(caught.value)


def test_a_value_is_said_with_three_digits_or_exactly():
    assert said(1.23456e9, "GB") == "1.23 GB" and said(1.23456e12, "GB") == "1,230 GB"
    assert said(33.333, "%") == "33.3%" and said(0.0123456, "ms") == "12.3 ms"
    assert said(12345, "rows", exact=True) == "12,345 rows"


def test_slips_of_units():
    assert confusions("GB", 1.0)["That is in GiB: 1 GB is 1000^3 bytes, not 1024^3."] == pytest.approx(1e9 / 2**30)
    assert confusions("kB", 2.0)["That is the number of bits: 8 bits are a byte."] == 16
    assert confusions("ms", 2.0)["That is 3600 times too long: seconds were taken for hours."] == 7200
    assert confusions("%", 30.0)["That is the other part: what is asked for and this make 100%."] == 70
    assert confusions("rows", 5, exact=True) == {"That is one too many.": 6, "That is one too few.": 4}


def test_a_number_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="more than a float holds"):
        parsed("1e999", "GPUs")
