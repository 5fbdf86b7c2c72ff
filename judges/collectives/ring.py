"""04.2 `ring_all_reduce(rank, world_size, tensor)`: is the sum made in a ring of chunks?

Peers and bytes are noted while the answer runs, whichever way it sends; an answer that calls a collective is none.
Read next: `cost.py`.
"""

from __future__ import annotations

from random import Random

from ddp_course.grading.exercise import Fault, FaultFound
from ddp_course.grading.vocabulary.expect import Ending, all_of, exercise
from ddp_course.grading.vocabulary.observe import MESSAGES, Collectives
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.collectives.ring_sum import LARGE_BASE, NEVER_TALKED, Case, make_case, ring_sum, rounding_case, summed

SPARE_BYTES = 256  # that an answer may send beside its chunks
NO_HANG = r"(?s)\A(?!.*(no result after|imed out|waited))"  # after a hang nothing more is run

TORCHS_OWN = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_reduce_coalesced"),
    "all_gather_coalesced",
)
COURSES_OWN = ("ring_all_reduce", "ring_reduce_scatter", "ring_all_gather", "tree_all_reduce")


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the sum.

    Raises:
        FaultFound: torch did the work, under whatever name it was called: there is more than messages and barriers.
    """
    with Collectives() as seen:
        note = summed(lambda tensor: function(rank, world_size, tensor), case.tensor(rank))
    for call in seen.talks:
        if call.op not in MESSAGES:
            cause = "the collective is to be written from single messages: send and recv, or isend and irecv"
            found = f"{call.op} among ranks {list(call.ranks)}"
            raise FaultFound(Fault("messages between neighbours", found, rank, cause))
    return note


def rounds(rng: Random) -> list[Round]:
    """Four ranks and a tensor that divides well; then awkward sizes, then awkward shapes and dtypes."""
    easy, bits = make_case(4, 12 * rng.randint(90, 150), rng), rounding_case(4, 12 * rng.randint(5, 9), rng)
    few = [rounding_case(3, n, rng) for n in (2, 1, 2, 1, 2)]  # fewer elements than ranks are easily added elsewhere
    sizes = [make_case(3, n, rng) for n in (5, 1, 2, rng.choice((50, 74)) * 3 + 1)]
    sizes.append(make_case(3, 1, rng, shape=()))
    # Twice the bytes show here, and chunks of whole rows.
    half = make_case(3, 1800, rng, base=8, dtype="float16", shape=(2, 900))
    whole = make_case(2, 24, rng, LARGE_BASE, dtype="int64", shape=(4, 6))
    transposed = make_case(2, 24, rng, dtype="float64", shape=(6, 4), transposed=True)
    return [
        Round(4, [("easy", easy), ("bits", bits)]),
        Ending(3, [("sizes", case) for case in sizes] + [("few", case) for case in few], how=NO_HANG),
        Ending(2, [("shapes", whole), ("shapes", transposed)], how=NO_HANG),
        Ending(3, [("half", half)], how=NO_HANG),
    ]


def neighbours(seen: Seen) -> Fault | None:
    """All messages go to the rank on the right or come from the one on the left, or the other way round."""
    both = {(seen.rank + 1) % seen.world_size, (seen.rank - 1) % seen.world_size}
    expected = f"messages with ranks {' and '.join(map(str, sorted(both)))} only"
    if not seen["calls"]:
        return Fault(expected, "no message", seen.rank, NEVER_TALKED)
    far = next((call for call in seen["calls"] if call.peer not in both), None)
    if far is None:
        return None
    cause = "in a ring a rank talks with its neighbours: (rank + 1) % world_size and (rank - 1) % world_size"
    cause += "; where all talk with rank 0, it is a star, or a tree" if 0 in (seen.rank, far.peer) else ""
    return Fault(expected, f"a message {'to' if far.op == 'send' else 'from'} rank {far.peer}", seen.rank, cause)


def few_bytes(seen: Seen) -> Fault | None:
    """This rank sends 2(W-1) chunks."""
    W, payload = seen.world_size, seen.case.tensor(0).nbytes
    limit = 2 * (W - 1) * payload // W
    sent = [sum(call.n_bytes for call in seen.of(rank)["calls"]) for rank in range(W)]
    mine, largest = sent[seen.rank], max((call.n_bytes for call in seen["calls"]), default=0)
    expected = f"at most {limit:,} bytes sent by each of {W} ranks: 2(W-1)/W of the tensor's {payload:,}"
    if not any(sent):
        return Fault(expected, "nothing sent", seen.rank, NEVER_TALKED)
    if mine <= limit + SPARE_BYTES:
        return None
    if largest >= payload and mine > min(sent):
        cause = "some ranks hand out whole tensors: share the work, so that each rank sends one chunk in each step"
    elif largest >= payload:
        cause = "whole tensors go round, so each rank sends W-1 times the tensor or more. Cut it into W chunks, and "
        cause += "send one in each step"
    elif largest > payload / W + SPARE_BYTES:
        cause = "the messages are larger than a chunk: 1/W of the tensor, in its own dtype"
    else:
        cause = "there are too many steps: W-1 that add and W-1 that copy are enough"
    found = f"{mine:,} bytes, {mine / payload:.3g} times the tensor; the largest message has {largest:,}"
    return Fault(expected, found, seen.rank, cause)


def same_bits(seen: Seen) -> Fault | None:
    """Every element is that of rank 0, to the last bit."""
    pairs = list(zip(seen.of(0)["held"], seen["held"], strict=True))
    i = next((i for i, (first, mine) in enumerate(pairs) if first != mine), None)
    if i is None:
        return None
    cause = "every rank adds for itself, in its own order, and rounds; add up each chunk once, then copy the sum"
    if abs(pairs[i][0] - pairs[i][1]) > 0.01:
        cause = "the ranks do not hold the same sum at all; fix what the checks above found first"
    expected = f"element {i} has the same bits on every rank; rank 0 holds {pairs[i][0]!r}"
    return Fault(expected, repr(pairs[i][1]), seen.rank, cause)


def any_size(seen: Seen) -> Fault | None:
    """The sum is right; where it is rounded, at least the same on all ranks."""
    return same_bits(seen) if seen.case.rounded else ring_sum(seen)


RING = exercise(
    "04.2",
    "Ring all-reduce",
    "ring_all_reduce",
    30,
    act=act,
    rounds=rounds,
    checks={
        "sum": ("every rank's tensor becomes the sum", 2, ring_sum, "easy"),
        "neighbours": ("each rank talks with its neighbours only", 1, neighbours, "easy"),
        "bytes": ("no rank sends more than 2(W-1)/W of the tensor", 2, few_bytes, "easy"),
        "bits": ("all ranks hold the same bits", 1, same_bits, "bits"),
        "sizes": ("any number of elements", 1, any_size, "sizes few"),
        "shapes": ("any dtype and any shape, also a transposed one", 1, all_of(ring_sum, few_bytes), "shapes half"),
    },
    refused=(
        *(f"torch.distributed.{name}" for name in TORCHS_OWN),
        *(f"ddp_course.collectives.{name}" for name in COURSES_OWN),
    ),
    hints={
        r"limit|absent|stuck|store: (dist\.|[^i])send\(; (?s)imed out.*(dist\.|[^i])send\(": "every rank waits in "
        "send until its neighbour "
        "receives, and none gets to receive. Post isend and irecv first and wait for both afterwards, or let one rank "
        "receive first",
        r"limit|absent|stuck|store: (dist\.|[^i])recv\(; (?s)imed out.*(dist\.|[^i])recv\(": "ranks wait in recv for "
        "a message that nobody "
        "sends: if all receive first, none gets to send; and both sides must take as many steps",
        r"sizes; disagree: different sizes; doesn't match expected size|op\.preamble": "a message is longer than the "
        "memory that it goes "
        "to: in each step both sides must mean the same chunk, in the tensor's own dtype",
        r"index out of range|not enough values to unpack": "chunk() and split() may give fewer chunks than ranks; "
        "tensor_split(W) always gives W, some of them empty",
        r"split_size can|invalid for input of size": "W need not divide the number of elements; tensor_split(W) cuts "
        "any size into W chunks",
        r"view size is not compatible": "a transposed tensor lies scattered in memory, so view refuses it: work on a "
        "copy (reshape), and copy back",
        r"contiguous": "a message must lie in one piece of memory; work on a contiguous copy, and copy the sum back at "
        "the end",
        r"Number of elements|size of tensor|must match the size": "the tensors that are added differ in size: in each "
        "step both sides must mean the same chunk",
        "absent; limit: waited in barrier": "one rank skips a barrier, or ends early, while the others wait; look for "
        "a branch on the rank",
        "limit; [Tt]imed out|waited": "the ranks wait for each other: each message needs a send and a "
        "receive; every rank, also the last, must take 2(W-1) steps",
    },
)
