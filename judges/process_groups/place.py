"""03.1 `place(environ, gpus)`: does an answer read the launcher's variables, all of them, and refuse bad ones?

One process is enough; each case is one call of the answer. Read next: `join.py`.
"""

from __future__ import annotations

import os
import re
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from ddp_course.grading.differential import exercise
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.rounds import Round, Seen

DECOY = {"RANK": "997", "WORLD_SIZE": "998", "LOCAL_RANK": "997", "LOCAL_WORLD_SIZE": "998"}


class Case(NamedTuple):
    environ: dict[str, str]
    gpus: int = 0
    names: tuple[str, ...] = ()  # of which an error may name one


def variables(rank: int, world_size: int, per_node: int) -> dict[str, str]:
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    return {name: str(value) for name, value in values.items()}


def cases(rng: Random) -> list[Round]:
    """Place ranks on one node and on several, with and without GPUs; then take variables away or spoil them."""
    per_node, nodes = rng.randint(2, 8), rng.randint(2, 5)
    size = per_node * nodes
    many = [variables(rank, size, per_node) for rank in (*rng.sample(range(1, size), 3), size - 1)]
    good, last = many[0], many[-1]
    gpus = [(last, count) for count in (per_node, 3 * per_node, 8, per_node - 1)]
    # The last: a GPU for rank 0 of a node, but not for each of its ranks.
    gpus += [(good, 0), (variables(0, size, per_node), per_node - 1)]
    bad = [
        *(({name: text}, (name,)) for name in good for text in ("1.5", "two", "")),
        *(({name: str(-rng.randint(1, 3))}, (name,)) for name in ("RANK", "LOCAL_RANK")),
        ({"RANK": good["WORLD_SIZE"], "LOCAL_RANK": "0"}, ("RANK", "WORLD_SIZE")),
        ({"LOCAL_RANK": good["LOCAL_WORLD_SIZE"]}, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    ]
    named = [("one", Case(variables(rank, 4, 4))) for rank in range(4)]
    named += [("many", Case(environ)) for environ in many] + [("device", Case(*each)) for each in gpus]
    named += [("missing", Case({k: v for k, v in good.items() if k != name}, 0, (name,))) for name in good]
    named += [("bad", Case({**good, **change}, 0, names)) for change, names in bad]
    return [Round(1, named, raises=(Exception,), init=False)]


def act(function, case: Case, rank: int, world_size: int) -> Any:
    """An answer that reads the wrong place shows it."""
    with mock.patch.dict(os.environ, DECOY):
        return function(dict(case.environ), case.gpus)


def said(seen: Seen) -> str:
    shown = " ".join(f"{name}={value!r}" for name, value in seen.case.environ.items())
    return f"{shown}, gpus={seen.case.gpus}:"


def four(seen: Seen) -> Any:
    if seen["error"]:
        read = "997" in seen["message"]
        cause = "read the given dictionary, not os.environ" if read else "these values are good; return the place"
        return Fault(f"a place for {said(seen)[:-1]}", report=seen["story"], cause=cause)
    found = seen["value"]
    return found if isinstance(found, list) and len(found) == 4 else f"not four values, but {found!r}"


def numbers(seen: Seen) -> Any:
    found = four(seen)
    return repr(tuple(found[:3])) if isinstance(found, list) else found  # 3.0 is no whole number, nor is "3"


def device(seen: Seen) -> Any:
    found = four(seen)
    return found[3] if isinstance(found, list) else found


def refused(seen: Seen) -> str:
    """A ValueError names the variable; a text that names all four, whatever is wrong, tells nothing."""
    if "ValueError" not in (seen["kinds"] or ()):
        return f"{seen['error']}" if seen["error"] else "no error"
    told = re.findall(r"\b(?:LOCAL_)?(?:RANK|WORLD_SIZE)\b", seen["message"])
    names = told and {told[0], told[-1], max(told, key=told.count)} & {*seen.case.names}
    return f"a ValueError that {'names' if names else 'does not name'} {' or '.join(seen.case.names)}"


def why(seen: Seen) -> str:
    name, *within = seen.case.names
    if "ValueError" in refused(seen):
        return "the message does not name the variable; say which one is wrong, and what was found"
    if within and not seen["error"]:
        return f"ranks count from 0, so {name} ends at {within[0]} - 1; refuse more"
    wrong = f"{seen['error']} does not tell a user what to do" if seen["error"] else "the value was not looked at"
    return f"{wrong}; check it, then raise a ValueError that names the variable"


MISTAKES = """
node by remainder | one many | the first LOCAL_WORLD_SIZE ranks are on node 0, the next on node 1: use //
    rank // local_world_size => rank % local_world_size
node by the world size | many | the first LOCAL_WORLD_SIZE ranks are on node 0: RANK // LOCAL_WORLD_SIZE
    rank // local_world_size => rank // world_size
node by the GPUs | many | a node has LOCAL_WORLD_SIZE ranks, however many GPUs it has
    rank // local_world_size => rank // (gpus if gpus >= local_world_size else local_world_size)
text, not numbers | one many | environment variables are text; make numbers of them with int()
    return rank, local_rank, => return environ["RANK"], environ["LOCAL_RANK"],
a float | one many | the index of the node is a whole number: divide by //
    rank // local_world_size => rank / local_world_size
returns nothing | one many device | return four values: rank, local rank, node, device
    return rank => rank
device by global rank | device | each node counts its own GPUs from 0, so the device must follow the local rank
    cuda:{local_rank} => cuda:{rank}
always a GPU | device | there is not a GPU for each rank of the node, so its ranks use the CPU
    gpus >= local_world_size => True
a GPU for those that find one | device | there is not a GPU for each rank of the node, so all its ranks use the CPU
    gpus >= local_world_size => gpus > local_rank
KeyError | missing | KeyError does not tell a user what to do
    if name not in environ: => if False:
a default | missing | a missing variable has no default; refuse it
    if name not in environ: => if False:
    environ[name]) => environ.get(name, 1))
the message names nothing | missing | the message does not name the variable
    f"{name} is not set; start the program with torchrun" => "a variable is not set"
all four are named | missing | the message names all four variables, whatever is missing
    f"{name} is not set; start the program with torchrun" => "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"
one rank too many | bad | ranks count from 0, so RANK ends at WORLD_SIZE - 1, and LOCAL_RANK at LOCAL_WORLD_SIZE - 1
    value >= below => value > below
negative ranks pass | bad | negative ranks are out of range, too
    value < 0 or =>
assertions | bad | python -O leaves assertions out; raise ValueError
    raise ValueError(f"{name}={value} => raise AssertionError(f"{name}={value}
int()'s own words | bad | the message does not name the variable
    raise ValueError(f"{name}={environ[name]!r} is not a whole number") from None => raise
1.5 is 1 | bad | "1.5" is not a whole number
    int(environ[name]) => int(float(environ[name]))
os.environ | all | read the given dictionary, not os.environ
    if name not in environ: => environ = __import__("os").environ
    if name not in environ:
nothing is checked | missing bad | KeyError does not tell a user what to do | tests
    def place(environ, gpus):
        rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
        per_node = int(environ["LOCAL_WORLD_SIZE"])
        return rank, local_rank, rank // per_node, f"cuda:{local_rank}" if gpus >= per_node else "cpu"
the course's own | all | this exercise is to write what it does | tests
    from ddp_course.groups import read_place

    def place(environ, gpus):
        found = read_place(environ)
        return found.rank, found.local_rank, found.rank // found.local_world_size, str(found.device)
"""

WORDS = "the first two are RANK and LOCAL_RANK; the third counts nodes, each of LOCAL_WORLD_SIZE ranks"
PLACE = exercise(
    *("03.1", "Where does this rank run?", "place", 15),
    cases=cases,
    act=act,
    said=said,
    mistakes=MISTAKES,
    checks={
        "one": ("one node: rank, local rank, node", 1, "one", numbers, WORDS),
        "many": ("several nodes: rank, local rank, node", 1, "many device", numbers, WORDS),
        "device": ("the device follows the local rank", 1, "device", device,
                   "with a GPU for each rank of the node, the device is cuda:<local rank>, else cpu"),
        "missing": ("a missing variable is refused", 1, "missing", refused, why),
        "bad": ("a bad value is refused", 1, "bad", refused, why),
    },
    refused=("ddp_course.groups.read_place",),
    right="""
an error of its own, which is a ValueError; a list; torch.device
    raise ValueError( => raise type("BadPlace", (ValueError,), {})(
    return rank, local_rank, rank // local_world_size, device => device = torch.device(device)
    return [rank, local_rank, (rank - local_rank) // local_world_size, device]
""",
)  # fmt: skip
