"""What do the notes of all ranks say together?

Each question is one function over the ranks' notes, named as the fault that it looks for. It answers with a finding,
with "right", or with nothing when the program gave it nothing to see. So a report can say three things, and never takes
silence for health.

Read next: `rehearse_sampling.py`, `rehearse_weights.py`, `rehearse_files.py`; `rehearse.py`, which asks.
"""

from __future__ import annotations

from inspect import signature

from ddp_course.rehearsal import rehearse_changes, rehearse_files, rehearse_sampling, rehearse_weights, two_runs
from ddp_course.rehearsal.finding import FAULTS
from ddp_course.rehearsal.notes import Answer, Notes
from ddp_course.rehearsal.source import Source

QUESTIONS = {
    fault: vars(module)[name]
    for module in (rehearse_sampling, rehearse_weights, rehearse_changes, rehearse_files, two_runs)
    for fault in FAULTS
    if (name := fault.replace("-", "_")) in vars(module)
}


def answers(many: Notes, one: Notes | None, source: Source) -> dict[str, Answer]:
    """Ask everything; what needs a run on one rank that came to its end, only if there is `one`."""
    facts = {"notes": many, "many": many, "one": one, "source": source}
    asked = {fault: (question, signature(question).parameters) for fault, question in QUESTIONS.items()}
    return {fault: question(**{name: facts[name] for name in names})
            for fault, (question, names) in asked.items() if one or "one" not in names}  # fmt: skip
