"""03.1 `place(environ, gpus)`: does an answer read the launcher's variables, all of them, and refuse bad ones?

The cases go to one process; each is one call of the answer. Read next: `join.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from unittest import mock

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from ddp_course.launcher.failure import describe

READS_ENVIRON = "the answer reads os.environ; it is to read the dictionary it is given"
DECOY = {"RANK": "997", "WORLD_SIZE": "998", "LOCAL_RANK": "997", "LOCAL_WORLD_SIZE": "998"}


def place_driver(rank: int, world_size: int, function: Callable, cases: list[tuple[dict, int]]) -> list[dict]:
    """Call `function(environ, gpus)` for each case; note what it returned or raised."""
    with mock.patch.dict(os.environ, DECOY):  # so that an answer which reads the wrong place shows it
        return [_outcome(function, dict(environ), gpus) for environ, gpus in cases]


def _outcome(function: Callable, environ: dict, gpus: int) -> dict:
    try:
        value = function(environ, gpus)
    except NotImplementedError:
        raise
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "story": describe(error, 0).story}
    parts = [plain(item) for item in value] if isinstance(value, tuple | list) else plain(value)
    return {"value": parts}


def place_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Place ranks on one node and on several, with and without GPUs; then take variables away or spoil them."""
    one = [_environ(rank, 4, 4) for rank in range(4)]
    ranks_per_node, nodes = rng.randint(2, 8), rng.randint(2, 5)
    world_size = ranks_per_node * nodes
    many = [
        _environ(rank, world_size, ranks_per_node) for rank in (*rng.sample(range(1, world_size), 3), world_size - 1)
    ]
    good = {
        "one": [(e, 0) for e in one],
        "many": [(e, 0) for e in many],
        # The last: a GPU for rank 0 of a node, but not for each of its ranks.
        "device": [(many[-1], ranks_per_node), (many[-1], 8), (many[-1], ranks_per_node - 1), (many[0], 0)]
        + [(_environ(0, world_size, ranks_per_node), ranks_per_node - 1)],
    }
    bad = {"missing": _missing_variables(many[0]), "bad": _bad_variables(many[0], rng)}
    cases = [case for group in good.values() for case in group]
    spoilt = [(environ, 0) for group in bad.values() for environ, _ in group]
    outcomes = iter(answer.run(place_driver, 1, cases + spoilt)[0])
    for key, group in good.items():
        faults = [_place_fault(environ, gpus, next(outcomes), key == "device") for environ, gpus in group]
        yield key, next(filter(None, faults), None)
    for key, group in bad.items():
        faults = [_refusal_fault(environ, names, next(outcomes)) for environ, names in group]
        yield key, next(filter(None, faults), None)


def _environ(rank: int, world_size: int, ranks_per_node: int) -> dict[str, str]:
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % ranks_per_node}
    return {name: str(value) for name, value in {**values, "LOCAL_WORLD_SIZE": ranks_per_node}.items()}


def _missing_variables(environ: dict[str, str]) -> list[tuple[dict, tuple[str, ...]]]:
    return [({k: v for k, v in environ.items() if k != name}, (name,)) for name in environ]


def _bad_variables(environ: dict[str, str], rng: Random) -> list[tuple[dict, tuple[str, ...]]]:
    """Environments with one wrong value, each with the variables that a good error may name."""
    spoilt = [
        ({"RANK": rng.choice(["two", "", "1.5"])}, ("RANK",)),
        ({"RANK": environ["WORLD_SIZE"], "LOCAL_RANK": "0"}, ("RANK", "WORLD_SIZE")),
        ({"RANK": str(-rng.randint(1, 3))}, ("RANK",)),
        ({"LOCAL_RANK": environ["LOCAL_WORLD_SIZE"]}, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ]
    return [({**environ, **change}, names) for change, names in spoilt]


def _place_fault(environ: dict, gpus: int, outcome: dict, judge_device: bool) -> Fault | None:
    rank, ranks_per_node = int(environ["RANK"]), int(environ["LOCAL_WORLD_SIZE"])
    local_rank = rank % ranks_per_node
    device = f"cuda:{local_rank}" if gpus >= ranks_per_node else "cpu"
    right = [rank, local_rank, rank // ranks_per_node, device]
    found = outcome.get("value")
    if isinstance(found, list) and len(found) == 4 and (found[3] == device if judge_device else found[:3] == right[:3]):
        return None
    shown = " ".join(f"{name}={value}" for name, value in environ.items())
    expected = f"{_tuple(right)} for {shown}, gpus={gpus}"
    if "error" in outcome:
        cause = READS_ENVIRON if "997" in outcome["message"] else "these values are good ones; return the place"
        return Fault(expected, report=outcome["story"], cause=cause)
    return Fault(expected, found=_tuple(found), cause=_place_cause(found, right, gpus, ranks_per_node, environ))


def _place_cause(found: Any, right: list, gpus: int, ranks_per_node: int, environ: dict) -> str:
    rank, local_rank, node, device = right
    if not isinstance(found, list) or len(found) != 4:
        return "return four values: rank, local rank, node, device"
    if 997 in found or "997" in found:
        return READS_ENVIRON
    if any(isinstance(value, str) and value.isdigit() for value in found[:3]):
        return "environment variables are text; make numbers of them with int()"
    if found[:2] != [rank, local_rank]:
        return "the first two are RANK and LOCAL_RANK, in this order"
    if found[2] != node:
        return "the first LOCAL_WORLD_SIZE ranks are on node 0, the next on node 1: RANK // LOCAL_WORLD_SIZE"
    if rank != local_rank and found[3] == f"cuda:{rank}":
        return "the device follows the rank; each node counts its own GPUs from 0, so it must follow the local rank"
    if device == "cpu":
        return "there is not a GPU for each rank of the node, so its ranks use the CPU"
    return "with a GPU for each rank of the node, the device is cuda:<local rank>"


def _refusal_fault(environ: dict, names: tuple[str, ...], outcome: dict) -> Fault | None:
    if outcome.get("error") == "ValueError" and any(name in outcome["message"] for name in names):
        return None
    missing = names[0] not in environ
    wrong = f"without {names[0]}" if missing else "for " + ", ".join(f"{name}={environ[name]!r}" for name in names)
    expected = f"ValueError that names {names[0]}, {wrong}"
    if "value" in outcome:
        return Fault(expected, _tuple(outcome["value"]), cause=_accepted_cause(environ, names))
    found = f"{outcome['error']}: {outcome['message']}"
    if outcome["error"] == "ValueError":
        cause = f"the message does not name {names[0]}; say which variable is wrong, and what was found"
    elif outcome["error"] == "AssertionError":
        cause = "python -O leaves assertions out; raise ValueError"
    else:
        cause = f"{outcome['error']} does not tell a user what to do; raise a ValueError that names {names[0]}"
    return Fault(expected, found, cause=cause)


def _accepted_cause(environ: dict, names: tuple[str, ...]) -> str:
    """Why a bad value came through."""
    if len(names) == 2:  # a number that does not fit the size it is counted within
        return f"ranks count from 0, so {names[0]} ends at {names[1]} - 1 = {int(environ[names[1]]) - 1}; refuse more"
    return "the value was used without a look at it; check it, then raise ValueError"


def _tuple(value: Any) -> str:
    return repr(tuple(value)) if isinstance(value, list) else repr(value)


PLACE = Exercise(
    "03.1",
    "Where does this rank run?",
    "place",
    15,
    (
        Check("one", "one node: rank, local rank, node", 1),
        Check("many", "several nodes: rank, local rank, node", 1),
        Check("device", "the device follows the local rank", 1),
        Check("missing", "a missing variable is refused", 1),
        Check("bad", "a bad value is refused", 1),
    ),
    place_judge,
    refused=("ddp_course.groups.read_place",),
)
