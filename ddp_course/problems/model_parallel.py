"""Lesson 18: what does a GPU compute, keep and send when layers, samples or the model's depth are cut?

The words are in `model_parallel.toml`.
Read next: `sheet.py`, which puts a lesson's problems together.
"""

from __future__ import annotations

import math

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from ddp_course.beyond.schedules import ORDERS, bubble, timetable
from ddp_course.problems.counting import Network, all_gather, all_reduce, least, training_operations
from ddp_course.problems.problem import Counted, Numbers


def own_heads(n: Numbers) -> Counted:
    queries = torch.empty(n.heads * n.size, n.width, dtype=torch.bfloat16, device="meta")
    keys = values = torch.empty(n.groups * n.size, n.width, dtype=torch.bfloat16, device="meta")
    true = sum(cut.chunk(n.gpus)[0].nbytes for cut in (queries, keys, values, queries))  # the output's is cut the same
    q, k, w = queries.nbytes, keys.nbytes, n.gpus
    slips = dict(whole=true * w, keys_whole=2 * q / w + 2 * k, all_heads=4 * q / w, no_output=(q + 2 * k) / w)
    slips |= dict(no_values=(2 * q + k) / w, queries=2 * q / w, double=2 * true, numbers=true / 2)
    return true, slips | dict(output_whole=(q + 2 * k) / w + q)


def tensor_sent(n: Numbers) -> Counted:
    network, size = Network(n.gpus), n.rows * n.length * n.width * 2
    for _ in range(n.blocks):
        for _ in ("attention", "MLP", "MLP, backward", "attention, backward"):
            all_reduce(network, size)
    true = max(network.sent.values())
    slips = dict(half=true / 2, quarter=true / 4, no_minus_one=8 * n.blocks * size, tensors=4 * n.blocks * size)
    slips |= dict(all_gpus=true * n.gpus, block=true / n.blocks, double=2 * true, recompute=true * 1.5)
    return true, slips | dict(divided=true / n.gpus) | ({"row": true / n.rows} if n.rows in (3, 5, 6) else {})


def tensor_time(n: Numbers) -> Counted:
    network, size = Network(n.gpus, bytes_per_s=n.speed * 1e9), n.tokens * n.width * 2
    for _ in ("attention", "MLP"):
        all_reduce(network, size)
    messages, computing = (
        network.seconds,
        training_operations(n.millions * 1e6, n.tokens) / 3 / (n.tflops * 1e12 * n.gpus),
    )
    true = messages + computing
    slips = dict(longer=max(messages, computing), undivided=messages + computing * n.gpus, one=computing + messages / 2)
    slips |= dict(slow=computing + messages / 8, half_width=computing + messages * n.gpus / (n.gpus - 1))
    slips |= dict(four=true + messages, divided=computing + messages / n.gpus, backward=true + 2 * computing)
    slips |= dict(computing=computing, messages=messages)
    del slips["computing" if computing > messages else "messages"]  # the longer one
    return true, slips


def sequence_saved(n: Numbers) -> Counted:
    tensor = torch.empty(n.rows, n.length, n.width, dtype=torch.bfloat16, device="meta")
    whole = sum(tensor.nbytes for _ in range(n.blocks * n.kept))
    left = sum(tensor.chunk(n.gpus, dim=1)[0].nbytes for _ in range(n.blocks * n.kept))
    true = whole - left
    slips = dict(left=left, whole=whole, block=true / n.blocks, tensor=true / n.kept, double=2 * true)
    return true, slips | dict(all_gpus=true * n.gpus) | ({} if n.kept == 2 else {"numbers": true / 2})


def context_share(n: Numbers) -> Counted:
    part = n.tokens // n.gpus
    pairs = [sum(query + 1 for query in range(rank * part, (rank + 1) * part)) for rank in range(n.gpus)]
    whole = sum(pairs) / 100
    slips = dict(equal=100 / n.gpus, first=pairs[0] / whole, two=200 / n.gpus, before=pairs[-2] / whole)
    slips |= dict(own=(pairs[-1] - pairs[0]) / whole, unmasked=100 * pairs[-1] / n.tokens**2)
    return (pairs[-1] / whole, slips | dict(to_first=100 * pairs[-1] / pairs[0])) if n.tokens % n.gpus == 0 else None


def ring_attention(n: Numbers) -> Counted:
    network, each = Network(n.gpus), n.thousands * 1000 * n.size * 2  # bytes of one head
    for _ in range(n.layers):
        for _ in ("keys", "values"):
            all_gather(network, each * n.groups)
    true, w = max(network.sent.values()), n.gpus
    slips = dict(half=true / 2, no_minus_one=true * w / (w - 1), part=true / (w - 1), all_gpus=true * w)
    slips |= dict(heads=true * n.heads / n.groups, queries=true * (2 * n.groups + n.heads) / 2 / n.groups)
    return true, slips | dict(layer=true / n.layers, double=2 * true)


def pipeline_bubble(n: Numbers) -> Counted:
    s, m = n.stages, n.micro
    true = 100 * bubble({"GPipe": "gpipe", "1F1B": "1f1b"}[n.name], s, m)
    slips = dict(to_work=(s - 1) / m, all_stages=s / (m + s - 1), plus_one=(s - 1) / (m + s), share=1 / s)
    slips |= dict(double=true / 50, half=true / 200, mixed=(s - 1) / (m + 2 * s - 2))
    return true, {name: 100 * value for name, value in slips.items()}


def pipeline_ms(micro: int, forward: list[float], backward: list[float]) -> float:
    """Play 1F1B through on stages of their own speed, and return when the last pass ends.

    A pass starts when its stage is free and its neighbour has computed what it needs.
    """
    stages = len(forward)
    todo = [ORDERS["1f1b"](stage, stages, micro) for stage in range(stages)]
    free, ends = [0.0] * stages, {}
    while any(todo):
        for stage, order in enumerate(todo):
            while order:
                kind, number = order[0]
                neighbour = stage - 1 if kind == "forward" else stage + 1
                if 0 <= neighbour < stages and (neighbour, *order[0]) not in ends:
                    break
                start = max(free[stage], ends.get((neighbour, *order[0]), 0.0))
                free[stage] = ends[stage, kind, number] = start + (forward if kind == "forward" else backward)[stage]
                del order[0]
    return max(free)


def pipeline_step(n: Numbers) -> Counted:
    s, m, both = n.stages, n.micro, n.forward + n.backward
    true = pipeline_ms(m, [n.forward] * s, [n.backward] * s)
    slips = dict(full=m * both, one_more=(m + s) * both, serial=m * s * both, forward=(m + s - 1) * n.forward)
    slips |= dict(one_less=(m + s - 2) * both, only_bubble=(s - 1) * both)
    slips |= dict(backward=(m + s - 1) * n.backward, one=s * both, double_bubble=(m + 2 * s - 2) * both)
    slips["no_backward_bubble"] = m * both + (s - 1) * n.forward
    return true / 1000, {name: value / 1000 for name, value in slips.items()}


def pipeline_kept(n: Numbers) -> Counted:
    if n.stage >= n.stages:
        return None
    kept = most = 0
    for step in timetable("1f1b", n.stages, n.micro)[n.stage]:
        kept += 0 if step is None else 1 if step.kind == "forward" else -1
        most = max(most, kept)
    one, mirrored = n.megabytes * 10**6, n.stage + 1
    true = most * one
    slips = dict(gpipe=n.micro * one, all=true * n.stages, one_more=true + one)
    slips |= dict(share=n.micro / n.stages * one, ticks=(n.micro + n.stages - 1) * one)
    slips |= {"first": n.stages * one} if n.stage > 1 else {}
    slips |= {"from_one": true - one} if most > 2 else {}
    slips |= {"one": one} if most > 2 else {}
    slips |= {"mirrored": mirrored * one} if mirrored not in (most - 1, most, most + 1, 1, n.stages) else {}
    return true, slips


def fewest_micro(n: Numbers) -> Counted:
    n.percent = n.tenths / 10
    s, share = n.stages, n.tenths / 1000
    true = least(lambda micro: bubble("1f1b", s, micro) <= share + 1e-9)
    slips = dict(to_work=(s - 1) / share, all_stages=s / share - s + 1, plus_one=(s - 1) / share - s, both=2 * true)
    slips["whole"] = s / share - s
    slips |= dict(
        naive=s / share, multiple=-(-true // s) * s, power=2 ** math.ceil(math.log2(true)), few=share * s * 100
    )
    return true, {name: math.ceil(value - 1e-9) for name, value in slips.items()}


def slow_stage(n: Numbers) -> Counted:
    s, m, both, slower = n.stages, n.micro, 3 * n.forward, 1 + n.percent / 100
    speeds = [1.0] * (s - 1) + [slower]
    true = pipeline_ms(m, [n.forward * k for k in speeds], [2 * n.forward * k for k in speeds])
    slips = dict(
        even=(m + s - 1) * both, mean=(m + s - 1) * both * sum(speeds) / s, all_slow=(m + s - 1) * both * slower
    )
    slips |= dict(no_forward=(m + s - 1) * n.forward * slower)
    slips |= dict(no_bubble=m * both * slower, forward=true / 3, once=(m + s - 2 + slower) * both)
    slips["serial"] = m * both * sum(speeds)
    return true / 1000, {name: value / 1000 for name, value in slips.items()}


def mesh_steps(n: Numbers) -> Counted:
    data = n.gpus // n.tensor
    sampler = DistributedSampler(range(n.rows), num_replicas=data, rank=data - 1, shuffle=False)
    true = sum(1 for _ in BatchSampler(sampler, n.batch, drop_last=False))

    def steps(parts: int) -> int:
        return -(-n.rows // parts // n.batch)

    slips = dict(all_gpus=steps(n.gpus), tensor=steps(n.tensor), one=steps(1), rows=-(-n.rows // data))
    slips |= dict(rows_of_all=n.rows // n.gpus)
    return true, slips | dict(floor=len(sampler) // n.batch, nodes=steps(n.gpus // 8))
