"""Which faults of a DDP program show in its text, before anything runs?

Each rule is one function from a `Source` to the lines it objects to. Few rules are certain; the findings of the others
are worth a look, and what depends on numbers is left to `rehearse`.

Read next: `source.py`, what the rules ask; `rehearse.py`, the same family of faults, seen while the program runs.
"""

from __future__ import annotations

from collections.abc import Callable

from ddp_course.rehearsal import lint_checkpoints as saves
from ddp_course.rehearsal import lint_gradients as weights
from ddp_course.rehearsal import lint_ranks as ranks
from ddp_course.rehearsal import lint_replicas as models
from ddp_course.rehearsal import lint_sampling as rows
from ddp_course.rehearsal import lint_startup as starts
from ddp_course.rehearsal.finding import FAULTS, LOOK, NOTES, WRONG, Finding
from ddp_course.rehearsal.source import Found, Source


def lint(text: str) -> list[Finding]:
    """Return what is wrong with a program, in the order of its lines.

    Raises:
        SyntaxError: it is no Python.
    """
    source = Source(text)
    found: set[Finding] = set()
    for fault, rule in RULES.items():
        if source.distributed or fault == "local-rank-argument":
            grade = "" if fault in NOTES else WRONG if fault in CERTAIN else LOOK
            lines = [Finding(fault, node.lineno, evidence, grade) for node, evidence in rule(source)]
            found |= set(lines[:1] if fault in ONCE else lines)  # several lines of one cause are told once
    return sorted(found, key=lambda each: (each.line, each.fault))


# A function that is named as a fault is its rule.
RULES: dict[str, Callable[[Source], Found]] = {
    fault: vars(module)[name]
    for module in (models, ranks, rows, saves, starts, weights)
    for fault in FAULTS
    if (name := fault.replace("-", "_")) in vars(module)
}
# Where the text leaves no ordinary way in which it could be right; the rest is worth a look, and for a run to decide.
CERTAIN = {
    *("lost-broadcast", "unwaited"),
    *("collective-under-rank-0", "set-order", "no-main-guard", "past-the-replica", "averaged-twice"),
    *("missing-set-epoch", "module-prefix"),
}
ONCE = {
    "past-the-replica",
    "mean-of-means",
    "averaged-twice",
    "loss-not-reduced",
    "prints-by-every-rank",
    "file-by-every-rank",
    "cuda-without-device",
}
