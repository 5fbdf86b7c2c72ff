"""01.3 `ranks_needed(parameters, optimizer, bytes_per_row, global_batch, device_bytes)`: what is divided, what is not?

A pure function. Read next: `judges/start_here/`.
"""

from __future__ import annotations

from random import Random
from typing import Any

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round, Seen

HELD = {"sgd": 12, "momentum": 16, "adam": 20}  # bytes for each parameter

Case = tuple[int, str, int, int, int]  # the arguments, in order


def cases(rng: Random) -> list[Round]:
    """Cases made backwards, from the largest shard that fits."""

    def made(optimizer: str, rows: int, batch: int, spare: float = 0.0, left: int | None = None) -> Case:
        """So many rows fit beside what is fixed, a part of one more, and `left` bytes."""
        # What is fixed outweighs many rows, so that a mistake there changes the number of ranks.
        parameters, bytes_per_row = rng.randint(50, 90) * 10**5, rng.randint(10, 30) * 10**5
        over = rng.randint(1, 10**5) if left is None else left
        device = parameters * HELD[optimizer] + int((rows + spare) * bytes_per_row) + over
        return parameters, optimizer, bytes_per_row, batch, device

    fits = [("one", made("sgd", 64, 64))]
    fits += [("divided", made("sgd", rows, 100, left=left)) for rows, left in ((20, 9), (10, 9), (25, 0), (25, -1))]
    fits += [("optimizer", made("momentum", 24, 96)), ("optimizer", made("adam", rng.choice((12, 16, 24)), 96, left=0))]
    fits += [("uneven", made("adam", 7, 100, spare=0.9)), ("uneven", made("sgd", rng.choice((3, 6)), 20))]
    fits += [("uneven", made("momentum", 1, rng.randint(120_000, 150_000)))]
    # What fits nowhere comes last, and alone: a loop that never ends there must not hide the rest.
    never = [("never", made("adam", *sizes)) for sizes in ((0, 64), (-3, 64), (1, 48))]
    return [Round(1, fits, init=False), Round(1, never, init=False)]


def said(seen: Seen) -> str:
    parameters, optimizer, bytes_per_row, batch, device = seen.case
    return f"{parameters:,} parameters, {optimizer}, {bytes_per_row:,} bytes a row, {batch} rows, {device:,} bytes:"


def ranks(seen: Seen) -> Any:
    found = seen["value"]
    return found if type(found) is int or found is None else f"{found!r}, a {type(found).__name__}"


MISTAKES = """
the bucket is forgotten | divided optimizer uneven never | the gradient's copy in DDP's bucket is missing
    "sgd": 3, "momentum": 4, "adam": 5 => "sgd": 2, "momentum": 3, "adam": 4
no gradients | divided optimizer uneven never | two numbers for each parameter are missing, such as both gradients
    "sgd": 3, "momentum": 4, "adam": 5 => "sgd": 1, "momentum": 2, "adam": 3
no optimizer | optimizer uneven never | the optimizer's state is missing: one running mean with momentum, two with adam
    "sgd": 3, "momentum": 4, "adam": 5 => "sgd": 3, "momentum": 3, "adam": 3
one byte a number | divided optimizer uneven never | a float32 number has 4 bytes
    4 * numbers => numbers
activations alone | divided optimizer uneven never | this counts the activations alone
    * numbers => * 0
all is divided | divided optimizer uneven never | parameters, gradients and optimizer state are not divided by the ranks
    room = device_bytes - => fixed =
    largest_shard * bytes_per_row <= room => fixed + global_batch * bytes_per_row <= device_bytes * world_size
the optimizer's state is divided | optimizer uneven never | each rank holds all of the optimizer's state
    * numbers => * 3
    <= room => <= room - 4 * (numbers - 3) * parameters / world_size
parts of rows | uneven | a device holds whole rows, and the largest shard decides
    -(-global_batch // world_size) => max(1, global_batch / world_size)
rounded down | uneven never | the largest shard decides: 100 rows on 3 ranks are 34 on one of them, not 33
    -(-global_batch // world_size) => global_batch // world_size
even shards alone | uneven | the shards need not be equal
    if largest => if global_batch % world_size == 0 and largest
full is too full | divided optimizer | what fits to the last byte fits: <=, not <
    <= room => < room
1024 ranks at most | uneven | it does fit: more ranks make the shards smaller, down to one row
    global_batch + 1 => min(global_batch, 1024) + 1
not None | never | not even one row fits, so no number of ranks helps: None
    return None => return global_batch
a float | all | a number of ranks is whole; return an int
    return world_size => return float(world_size)
never ends | never | an endless loop | hangs
    range(1, global_batch + 1) => __import__("itertools").count(1)
only an empty room is too small | never | not even one row fits beside what is fixed | tests
    def ranks_needed(parameters, optimizer, bytes_per_row, global_batch, device_bytes):
        numbers = 3 + ("sgd", "momentum", "adam").index(optimizer)
        most_rows = (device_bytes - numbers * 4 * parameters) // bytes_per_row
        return -(-global_batch // most_rows) if most_rows else None
"""

WORDS = "a rank holds parameters, gradients twice, the optimizer's state, and the rows of the largest shard"
FIT = exercise(
    *("01.3", "How many ranks until it fits? (stretch)", "ranks_needed", 15),
    cases=cases,
    said=said,
    mistakes=MISTAKES,
    checks={
        "one": ("one rank is enough", 1, "one", ranks, WORDS),
        "divided": ("the rows are divided, the rest is not", 1, "divided", ranks, WORDS),
        "optimizer": ("each optimizer's state", 1, "optimizer", ranks, WORDS),
        "uneven": ("rows that do not divide evenly, and many of them", 1, "uneven", ranks, WORDS),
        "never": ("too large for any number of ranks, and just not too large", 1, "never", ranks,
                  "where not even one row fits beside what is fixed, no number of ranks helps: None"),
    },
)  # fmt: skip
