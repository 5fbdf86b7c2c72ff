"""04.2 `ring_all_reduce(rank, world_size, tensor)`: is the sum made in a ring of chunks?

Peers and bytes are noted while the answer runs, whichever way it sends; an answer that calls a collective is none.
Read next: `cost.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from ddp_course.grading.differential import exercise
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.observe import MESSAGES
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

SPARE_BYTES = 256  # that an answer may send beside its chunks
NO_HANG = r"(?s)\A(?!.*(no result after|imed out|waited))"  # after a hang nothing more is run
TORCHS_OWN = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_reduce_coalesced"),
    "all_gather_coalesced",
)
COURSES_OWN = ("ring_all_reduce", "ring_reduce_scatter", "ring_all_gather", "tree_all_reduce")


def cases(rng: Random) -> list[Round]:
    """Four ranks and a tensor that divides well; then awkward sizes, then awkward shapes and dtypes."""

    def whole(ranks: int, n: int, dtype: str = "float32", shape: tuple = (-1,), add: int = 0) -> tuple:
        return [[rng.randint(1, 200) + add for _ in range(n)] for _ in range(ranks)], dtype, shape

    def rounded(ranks: int, n: int) -> tuple:  # the sum depends on the order in which it is made
        numbers = [[rng.uniform(-1, 1) * 2.0 ** rng.randint(-8, 8) for _ in range(n)] for _ in range(ranks)]
        return numbers, "float32", (-1,)

    sizes = [whole(3, n) for n in (5, 1, 2, rng.choice((50, 74)) * 3 + 1)] + [whole(3, 1, shape=())]
    few = [rounded(3, n) for n in (2, 1, 2, 1, 2)]  # fewer elements than ranks are easily added elsewhere
    shapes = [whole(2, 24, "int64", (4, 6), add=2**60), whole(2, 24, "float64", (6, 4))]  # the second is transposed
    return [
        Round(4, [("easy", whole(4, 12 * rng.randint(90, 150))), ("bits", rounded(4, 12 * rng.randint(5, 9)))]),
        Round(3, [("sizes", case) for case in sizes] + [("few", case) for case in few], ends=NO_HANG),
        Round(2, [("shapes", case) for case in shapes], ends=NO_HANG),
        Round(3, [("half", whole(3, 1800, "float16", (2, 900)))], ends=NO_HANG),  # twice the bytes show, and whole rows
    ]


def act(function, case: tuple, rank: int, world_size: int) -> Note:
    """Note what the tensor holds, in its old memory."""
    numbers, dtype, shape = case
    tensor = torch.tensor(numbers[rank], dtype=getattr(torch, dtype)).reshape(shape)
    tensor = tensor.t().contiguous().t() if dtype == "float64" else tensor
    memory = tensor.detach()
    function(rank, world_size, tensor)
    return Note(held=[int(x) if float(x).is_integer() else x for x in memory.flatten().tolist()], n_bytes=tensor.nbytes)


def sent(seen: Seen) -> int:
    return sum(call.n_bytes for call in seen["calls"])


def by_messages(view: Callable[[Seen], Any]) -> Callable[[Seen], Any]:
    """A view of an answer that did not let torch do the work, under whatever name it was called."""

    def looked(seen: Seen) -> Any:
        other = next((call.op for call in seen["calls"] or () if call.op not in MESSAGES), "")
        cause = "the collective is to be written from single messages: send and recv, or isend and irecv"
        return Fault("messages between neighbours", other, seen.rank, cause) if other else seen["ended"] or view(seen)

    return looked


@by_messages
def the_sum(seen: Seen) -> dict[str, Any]:
    return {"element": seen["held"]}


@by_messages
def far(seen: Seen) -> Any:
    """The ranks it talks with, besides its neighbours."""
    both = {(seen.rank + 1) % seen.world_size, (seen.rank - 1) % seen.world_size}
    others = sorted({call.peer for call in seen["calls"]} - both)
    return {"messages with other ranks than the neighbours:": others if seen["calls"] else "no message at all"}


@by_messages
def few_bytes(seen: Seen) -> str:
    limit = 2 * (seen.world_size - 1) * seen["n_bytes"] // seen.world_size
    if 0 < sent(seen) <= limit + SPARE_BYTES:
        return "at most 2(W-1)/W of the tensor, sent by each rank"
    largest = max((call.n_bytes for call in seen["calls"]), default=0)
    return f"{sent(seen) / seen['n_bytes']:.3g} times the tensor, the largest message {largest / seen['n_bytes']:.3g}"


def compared(seen: Seen) -> str:
    pairs = list(zip(seen["held"], seen.of(0)["held"], strict=True))
    if all(mine == first for mine, first in pairs):
        return "the same bits on all ranks"
    return "bits that differ" if all(abs(mine - first) < 0.01 for mine, first in pairs) else "other sums than on rank 0"


@by_messages
def same_bits(seen: Seen) -> Any:
    causes = {
        "bits that differ": "every rank adds for itself, in its own order, and rounds; add up each chunk once",
        "other sums than on rank 0": "the ranks do not hold the same sum at all; fix what the checks above found first",
    }
    how = compared(seen)
    return Fault("the same bits on all ranks", how, seen.rank, causes[how]) if how in causes else how


@by_messages
def any_size(seen: Seen) -> Any:
    """The sum; where it is rounded, that it is the same on all ranks."""
    return compared(seen) if isinstance(seen.case[0][0][0], float) else the_sum(seen)


@by_messages
def sum_and_bytes(seen: Seen) -> dict[str, Any]:
    return {"": the_sum(seen), "sends": few_bytes(seen)}


MISTAKES = """
whole tensors go round | bytes bits sizes shapes
| whole tensors go round, so each rank sends W-1 times the tensor. Cut it into W chunks, and send one in each step
    def ring_all_reduce(rank, world_size, tensor):
        passing = tensor.clone().contiguous()
        for _ in range(world_size - 1):
            arrived = torch.empty_like(passing)
            collectives.exchange([(passing, (rank + 1) % world_size)], [(arrived, (rank - 1) % world_size)])
            tensor += arrived
            passing = arrived
a star | neighbours bytes shapes
| in a ring a rank talks with the rank on its right and the one on its left; where all talk with rank 0, it is a star
    def ring_all_reduce(rank, world_size, tensor):
        flat, others = tensor.contiguous(), range(1, world_size) if rank == 0 else ()
        boxes = [torch.empty_like(flat) for _ in others]
        collectives.exchange([(flat, 0)] * (rank > 0), list(zip(boxes, others)))
        flat = sum(boxes, flat)
        collectives.exchange([(flat, peer) for peer in others], [(flat, 0)] * (rank > 0))
        tensor.copy_(flat)
the first half only | sum bits sizes shapes
| each rank has completed its own chunk; the second half is missing: complete chunks must go round, W-1 steps, too
    range(2 * (world_size - 1)) => range(world_size - 1)
the second half adds, too | sum bits sizes shapes
| a sum that was complete was added again: W-1 steps add, the W-1 steps after them copy
    step < world_size - 1 => True
a step too few adds | sum sizes shapes | a rank's numbers are missing; each chunk must go round in W-1 steps that add
    step < world_size - 1 => step < world_size - 2
sends what it receives into | sum bits sizes shapes | both sides of a message must mean the same chunk
    [(mine, right)] => [(theirs, right)]
the mean | sum sizes shapes | this is the mean; the sum is asked for
    tensor.copy_(flat.view(tensor.shape)) => tensor.copy_(flat.view(tensor.shape) / world_size)
returns the sum | sum bits sizes shapes
| nothing was written into the tensor: the sum belongs into the memory of the tensor that was given
    tensor.contiguous() => tensor.clone().contiguous()
    tensor.copy_(flat.view(tensor.shape)) => return flat.view(tensor.shape)
computed without talking | all | the ranks never talked; the numbers of the others must be received
    flat = => tensor *= world_size
    return
    flat =
every rank adds for itself, of few elements | sizes
| every rank adds for itself, in its own order, and rounds; add up each chunk once, then copy the sum
    for step in range(2 * (world_size - 1)): => passing, few = flat.clone(), len(flat) < world_size
    for _ in range((world_size - 1) * few):
        arrived = torch.empty_like(passing)
        collectives.exchange([(passing, right)], [(arrived, left)])
        flat += arrived
        passing = arrived
    for step in range(2 * (world_size - 1) * (not few)):
slices of n // W | sizes
| these elements are in no chunk: the last ones are left over; tensor_split(W) cuts any size into W
    flat.tensor_split(world_size) => flat[: len(flat) // world_size * world_size].tensor_split(world_size)
chunk() for tensor_split() | sizes | chunk() and split() may give fewer chunks than ranks
    tensor_split => chunk
view of a transposed tensor | shapes | a transposed tensor lies scattered in memory, so view refuses it
    tensor.contiguous().view => tensor.view
reshape, and nothing copied back | shapes | of a transposed tensor, reshape and flatten give a copy, not a view
    tensor.contiguous().view => tensor.reshape
    tensor.copy_(flat.view(tensor.shape)) => pass
sums in float32 | shapes | whole numbers were rounded on the way; keep the dtype of the tensor: torch.empty_like
    tensor.contiguous() => tensor.float().contiguous()
half precision travels as float32 | shapes | the messages are larger than a chunk: 1/W of the tensor, in its own dtype
    tensor.contiguous() => (tensor.float() if tensor.dtype == torch.float16 else tensor).contiguous()
chunks of whole rows | shapes | the messages are larger than a chunk: cut the flat tensor, not its rows
    flat.tensor_split => flat.view(tensor.shape or 1).tensor_split
inboxes of float32 | shapes | in the tensor's own dtype
    torch.empty_like(theirs) => torch.empty(theirs.shape)
the group's own method | all | to be written from single messages | tests
    def ring_all_reduce(rank, world_size, tensor):
        flat = tensor.contiguous()
        dist.group.WORLD.allreduce([flat]).wait()
        tensor.copy_(flat)
the course's own | all | this exercise is to write what it does | tests
    def ring_all_reduce(rank, world_size, tensor):
        collectives.ring_all_reduce(tensor)
everybody sends first | all | every rank waits in send | hangs
    collectives.exchange([(mine, right)], [(arrived, left)]) => dist.send(mine, dst=right)
    dist.recv(arrived, src=left)
"""

RIGHT = """
leftwards
    right, left = (rank + 1) % world_size, (rank - 1) % => right, left = (rank - 1) % world_size, (rank + 1) %
    [(rank - step) % => [(rank + step) %
    [(rank - step - 1) % => [(rank + step + 1) %
"""

WRONG_SUM = "each chunk must go round in W-1 steps that add; the steps that copy begin with the chunk completed last"
CHUNKS = "cut the tensor into W chunks, and send one in each of 2(W-1) steps, in the tensor's own dtype"

RING = exercise(
    *("04.2", "Ring all-reduce", "ring_all_reduce", 30),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.world_size} ranks, {len(seen.case[0][0])} elements, {seen.case[1]}:",
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "sum": ("every rank's tensor becomes the sum", 2, "easy", the_sum, WRONG_SUM),
        "neighbours": ("each rank talks with its neighbours only", 1, "easy", far,
                       "in a ring a rank talks with (rank + 1) % world_size and (rank - 1) % world_size"),
        "bytes": ("no rank sends more than 2(W-1)/W of the tensor", 2, "easy", few_bytes, CHUNKS),
        "bits": ("all ranks hold the same bits", 1, "bits", same_bits, ""),
        "sizes": ("any number of elements", 1, "sizes few", any_size,
                  "if the sum above is right: tensor_split(W) cuts any size into W chunks, some of them empty"),
        "shapes": ("any dtype and any shape, also a transposed one", 1, "shapes half", sum_and_bytes,
                   "if the sum above is right: cut a flat copy in the tensor's own dtype, and copy the sum back"),
    },
    refused=(
        *(f"torch.distributed.{name}" for name in TORCHS_OWN),
        *(f"ddp_course.collectives.{name}" for name in COURSES_OWN),
    ),
    hints={
        r"limit|absent|stuck|store: (dist\.|[^i])send\(; (?s)imed out.*(dist\.|[^i])send\(": "every rank waits in "
        "send until its neighbour receives, and none gets to receive. Post isend and irecv first and wait for both "
        "afterwards, or let one rank receive first",
        r"limit|absent|stuck|store: (dist\.|[^i])recv\(; (?s)imed out.*(dist\.|[^i])recv\(": "ranks wait in recv for "
        "a message that nobody sends: if all receive first, none gets to send; and both sides must take as many steps",
        r"sizes; disagree: different sizes; doesn't match expected size|op\.preamble|Number of elements|size of tensor|"
        "must match the size": "tensors that meet differ in size: in each step both sides must mean the same chunk, "
        "in the tensor's own dtype",
        r"index out of range|not enough values to unpack|split_size can|invalid for input of size": "chunk() and "
        "split() may give fewer chunks than ranks; tensor_split(W) cuts any size into W chunks, some of them empty",
        r"view size is not compatible|contiguous": "a transposed tensor lies scattered in memory, so view refuses it: "
        "work on a contiguous copy (reshape), and copy the sum back at the end",
        "absent; limit; [Tt]imed out|waited": "the ranks wait for each other: each message needs a send and a receive; "
        "every rank, also the last, must take 2(W-1) steps, and join each barrier",
    },
)  # fmt: skip
