"""What is said when ranks wait for ranks?

First, whether they disagree about a call; then, who keeps whom waiting, and who is to blame, if that can be known. A
report that accuses the wrong rank sends people to the wrong line, so one that cannot tell says so, and says what it
knows.

Read next: `wait_graph.py`, where this is found out; `failure_report.py`, what else a report has.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ddp_course.launcher.compare_calls import Disagreement
from ddp_course.launcher.failure import Failure
from ddp_course.launcher.failure_report import RankError, failed, oddities
from ddp_course.launcher.rank_status import Collective, Whereabouts, listed_ranks
from ddp_course.launcher.wait_graph import Difference, Hang, find_difference, find_hang

SAME_CALLS = "Every rank must make the same calls, in the same order, with the same shapes and dtypes."
_VERBS = {"send": "posted the recv for", "recv": "posted the send for"}
_ORDER = (
    "Let all ranks use their groups in the same order; of two ranks that send to each other, let one receive first, or "
    "post both with batch_isend_irecv."
)
_LEFT_EARLY = "A rank that ends its group cuts the others off: call dist.barrier() before it, on every rank."
_NEVER_CAME = (
    "Every rank must call every collective. Look for a branch on the rank, an early return or an endless loop; if a "
    "rank was only slow, raise timeout_s."
)


def explain(timeout_s: float, ranks: list[Whereabouts], failures: Collection[Failure] = ()) -> RankError:
    """Say which failure caused the others: a rank's own, or what ranks disagree about, who never came, what is known.

    Args:
        timeout_s: the longest that a rank may wait.
        failures: of the ranks that raised; ranks that merely wait have none.
    """
    if own := [failure for failure in failures if not failure.talking]:
        return failed(min(own, key=lambda f: f.rank), ranks)  # the lowest, so that the report is the same each time
    failure = _most_telling(failures)
    timeout_s = _own_limit_s(failure) or timeout_s
    if difference := find_difference(ranks):
        return _disagreement(difference, ranks, failure)
    lost = failure is not None and failure.lost_peer
    if lost and any(w.status == "silent" for w in ranks):
        return _cut_off(failure, ranks)
    if hang := find_hang(ranks):
        return _hung(hang, timeout_s, ranks, failure)
    if any(w.key for w in ranks) or (failure and "keys:" in failure.message):
        return _at_store(timeout_s, ranks, failure)
    if lost:
        return _cut_off(failure, ranks)
    if failure and failure.error_type == Disagreement.__name__:  # whoever comes second finds it, right or wrong
        text = f"{failure.message}\nThe calls alone do not tell who is wrong."
        return RankError("disagree", None, text, ranks, failure)
    if failure:
        return failed(failure, ranks)
    stuck = max(ranks, key=lambda w: w.waited_s)
    text = f"rank {stuck.rank} waited {timeout_s:g} s in {stuck.waiting_in}, which all entered: look at the network"
    return RankError("stuck", None, text, ranks)


def _most_telling(failures: Collection[Failure]) -> Failure | None:
    """Of failures that come from talking, the one that knows most; None if there is none.

    A rank whose patience ends closes its connections, so its peers may report a lost peer first.
    """
    signs = ("Detected mismatch", "failed to pass monitoredBarrier", "imed out", "timeout")
    return min(failures, key=lambda f: [sign not in f.message for sign in signs], default=None)


def _own_limit_s(failure: Failure | None) -> float | None:
    """The limit of the group or the store that gave up, which may be another than the launcher's."""
    sign = r"(?:Timed out waiting|wait timeout after|monitoredBarrier in) (\d+) ?ms"
    found = failure and re.search(sign, failure.message)
    return int(found[1]) / 1000 if found else None


def _disagreement(found: Difference, ranks: list[Whereabouts], failure: Failure | None) -> RankError:
    number = next(iter(found.calls.values())).number
    calls = "".join(f"\n  rank {rank} called {_at(call)}" for rank, call in found.calls.items())
    groups = {call.members for call in found.calls.values()}
    if len(groups) > 1:
        calls += f"\nTheir groups differ: {'; '.join(map(listed_ranks, sorted(groups)))}. "
        calls += "Every rank must call new_group for every group, in the same order, also for those it is not in."
    else:
        calls += f"\n{_in_what(list(found.calls.values()))} {SAME_CALLS}"
    if found.alone is None and len(ranks) > 2:  # of two, nobody would expect it
        calls += "\nThe calls alone do not tell who is wrong."
    text = f"ranks disagree about collective #{number}:{calls}{_of_torch(failure)}"
    return RankError("disagree", found.alone, text, ranks, failure, found.calls)


def _in_what(calls: list[Collective]) -> str:
    """Say in what the calls differ."""
    aspects = {
        "These are different operations.": lambda call: call.op,
        "They bring tensors of different dtypes.": lambda call: call.dtype,
        "They reduce in different ways.": lambda call: call.reduce,
        "They name different ranks as src or dst.": lambda call: call.root,
        "They make different groups.": lambda call: call.of,
        "They bring tensors of different sizes.": lambda call: call.sizes,
    }
    return next((words for words, aspect in aspects.items() if len(set(map(aspect, calls))) > 1), "")


def _at(call: Collective) -> str:
    return f"{call}\n         {call.line}" if call.line else str(call)


def _hung(hang: Hang, timeout_s: float, ranks: list[Whereabouts], failure: Failure | None) -> RankError:
    """Some have entered a call and others have not."""
    waited = "lost the connection" if failure and failure.lost_peer else f"waited {timeout_s:g} s"
    absent = [ranks[rank] for rank in hang.absent if rank in hang.blamed] or [ranks[rank] for rank in hang.absent]
    missing, waiting = listed_ranks([w.rank for w in absent]), listed_ranks(hang.waiting)
    never = f"{missing} never {_VERBS.get(hang.call.op, 'entered')} {hang.call}"
    at = "".join(f"\n  rank {w.rank} {fact}" for w in absent for fact in _while_absent(w))
    at += f"\n  rank {hang.waiting[0]} called it at {hang.call.line}" if hang.call.line else ""
    if hang.circle:
        steps = "".join(f"\n  rank {a} waits for rank {b} in {_at(call)}" for a, call, b in hang.circle)
        text = f"ranks wait for each other in a circle, so no one of them is to blame:{steps}\n{_ORDER}"
    elif not hang.blamed:
        text = (
            f"{never}; {waiting} {waited}{at}\nThe calls alone do not tell who is wrong: {missing} left one out, or "
            f"{waiting} made one too many. Look for a branch on the rank, an early return, and loops of different "
            "lengths."
        )
    elif hang.blamed == hang.waiting:
        text = (
            f"{waiting} {waited} alone in {hang.call}\n  called at {hang.call.line}\n"
            f"{never}: {'they' if len(absent) > 1 else 'it'} had returned, all with one call fewer. Look at {waiting} "
            "first: has it one batch, one step or one branch more than the others?"
        )
    else:
        text = f"{never}; {'the others' if len(hang.waiting) > 1 else waiting} {waited}{at}\n"
        text += _LEFT_EARLY if any("ended" in words for w in absent for words, _ in w.oddities) else _NEVER_CAME
    blamed = hang.blamed[0] if hang.blamed else None
    code, calls = "circle" if hang.circle else "absent", dict.fromkeys(hang.waiting, hang.call)
    return RankError(code, blamed, text + _of_torch(failure), ranks, failure, calls)


def _of_torch(failure: Failure | None) -> str:
    """torch's own sentence, where it says more than that it lost its patience."""
    found = failure and re.search(r"[^\n]*(?:monitoredBarrier|Detected mismatch)[^\n]*", failure.message)
    return f"\ntorch says: {found[0].strip()}" if found else ""


def _while_absent(w: Whereabouts) -> list[str]:
    if w.status == "returned":
        return ["had returned", *oddities(w)]
    doing = f"waits at the store for the key {w.key!r}, " if w.key else ""
    return [f"{doing}was at {w.line}" if w.line else "did not answer", *oddities(w)]


def _at_store(timeout_s: float, ranks: list[Whereabouts], failure: Failure | None) -> RankError:
    waiting = [w for w in ranks if w.key] or [w for w in ranks if failure and w.rank == failure.rank]
    key = waiting[0].key or failure.message.rpartition("keys:")[2].strip()
    at = "".join(f"\n  rank {w.rank} at {w.line}" for w in waiting if w.line)
    who = listed_ranks([w.rank for w in waiting])
    text = (
        f"{who} waited {timeout_s:g} s at the store for a key that no rank has set: {key}{at}\n"
        "Some rank must set it, under the same name, before the others wait for it. new_group waits there, too, until "
        "every rank has called it."
    )
    return RankError("store", waiting[0].rank if len(waiting) == 1 else None, text, ranks, failure)


def _cut_off(failure: Failure, ranks: list[Whereabouts]) -> RankError:
    last = next((w.recent[-1] for w in ranks if w.rank == failure.rank and w.recent), "a collective")
    if gone := [w.rank for w in ranks if w.status == "silent"]:
        text = (
            f"rank {gone[0]} of {len(ranks)} is gone: it does not answer, and rank {failure.rank} lost the connection "
            f"to a peer in {last}\nEither it was killed, and the launcher's own report has the signal, "
            "or its host or the network is down."
        )
        return RankError("died", gone[0], text, ranks, failure)
    text = (
        f"rank {failure.rank} of {len(ranks)} lost the connection to a peer in {last}\n  it was at {failure.line}\n"
        "A rank that skips a collective, or ends its group while others still talk, cuts them off: look for a branch "
        "on the rank, and call dist.barrier() before dist.destroy_process_group(), on every rank."
    )
    return RankError("cut-off", None, text, ranks, failure)


def uneven(made: dict[int, int], ranks: list[Whereabouts]) -> RankError:
    """All ranks have returned, and some have made more calls than others on a group; `made` has how many, by rank."""
    most, least = max(made, key=made.__getitem__), min(made, key=made.__getitem__)
    over = next((c for c in ranks[most].recent if set(c.members) == set(made) and c.seq == made[least] + 1), None)
    calls = "1 call" if made[most] - made[least] == 1 else f"{made[most] - made[least]} calls"
    text = f"rank {most} made {calls} more than rank {least}, and all have returned"
    text += f":\n  rank {most} called {_at(over)}" if over else ""
    text += (
        "\nEither no rank has waited for it, or its error was caught: its result is wrong, and the next call would "
        f"meet it. {SAME_CALLS} A program that catches such an error on purpose ends the group after it, by "
        "dist.destroy_process_group()."
    )
    fewer = [rank for rank in made if made[rank] == made[least]]
    return RankError("uneven", least if len(fewer) == 1 < len(made) - 1 else None, text, ranks)


def without_effect(w: Whereabouts, ranks: list[Whereabouts]) -> RankError:
    """A rank has called a collective on a group of others; torch warns, and does nothing."""
    calls = "\n".join(f"rank {w.rank} {fact}" for fact in oddities(w))
    text = f"{calls}\ntorch leaves its tensor as it was, and only warns. Let the members of the group call it, alone."
    return RankError("outside-group", w.rank, text, ranks)
