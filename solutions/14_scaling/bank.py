"""The answer bank of lesson 14: right answers written differently, and wrong ones that people really give.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, right, spoilt
from tests.grading.submissions import solutions

IMPORTS = """
import heapq
import math
import os
import numpy as np
import torch
"""

COST, TOKENS, STEP = solutions("14").values()

# --- 14.1 ------------------------------------------------------------------------------------------

COST_BY_POLYFIT = """
def message_cost(op, world_size, nbytes, seconds):
    S, t = np.array(nbytes, dtype=float), np.array(seconds)
    if op == "all_gather":
        S = S * world_size
    beta, alpha = np.polyfit(S, t, 1, w=1 / t)
    if op == "broadcast":
        bus = 1 / beta
    else:
        bus = (2 if op == "all_reduce" else 1) * (world_size - 1) / world_size / beta
    return alpha, beta, bus
"""

COST_RIGHT = """
torch's least squares
    def message_cost(op, world_size, nbytes, seconds):
        t = torch.tensor(seconds, dtype=torch.float64)
        S = torch.tensor(nbytes, dtype=torch.float64) * (world_size if op == "all_gather" else 1)
        A = torch.stack([1 / t, S / 1e6 / t], dim=1)
        alpha, beta = torch.linalg.lstsq(A, torch.ones(len(t), 1, dtype=torch.float64)).solution.flatten()
        beta = beta / 1e6
        moved = {"all_reduce": 2 - 2 / world_size, "broadcast": 1}.get(op, 1 - 1 / world_size)
        return [alpha, beta, moved / beta]
"""

# --- 14.2 ------------------------------------------------------------------------------------------

TOKENS_RIGHT = """
by two times for a model of a thousand parameters, numpy
    def tokens_per_gpu(flops, bytes_per_s, gradient_bytes, global_batch):
        sent = 2 * gradient_bytes * 1000 / bytes_per_s
        equal, hidden = sent / (np.array([6, 4]) * 1000 / flops)
        return [equal, hidden, np.floor(global_batch / hidden)]
as tensors
    def tokens_per_gpu(flops, bytes_per_s, gradient_bytes, global_batch):
        hidden = torch.tensor(gradient_bytes * flops / 2 / bytes_per_s, dtype=torch.float64)
        return hidden * 2 / 3, hidden, global_batch // hidden
"""

# --- 14.3 ------------------------------------------------------------------------------------------

STEP_RIGHT = """
events from a heap
    def step_seconds(forward_s, backward_s, optimizer_s, gradients, buckets, world_size, latency_s, bytes_per_s):
        if world_size == 1:
            return forward_s + backward_s + optimizer_s, 0.0
        events = [(ready, index) for index, (_, ready) in enumerate(gradients)]
        heapq.heapify(events)
        missing = [set(bucket) for bucket in buckets]
        launched, arrived = [], [0.0]
        while events:
            now, index = heapq.heappop(events)
            for group in missing:
                group.discard(index)
            while len(launched) < len(missing) and not missing[len(launched)]:
                bytes_ = sum(gradients[i][0] for i in buckets[len(launched)])
                launched.append(now)
                start = max(now, arrived[-1])
                for _ in range(2 * (world_size - 1)):
                    start += latency_s + bytes_ / world_size / bytes_per_s
                arrived.append(start)
        end = max(arrived[-1], backward_s)
        return torch.tensor([forward_s + end + optimizer_s, end - backward_s], dtype=torch.float64)
from the last bucket back
    def arrival(buckets, gradients, ring):
        if not buckets:
            return 0.0, 0.0
        launched, arrived = arrival(buckets[:-1], gradients, ring)
        sizes, moments = zip(*[gradients[i] for i in buckets[-1]])
        launched = max(launched, *moments)
        return launched, max(launched, arrived) + ring(sum(sizes))

    def step_seconds(forward_s, backward_s, optimizer_s, gradients, buckets, world_size, latency_s, bytes_per_s):
        def ring(nbytes):
            if world_size < 2:
                return 0.0
            return 2 * (world_size - 1) * latency_s + 2 * (world_size - 1) / world_size * nbytes / bytes_per_s

        _, end = arrival(buckets, gradients, ring)
        exposed = end - backward_s if end > backward_s and world_size > 1 else 0
        return [forward_s + backward_s + optimizer_s + exposed, exposed]
"""

RIGHT = [
    Right("14.1", "polyfit with weights", COST_BY_POLYFIT),
    *right("14.1", COST, COST_RIGHT),
    *right("14.2", TOKENS, TOKENS_RIGHT),
    *right("14.3", STEP, STEP_RIGHT),
]

WRONG = [
    *spoilt("14.1", COST_BY_POLYFIT, [
        ("absolute errors", "relative bytes", "the largest message decides this line", (", w=1 / t", "")),
        ("the root as weight", "relative bytes", "by the root of the time", ("w=1 / t", "w=t ** -0.5")),
        ("weighted twice", "relative bytes", "the errors are weighed twice", ("w=1 / t", "w=1 / t ** 2")),
        ("a line through logarithms", ALL, "a factor and an exponent",
         ("np.polyfit(S, t, 1, w=1 / t)", "np.polyfit(np.log(S), np.log(t), 1)\n    alpha = np.exp(alpha)")),
        ("the first and the last", "relative bytes", "two sizes make a line of their own errors",
         ("beta, alpha = np.polyfit(S, t, 1, w=1 / t)",
          "beta = (t[-1] - t[0]) / (S[-1] - S[0])\n    alpha = t[0] - beta * S[0]")),
    ]),
    *spoilt("14.1", COST, [
        ("the smallest time as latency", "line relative bytes", "the smallest time is no latency yet",
         ("    part =", "    alpha = seconds[0]\n    part =")),
        ("bytes a second for beta", "line relative bytes", "not the bytes of a second", (", beta,", ", 1 / beta,")),
        ("microseconds", "line relative bytes", "alpha is in seconds", ("return alpha,", "return alpha * 1e6,")),
        ("beta first", "line relative bytes", "alpha comes first, then beta", ("alpha, beta,", "beta, alpha,")),
        ("algorithm bandwidth", "bus bytes", "that is the algorithm bandwidth", ("factor / beta", "1 / beta")),
        ("an all_reduce's bytes once", "bus", "there and back", ("2 * part", "part")),
        ("one factor for all", "bus bytes", "each collective has a factor of its own", ("factor /", "2 * part /")),
        ("no W below", "bus bytes", "each of W ranks sends its part", ("1) / world_size", "1)")),
        ("at the largest size", "bus bytes", "with the latency still in it", ("/ beta", "* sizes[-1] / seconds[-1]")),
        ("divided by the factor", "bus bytes", "it does not divide it", ("factor / beta", "1 / beta / factor")),
        ("GB", "bus bytes", "not 10^9 of them", ("factor / beta", "factor / beta / 1e9")),
        ("bits", "bus bytes", "not bits", ("factor / beta", "8 * factor / beta")),
        ("a rank's share", "bytes", "W times what one rank gives", ("size * world_size if", "size if")),
        ("all shares for reduce_scatter too", "bus", "only an all_gather's bytes",
         ('op == "all_gather"', 'op in ("all_gather", "reduce_scatter")')),
        ("searched without an end", ALL, "no search is needed",
         ("    part =", "    while beta > 0:\n        alpha += 0\n    part ="), 1.0),
        ("an error is swallowed", ALL, "return the tuple (alpha, beta, bus)",
         ("    return alpha, beta, factor / beta",
          "    try:\n        return alpha, beta, factor / missing\n    except Exception:\n        return None")),
    ]),
    *spoilt("14.2", TOKENS, [
        ("each byte once", ALL, "an all_reduce sends each byte twice", ("2 * gradient_bytes", "gradient_bytes")),
        ("always float32", ALL, "use gradient_bytes", ("2 * gradient_bytes", "2 * 4")),
        ("hidden by all computing", "hidden gpus", "only backward hides communication", ("flops / 4", "flops / 6")),
        ("hidden by forward", "hidden gpus", "forward is over", ("flops / 4", "flops / 2")),
        ("rounded up", "gpus", "round down", ("int(global_batch / hidden)", "math.ceil(global_batch / hidden)")),
    ]),
    *spoilt("14.3", STEP, [
        ("all at once", "queue order", "the link carries one message at a time",
         ("max(full_s, free_s) + ring_s", "max(free_s, full_s + ring_s)")),
        ("no overlap", "overlap queue order edges", "here all messages wait for the end of backward",
         ("max(full_s,", "max(backward_s,")),
        ("at the first gradient", "one overlap queue order", "not for an earlier one", ("= max(grad", "= min(grad")),
        ("at the gradient listed last", "overlap queue", "wherever that one stands in the list",
         ("max(gradients[index][1] for index in bucket)", "gradients[bucket[-1]][1]")),
        ("whoever is full first", "order", "buckets are launched in the order of the plan",
         ("in buckets if", "in sorted(buckets, key=lambda b: max(gradients[i][1] for i in b)) if")),
        ("half a ring", ALL, "as many to hand round as to add up", ("2 * (world_size - 1)", "(world_size - 1)")),
        ("one latency", "overlap queue", "each of the 2 (W - 1) messages has a latency",
         ("2 * (world_size - 1) * (latency_s + nbytes / world_size / bytes_per_s)",
          "latency_s + 2 * (world_size - 1) * nbytes / world_size / bytes_per_s")),
        ("no latency", "overlap queue", "the latency is forgotten", ("(latency_s + nbytes", "(nbytes")),
        ("all bytes in each message", ALL, "a W-th of the bytes", ("nbytes / world_size /", "nbytes /")),
        ("whole bytes", "one", "need not be a whole number",
         ("nbytes / world_size /", "nbytes // world_size /")),
        ("a link that never stands still", "queue", "one message at a time",
         ("    for bucket", "    fulls, rings = [], []\n    for bucket"),
         ("        free_s = max(full_s, free_s) + ring_s\n",
          "        fulls, rings = [*fulls, full_s], [*rings, ring_s]\n"
          "        free_s = max(fulls[0] + sum(rings), full_s + ring_s)\n")),
        ("one rank sends", "edges", "one rank sends nothing", (" if world_size > 1 else []", ""),
         ("2 * (world_size - 1) * (latency_s", "max(1, 2 * (world_size - 1)) * (latency_s")),
        ("behind the last bucket", "edges", "not what lies after the last bucket was full",
         ("max(0.0, free_s - backward_s)",
          "max(0.0, free_s - max((gradients[i][1] for b in buckets for i in b), default=0))")),
        ("less than nothing", "edges", "not less than 0", ("max(0.0, free_s - backward_s)", "free_s - backward_s")),
        ("no optimizer", ALL, "the optimizer is part of the step", (" + exposed_s + optimizer_s", " + exposed_s")),
        ("the exposed part is not in the step", ALL, "the step is longer by what is exposed", (" + exposed_s", "")),
        ("the other way round", ALL, "the step comes first",
         ("return forward_s + backward_s + exposed_s + optimizer_s, exposed_s",
          "return exposed_s, forward_s + backward_s + exposed_s + optimizer_s")),
        ("no bucket, no maximum", ALL, "there may be no bucket at all", ("    return", "    max(buckets)\n    return")),
        ("calling the course's own", ALL, "a call of ddp_course.collectives.ring_seconds",
         ("    for bucket", "    from ddp_course.collectives import ring_seconds\n    for bucket"),
         ("2 * (world_size - 1) * (latency_s + nbytes / world_size / bytes_per_s)",
          "ring_seconds(nbytes, world_size, latency_s, bytes_per_s)")),
        ("small steps of time, and none is left", ALL, "walk from event to event",
         ("free_s = max(full_s, free_s) + ring_s", "while free_s != full_s: free_s += 1e-9"), 1.0),
    ]),
]  # fmt: skip
