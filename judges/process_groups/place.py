"""03.1 `place(environ, gpus)`: does an answer read the launcher's variables, all of them, and refuse bad ones?

One process is enough; each case is one call of the answer. Read next: `join.py`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import Expect, exercise
from ddp_course.grading.vocabulary.play import Round, Seen

READS_ENVIRON = "the answer reads os.environ; it is to read the dictionary it is given"
DECOY = {"RANK": "997", "WORLD_SIZE": "998", "LOCAL_RANK": "997", "LOCAL_WORLD_SIZE": "998"}


@dataclass(frozen=True)
class Case:
    """A launcher's variables, how many GPUs there are, and what an error may name."""

    environ: dict[str, str]
    gpus: int = 0
    names: tuple[str, ...] = ()


def act(function, case: Case, rank: int, world_size: int) -> Any:
    """An answer that reads the wrong place shows it."""
    with mock.patch.dict(os.environ, DECOY):
        return function(dict(case.environ), case.gpus)


def rounds(rng: Random) -> list[Round]:
    """Place ranks on one node and on several, with and without GPUs; then take variables away or spoil them."""
    per_node, nodes = rng.randint(2, 8), rng.randint(2, 5)
    size = per_node * nodes
    chosen = (*rng.sample(range(1, size), 3), size - 1)
    many = [_environ(rank, size, per_node) for rank in chosen]
    good, last = many[0], many[-1]
    # The last: a GPU for rank 0 of a node, but not for each of its ranks.
    gpus = [
        (last, per_node),
        (last, 3 * per_node),
        (last, 8),
        (last, per_node - 1),
        (good, 0),
        (_environ(0, size, per_node), per_node - 1),
    ]
    bad = [
        *(({name: text}, (name,)) for name in good for text in ("1.5", "two", "")),
        *(({name: str(-rng.randint(1, 3))}, (name,)) for name in ("RANK", "LOCAL_RANK")),
        ({"RANK": good["WORLD_SIZE"], "LOCAL_RANK": "0"}, ("RANK", "WORLD_SIZE")),
        ({"LOCAL_RANK": good["LOCAL_WORLD_SIZE"]}, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ]
    cases = [
        *(("one", Case(_environ(rank, 4, 4))) for rank in range(4)),
        *(("many", Case(environ)) for environ in many),
        *(("device", Case(environ, count)) for environ, count in gpus),
        *(("missing", Case({k: v for k, v in good.items() if k != name}, 0, (name,))) for name in good),
        *(("bad", Case({**good, **change}, 0, names)) for change, names in bad),
    ]
    return [Round(1, cases, raises=(Exception,), init=False)]


def _environ(rank: int, world_size: int, per_node: int) -> dict[str, str]:
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    return {name: str(value) for name, value in values.items()}


def placed(parts: slice) -> Expect:
    """Expect these of the four parts of a place."""

    def expect(seen: Seen) -> Fault | None:
        environ, found = seen.case.environ, seen["value"]
        rank, per_node = int(environ["RANK"]), int(environ["LOCAL_WORLD_SIZE"])
        device = f"cuda:{rank % per_node}" if seen.case.gpus >= per_node else "cpu"
        right = [rank, rank % per_node, rank // per_node, device]
        if isinstance(found, list) and len(found) == 4 and repr(found[parts]) == repr(right[parts]):
            return None
        shown = " ".join(f"{name}={value}" for name, value in environ.items())
        expected = f"{tuple(right)} for {shown}, gpus={seen.case.gpus}"
        if seen["error"]:
            cause = READS_ENVIRON if "997" in seen["message"] else "these values are good ones; return the place"
            return Fault(expected, report=seen["story"], cause=cause)
        return Fault(expected, _tuple(found), cause=_place_cause(found, right))

    return expect


def _place_cause(found: Any, right: list) -> str:
    rank, local_rank, node, device = right
    if not isinstance(found, list) or len(found) != 4:
        return "return four values: rank, local rank, node, device"
    if 997 in found or "997" in found:
        return READS_ENVIRON
    if any(not isinstance(value, int) for value in found[:3]):
        return "environment variables are text; make numbers of them with int(), and divide by //"
    if found[:2] != [rank, local_rank]:
        return "the first two are RANK and LOCAL_RANK, in this order"
    if found[2] != node:
        return "the first LOCAL_WORLD_SIZE ranks are on node 0, the next on node 1: RANK // LOCAL_WORLD_SIZE"
    if rank != local_rank and found[3] == f"cuda:{rank}":
        return "the device follows the rank; each node counts its own GPUs from 0, so it must follow the local rank"
    if device == "cpu":
        return "there is not a GPU for each rank of the node, so its ranks use the CPU"
    return "with a GPU for each rank of the node, the device is cuda:<local rank>"


def refused(seen: Seen) -> Fault | None:
    """A ValueError names the variable."""
    environ, names = seen.case.environ, seen.case.names
    error = "ValueError" if "ValueError" in (seen["kinds"] or ()) else seen["error"]
    told = re.findall(r"\b(?:LOCAL_)?(?:RANK|WORLD_SIZE)\b", seen["message"] or "")
    # A text that names all four, whatever is wrong, tells nothing.
    if error == "ValueError" and told and {told[0], told[-1], max(told, key=told.count)} & {*names}:
        return None
    wrong = f"for {', '.join(f'{n}={environ[n]!r}' for n in names)}" if names[0] in environ else f"without {names[0]}"
    found = f"{error}: {seen['message']}" if error else _tuple(seen["value"])
    if error == "ValueError":
        cause = f"the message does not name {names[0]}; say which variable is wrong, and what was found"
    elif error == "AssertionError":
        cause = "python -O leaves assertions out; raise ValueError"
    elif error:
        cause = f"{error} does not tell a user what to do; raise a ValueError that names {names[0]}"
    elif len(names) == 2:  # a number that does not fit the size it is counted within
        most = f"{names[1]} - 1 = {int(environ[names[1]]) - 1}"
        cause = f"ranks count from 0, so {names[0]} ends at {most}; refuse more"
    else:
        cause = "the value was used without a look at it; check it, then raise ValueError"
    return Fault(f"ValueError that names {names[0]}, {wrong}", found, cause=cause)


def _tuple(value: Any) -> str:
    return repr(tuple(value)) if isinstance(value, list) else repr(value)


PLACE = exercise(
    "03.1",
    "Where does this rank run?",
    "place",
    15,
    act=act,
    rounds=rounds,
    checks={
        "one": ("one node: rank, local rank, node", 1, placed(slice(3)), "one"),
        "many": ("several nodes: rank, local rank, node", 1, placed(slice(3)), "many device"),
        "device": ("the device follows the local rank", 1, placed(slice(3, 4)), "device"),
        "missing": ("a missing variable is refused", 1, refused, "missing"),
        "bad": ("a bad value is refused", 1, refused, "bad"),
    },
    refused=("ddp_course.groups.read_place",),
)
