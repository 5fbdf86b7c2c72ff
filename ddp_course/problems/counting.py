"""What do ranks really send, and how long does it take?

Simulated ranks send messages in rounds over a network, which counts them. Collectives run on it step by step, as those
of lesson 04 do, and return it. A chunk carries the set of ranks whose numbers it holds, so a collective that leaves its
work undone fails here.

Left out on purpose: the numbers themselves, and links that several ranks share.
Read next: `collectives.py`, whose answers are counted with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

TYPES = {"float32": 4, "bfloat16": 2}  # bytes of a number
Message = tuple[int, int, float]  # sender, receiver, bytes


class Network:
    """Ranks with one link each. A round lasts as long as the rank needs that sends most in it.

    Args:
        latency_s: of any message.
        bytes_per_s: of a rank's link, in one direction.
        node_size: ranks in a node; what leaves a node is also counted in `crossed`.
    """

    def __init__(
        self, ranks: int, latency_s: float = 0.0, bytes_per_s: float = math.inf, node_size: int | None = None
    ) -> None:
        self.ranks, self.latency_s, self.bytes_per_s = ranks, latency_s, bytes_per_s
        self.node_size = node_size or ranks
        self.sent: Counter[int] = Counter()  # bytes, by rank
        self.received: Counter[int] = Counter()
        self.crossed: Counter[int] = Counter()  # bytes that a rank sent to another node
        self.seconds = 0.0

    def round(self, messages: Iterable[Message]) -> None:
        """Send messages at the same time, those of one rank one after the other."""
        busy: Counter[int] = Counter()
        for sender, receiver, nbytes in messages:
            busy[sender] += nbytes
            self.received[receiver] += nbytes
            if sender // self.node_size != receiver // self.node_size:
                self.crossed[sender] += nbytes
        self.sent += busy
        self.seconds += self.latency_s + max(busy.values()) / self.bytes_per_s


def split(total: int, parts: int) -> list[int]:
    """Return sizes that differ by 1 at most, as `tensor_split` does."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def reduce_scatter(network: Network, nbytes: int, group: Sequence[int] | None = None) -> Network:
    """Add up tensors of `nbytes` around a ring; each rank of `group`, by default all, ends with its part of the sum."""
    members = group or range(network.ranks)
    size = len(members)
    chunks = split(nbytes, size)
    held = [[1 << place] * size for place in range(size)]  # by place and chunk: a bit for each rank in the sum
    for step in range(1, size):
        moves = [(place, (place + 1) % size, (place - step) % size) for place in range(size)]
        network.round((members[a], members[b], chunks[chunk]) for a, b, chunk in moves)
        for b, chunk, arrived in [(b, chunk, held[a][chunk]) for a, b, chunk in moves]:
            assert not held[b][chunk] & arrived, "a number was added twice"
            held[b][chunk] |= arrived
    assert all(held[place][place] == (1 << size) - 1 for place in range(size)), "a sum is not complete"
    return network


def all_gather(network: Network, nbytes: int, group: Sequence[int] | None = None) -> Network:
    """Pass the parts of a tensor of `nbytes` in all around a ring, until each rank of `group` has all of them."""
    members = group or range(network.ranks)
    size = len(members)
    chunks = split(nbytes, size)
    held = [{place} for place in range(size)]
    for step in range(size - 1):
        moves = [(place, (place + 1) % size, (place - step) % size) for place in range(size)]
        network.round((members[a], members[b], chunks[chunk]) for a, b, chunk in moves)
        assert all(chunk in held[a] for a, _, chunk in moves), "a rank sent what it does not have"
        for _, b, chunk in moves:
            held[b].add(chunk)
    assert all(len(parts) == size for parts in held), "a rank lacks a part"
    return network


def all_reduce(network: Network, nbytes: int, group: Sequence[int] | None = None) -> Network:
    """Add up tensors of `nbytes` on all ranks of `group`, around a ring."""
    return all_gather(reduce_scatter(network, nbytes, group), nbytes, group)


def tree_all_reduce(network: Network, nbytes: float) -> Network:
    """Add up whole tensors along a tree to rank 0, round by round, and send the sum back along it."""
    rounds, held = [], [1 << rank for rank in range(network.ranks)]
    step = 1
    while step < network.ranks:
        pairs = [(rank + step, rank) for rank in range(0, network.ranks - step, 2 * step)]
        for child, parent in pairs:
            held[parent] |= held[child]
        rounds.append(pairs)
        step *= 2
    assert held[0] == (1 << network.ranks) - 1, "the sum is not complete"
    for pairs in rounds:
        network.round((child, parent, nbytes) for child, parent in pairs)
    for pairs in reversed(rounds):
        network.round((parent, child, nbytes) for child, parent in pairs)
    return network


def all_to_all(network: Network, nbytes: int) -> None:
    """Send each rank its part of every other rank's tensor of `nbytes`."""
    chunks = split(nbytes, network.ranks)
    for step in range(1, network.ranks):
        moves = [(rank, (rank + step) % network.ranks) for rank in range(network.ranks)]
        network.round((rank, other, chunks[other]) for rank, other in moves)


def training_operations(parameters: float, tokens: float) -> float:
    """Count the floating-point operations of a step in which each weight is used once for each token.

    A weight is in three products: forward's, and in backward those of the input's gradient and of the weight's own.
    In each it is multiplied and added once for a token.
    """
    return sum(parameters * tokens * 2 for product in ("output", "gradient of the input", "gradient of the weight"))


def step_seconds(
    forward_s: float, backward_s: float, message_s: float, buckets: int = 1, passes: int = 1, each: bool = False
) -> float:
    """Play a step of DDP through and return when the last message has arrived.

    Gradients become ready evenly during backward. A bucket is sent when its gradients are ready and the link is free.

    Args:
        message_s: how long the link needs for all buckets.
        passes: forward and backward passes of a step; only the last communicates, unless `each`.
    """
    now = free = 0.0
    for number in range(1, passes + 1):
        start = now + forward_s
        now = start + backward_s
        if number == passes or each:
            for bucket in range(1, buckets + 1):
                ready = start + backward_s * bucket / buckets
                free = max(ready, free) + message_s / buckets
            now = max(now, free)
    return now


def bisected(enough: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least value for which `enough` holds, to a millionth; it does at `high`, and does not at `low`."""
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def least(enough: Callable[[int], bool]) -> int:
    """Return the first whole number from 1 on for which `enough` holds, if it does for all larger ones."""
    low, high = 0, 1
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
