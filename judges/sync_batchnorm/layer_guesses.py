"""Which wrong ways lead a layer to which output, and to which running statistics?

Read `rows.py` first. Read next: `layer.py`, which looks a learner's numbers up here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from judges.sync_batchnorm.rows import Guess, mean_of, variance_of, wide

EPS, MOMENTUM = 0.3, 0.2  # far from the defaults, so that they cannot be left out


def outputs(parts: list[torch.Tensor], rank: int, right: dict) -> Iterator[Guess]:
    """Yield the outputs of wrong ways."""
    whole, own = torch.cat(parts), parts[rank]
    mean_C, var_C = mean_of(whole), variance_of(whole)
    mean_of_means, mean_of_vars = (torch.stack([of(part) for part in parts]).mean(0) for of in (mean_of, variance_of))

    def output(mean: torch.Tensor, scale: torch.Tensor, affine: bool = True) -> torch.Tensor:
        y = (own - wide(mean, own)) * wide(scale, own)
        return y * wide(right["weight"], own) + wide(right["bias"], own) if affine else y

    unbiased = "normalise by the variance divided by count; count - 1 is for the running variance alone"
    of_own = "the statistics are those of this rank's rows; take those of all ranks' rows"
    of_means = "the ranks' means, or variances, are averaged; weigh by rows, and add the distances of the means"
    before = right["before"]
    yield output(mean_C, (var_C + EPS).rsqrt(), affine=False), "weight and bias are missing: y * weight + bias"
    yield output(mean_of(own), (variance_of(own) + EPS).rsqrt()), of_own
    yield output(mean_of(own), (variance_of(own, correction=1) + EPS).rsqrt()), of_own
    yield output(mean_C, (variance_of(whole, correction=1) + EPS).rsqrt()), unbiased
    yield output(mean_of_means, (mean_of_vars + EPS).rsqrt()), of_means
    yield output(mean_C, (mean_of_vars + EPS).rsqrt()), of_means
    yield output(mean_C, var_C.rsqrt()), "eps is missing: add self.eps to the variance"
    yield output(mean_C, 1 / (var_C.sqrt() + EPS)), "eps belongs to the variance, before the root is taken"
    yield output(mean_C, (var_C + 1e-5).rsqrt()), "eps is not always 1e-5; take self.eps"
    yield output(mean_C, 1 / (var_C + EPS)), "divide by the standard deviation, the root of variance + eps"
    yield (
        output(before["running_mean"], (before["running_var"] + EPS).rsqrt()),
        "training normalises by the batch; the running statistics are for eval mode",
    )
    yield (
        output(right["running_mean"], (right["running_var"] + EPS).rsqrt()),
        "training normalises by the batch; the running statistics are for eval mode",
    )


def followed(parts: list[torch.Tensor], rank: int, before: torch.Tensor, of: Callable) -> Iterator[Guess]:
    """Yield the running statistics of wrong ways, from those before the step."""
    whole, own = torch.cat(parts), parts[rank]
    count, own_count = (x.numel() / x.shape[1] for x in (whole, own))
    right = of(whole) if of is mean_of else of(whole, correction=1)
    own_rows = "it follows this rank's rows; take the statistics of all rows"
    yield before, "it stayed what it was; move it towards the batch's in each training step, in place or not"
    yield MOMENTUM * before + (1 - MOMENTUM) * right, "momentum is the share of the new: 1 - momentum of the old stays"
    yield right, "it was replaced; momentum says how far to move"
    yield before + MOMENTUM * right, "the old value must shrink: (1 - momentum) * old + momentum * new"
    yield 0.9 * before + 0.1 * right, "momentum is not always 0.1; take self.momentum"
    yield before.lerp(of(own), MOMENTUM), own_rows
    if of is variance_of:
        biased = of(whole)
        yield before.lerp(biased, MOMENTUM), "the running variance takes the batch's times count / (count - 1)"
        for n, counted in ((own_count, "this rank's rows"), (len(own), "this rank's rows"), (len(whole), "rows alone")):
            pixels = ", and pixels" if count > len(whole) else ""
            cause = f"count / (count - 1) is of {counted}; the count is that of all ranks' rows{pixels}"
            yield before.lerp(biased * n / (n - 1), MOMENTUM), cause
        yield before.lerp(of(own, correction=1), MOMENTUM), own_rows
        yield before.lerp(right * count / (count - 1), MOMENTUM), "count / (count - 1) is applied twice"
