"""02.1 `parallel_apply(replicas, inputs)`: do all replicas run at once, and does nothing get lost on the way?

The replicas of the judge meet inside `forward`: one that runs alone waits in vain, and says so. Others fail, sleep
unequally, or tell whether gradients were on. Read next: `home.py`.
"""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any
from unittest import mock

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.answer.limits import patience
from ddp_course.grading.differential import exercise
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

MEET_S = 2.0  # how long a replica waits for the others
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
    meeting, caller = threading.Barrier(count), threading.current_thread()

    def meets(x):
        if threading.current_thread() is caller:
            meeting.abort()
            return "ran in the caller's thread"
        try:
            meeting.wait(MEET_S * patience())
        except threading.BrokenBarrierError:
            return "waited alone"
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


def cases(rng: Random) -> list[Round]:
    """A case is its kind, and the arguments of each replica; who does not meet waits, so those come last."""
    one = [(float(value),) for value in rng.sample(range(1, 50), rng.choice((3, 4)))]
    many = [(float(value),) for value in rng.sample(range(1, 50), 40)]  # more than a pool has threads by itself
    named = [(kind, (kind, one)) for kind in ("order", "error", "returned", "on", "off")]
    named.append(("arguments", ("arguments", [(1.0, 10.0), (2, 20)])))
    together = [("together", ("together", many))]
    return [Round(1, each, raises=(Exception,), init=False) for each in (named, together)]


def act(function, case: tuple[str, list], rank: int, world_size: int) -> Note:
    """Note the result or the error, and whether somebody is still at work."""
    kind, arguments = case
    replicas, value, lost = replicas_of(kind, len(arguments)), None, ""
    inputs = [tuple(torch.tensor(x) if isinstance(x, float) else x for x in given) for given in arguments]
    # The last words of a thread name our files; the check says it better.
    with mock.patch.object(threading, "excepthook", lambda args: None), torch.set_grad_enabled(kind != "off"):
        try:
            found = function(replicas, inputs)
            value = plain(found) if isinstance(found, list) else f"a {type(found).__name__}"
        except ShardLost as error:
            lost = "its own error" if error.own else "another ShardLost"
        late = [replica.began and not replica.ended for replica in replicas if replica.work_s > WORK_S]
        threads = sum(not thread.daemon for thread in threading.enumerate()) - 1
        time.sleep(0.1 * threads)  # for their last words
    return Note(value=value, lost=lost, left=any(late) or threads > 0)


def results(seen: Seen) -> Any:
    """What came back, in no order."""
    cause = "call replicas[i](*inputs[i]), each input is a tuple; and wait for every thread with join()"
    if seen["error"]:
        return Fault("a list of results", report=seen["story"], cause=cause)
    return sorted(seen["value"], key=str) if isinstance(seen["value"], list) else seen["value"] or seen["lost"]


def ordered(seen: Seen) -> Any:
    if seen["error"]:
        return results(seen)
    right = seen["value"] == [2 * x for (x,) in seen.case[1]]
    return [results(seen), f"in {'the order of the replicas' if right else 'another order'}"]


def meeting(seen: Seen) -> Any:
    found = results(seen)
    return sorted({each for each in found if isinstance(each, str)}) or found if isinstance(found, list) else found


def arguments(seen: Seen) -> Any:
    found = results(seen)
    same = isinstance(found, list) and len(found) == 2 and found[0] == found[1]
    return "one result, twice" if same else found


def error(seen: Seen) -> Any:
    """A replica's error comes out, when all threads have ended; one that it returns is a result."""
    if seen.case[0] == "returned":
        return results(seen)
    found = f"{seen['error'] or seen['lost']}, raised" if seen["error"] or seen["lost"] else "a result, and no error"
    return f"{found}, while a thread was at work" if seen["left"] else found


MISTAKES = """
one after the other | together | start a thread for each replica, and join them when all have started
    thread.start() => thread.start()
    thread.join()
in the caller's thread | together | start a thread for each replica: these ran in the caller's own thread
    thread.start() => thread.run()
    thread.join() => pass
the first one in the caller's thread | together | start a thread for each replica: one ran in the caller's own thread
    for thread in threads: => for thread in threads[1:]:
    thread.start() => thread.start()
    if thread is threads[-1]:
        run(0)
results as they come | order | in which the threads ended; keep each result under its replica's number
    [results[number] for number in range(len(replicas))] => list(results.values())
kept by replica | arguments | one replica is in the list twice: keep each result under its number
    results[number] => results[replicas[number]]
None is dropped | error | None is a result like any other
    [results[number] for number in range(len(replicas))] => [r for _, r in sorted(results.items()) if r is not None]
an error that is returned | error | an error that a replica returns is its result; keep raised ones apart
    if errors: => errors |= {n: result for n, result in results.items() if isinstance(result, Exception)}
    if errors:
a new error of the kind | error | raise the replica's own error again, not a new one
    raise errors[min(errors)] => raise type(errors[min(errors)])(*errors[min(errors)].args)
another error | error | raise the replica's own error again, not another one
    raise errors[min(errors)] => raise RuntimeError("a replica failed")
errors are swallowed | error | an error in a thread ends only the thread; catch it there, and raise it at the end
    results, errors = {}, {} => results, errors = dict.fromkeys(range(len(replicas))), {}
    if errors: => if False:
errors are left to the thread | error | an error in a thread ends only the thread; its result is missing
    errors[number] = error => raise
raised before the others have ended | error | join all threads before you raise
    thread.join() => thread.join()
    if errors:
        raise errors[min(errors)]
the threads record always | gradients | note torch.is_grad_enabled() in the caller, and set it in each thread
    set_grad_enabled(recording) => set_grad_enabled(True)
not joined | all | results are missing: wait for every thread with join()
    results, errors = {}, {} => results, errors = dict.fromkeys(range(len(replicas))), {}
    thread.join() => pass
the tuple as one argument | order together arguments | each input is a tuple
    *inputs[number] => inputs[number]
never ends | all | an endless loop | hangs
    thread.join() => while True: pass
a pool of its usual size | together | start a thread for each replica | tests
    from concurrent.futures import ThreadPoolExecutor

    def parallel_apply(replicas, inputs):
        mode = torch.is_grad_enabled()

        def call(replica, args):
            with torch.set_grad_enabled(mode):
                return replica(*args)

        with ThreadPoolExecutor(4) as pool:
            return [future.result() for future in [pool.submit(call, *pair) for pair in zip(replicas, inputs)]]
a loop | together | start a thread for each replica | tests
    def parallel_apply(replicas, inputs):
        return [replica(*args) for replica, args in zip(replicas, inputs)]
"""

WORDS = "return a list with what each replica returned, in their order"
THREADS = exercise(
    *("02.1", "Apply in parallel", "parallel_apply", 20),
    cases=cases,
    act=act,
    said=lambda seen: f"{len(seen.case[1])} replicas:",
    mistakes=MISTAKES,
    checks={
        "order": ("results in the order of the replicas", 1, "order", ordered, WORDS),
        "together": ("all replicas at the same time", 2, "together", meeting, WORDS),
        "arguments": ("each replica with its own arguments", 1, "arguments", arguments, WORDS),
        "error": ("an error in a thread is raised again", 1, "error returned", error,
                  "catch it in the thread, join all, and raise it again; an error that is returned is a result"),
        "gradients": ("autograd is on or off as in the caller", 1, "on off", results,
                      "note torch.is_grad_enabled() in the caller, and use torch.set_grad_enabled in each thread"),
    },
    refused=("torch.nn.parallel.parallel_apply.parallel_apply",),
)  # fmt: skip
