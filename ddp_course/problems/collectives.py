"""Lesson 04: how many bytes does a collective send, and how long does it take?

The words are in `collectives.toml`.
Read next: `scaling.py`, the problems of lesson 14.
"""

from __future__ import annotations

import math

from ddp_course.problems.counting import (
    TYPES,
    Network,
    all_gather,
    all_reduce,
    all_to_all,
    bisected,
    reduce_scatter,
    split,
    tree_all_reduce,
)
from ddp_course.problems.problem import Counted, Numbers


def ring_sent(n: Numbers) -> Counted:
    size = n.millions * 10**6 * TYPES[n.dtype]
    true = max(all_reduce(Network(n.ranks), size).sent.values())
    slips = dict(half=true / 2, double=2 * true, no_minus_one=2 * size, tensor=size, all_ranks=n.ranks * true)
    slips |= dict(chunk=size / n.ranks, inverse=2 * size * n.ranks / (n.ranks - 1))
    slips["star"] = size * (n.ranks - 1)
    return true, slips | ({"numbers": true / 4} if n.dtype == "float32" else {})


def ring_total(n: Numbers) -> Counted:
    ranks, size = n.nodes * n.gpus, n.megabytes * 10**6
    true = sum(all_reduce(Network(ranks), size).sent.values()) * n.steps
    slips = dict(half=true / 2, double=2 * true, step=true / n.steps, no_minus_one=2 * size * ranks * n.steps)
    slips |= dict(one_step=true / ranks / n.steps)
    return true, slips | dict(one=true / ranks, node=true / n.nodes, nodes=2 * size * (n.nodes - 1) * n.steps)


def star_time(n: Numbers) -> Counted:
    network, size = Network(n.ranks, bytes_per_s=n.gbit * 1e9 / 8), n.megabytes * 10**6
    for ends in [(rank, 0) for rank in range(1, n.ranks)] + [(0, rank) for rank in range(1, n.ranks)]:
        network.round([(*ends, size)])
    true, others = network.seconds, n.ranks - 1
    slips = dict(half=true / 2, no_minus_one=true * n.ranks / others, bits=true / 8, ring=true / n.ranks)
    slips |= dict(all_one_way=true * n.ranks / others / 2)
    return true, slips | dict(one_way=true / others / 2, one_each=true / others)


def ring_time(n: Numbers) -> Counted:
    latency, speed, size, steps = n.us * 1e-6, n.gbit * 1e9 / 8, n.kilobytes * 1000, 2 * (n.ranks - 1)
    true = all_reduce(Network(n.ranks, latency, speed), size).seconds
    only = steps * latency
    sending = true - only
    slips = dict(once=sending + latency, bytes_only=sending, latency_only=only, half=true / 2)
    slips |= dict(one_step=true / steps, slow=only + 8 * sending)
    slips |= dict(bits=only + sending / 8, no_minus_one=true * n.ranks / (n.ranks - 1))
    return true, slips | dict(whole=only + sending * n.ranks, no_latency_factor=only + sending / 2)


def tree_time(n: Numbers) -> Counted:
    latency, sending = n.us * 1e-6, n.kilobytes * 1e3 / (n.gigabytes * 1e9)
    true = tree_all_reduce(Network(n.ranks, latency, n.gigabytes * 1e9), n.kilobytes * 1000).seconds
    each, rounds = latency + sending, true / (latency + sending)
    slips = dict(up=true / 2, linear=2 * (n.ranks - 1) * each, floor=2 * int(math.log2(n.ranks)) * each)
    slips |= dict(one_round=each, gbit=rounds * (latency + 8 * sending))
    slips |= dict(fraction=2 * math.log2(n.ranks) * each, bytes_only=rounds * sending, latency_only=rounds * latency)
    return true, slips | dict(ring=2 * (n.ranks - 1) * (latency + sending / n.ranks), once=rounds * latency + sending)


def chain_time(n: Numbers) -> Counted:
    has = [0.0] * n.pieces  # when the present node has each piece
    for _ in range(1, n.ranks):
        free = 0.0  # its link
        for piece, size in enumerate(split(n.gigabytes * 10**9, n.pieces)):
            free = has[piece] = max(has[piece], free) + size / (n.speed * 1e9)
    link = n.gigabytes / n.speed
    step = link / n.pieces
    slips = dict(link=link, whole=link * (n.ranks - 1), nodes=has[-1] + step, more=has[-1] + 2 * step)
    return has[-1], slips | dict(first=step * (n.ranks - 1), tree=link * (n.ranks - 1).bit_length())


def expert_tokens(n: Numbers) -> Counted:
    network = Network(n.ranks)
    for _ in ("there", "back"):
        all_to_all(network, n.tokens * n.experts * n.width * 2)
    true = sum(network.sent.values()) / n.ranks
    slips = dict(half=true / 2, double=2 * true, own=true * n.ranks / (n.ranks - 1), all_ranks=true * n.ranks)
    slips |= dict(once=true / n.experts, one_other=true / (n.ranks - 1), share=true / n.ranks)
    return (true, slips) if n.experts < n.ranks else None


def gathered_logits(n: Numbers) -> Counted:
    part = n.rows * n.classes * 4
    true = max(all_gather(Network(n.ranks), n.ranks * part).received.values())
    slips = dict(own=part * n.ranks, part=part, divided=true / n.ranks, all_ranks=true * n.ranks)
    return true, slips | dict(double=2 * true, half=true / 2, numbers=true / 4)


def over_the_port(n: Numbers) -> Counted:
    ranks, size = n.nodes * n.gpus, n.megabytes * 10**6
    nodes = [range(first, first + n.gpus) for first in range(0, ranks, n.gpus)]
    network = Network(ranks, node_size=n.gpus)
    for node in nodes:
        reduce_scatter(network, size, node)
    for place in range(n.gpus):
        all_reduce(network, size // n.gpus, [node[place] for node in nodes])
    for node in nodes:
        all_gather(network, size, node)
    true, part = max(network.crossed.values()), size / n.gpus
    slips = dict(node=true * n.gpus, half=true / 2, no_minus_one=2 * part, part=part, double=2 * true)
    slips |= dict(
        one_pass=true * n.gpus / 2, all_ranks=2 * part * (ranks - 1) / ranks, gpus=2 * part * (n.gpus - 1) / n.gpus
    )
    return true, slips | dict(inside=max(network.sent.values()), all=true * ranks)


def bus_bandwidth(n: Numbers) -> Counted:
    size, seconds = n.megabytes * 10**6, n.ms * 1e-3
    true = max(all_reduce(Network(n.ranks), size).sent.values()) / seconds
    slips = dict(algorithm=size / seconds, half=true / 2, double=2 * true, no_minus_one=2 * size / seconds)
    slips |= dict(inverse=size / seconds * n.ranks / (n.ranks - 1) / 2)
    return true, slips | dict(all_ranks=true * n.ranks, share=true / n.ranks)


def crossover(n: Numbers) -> Counted:
    latency, speed = n.us * 1e-6, n.gbit * 1e9 / 8

    def ring_wins(size: float) -> bool:
        ring, tree = all_reduce(Network(n.ranks, latency, speed), round(size)), Network(n.ranks, latency, speed)
        return ring.seconds <= tree_all_reduce(tree, size).seconds

    true = bisected(ring_wins, 1e3, 1e9)
    rounds, steps, log = (n.ranks - 1).bit_length(), n.ranks - 1, math.log2(n.ranks)
    slips = dict(tree_latency=latency * speed * steps / (rounds - steps / n.ranks), equal_parts=latency * speed)
    slips |= dict(double=2 * true)
    slips |= dict(ring_bytes=latency * speed * (steps - rounds) / rounds, half=true / 2)
    slips["whole"] = latency * speed * (steps - rounds) / (rounds - 1)
    return true, slips | (
        {"fraction": latency * speed * (steps - log) / (log - steps / n.ranks)} if log < rounds else {}
    )


def barrier_wait(n: Numbers) -> Counted:
    enters = [rank * n.ms * 1e-3 for rank in range(n.ranks)]
    true = sum(max(enters) - moment for moment in enters) * n.steps
    slips = dict(longest=2 * true, mean=true / n.ranks, first=2 * true / n.ranks, step=true / n.steps)
    return true, slips | dict(plus_one=true * (n.ranks + 1) / (n.ranks - 1), gap=n.ms * 1e-3 * n.steps)
