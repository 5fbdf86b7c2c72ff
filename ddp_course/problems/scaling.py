"""Lesson 14: where does the time of a step go, and how many GPUs are too many?

The words are in `scaling.toml`.
Read next: `recovery.py`, the problems of lesson 15.
"""

from __future__ import annotations

import math

from ddp_course.problems.counting import (
    TYPES,
    Network,
    all_reduce,
    bisected,
    least,
    step_seconds,
    training_operations,
)
from ddp_course.problems.problem import Counted, Numbers

BACKWARD = 2 / 3  # of a step's operations


def strong_scaling(n: Numbers) -> Counted:
    ends = [n.alone / n.gpus + n.exposed for _ in range(n.gpus)]  # of each GPU's step, in ms
    true = 100 * n.alone / sum(ends)
    slips = dict(weak=100 * n.alone / (n.alone + n.exposed), speedup=true * n.gpus, share_alone=1e4 / true / n.gpus)
    slips |= dict(of_alone=100 * (1 - n.exposed / n.alone))
    return true, slips | dict(ratio=100 * n.exposed * n.gpus / n.alone)


def tokens_to_hide(n: Numbers) -> Counted:
    parameters, size = 10**9, TYPES[n.dtype]

    def hidden(tokens: float) -> bool:
        backward_s = BACKWARD * training_operations(parameters, tokens) / (n.tflops * 1e12)
        return backward_s >= 2 * size * parameters / (n.speed * 1e9)

    true = bisected(hidden, 1, 1e7)
    slips = dict(step=true * BACKWARD, forward=2 * true, half=true / 2, bits=8 * true)
    slips |= dict(third=true / 3, more=true * 1.5)
    return true, slips | ({"numbers": true / 4} if n.dtype == "float32" else {})


def exposed_buckets(n: Numbers) -> Counted:
    computing = n.forward + n.backward
    true = (step_seconds(n.forward, n.backward, n.message, n.buckets) - computing) / 1000
    slips = dict(
        none=n.message, perfect=n.message - n.backward, everything=n.message - computing, last=n.message / n.buckets
    )
    slips |= dict(
        step=computing + 1000 * true,
        serial=computing + n.message,
        one_part=n.message - n.backward / n.buckets,
        but_last=n.message * (1 - 1 / n.buckets),
    )
    slips |= dict(two=n.message - n.backward * (n.buckets - 2) / n.buckets, hidden=n.message - 1000 * true)
    return true, {name: value / 1000 for name, value in slips.items() if value > 0 and value != 1000 * true}


def accumulation(n: Numbers) -> Counted:
    true = step_seconds(n.forward, n.backward, n.message, passes=n.passes) / 1000
    one = n.forward + n.backward
    slips = dict(each=n.passes * (one + n.message), one=one + n.message, silent=n.passes * one)
    slips |= dict(
        one_more=(n.passes + 1) * one + n.message,
        one_less=(n.passes - 1) * one + n.message,
        backward_once=n.passes * n.forward + n.backward + n.message,
    )
    slips |= dict(hidden=n.passes * one + max(0, n.message - n.backward), mean=1000 * true / n.passes)
    slips["forward_once"] = n.forward + n.passes * n.backward + n.message
    if n.message <= n.backward:  # then nothing would be exposed, which is `silent`
        del slips["hidden"]
    return true, {name: value / 1000 for name, value in slips.items()}


def straggler(n: Numbers) -> Counted:
    slow = n.compute * (1 + n.percent / 100)
    ready = [n.compute] * (n.gpus - 1) + [slow]  # when each GPU has its gradients, in ms
    step = max(ready) + n.exposed
    rows = sum(n.rows for _ in ready)
    slips = dict(mean=sum(ready) / n.gpus + n.exposed, none=n.compute + n.exposed, no_messages=slow)
    slips |= dict(rate=n.compute / (1 - n.percent / 100) + n.exposed, others=step * n.gpus / (n.gpus - 1))
    slips["all_slow"] = (n.compute + n.exposed) * (1 + n.percent / 100)
    wrong = {name: 1000 * rows / ms for name, ms in slips.items()}
    alone = 1000 * n.rows * ((n.gpus - 1) / (n.compute + n.exposed) + 1 / step)
    return 1000 * rows / step, wrong | dict(alone=alone, one=1000 * n.rows / step, step=rows)


def utilisation(n: Numbers) -> Counted:
    reached = training_operations(n.billions * 1e9, n.tokens) / n.seconds
    true = 100 * reached / (n.peak * 1e12)
    slips = dict(forward=true / 3, backward=true * BACKWARD, single=true / 2, all=true * n.gpus)
    slips |= dict(time=true * n.seconds, nodes=true * 8)
    return (true, slips | dict(divided=true / n.gpus, recompute=true * 4 / 3)) if 15 < true < 65 else None


def most_gpus(n: Numbers) -> Counted:
    able = [gpus for gpus in range(1, n.rows + 1) if n.rows % gpus == 0 and n.rows // gpus * n.length >= n.tokens]
    if not able:
        return None
    true, enough = able[-1], -(-n.tokens // n.length)
    slips = dict(tokens=n.rows * n.length // n.tokens, uneven=n.rows // enough, rows=enough, one_row=n.rows)
    slips |= dict(floor=n.rows // max(1, n.tokens // n.length), power=2 ** int(math.log2(true)))
    slips |= dict(nearest=round(n.rows * n.length / n.tokens), rounded=n.rows // 2 ** math.ceil(math.log2(enough)))
    return true, slips


def amdahl(n: Numbers) -> Counted:
    if n.step / n.speedup - n.fixed < 2:
        return None
    true = least(lambda gpus: (n.fixed * gpus + n.step - n.fixed) * n.speedup <= n.step * gpus)
    slips = dict(ideal=n.speedup, limit=n.step // n.fixed, serial=math.ceil(n.step / (n.step / n.speedup - n.fixed)))
    slips |= dict(more=math.ceil(n.speedup * (n.step + n.fixed) / n.step), power=2 ** math.ceil(math.log2(true)))
    slips |= dict(parts=n.step // n.fixed - 1)
    slips["double"] = math.ceil((n.step + n.fixed) / (n.step / n.speedup - n.fixed))
    return true, slips


def fitted_link(n: Numbers) -> Counted:
    micros = []
    for kilobytes in (n.small, n.large):
        network = Network(2, n.us * 1e-6, n.speed * 1e9)
        network.round([(0, 1, kilobytes * 1000)])
        micros.append(round(1e6 * network.seconds, 2))
    n.small_us, n.large_us = micros
    rates = [n.small / n.small_us * 1e9, n.large / n.large_us * 1e9]
    later, difference = n.large_us - n.small_us, n.large - n.small
    slips = dict(large=rates[1], small=rates[0], sum=(n.small + n.large) / sum(micros) * 1e9, mean=sum(rates) / 2)
    slips |= dict(difference=n.large / later * 1e9, later=difference / n.large_us * 1e9)
    return n.speed * 1e9, slips


def compressed(n: Numbers) -> Counted:
    computing = n.forward + n.backward
    before, true, quarter = (step_seconds(n.forward, n.backward, n.message / k, n.buckets) for k in (1, 2, 4))
    slips = dict(before=before, exposed=(before + computing) / 2, saved=before - true, serial=computing + n.message / 2)
    slips |= dict(perfect=n.forward + n.message / 2, quarter=quarter, half=before / 2, silent=computing)
    slips["last"] = computing + n.message / 2 / n.buckets
    fits = n.message / 2 > n.backward  # so that buckets queue
    return (true / 1000, {name: value / 1000 for name, value in slips.items()}) if fits else None


def local_sgd(n: Numbers) -> Counted:
    size = n.millions * 4 * 10**6
    each = max(all_reduce(Network(n.ranks), size).sent.values())
    true = sum(each for step in range(1, n.steps + 1) if step % n.every == 0)
    rounds = true / each
    slips = dict(ddp=each * n.steps, once=each, half=true / 2, no_minus_one=2 * size * rounds, all_ranks=true * n.ranks)
    slips |= dict(fraction=each * n.steps / n.every, numbers=true / 4, divided=true / n.ranks, double=2 * true)
    if n.steps / n.every / rounds < 1.015:
        del slips["fraction"]
    return true, slips


def days(n: Numbers) -> Counted:
    operations = sum(training_operations(n.billions * 1e9, n.trillions * 1e11) for _ in range(10))  # tenths of the data
    true = operations / (n.gpus * n.peak * 1e12 * n.percent / 100)
    slips = dict(forward=true / 3, backward=true * BACKWARD, single=true / 2, peak=true * n.percent / 100)
    slips |= dict(inverse=true * (n.percent / 100) ** 2, one_node=true * n.gpus / 8)
    slips |= dict(one=true * n.gpus, recompute=true * 4 / 3, node=true / 8)
    return (true, slips) if 86400 < true < 200 * 86400 else None
