"""What does a collective do inside, and how is an all-reduce built from send and recv?

A ring of W ranks cuts the tensor into W chunks. While W - 1 messages go round, every chunk collects the sum of all
ranks; in W - 1 more it is handed to everybody: each rank sends about twice the tensor, however many ranks there are.
A tree sends the whole tensor along fewer steps, so it is quicker where latency counts, and slower where bytes do.

Left out on purpose: operations other than the sum, and several rings at once, which NCCL uses.
Read next: `data/permutation.py`, in which order ranks see their samples; `parallel/naive.py`, where gradients are
all-reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

# --- Pure: a tree of ranks, and what a ring and a tree cost --------------------------------------------


def tree_family(rank: int, world_size: int) -> tuple[int | None, list[int]]:
    """Return a rank's parent (None for rank 0) and its children, in the order in which they report.

    The tree is that of a knock-out tournament: in round k, ranks that are 2^k apart meet, and the lower one goes on.
    A rank thus sends or receives at most one message in a round, and there are log2(W) rounds, rounded up.
    """
    children, step = [], 1
    while step < world_size:
        if rank & step:  # it loses this round
            return rank - step, children
        if rank + step < world_size:
            children.append(rank + step)
        step *= 2
    return None, children


def ring_seconds(payload_bytes: float, world_size: int, latency_s: float, bytes_per_s: float) -> float:
    """Return the time of a ring all-reduce when a message of n bytes takes latency_s + n / bytes_per_s.

    2(W-1) steps, each with a message of 1/W of the payload: the bytes hardly grow with W, the latencies do.
    The model knows no time for adding, and takes the chunks as equal.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, 2005.
    """
    steps = 2 * (world_size - 1)
    return steps * (latency_s + payload_bytes / world_size / bytes_per_s)


def tree_seconds(payload_bytes: float, world_size: int, latency_s: float, bytes_per_s: float) -> float:
    """Return the time of a tree all-reduce, by the same model: log2(W) steps up and as many down, each of all bytes."""
    return 2 * _rounds(world_size) * (latency_s + payload_bytes / bytes_per_s)


def crossover_bytes(world_size: int, latency_s: float, bytes_per_s: float) -> float:
    """Return the payload for which ring and tree take equally long: below it the tree wins, above it the ring.

    0 means that the ring is never slower, as with two or three ranks.
    """
    if world_size == 1:
        return 0.0
    rounds = _rounds(world_size)
    more_latencies = world_size - 1 - rounds
    fewer_payloads = rounds - (world_size - 1) / world_size
    return latency_s * bytes_per_s * more_latencies / fewer_payloads


def _rounds(world_size: int) -> int:
    return (world_size - 1).bit_length()  # log2, rounded up, without the errors of floats


# --- Ring --------------------------------------------------------------------------------------------


def ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> int:
    """Replace `tensor` on every rank by the sum over the ranks of `group`, and return the bytes this rank sent.

    All ranks end with the same bits, since each chunk's sum is completed on one rank and then copied. The sum may
    differ in its last bits from `dist.all_reduce`, which adds in another order.

    Args:
        tensor: the same shape, dtype and kind of device on every rank. Strides may differ: a tensor that is not
            contiguous is summed in a copy.
    Collective: 2(W-1) rounds of one isend to the right and one irecv from the left; every rank of `group`.
    Source: P. Patarasuk, X. Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009.
    """
    _rank, world_size = _rank_and_size(group)
    flat = _flat(tensor)
    chunks = flat.tensor_split(world_size)  # views: what happens to them happens to `flat`
    sent = ring_reduce_scatter(chunks, group) + ring_all_gather(chunks, group)
    _unflatten(flat, tensor)
    return sent


def ring_reduce_scatter(chunks: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> int:
    """Add up chunks along the ring, in place: rank r ends with the full sum in chunk r. Returns bytes sent.

    The other chunks are left holding sums over some of the ranks.

    Args:
        chunks: one contiguous tensor per rank of `group`; chunk r has the same size on every rank.
    Collective: W-1 rounds of one isend to the right and one irecv from the left; every rank of `group`.
    """
    rank, world_size = _rank_and_size(group, chunks)
    inbox = torch.empty_like(max(chunks, key=torch.numel))
    sent = 0
    for step in range(1, world_size):  # not from 0: then the chunk that is whole at the end would be the neighbour's
        outgoing = chunks[(rank - step) % world_size]
        growing = chunks[(rank - step - 1) % world_size]
        arrived = inbox[: growing.numel()]
        sent += _pass_on(outgoing, arrived, rank, world_size, group)
        growing += arrived
    return sent


def ring_all_gather(chunks: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> int:
    """Copy chunk r of rank r to every rank, along the ring, in place. Returns bytes sent.

    Args:
        chunks: as in `ring_reduce_scatter`; only chunk r of rank r is read.
    Collective: W-1 rounds of one isend to the right and one irecv from the left; every rank of `group`.
    """
    rank, world_size = _rank_and_size(group, chunks)
    sent = 0
    for step in range(world_size - 1):
        outgoing, arriving = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        sent += _pass_on(outgoing, arriving, rank, world_size, group)
    return sent


def _pass_on(
    outgoing: torch.Tensor, arrived: torch.Tensor, rank: int, world_size: int, group: dist.ProcessGroup | None
) -> int:
    """Send `outgoing` to the right neighbour while `arrived` is filled by the left one."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    return exchange([(outgoing, right)], [(arrived, left)], group)


# --- Tree --------------------------------------------------------------------------------------------


def tree_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> int:
    """Replace `tensor` on every rank by the sum over the ranks of `group`, and return the bytes this rank sent.

    Sums travel up to rank 0 of the group, the total travels down, always as a whole tensor.

    Args:
        tensor: as in `ring_all_reduce`.
    Collective: per rank one isend and one irecv with its parent and with each child; every rank of `group`.
    """
    rank, world_size = _rank_and_size(group)
    flat = _flat(tensor)
    parent, children = tree_family(rank, world_size)
    inbox, sent = torch.empty_like(flat), 0
    for child in children:
        exchange([], [(inbox, child)], group)
        flat += inbox
    if parent is not None:
        sent += exchange([(flat, parent)], [], group)
        exchange([], [(flat, parent)], group)
    for child in reversed(children):  # first the one that has come latest, and with most descendants in a full tree
        sent += exchange([(flat, child)], [], group)
    _unflatten(flat, tensor)
    return sent


# --- Messages ----------------------------------------------------------------------------------------

Message = tuple[torch.Tensor, int]  # a contiguous tensor, and a rank of the group


def exchange(outgoing: Sequence[Message], incoming: Sequence[Message], group: dist.ProcessGroup | None = None) -> int:
    """Post all messages at once, wait for all of them, and return the bytes sent.

    Nobody waits before everything is posted, so ranks that send to each other, or round a ring, cannot block each
    other. An empty tensor needs no message: both sides know its size, and neither posts it.

    Args:
        outgoing, incoming: pairs of a tensor and the rank, counted within `group`, that it goes to or comes from.
    Collective: one isend or irecv per tensor that is not empty, matched by the peer's. NCCL
        connects a group in its first operation, so every rank must take part in that; a barrier before does it.
    """
    message = partial(dist.P2POp, group=group)
    sends = [message(dist.isend, t, group_peer=peer) for t, peer in outgoing if t.numel()]
    receives = [message(dist.irecv, t, group_peer=peer) for t, peer in incoming if t.numel()]
    if sends or receives:
        for work in dist.batch_isend_irecv(sends + receives):
            work.wait()
    return sum(op.tensor.nbytes for op in sends)


def _rank_and_size(group: dist.ProcessGroup | None, chunks: Sequence[torch.Tensor] | None = None) -> tuple[int, int]:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in this group: only its members may call its collectives")
    if chunks is not None and len(chunks) != world_size:
        raise ValueError(f"rank {rank}: one chunk per rank is needed, {world_size}; found {len(chunks)} chunks")
    return rank, world_size


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """One dimension, contiguous, outside autograd: a view of the tensor's memory where that is possible."""
    if tensor.layout != torch.strided:
        raise ValueError(f"a dense tensor is needed, found layout {tensor.layout}: call to_dense() first")
    return tensor.detach().contiguous().view(-1)


def _unflatten(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write the result back, where `flat` had to be a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
