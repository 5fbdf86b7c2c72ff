"""Lesson 17: what does a GPU hold and send when the model is divided?

Bytes held are those of tensors on the meta device, which have a shape and a dtype, but no memory. The words are in
`sharding.toml`.
Read next: `model_parallel.py`, the problems of lesson 18.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import torch

from ddp_course.problems.counting import Network, all_gather, all_reduce, bisected, least, reduce_scatter
from ddp_course.problems.problem import Counted, Numbers


def weights(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    """Return float32 weights without memory."""
    return [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that tensors have, or would have."""
    return sum(tensor.nbytes for tensor in tensors)


def trained(parameters: list[torch.nn.Parameter]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Give weights gradients, let Adam take a step, and return the gradients and the state of all weights."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    adam = torch.optim.Adam(parameters, foreach=True)
    adam.step()
    state = [value for values in adam.state.values() for value in values.values() if value.dim()]  # not the step
    return [parameter.grad for parameter in parameters if parameter.grad is not None], state


@cache
def held(*shapes: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes of weights, gradients and Adam's state together, and those of the weights."""
    parameters = weights(*shapes)
    gradients, state = trained(parameters)
    return nbytes([*parameters, *gradients, *state]), nbytes(parameters)


def replica(n: Numbers) -> Counted:
    block, block_weights = held(*[(n.width, n.width)] * 4, (4 * n.width, n.width), (n.width, 4 * n.width))
    extra, embedding = held((n.vocabulary, n.width))
    true, one = n.layers * block + extra, n.layers * block_weights + embedding
    slips = dict(weights=one, state=2 * one, one_average=3 * one, buckets=5 * one, numbers=one / 4)
    slips |= dict(six=4 * (one - 24 * n.layers * n.width**2))
    return true, slips | dict(no_embedding=true - extra, untied=true + extra, mixed=one * 4.5)


def default_peak(n: Numbers) -> Counted:
    layer = weights((n.width, n.width))
    gradients, state = trained(layer)
    buckets, roots = [torch.empty_like(gradient) for gradient in gradients], torch._foreach_sqrt(state[1::2])
    true, one = n.layers * nbytes([*layer, *gradients, *state, *buckets, *roots]), n.layers * nbytes(layer)
    slips = dict(lowest=4 * one, one_extra=5 * one, weights=one, two_more=7 * one, no_gradients=3 * one)
    slips |= dict(two=2 * one)
    return true, slips


def zero_1(n: Numbers) -> Counted:
    block = weights((n.millions * 1000, 1000))
    gradients, state = trained(block)
    shards = [average.flatten().chunk(n.gpus)[0] for average in state]
    true, one, w = n.layers * nbytes([*block, *gradients, *shards]), n.layers * nbytes(block), n.gpus
    slips = dict(ddp=4 * one, fsdp=4 * one / w, zero_2=one + 3 * one / w, one_average=2 * one + one / w)
    return true, slips | dict(
        state=2 * one / w, no_gradients=one + 2 * one / w, bfloat16=true / 2, weights=3 * one + one / w
    )


def fewest_gpus(n: Numbers) -> Counted:
    (weight,) = weights((n.width, n.width))
    gradients, state = trained([weight])
    room = n.memory * 1e9 * n.percent / 100

    def fits(gpus: int) -> bool:
        return n.layers * nbytes(tensor.chunk(gpus)[0] for tensor in [weight, *gradients, *state]) <= room

    gpus, whole = least(fits), 16 * n.width**2 * n.layers
    slips = dict(all_memory=n.memory * 1e9, state=room * 4 / 3, weights=room * 4, bfloat16=room * 2)
    slips["free"] = n.memory * 1e9 - room
    wrong = {name: math.ceil(whole / memory) for name, memory in slips.items()} | {"floor": gpus - 1}
    wrong["power"] = 2 ** math.ceil(math.log2(gpus))
    return (gpus, wrong) if gpus > 5 and gpus == math.ceil(whole / room) else None


def gathered_peak(n: Numbers) -> Counted:
    blocks = [torch.empty(n.millions * 1000, 1000, device="meta") for _ in range(n.layers)]
    shards, whole, true = nbytes(block.chunk(n.gpus)[0] for block in blocks), {0: blocks[0].bfloat16()}, 0
    for at in range(n.layers):
        if at + 1 < n.layers:
            whole[at + 1] = blocks[at + 1].bfloat16()
        true = max(true, shards + nbytes(whole.values()))
        del whole[at]
    one = n.millions * 10**6 * 2
    slips = dict(one_unit=shards + one, all_units=shards + n.layers * one, shards=shards, gathered=2 * one)
    slips |= dict(divided=shards + 2 * one / n.gpus)
    slips |= dict(float32=shards + 4 * one, half_shards=shards / 2 + 2 * one, three=shards + 3 * one)
    return true, slips | dict(adam=4 * shards + 2 * one, whole=2 * n.layers * one + 2 * one)


def fsdp_sent(n: Numbers) -> Counted:
    network, block = Network(n.gpus), n.millions * 10**6
    for _ in range(n.layers):
        for _ in ("forward", "backward"):
            all_gather(network, 2 * block)
        reduce_scatter(network, 4 * block)
    true = max(network.sent.values())
    one = true / 8  # a byte for each parameter
    slips = dict(once=6 * one, all_float32=12 * one, no_minus_one=8 * n.layers * block)
    slips |= dict(all_gpus=true * n.gpus, block=true / n.layers, gradients=4 * one, divided=true / n.gpus)
    return true, slips


def hsdp_crossing(n: Numbers) -> Counted:
    ranks, size = n.nodes * n.gpus, n.millions * 10**6 * 4
    network = Network(ranks, node_size=n.gpus)
    nodes = [range(first, first + n.gpus) for first in range(0, ranks, n.gpus)]
    for node in nodes:
        reduce_scatter(network, size, node)
    for place in range(n.gpus):
        all_reduce(network, size // n.gpus, [node[place] for node in nodes])
    true, shard = max(network.crossed.values()), size / n.gpus
    slips = dict(node=true * n.gpus, half=true / 2, no_minus_one=2 * shard, shard=shard, all=true * ranks)
    slips |= dict(over_all=true / n.nodes, double=2 * true, inside=max(network.sent.values()))
    return true, slips


def last_shard(n: Numbers) -> Counted:
    chunks = torch.empty(n.rows, 1, device="meta").chunk(n.gpus)
    full, last = chunks[0].shape[0], chunks[-1].shape[0]
    down, rest = divmod(n.rows, n.gpus)
    slips = dict(ceiling=full, floor=down, remainder=rest, with_rest=down + rest, missing=full - last)
    slips |= dict(one_more=full + 1, less=full - rest)
    return (last, slips) if len(chunks) == n.gpus and rest and full - last > 2 else None


def recomputed_peak(n: Numbers) -> Counted:
    tensor = torch.empty(n.rows, n.length, n.width, dtype=torch.bfloat16, device="meta")
    alive, true = {(block, 0): tensor for block in range(n.layers)}, 0
    for block in reversed(range(n.layers)):
        alive |= {(block, saved): tensor for saved in range(n.kept)}
        true = max(true, nbytes(alive.values()))
        alive = {place: saved for place, saved in alive.items() if place[0] != block}
    one = tensor.nbytes
    slips = dict(inputs=n.layers * one, all=n.layers * n.kept * one, twice=true + one, one_block=n.kept * one)
    slips |= dict(float32=2 * true, numbers=true / 2, two_blocks=true + (n.kept - 1) * one)
    return true, slips | ({"row": true / n.rows} if n.rows > 2 else {})


def accumulated_gathers(n: Numbers) -> Counted:
    network, size = Network(n.gpus), n.millions * 10**6
    for _ in range(n.passes):
        for _ in ("forward", "backward"):
            all_gather(network, 2 * size)
    reduce_scatter(network, 4 * size)
    true = max(network.sent.values())
    one = true / (4 * n.passes + 4)  # a byte for each parameter
    slips = dict(
        no_gathers=8 * one, every=8 * n.passes * one, once=(2 * n.passes + 4) * one, weights=4 * n.passes * one
    )
    slips |= dict(no_minus_one=true * n.gpus / (n.gpus - 1), all_gpus=true * n.gpus, micro=true / n.passes)
    slips |= dict(all_reduce=(4 * n.passes + 8) * one, float32=(8 * n.passes + 4) * one)
    return true, slips | dict(bfloat16=(4 * n.passes + 2) * one)


def hidden_gathers(n: Numbers) -> Counted:
    block = 10**8  # parameters; they cancel
    gather_s = all_gather(Network(n.gpus, bytes_per_s=n.speed * 1e9), 2 * block).seconds

    def hidden(tokens: float) -> bool:
        forward_s = 2 * block * tokens / (n.tflops * 1e12)
        gathered = computed = gather_s
        for _ in range(n.layers - 1):
            starts = computed  # the gather of the next block, with this one's forward
            computed = starts + forward_s
            gathered = starts + gather_s
            if gathered > computed:
                return False
        return True

    true, w = bisected(hidden, 1, 1e7), n.gpus
    slips = dict(double=2 * true, six=true / 3, half=true / 2, no_minus_one=true * w / (w - 1), shard=true / (w - 1))
    slips |= dict(with_bits=true / 8, float32=4 * true)
    return true, slips | dict(layers=true / n.layers, bits=8 * true)


def host_memory(n: Numbers) -> Counted:
    models = [torch.empty(n.millions, 10**6, device="meta") for _ in range(n.gpus)]
    checkpoint = torch.empty(n.millions, 10**6, dtype=torch.bfloat16, device="meta")
    true, model = nbytes([*models, checkpoint]), nbytes(models[:1])
    slips = dict(one=1.5 * model, no_checkpoint=n.gpus * model, all_read=n.gpus * 1.5 * model, model=model)
    slips |= dict(float32=(n.gpus + 1) * model, bfloat16=(n.gpus + 1) * model / 2, adam=(4 * n.gpus + 0.5) * model)
    return true, slips
