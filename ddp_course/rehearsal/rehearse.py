"""What goes wrong when this program runs on several ranks?

The program runs as it is, in a copy of its folder: on one rank, on N, and, if it saves checkpoints, once more, killed
after its first save and started again. Its own `init_process_group` finds the variables that torchrun would have set;
if it calls `mp.spawn` itself, that runs its function on the ranks that are there. `Watch` notes what it does, and
`compare` reads the notes of all ranks. What `lint` finds in the text is said too, unless the run has shown otherwise.

Left out on purpose: whether the network learns well, and anything that only GPUs or many machines show.
Read next: `stage.py`, `watch.py`, then `compare.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_course.diagnose.causes import CAUSES
from ddp_course.diagnose.recognise import recognise
from ddp_course.rehearsal import compare, two_runs
from ddp_course.rehearsal.certificate import Certificate
from ddp_course.rehearsal.finding import GRADES, LOOK, NOTE, WRONG, Finding
from ddp_course.rehearsal.lint import lint
from ddp_course.rehearsal.notes import RIGHT, Answer, Notes
from ddp_course.rehearsal.rehearse_calls import calls, crash, hang, steps
from ddp_course.rehearsal.rehearse_sampling import asked_in_vain
from ddp_course.rehearsal.source import Source
from ddp_course.rehearsal.stage import Stage

CALLS = ("uneven-inputs", "decided-by-one-rank", "collective-under-rank-0", "forward-on-one-rank", "collective-order",
         "set-order", "collective-under-join")  # fmt: skip
CHANGES = (
    "outside-the-replica",
    "changed-after-wrapping",
    "thawed-after-wrapping",
    "rates-differ",
    "step-without-sync",
    "past-the-replica",
)
# Faults of the text that a run which looked for others has looked for, too.
SHOWN_WITH = {
    **dict.fromkeys(("past-the-replica", "averaged-twice", "summed", "forward-outside-no-sync"), {"not-averaged"}),
    **dict.fromkeys(CALLS, {"collective-order"}),
    "set-order": set(),  # an order that agreed by chance
}

# Whose line the run tells better: a pass over the loader is nearer to the fault than the sampler's line.
RUN_KNOWS_BETTER = {"missing-set-epoch", "unread-samples"}
RACES = {"early-load"}  # one run that went well refutes no race
# Of findings with one cause, only the first is told: what is in a set follows from what it stands behind.
FOLLOWS = {
    "crash": {"drift", "not-averaged"},
    "hang": {"drift"},
    **dict.fromkeys(CALLS, {"drift", "collective-order", "crash", "hang"}),
    **dict.fromkeys(("same-draws", "sampler-differs", "stale-workers"), {"same-rows", "missing-set-epoch"}),
    **dict.fromkeys(CHANGES, {"drift", "not-averaged", "loss-of-whole-batch"}),
    **dict.fromkeys(("not-averaged", "unwaited"), {"drift", "not-averaged"}),
    "early-load": {"drift", "models-differ"},
    "different-start": {"drift", "not-averaged"},
    "split-leak": {"same-rows"},
    "loss-of-unequal-counts": {"mean-of-means", "loss-of-whole-batch"},
    "local-batchnorm": {"loss-of-whole-batch"},
}


@dataclass
class Rehearsal:
    """What a program has shown.

    Attributes:
        findings: what is wrong or worth a look, by line.
        right: faults that were looked for, could have been seen, and were not there.
        unseen: faults that this program gave no occasion to see.
        failure: why it did not run to its end; "" if it did.
        started: whether it came to open a process group, or to its end.
        certificate: what `certify` has measured.
    """

    findings: list[Finding] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    failure: str = ""

    started: bool = True
    certificate: Certificate | None = None

    @property
    def status(self) -> int:
        """0 nothing wrong, 1 something wrong, 2 the program could not be started."""
        if not self.started:
            return 2
        return int(bool(self.failure) or any(each.grade == WRONG for each in self.findings))


def rehearse(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    world_size: int = 2,
    limit_s: float = 300.0,
    wait_s: float = 20.0,
    say: Callable[[str], None] = lambda text: None,
    resume_with: Sequence[str] = (),
    measure: Callable[[Stage], None] | None = None,
) -> Rehearsal:
    """Run a program on one rank and on `world_size`, and say what is right, wrong or could not be seen.

    Args:
        script: a Python file that trains with `torch.distributed`; it is not changed.
        arguments: its own.
        limit_s: the longest that one run may take, once its ranks have started.
        wait_s: the longest that a rank may wait for the others.
        say: is told what is being tried.
        resume_with: arguments added to its own when it is started again after a kill.
        measure: is given the stage after all runs, while their files are there.
    Raises:
        OSError: the script cannot be read.
        SyntaxError: it is no Python.
        ValueError: its folder is too large to be copied.
    Collective: none of its own; the program's, on ranks of this machine.
    """
    path = Path(script).resolve()
    source = Source(path.read_text(encoding="utf-8"))
    by_text = lint(source.text)
    with tempfile.TemporaryDirectory(prefix="ddp_course_rehearsal_") as folder:
        stage = Stage(path, list(arguments), Path(folder), limit_s, wait_s, resume_with, measure is not None)
        say(f"running it on {world_size} ranks")
        whole, failure = stage.run("whole", world_size, hashes=source.has_sets)
        hung = calls(whole, source.text, bool(failure))
        one, alone = Notes([[]], []), ""
        if not isinstance(hung, Finding):
            say("running it on 1 rank, with the same samples in its first step")
            one, alone = stage.run("one", 1, batches=str(stage.notes("whole")))
        answers = {"collective-order": hung, "crash": crash(whole, one, CAUSES) if failure else RIGHT}
        answers |= compare.answers(whole, None if failure or alone else one, source)
        if not failure:
            loss = two_runs.same_batch(one, whole)
            answers["loss-of-unequal-counts"] = (
                replace(loss, line=source.origin(loss.line)) if isinstance(loss, Finding) else loss
            )
            if not isinstance(answers["not-averaged"], Finding):
                answers["not-averaged"] = two_runs.same_step(one, whole) or answers["not-averaged"]
        # Neighbours that exchange weights may differ, as is meant.
        if source.named("isend", "send", "batch_isend_irecv"):
            for fault in ("drift", "not-averaged"):
                if isinstance(found := answers[fault], Finding):
                    answers[fault] = replace(found, grade=LOOK)
        if isinstance(answers["same-rows"], Finding):
            made = next((call.lineno for call in source.named("DataLoader")), None)
            same = replace(answers["same-rows"], line=answers["same-rows"].line or made)
            answers["same-rows"] = asked_in_vain(same, whole, source)
        drifted = answers["drift"]
        if isinstance(drifted, Finding) and drifted.fault == "drift" and (apart := steps(whole, source.text)):
            answers["drift"] = apart
        if failure and not any(isinstance(each, Finding) for each in (hung, answers["crash"])):
            answers["hang"] = hang(whole, failure)
        answers["inexact-resume"] = None
        if not failure and whole.all("saved"):
            say("running it again, killed after its first save and started again")
            answers["inexact-resume"] = stage.killed_and_resumed(whole)
        if measure:
            measure(stage)
    started = not failure or bool(whole.all("group")) and not (alone and not whole.all("call"))
    return _told(by_text, answers, failure, started)


def _told(by_text: list[Finding], answers: dict[str, Answer], failure: str, started: bool) -> Rehearsal:
    lines = {each.fault: each.line for each in reversed(by_text) if each.fault not in RUN_KNOWS_BETTER}
    if "past-the-replica" in lines:  # a forward past the replica is both
        lines.setdefault("not-averaged", lines["past-the-replica"])
    seen = [replace(each, line=lines.get(each.fault, each.line))  # the text's line is the cause's
            for each in answers.values() if isinstance(each, Finding)]  # fmt: skip
    named = {each.fault for each in seen}
    settled = named | {fault for fault, answer in answers.items() if answer == RIGHT and fault not in RACES}
    settled |= {fault for fault, group in SHOWN_WITH.items() if group & settled}
    if failure:  # what came to an early end has not shown that all is well
        settled = named
    rest = [each for each in by_text if each.fault not in settled]
    findings = {*seen, *rest}
    wrong = {each.fault for each in findings if each.grade == WRONG}
    findings = {  # what explains a finding that is wrong is no longer only worth a look
        replace(each, grade=WRONG) if each.grade == LOOK and FOLLOWS.get(each.fault, set()) & wrong else each
        for each in findings
    }
    behind = set().union(*(FOLLOWS.get(each.fault, set()) - {each.fault} for each in findings if each.grade != NOTE))
    findings = {each for each in findings if each.fault not in behind}
    right = [fault for fault, answer in answers.items() if answer == RIGHT and not failure]
    unseen = [fault for fault, answer in answers.items() if answer is None]
    in_order = sorted(findings, key=lambda each: (GRADES.index(each.grade), each.fault not in CALLS, each.line or 0))
    return Rehearsal(in_order, right, unseen, failure, started)


def cause_of(failure: str) -> str:
    """Return in a sentence what a failed run died of, if its words are known."""
    found = recognise(failure)
    return f"{found.fault}: {found.evidence}" if found.fault else ""
