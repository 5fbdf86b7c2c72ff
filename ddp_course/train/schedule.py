"""How large is the learning rate at this place of the run?

It is a formula of the place alone. A scheduler object would count steps, and its count would have to be saved, restored
and kept apart from the run's own. A formula has nothing to store: a run that goes on in the middle of an epoch asks it
again, and gets the same number.

A place is a number of epochs, with a fraction: 2.25 is a quarter of the way through the third. So it counts rows, not
steps, and a run that goes on with another number of ranks is still in the same place.

Left out on purpose: rates that look at the loss. They have a memory, and that must be saved.
Read next: `run.py`, which asks before each step; or torch/optim/lr_scheduler.py.
"""

from __future__ import annotations

import math

SCHEDULES = ("constant", "cosine")
START = 0.1  # the share with which a warm-up begins: at zero, the first step would do nothing


def share_of_rate(schedule: str, place: float, end: float, warmup: float = 0.0) -> float:
    """Return which share of the full learning rate holds for the step that begins at `place`.

    During the warm-up the share rises in a straight line from `START` to 1. After it, "constant" stays there, and
    "cosine" goes down to 0 at the end along half a cosine wave.

    Args:
        schedule: "constant" or "cosine".
        place, end, warmup: in one unit, whichever; `images.py` counts epochs, torch's schedulers count steps.
    Source: Goyal et al. 2017 (arXiv 1706.02677), section 2.2, for the warm-up; Loshchilov, Hutter 2016
        (arXiv 1608.03983), section 3, for the cosine. In torch: LinearLR, then CosineAnnealingLR.
    """
    if place < warmup:
        return START + (1 - START) * place / warmup
    if schedule == "constant":
        return 1.0
    return (1 + math.cos(math.pi * (place - warmup) / (end - warmup))) / 2
