"""07.2 `OverlappedDDP(module, cap_bytes)`: do buckets leave while backward still computes?

The gradients are compared with those of one process on the whole batch. What was noted at each collective, namely
which gradients were there, tells when it left. Read next: `accumulation.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from random import Random

from ddp_course.grading.compare import close, factor, flat, is_factor, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.gradient_bucketing.training import STEPS, STUCK, Task, train_driver, whole_batch

BUCKETS, MORE = 3, 2  # collectives in a step, and how many more another good plan may have
LATE = "a bucket that is full must not wait for gradients of another one: launch it in the hook of its last gradient"


def overlap_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Six layers in three buckets, with gates; then seven in three, with another number of ranks."""
    runs = []
    for world_size, layers, per_bucket in zip(rng.sample((2, 3, 4), 2), (6, 7), (2, 3), strict=True):
        width = rng.randint(5, 9)
        task = Task(layers, width, rng.randint(1, 10**6), 8 * per_bucket * (width * width + width), gated=not runs)
        with tempfile.TemporaryDirectory() as folder:
            notes = answer.run(train_driver, world_size, f"{folder}/gates", task, init=True)
        runs.append((task, notes))
    for key, fault_of in (
        ("gradients", _gradients_fault),
        ("steps", _steps_fault),
        ("buckets", _buckets_fault),
        ("overlap", _overlap_fault),
        ("async", _async_fault),
        ("wait", _wait_fault),
    ):
        yield key, next(filter(None, (fault_of(*run) for run in runs)), None)


def _too_early(notes: list[dict]) -> bool:
    return notes[-1]["gates"].get("finished", False)


def _gradients_fault(task: Task, notes: list[dict]) -> Fault | None:
    right = whole_batch(task, range(len(notes)))[0][0]
    for rank, note in enumerate(notes):
        found = note["steps"][0]["gradients"]
        if not close(found, right, 1e-9):
            expected = f"with {len(notes)} ranks, the last bias's gradient {short(right[-1])}"
            own = whole_batch(task, range(rank, rank + 1))[0][0]
            cause = _gradients_cause(found, right, own, notes)
            return Fault(expected, short(found[-1]), rank, cause)
    return None


def _gradients_cause(found: list, right: list, own: list, notes: list[dict]) -> str:
    ranks = len(notes)
    if _too_early(notes) and any(note["steps"][0]["calls"] for note in notes):
        return "the averages were used before they had arrived; wait() for every work handle, then copy back"
    if is_factor(found, right, ranks):
        return "gradients are summed over the ranks, not averaged: divide by the world size"
    if is_factor(found, right, 1 / ranks):
        return "gradients are divided by the world size twice; once is enough, before the sum or after it"
    if close(found, own, 1e-9):
        return "this is the rank's own gradient; copy the averages from the bucket back into each .grad"
    if is_factor(found, own, 1 / ranks):
        return "this is the rank's own gradient, divided: its sum over the ranks never came into .grad"
    if (times := factor(found, right)) is not None:
        return f"gradients are {times:.3g} times the mean; divide by dist.get_world_size(), once"
    numbers, wanted = sorted(flat(found)), sorted(flat(right))
    if close(numbers, wanted, 1e-9):
        return "the numbers are right, their places are not: split the bucket in the order in which it was put together"
    if all(not any(flat(gradient)) for gradient in found):
        return "all gradients are None or 0 when finish_gradient_sync has returned"
    if any(close(a, b, 1e-9) for a, b in zip(found, right, strict=True)):
        return (
            "some parameters have the average, others have not: every gradient must be in a bucket that is sent, and a "
            "bucket is left alone between all_reduce(async_op=True) and wait()"
        )
    return "a bucket was sent before all its gradients were in it, or copied back to the wrong parameters"


def _steps_fault(task: Task, notes: list[dict]) -> Fault | None:
    gradients, weights = whole_batch(task, range(len(notes)))
    for rank, note in enumerate(notes):
        if close(note["weights"], weights, 1e-9):
            continue
        steps = [step["gradients"] for step in note["steps"]]
        wrong = next((n for n, (a, b) in enumerate(zip(steps, gradients, strict=True)) if not close(a, b, 1e-9)), None)
        expected = f"after {STEPS} steps, the last bias {short(weights[-1])}, as in one process"
        if wrong is None:
            cause = "the gradients are right, the weights are not: do not change weights, nor gradients after the sync"
        elif wrong == 0:
            cause = "the gradients of the first step are wrong already"
        elif not note["steps"][wrong]["calls"]:
            cause = (
                f"step {wrong + 1} sends nothing: a bucket that has been sent must wait for all its gradients again; "
                "reset what counts them"
            )
        else:
            cause = (
                f"step 1 is right, step {wrong + 1} is not: reset what counts the gradients, forget the handles of the "
                "step before, and build the flat tensor anew from .grad"
            )
        return Fault(expected, short(note["weights"][-1]), rank, cause)
    return None


def _buckets_fault(task: Task, notes: list[dict]) -> Fault | None:
    for rank, note in enumerate(notes):
        for number, step in enumerate(note["steps"], 1):
            count, parameters = len(step["calls"]), len(note["weights"])
            sent = sum(call["bytes"] for call in step["calls"])
            expected = f"in step {number}, {BUCKETS} collectives for {parameters} gradients of {task.n_bytes} bytes"
            found = f"{count} collectives of {sent} bytes"
            if not count:
                cause = "nothing was sent: the hooks launch no collective"
                if number > 1:
                    cause = f"step {number} sends nothing: reset what counts the gradients"
            elif count >= parameters:
                cause = "one collective for each parameter: put the gradients of a bucket into one flat tensor"
            elif count < BUCKETS:
                cause = (
                    "a bucket holds more than the cap, or some are never sent: close it when it has reached cap_bytes "
                    "(plan_buckets of the course wants first_cap_bytes as well), and let each hook know its own bucket"
                )
            elif count > BUCKETS + MORE:
                cause = "more collectives than buckets: send each bucket once, when its last gradient is there"
            elif sent > task.n_bytes * 1.05:
                cause = "gradients travel more than once; a bucket holds its own gradients only"
            else:
                continue
            return Fault(expected, found, rank, cause)
    return None


def _overlap_fault(task: Task, notes: list[dict]) -> Fault | None:
    expected = "each bucket but the last starts before the first layer's weight has its gradient"
    for rank, note in enumerate(notes):
        for number, step in enumerate(note["steps"], 1):
            calls = step["calls"]
            early = [0 not in call["ready"] for call in calls]
            if len(calls) > 1 and all(early[:-1]):
                if late := _late_bucket(task, calls):
                    return Fault("a bucket starts as soon as its last gradient is there", late, rank, LATE)
                continue
            found = f"in step {number}, {sum(early)} of {len(calls)} collectives start before it"
            return Fault(expected, found, rank, _overlap_cause(calls, early))
    return None


def _overlap_cause(calls: list[dict], early: list[bool]) -> str:
    if not calls:
        return "nothing was sent"
    if not any(call["backward"] for call in calls):
        return "all collectives start after backward; launch a bucket from a hook, when its last gradient is there"
    if len(calls) == 1:
        return "one bucket for everything is full only when backward is over; close buckets at the cap"
    if not any(early):
        return (
            "the buckets wait for the first layer: either they are planned from the front, so that the first to be "
            "sent is the last to be full (go through the parameters in reverse), or all are sent at the end"
        )
    return LATE


def _late_bucket(task: Task, calls: list[dict]) -> str:
    """Say at which collective another whole bucket lay ready."""
    sent = 0
    for number, call in enumerate(calls, 1):
        sent += call["bytes"]
        there = sum(task.parameter_bytes(index) for index in call["ready"])
        if call["op"] == "all_reduce" and there - sent >= task.cap:
            return f"at collective {number}, {there} bytes of gradients were ready and {sent} on their way"
    return ""


def _async_fault(task: Task, notes: list[dict]) -> Fault | None:
    expected = "a rank computes on while its buckets wait for a slower rank"
    if not any(call["backward"] for note in notes for call in note["steps"][0]["calls"]):
        return Fault(expected, "no collective starts in backward", cause="nothing is launched while backward computes")
    if notes[-1]["gates"].get("through", True):
        return None
    cause = (
        "the hook waits for the slower rank: give the collective async_op=True, keep its handle, and call wait() "
        "in finish_gradient_sync, not in the hook"
    )
    return Fault(expected, "backward stands still until the last rank has begun its own", cause=cause)


def _wait_fault(task: Task, notes: list[dict]) -> Fault | None:
    if any(call["bytes"] for note in notes for call in note["steps"][0]["calls"]):
        if not _too_early(notes):
            return None
        found = "it returned while the last rank had not sent its gradients yet"
        cause = "keep the handle of each asynchronous collective, and call wait() on every one of them"
    else:
        found, cause = "nothing was sent", "the hooks launch no collective"
    return Fault("finish_gradient_sync returns when all averages are there", found, cause=cause)


OVERLAP = Exercise(
    "07.2",
    "Talk while backward still computes",
    "OverlappedDDP",
    30,
    (
        Check("gradients", "one step: the gradients are those of the whole batch", 2),
        Check("steps", "three steps: the weights are those of one process", 1),
        Check("buckets", "there is one collective for each bucket", 1),
        Check("overlap", "buckets leave before backward is at the first layer", 2),
        Check("async", "backward does not wait for other ranks", 1),
        Check("wait", "the averages are there when finish_gradient_sync returns", 1),
    ),
    overlap_judge,
    refused=(
        "torch.nn.parallel.DistributedDataParallel",
        "ddp_course.parallel.ddp.BucketedDDP",
        "ddp_course.parallel.grad_bucket.GradBucket",
        "ddp_course.parallel.naive.NaiveDDP",
    ),
    hints=(
        STUCK,
        (
            r"no attribute 'finish_gradient_sync'",
            "the class needs a method finish_gradient_sync, which may do nothing if backward itself waits",
        ),
        (
            r"mandatory and cannot be None|'NoneType' object has no attribute '(flatten|reshape|view|ravel|numel|div)",
            "a bucket was sent before all its gradients were there: count those that are missing, count anew in each "
            "backward pass, and use register_post_accumulate_grad_hook, which comes when .grad is set",
        ),
        (
            r"no attribute 'register_hook'",
            "forward must return what the module returns",
        ),
        (
            r"cannot assign .* before Module.__init__|has no attribute '_parameters'|before Module.__init__",
            "call super().__init__() first",
        ),
        (
            r"forward\(\)|_forward_unimplemented|missing the required \"forward\"",
            "forward passes its inputs on to the module and returns what that returns",
        ),
    ),
)
