"""02.2 `parallel_apply(replicas, inputs)`: do all replicas run at once, and does nothing get lost on the way?

The replicas of the judge meet inside `forward`: one that runs alone waits in vain, and says so. Others fail, sleep
unequally, or tell whether gradients were on. Read next: `home.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from random import Random
from unittest import mock

import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from ddp_course.launcher.failure import describe

MEET_S = 1.0  # how long a replica waits for the others


class ShardLost(Exception):
    """What a replica of the judge raises on purpose."""


def threads_driver(rank: int, world_size: int, function: Callable, values: list[int]) -> dict:
    """Call the function in several situations; note what came of each."""
    # The last words of a thread name our files; the check says it better.
    with mock.patch.object(threading, "excepthook", lambda args: None):
        ready = [(torch.tensor(float(value)),) for value in values]
        return {
            "order": _outcome(function, [_slow(place, len(values)) for place in range(len(values))], ready),
            "together": _outcome(function, [_meets(threading.Barrier(len(values)))] * len(values), ready),
            "error": _failing(function, ready),
            "gradients": _modes(function, ready),
            "arguments": _outcome(function, [_adds] * 2, [(torch.tensor(1.0), torch.tensor(10.0)), (2, 20)]),
            "left": [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon],
        }


def _outcome(function: Callable, replicas: list, inputs: list) -> dict:
    try:
        return {"value": plain(function(replicas, inputs))}
    except NotImplementedError:
        raise
    except ShardLost as error:
        return {"lost": str(error)}
    except Exception as error:
        return {"story": describe(error, 0).story}


def _failing(function: Callable, inputs: list) -> dict:
    """Let replica 1 fail while the last one is still at work; note whether the caller waited for it."""
    started, ended = [], []

    def slow(x):
        started.append(True)
        _wait(0.4)
        ended.append(True)

    outcome = _outcome(function, [_doubles, _fails, *[slow] * (len(inputs) - 2)], inputs)
    return outcome | {"ended": len(ended) == len(started)}


def _modes(function: Callable, inputs: list) -> dict:
    with torch.no_grad():
        off = _outcome(function, [_tells_mode] * len(inputs), inputs)
    return {"on": _outcome(function, [_tells_mode] * len(inputs), inputs), "off": off}


def _wait(seconds: float = 0.03) -> None:
    """Take a while, so that a caller which does not wait for its threads shows it."""
    threading.Event().wait(seconds)


def _doubles(x):
    _wait()
    return x * 2


def _adds(x, y):
    _wait()
    return x + y


def _tells_mode(x):
    _wait()
    return torch.is_grad_enabled()


def _fails(x):
    _wait()
    raise ShardLost("replica 1 lost its shard")


def _slow(place: int, count: int) -> Callable:
    def forward(x):
        _wait(0.03 * (count - place))  # the first one takes longest, so replicas do not end in their order
        return x * 2

    return forward


def _meets(barrier: threading.Barrier) -> Callable:
    def forward(x):
        try:
            barrier.wait(MEET_S)
        except threading.BrokenBarrierError:
            return "alone"
        return _doubles(x)

    return forward


def threads_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """One run with several replicas: order, being at once, arguments, errors, and the mode of autograd."""
    values = rng.sample(range(1, 50), rng.choice((3, 4)))
    note = answer.run(threads_driver, 1, values)[0]
    doubled = [2.0 * value for value in values]
    yield "order", _value_fault(note["order"], doubled)
    yield "together", _together_fault(note["together"], doubled)
    yield "arguments", _any_order_fault(note["arguments"], [11.0, 22])
    yield "error", _error_fault(note["error"], note["left"])
    yield "gradients", _mode_fault(note["gradients"])


def _value_fault(outcome: dict, right: list) -> Fault | None:
    found = outcome.get("value")
    if found == right:
        return None
    expected = f"{right}, in the order of the replicas"
    if "story" in outcome:
        return Fault(expected, report=outcome["story"], cause="call replicas[i](*inputs[i]): each input is a tuple")
    if isinstance(found, list) and None not in found and sorted(map(str, found)) == sorted(map(str, right)):
        cause = "these stand in the order in which the threads ended; keep each result under its replica's number"
    elif isinstance(found, list) and (None in found or len(found) < len(right)):
        cause = "results are missing: wait for every thread with join() before you return"
    else:
        cause = "return a list with what each replica returned"
    return Fault(expected, repr(found), cause=cause)


def _together_fault(outcome: dict, right: list) -> Fault | None:
    if "alone" in (outcome.get("value") or []):
        cause = "one replica after the other: start a thread for each replica, and join them when all have started"
        return Fault("all replicas inside forward at the same time", "a replica that waited alone", cause=cause)
    return _any_order_fault(outcome, right)


def _any_order_fault(outcome: dict, right: list) -> Fault | None:
    """In another order is right here: that is another check's affair."""
    found = outcome.get("value")
    if isinstance(found, list) and sorted(map(str, found)) == sorted(map(str, right)):
        return None
    return _value_fault(outcome, right)


def _error_fault(outcome: dict, left: list[str]) -> Fault | None:
    expected = "the error of replica 1, raised by parallel_apply: ShardLost: replica 1 lost its shard"
    if "value" in outcome:
        cause = "an error in a thread ends only the thread; catch it there, and raise it again after all have joined"
        return Fault(expected, f"a result: {outcome['value']}", cause=cause)
    if "story" in outcome:
        return Fault(expected, report=outcome["story"], cause="raise the replica's own error again, not another one")
    if left or not outcome["ended"]:
        return Fault("no thread left", "one still running", cause="join all threads before you raise")
    return None


def _mode_fault(note: dict) -> Fault | None:
    for state, right in (("on", True), ("off", False)):
        outcome = note[state]
        found = outcome.get("value")
        if isinstance(found, list) and found and all(value is right for value in found):
            continue
        cause = (
            "whether autograd records is a matter of each thread: note torch.is_grad_enabled() in the caller, and use "
            "torch.set_grad_enabled in each thread"
        )
        expected = f"gradients {state} in the threads, as in the caller"
        return Fault(expected, repr(found), report=outcome.get("story", ""), cause=cause)
    return None


THREADS = Exercise(
    "02.2",
    "Apply in parallel",
    "parallel_apply",
    20,
    (
        Check("order", "results in the order of the replicas", 1),
        Check("together", "all replicas at the same time", 2),
        Check("arguments", "each replica with its own arguments", 1),
        Check("error", "an error in a thread is raised again", 1),
        Check("gradients", "autograd is on or off as in the caller", 1),
    ),
    threads_judge,
    refused=("torch.nn.parallel.parallel_apply.parallel_apply", "ddp_course.parallel.data_parallel.parallel_apply"),
)
