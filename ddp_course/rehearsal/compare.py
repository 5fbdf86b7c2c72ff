"""What do the notes of all ranks say together?

Each question is one function over the ranks' notes. It answers with a finding, with "right", or with nothing when the
program gave it nothing to see. So a report can say three things, and never takes silence for health.

Read next: `run_of_rows.py`, `run_of_weights.py`, `run_of_files.py`; `rehearse.py`, which asks.
"""

from __future__ import annotations

from collections.abc import Callable

from ddp_course.rehearsal.notes import Answer
from ddp_course.rehearsal.run_of_changes import (
    clipped_before_sync,
    empty_group,
    local_buffers,
    losses_differ,
    low_precision,
    models_differ,
    reseeded,
    running_sums,
)
from ddp_course.rehearsal.run_of_files import early_load, files, module_prefix, prints, saves
from ddp_course.rehearsal.run_of_rows import (
    mean_of_means,
    no_set_epoch,
    padded_evaluation,
    same_augmentation,
    same_rows,
    slow_loading,
    split_leak,
    stale_workers,
)
from ddp_course.rehearsal.run_of_weights import (
    different_start,
    drift,
    find_unused,
    gradients,
    local_batchnorm,
    no_sync,
)

QUESTIONS: dict[str, Callable[..., Answer]] = {
    "same-rows": same_rows,
    "missing-set-epoch": no_set_epoch,
    "stale-workers": stale_workers,
    "split-leak": split_leak,
    "same-augmentation": same_augmentation,
    "slow-loading": slow_loading,
    "different-start": different_start,
    "drift": drift,
    "not-averaged": gradients,
    "forward-outside-no-sync": no_sync,
    "find-unused-without-need": find_unused,
    "clipped-before-sync": clipped_before_sync,
    "losses-differ": losses_differ,
    "empty-group": empty_group,
    "local-buffers": local_buffers,
    "models-differ": models_differ,
    "reseeded": reseeded,
    "reduced-again": running_sums,
    "low-precision-counts": low_precision,
    "mean-of-means": mean_of_means,
    "prints-by-every-rank": prints,
    "file-by-every-rank": files,
    "unguarded-save": saves,
    "early-load": early_load,
    "module-prefix": module_prefix,
    "padded-evaluation": padded_evaluation,
    "local-batchnorm": local_batchnorm,
}
# These read the program as well.
OF_TEXT_TOO = {"padded-evaluation", "local-batchnorm", "split-leak", "local-buffers", "losses-differ"}
