"""04.2 `ring_all_reduce(rank, world_size, tensor)`: is the sum made in a ring of chunks?

Peers and bytes are noted while the answer runs, whichever way it sends; an answer that calls a collective is none.
Read next: `cost.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random

import torch

from ddp_course.grading.exercise import AnswerFailed, Check, Exercise, Fault, FaultFound
from ddp_course.grading.isolated import Answer
from ddp_course.grading.observe import MESSAGES, Call, Collectives
from judges.collectives.ring_sum import (
    LARGE_BASE,
    NEVER_TALKED,
    Case,
    make_case,
    rounding_case,
    sum_fault,
    tensor_of,
)
from judges.collectives.traffic import (
    each_case,
    right_and_left,
    run_cases,
    told,
)

SPARE_BYTES = 256  # that an answer may send beside its chunks
BYTES_EACH = 4  # of a float32

TORCHS_OWN = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_reduce_coalesced"),
    "all_gather_coalesced",
)
COURSES_OWN = ("ring_all_reduce", "ring_reduce_scatter", "ring_all_gather", "tree_all_reduce")


def ring_driver(rank: int, world_size: int, function: Callable, path: str, cases: list[Case]) -> list[dict]:
    """Call the function on this rank's tensor of each case; note the tensor afterwards, and what was sent to whom."""

    def look(case: Case) -> dict:
        tensor = tensor_of(case, rank)
        with Collectives() as seen:
            returned = function(rank, world_size, tensor)
        _refuse_collectives(rank, seen.talks)
        note = {"held": tensor.reshape(-1).tolist(), "traffic": told(seen.talks)}
        if isinstance(returned, torch.Tensor) and returned is not tensor:
            note["returned"] = returned.reshape(-1).tolist()
        return note

    return each_case(rank, world_size, path, cases, look)


def _refuse_collectives(rank: int, calls: list[Call]) -> None:
    """Say so when torch did the work, under whatever name it was called.

    Raises:
        FaultFound: there is something else than messages and barriers.
    """
    other = next((call for call in calls if call.op not in MESSAGES), None)
    if other is not None:
        found = f"{other.op} among ranks {list(other.ranks)}"
        cause = "the collective is to be written from single messages: send and recv, or isend and irecv"
        raise FaultFound(Fault("messages between neighbours", found, rank, cause))


def ring_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Four ranks and a tensor that divides well; then awkward sizes, then awkward shapes and dtypes."""
    easy, bits = make_case(4, 12 * rng.randint(90, 150), rng), rounding_case(4, 12 * rng.randint(5, 9), rng)
    by_rank = run_cases(answer, ring_driver, 4, [easy, bits])
    notes, bits_notes = ([of_rank[i] for of_rank in by_rank] for i in range(2))
    yield "sum", sum_fault(easy, notes)
    yield "neighbours", next(filter(None, (_neighbours_fault(rank, note) for rank, note in enumerate(notes))), None)
    yield "bytes", _bytes_fault(easy, notes)
    yield "bits", _bits_fault(bits_notes)
    yield "sizes", _run_sums(answer, [make_case(3, n, rng) for n in (rng.choice((50, 74)) * 3 + 1, 5, 2, 1)])
    whole = make_case(2, 24, rng, LARGE_BASE, dtype="int64", shape=(4, 6))
    yield "shapes", _run_sums(answer, [whole, make_case(2, 24, rng, dtype="float64", shape=(6, 4), transposed=True)])


def _run_sums(answer: Answer, cases: list[Case]) -> Fault | None:
    """Run the cases and compare; an error is a fault of this check alone, but after a hang nothing more is run."""
    try:
        by_rank = run_cases(answer, ring_driver, len(cases[0]["brought"]), cases)
    except AnswerFailed as failed:
        if re.search("no result after|imed out|waited", failed.fault.report):
            raise
        return failed.fault
    faults = (sum_fault(case, [notes[i] for notes in by_rank]) for i, case in enumerate(cases))
    return next(filter(None, faults), None)


# --- The messages ------------------------------------------------------------------------------------


def _neighbours_fault(rank: int, note: dict) -> Fault | None:
    world_size = 4
    neighbours = right_and_left(rank, world_size)
    expected = f"messages with ranks {' and '.join(map(str, sorted(neighbours)))} only"
    if not note["traffic"]:
        return Fault(expected, "no message", rank, NEVER_TALKED)
    for op, _, _, peer in note["traffic"]:
        if peer is not None and peer not in neighbours:
            found = f"a message {'to' if op == 'send' else 'from'} rank {peer}"
            cause = "in a ring a rank talks with its neighbours: (rank + 1) % world_size and (rank - 1) % world_size"
            if 0 in (rank, peer):
                cause += "; where all talk with rank 0, it is a star, or a tree"
            return Fault(expected, found, rank, cause)
    return None


def _bytes_fault(case: Case, notes: list[dict]) -> Fault | None:
    world_size, payload = len(notes), len(case["brought"][0]) * BYTES_EACH
    limit = 2 * (world_size - 1) * payload // world_size
    sent = [sum(n_bytes for _, _, n_bytes, _ in note["traffic"]) for note in notes]
    expected = f"at most {limit:,} bytes sent by each of {world_size} ranks: 2(W-1)/W of the tensor's {payload:,}"
    rank = next((r for r, n_bytes in enumerate(sent) if n_bytes > limit + SPARE_BYTES), None)
    if rank is None:
        if max(sent) > 0:
            return None
        return Fault(expected, "nothing sent", 0, NEVER_TALKED)
    times = sent[rank] / payload
    largest = max(n_bytes for _, _, n_bytes, _ in notes[rank]["traffic"])
    found = f"{sent[rank]:,} bytes, {times:.3g} times the tensor; the largest message has {largest:,}"
    if largest >= payload and max(sent) > min(sent):
        cause = "some ranks hand out whole tensors: share the work, so that each rank sends one chunk in each step"
    elif largest >= payload:
        cause = (
            "whole tensors go round, so each rank sends W-1 times the tensor or more. Cut it into W chunks, and send "
            "one in each step"
        )
    elif largest > payload / world_size + SPARE_BYTES:
        cause = "the messages are larger than a chunk: 1/W of the tensor, in its own dtype"
    else:
        cause = "there are too many steps: W-1 that add and W-1 that copy are enough"
    return Fault(expected, found, rank, cause)


def _bits_fault(notes: list[dict]) -> Fault | None:
    for i, values in enumerate(zip(*(note["held"] for note in notes), strict=True)):
        if len(set(values)) == 1:
            continue
        rank = next(r for r, value in enumerate(values) if value != values[0])
        expected = f"element {i} has the same bits on every rank; rank 0 holds {values[0]!r}"
        cause = "every rank adds for itself, in its own order, and rounds; add up each chunk once, then copy the sum"
        if any(abs(value - values[0]) > 0.01 for value in values):
            cause = "the ranks do not hold the same sum at all; mend what the checks above found first"
        return Fault(expected, repr(values[rank]), rank, cause)
    return None


RING = Exercise(
    "04.2",
    "Ring all-reduce",
    "ring_all_reduce",
    30,
    (
        Check("sum", "every rank's tensor becomes the sum", 2),
        Check("neighbours", "each rank talks with its neighbours only", 1),
        Check("bytes", "no rank sends more than 2(W-1)/W of the tensor", 2),
        Check("bits", "all ranks hold the same bits", 1),
        Check("sizes", "any number of elements", 1),
        Check("shapes", "any dtype and any shape, also a transposed one", 1),
    ),
    ring_judge,
    refused=(
        *(f"torch.distributed.{name}" for name in TORCHS_OWN),
        *(f"ddp_course.collectives.{name}" for name in COURSES_OWN),
    ),
    hints=(
        (
            r"(?s)(no result after|imed out|waited).*(dist\.|[^i])send\(",
            "every rank waits in send until its neighbour receives, and none gets to receive. Post isend and irecv "
            "first and wait for both afterwards, or let one rank receive first",
        ),
        (
            r"(?s)(no result after|imed out|waited).*(dist\.|[^i])recv\(",
            "ranks wait in recv for a message that nobody sends: if all receive first, none gets to send; and both "
            "sides must take as many steps",
        ),
        (
            r"different sizes|doesn't match expected size|op\.preamble",
            "a message is longer than the memory that it goes to: in each step both sides must mean the same chunk, "
            "in the tensor's own dtype",
        ),
        (
            r"index out of range|not enough values to unpack",
            "chunk() and split() may give fewer chunks than ranks; tensor_split(W) always gives W, some of them empty",
        ),
        (
            r"split_size can|invalid for input of size",
            "W need not divide the number of elements; tensor_split(W) cuts any size into W chunks",
        ),
        (
            r"view size is not compatible",
            "a transposed tensor lies scattered in memory, so view refuses it: work on a copy (reshape), and copy back",
        ),
        (
            r"contiguous",
            "a message must lie in one piece of memory; work on a contiguous copy, and copy the sum back at the end",
        ),
        (
            r"Number of elements|size of tensor|must match the size",
            "the tensors that are added differ in size: in each step both sides must mean the same chunk",
        ),
        (
            r"never entered|waited in barrier",
            "one rank skips a barrier, or ends early, while the others wait; look for a branch on the rank",
        ),
        (
            r"no result after|[Tt]imed out|waited",
            "the ranks wait for each other: each message needs a send and a receive; every rank, also the last, must "
            "take 2(W-1) steps",
        ),
    ),
)
