"""02.1 `parallel_apply(replicas, inputs)`: do all replicas run at once, and does nothing get lost on the way?

The replicas of the judge meet inside `forward`: one that runs alone waits in vain, and says so. Others fail, sleep
unequally, or tell whether gradients were on. Read next: `home.py`.
"""

from __future__ import annotations

import threading
import time
from random import Random
from unittest import mock

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import short
from ddp_course.grading.vocabulary.expect import Expect, exercise, first_mistake
from ddp_course.grading.vocabulary.play import Note, Round, Seen

MEET_S = 4.0  # how long a replica waits for the others
WORK_S = 0.03  # so that a caller which does not wait for its threads shows it


class ShardLost(Exception):
    """What a replica of the judge raises on purpose; `own` is its mark, which a new error of the kind lacks."""

    own = False


class Replica:
    """A replica that takes a while, and tells when it began and ended."""

    def __init__(self, forward, work_s: float = WORK_S):
        self.forward, self.work_s = forward, work_s
        self.began = self.ended = False

    def __call__(self, *args):
        self.began = True
        time.sleep(self.work_s)
        result = self.forward(*args)
        self.ended = True
        return result


def replicas_of(kind: str, count: int) -> list[Replica]:
    """Return the replicas of a case."""
    meeting, caller = threading.Barrier(count), threading.current_thread()

    def meets(x):
        if threading.current_thread() is caller:
            meeting.abort()
            return "caller"
        try:
            meeting.wait(MEET_S)
        except threading.BrokenBarrierError:
            return "alone"
        return x * 2

    def fails(x):
        error = ShardLost("replica 1 lost its shard")
        error.own = True
        raise error

    if kind == "order":  # the first one takes longest, so replicas do not end in their order
        return [Replica(lambda x: x * 2, WORK_S * (count - place)) for place in range(count)]
    if kind == "error":  # replica 1 fails while others are still at work, the last one longest
        return [Replica(lambda x: x * 2), Replica(fails), *(Replica(lambda x: x, 0.2 * n) for n in range(1, count - 1))]
    if kind == "returned":
        return [Replica(lambda x: None), *(Replica(lambda x: ShardLost("no accident")) for _ in range(count - 1))]
    if kind == "arguments":
        return [Replica(lambda x, y: x + y)] * count
    forward = meets if kind == "together" else lambda x: torch.is_grad_enabled()
    return [Replica(forward) for _ in range(count)]


def act(function, case: tuple[str, list], rank: int, world_size: int) -> Note:
    """A case is its kind, and the arguments of each replica; note the result or the error, and who is still at work."""
    kind, arguments = case
    replicas, value, lost = replicas_of(kind, len(arguments)), None, ""
    inputs = [tuple(torch.tensor(x) if isinstance(x, float) else x for x in given) for given in arguments]
    # The last words of a thread name our files; the check says it better.
    with mock.patch.object(threading, "excepthook", lambda args: None), torch.set_grad_enabled(kind != "off"):
        try:
            found = function(replicas, inputs)
            value = plain(found) if isinstance(found, list) else f"a {type(found).__name__}"
        except ShardLost as error:
            lost = "its own" if error.own else "another ShardLost, raised"
        late = [replica.began and not replica.ended for replica in replicas if replica.work_s > WORK_S]
        threads = sum(not thread.daemon for thread in threading.enumerate()) - 1
        time.sleep(0.1 * threads)  # for their last words
    return Note(value=value, lost=lost, left=any(late) or threads)


def rounds(rng: Random) -> list[Round]:
    """Several replicas: order, being at once, arguments, errors, and the mode of autograd."""
    one = [(float(value),) for value in rng.sample(range(1, 50), rng.choice((3, 4)))]
    many = [(float(value),) for value in rng.sample(range(1, 50), 40)]  # more than a pool has threads by itself
    cases = {"arguments": [(1.0, 10.0), (2, 20)], "together": many}
    kinds = ("order", "together", "arguments", "error", "returned", "on", "off")
    return [Round(1, [(kind, (kind, cases.get(kind, one))) for kind in kinds], (Exception,), init=False)]


def results(in_order: bool) -> Expect:
    """Expect what each replica returned; that another order is wrong is one check's affair."""

    def expect(seen: Seen) -> Fault | None:
        kind, given = seen.case
        right, found = [sum(args) if kind == "arguments" else 2 * args[0] for args in given], seen["value"]
        shown = right if len(right) < 9 else f"{short(right)}, {len(right)} results"
        expected, is_list = f"{shown}, in the order of the replicas", isinstance(found, list)
        these = short(found)
        if seen["story"]:
            return Fault(expected, report=seen["story"], cause="call replicas[i](*inputs[i]): each input is a tuple")
        permuted = is_list and sorted(map(str, found)) == sorted(map(str, right))
        if found == right or (permuted and not in_order):
            return None
        return first_mistake(expected, {
            "start a thread for each replica: one ran in the caller's own thread":
                is_list and "caller" in found and these,
            "one replica after the other: start a thread for each replica, and join them when all have started":
                is_list and "alone" in found and "a replica that waited alone",
            "these stand in the order in which the threads ended; keep each result under its replica's number":
                permuted and these,
            "results are missing: wait for every thread with join() before you return":
                is_list and (None in found or len(found) < len(right)) and these,
            "one replica is in the list twice: keep each result under its number, not under its replica":
                kind == "arguments" and is_list and len({*map(str, found)}) < len(found) == len(right) and these,
            "return a list with what each replica returned": these,
        })  # fmt: skip

    return expect


def error(seen: Seen) -> Fault | None:
    """The replica's error comes out, when all threads have ended; one that it returns is a result."""
    if seen.case[0] == "returned":
        cause = "an error that a replica returns is its result; keep the errors that are raised in a place of their own"
        right = [None] + ["<ShardLost>"] * (len(seen.case[1]) - 1)
        return first_mistake("a list of what the replicas returned", {
            cause: seen["lost"] and "ShardLost, raised",
            "None is a result like any other": seen["value"] != right and short(seen["value"]),
        })  # fmt: skip
    expected = "the error of replica 1, raised by parallel_apply: ShardLost: replica 1 lost its shard"
    if seen["story"]:
        return Fault(expected, report=seen["story"], cause="raise the replica's own error again, not another one")
    return first_mistake(expected, {
        "an error in a thread ends only the thread; catch it there, and raise it again after all have joined":
            not seen["lost"] and f"a result: {seen['value']}",
        "raise the replica's own error again, not another one": seen["lost"] != "its own" and seen["lost"],
        "join all threads before you raise": seen["left"] and "a thread still running",
    })  # fmt: skip


def mode(seen: Seen) -> Fault | None:
    """Gradients are recorded in the threads as in the caller."""
    kind, found = seen.case[0], seen["value"]
    if isinstance(found, list) and found and all(value is (kind == "on") for value in found):
        return None
    cause = (
        "whether autograd records is a matter of each thread: note torch.is_grad_enabled() in the caller, and use "
        "torch.set_grad_enabled in each thread"
    )
    expected = f"gradients {kind} in the threads, as in the caller"
    return Fault(expected, repr(found), report=seen["story"] or "", cause=cause)


THREADS = exercise(
    "02.1",
    "Apply in parallel",
    "parallel_apply",
    20,
    act=act,
    rounds=rounds,
    checks={
        "order": ("results in the order of the replicas", 1, results(in_order=True), "order"),
        "together": ("all replicas at the same time", 2, results(in_order=False), "together"),
        "arguments": ("each replica with its own arguments", 1, results(in_order=False), "arguments"),
        "error": ("an error in a thread is raised again", 1, error, "error returned"),
        "gradients": ("autograd is on or off as in the caller", 1, mode, "on off"),
    },
    refused=("torch.nn.parallel.parallel_apply.parallel_apply",),
)
