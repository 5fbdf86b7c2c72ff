"""The answer bank of lesson 13: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong, edited, spoilt

IMPORTS = """
import heapq
import math
import os
import statistics
import numpy as np
import torch
"""


# --- 13.1 ------------------------------------------------------------------------------------------

EFFICIENCY = """
def efficiency(alone, together, world_size, mode, warmup, t):
    share = 1 / world_size if mode == "strong" else 1.0
    a = [share * statistics.mean(steps[warmup:]) for steps in alone]
    b = [statistics.mean(steps[warmup:]) for steps in together]
    value = sum(a) / sum(b)
    n = len(a)
    left = sum((above - value * below) ** 2 for above, below in zip(a, b))
    error = math.sqrt(left / (n * (n - 1))) / statistics.mean(b)
    return value, value - t * error, value + t * error
"""

EFFICIENCY_BY_RATES = """
def efficiency(alone, together, world_size, mode, warmup, t):
    one = torch.tensor(alone, dtype=torch.float64)[:, warmup:]
    many = torch.tensor(together, dtype=torch.float64)[:, warmup:]
    rows_one = 64
    rows_many = 64 * world_size if mode == "weak" else 64
    rate_one = rows_one * one.numel() / one.sum()
    rate_many = rows_many * many.numel() / many.sum() / world_size
    value = rate_many / rate_one
    a = one.mean(dim=1) * rows_many / rows_one / world_size
    left = a - value * many.mean(dim=1)
    error = left.std() / len(a) ** 0.5 / many.mean()
    return [value, value - t * error, value + t * error]
"""

EFFICIENCY_BY_NUMPY = """
def efficiency(alone, together, world_size, mode, warmup, t):
    a = np.array([np.sum(r[warmup:]) for r in alone])
    b = np.array([np.sum(r[warmup:]) for r in together])
    if mode == "strong":
        b = b * world_size
    value = a.mean() / b.mean()
    half = t * np.sqrt(np.var(a - value * b, ddof=1) / len(a)) / b.mean()
    return tuple(value + half * np.array([0, -1, 1])) if False else (value, value - half, value + half)
"""

# --- 13.2 ------------------------------------------------------------------------------------------

COST = """
def message_cost(op, world_size, nbytes, seconds):
    sizes = [size * world_size if op == "all_gather" else size for size in nbytes]
    u = [1 / t for t in seconds]
    v = [size / t for size, t in zip(sizes, seconds)]
    uu, vv = sum(x * x for x in u), sum(x * x for x in v)
    uv = sum(x * y for x, y in zip(u, v))
    det = uu * vv - uv * uv
    alpha = (sum(u) * vv - sum(v) * uv) / det
    beta = (sum(v) * uu - sum(u) * uv) / det
    part = (world_size - 1) / world_size
    factor = {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part, "broadcast": 1.0}[op]
    return alpha, beta, factor / beta
"""

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

COST_BY_LSTSQ = """
def message_cost(op, world_size, nbytes, seconds):
    t = torch.tensor(seconds, dtype=torch.float64)
    S = torch.tensor(nbytes, dtype=torch.float64) * (world_size if op == "all_gather" else 1)
    A = torch.stack([1 / t, S / 1e6 / t], dim=1)
    alpha, beta = torch.linalg.lstsq(A, torch.ones(len(t), 1, dtype=torch.float64)).solution.flatten()
    beta = beta / 1e6
    moved = {"all_reduce": 2 - 2 / world_size, "broadcast": 1}.get(op, 1 - 1 / world_size)
    return [alpha, beta, moved / beta]
"""

# --- 13.3 ------------------------------------------------------------------------------------------

STEP = """
def step_seconds(forward_s, backward_s, optimizer_s, gradients, buckets, world_size, latency_s, bytes_per_s):
    free = 0.0
    for bucket in buckets if world_size > 1 else []:
        full = max(gradients[i][1] for i in bucket)
        nbytes = sum(gradients[i][0] for i in bucket)
        ring = 2 * (world_size - 1) * (latency_s + nbytes / world_size / bytes_per_s)
        free = max(full, free) + ring
    exposed = max(0.0, free - backward_s)
    return forward_s + backward_s + exposed + optimizer_s, exposed
"""

STEP_BY_EVENTS = """
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
"""

STEP_BY_RECURSION = """
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
    Right("13.1", "sums of means, by hand", EFFICIENCY),
    Right("13.1", "from rates, with tensors", EFFICIENCY_BY_RATES),
    Right("13.1", "the ranks' seconds W times, numpy", EFFICIENCY_BY_NUMPY),
    Right("13.2", "two equations", COST),
    Right("13.2", "polyfit with weights", COST_BY_POLYFIT),
    Right("13.2", "torch's least squares", COST_BY_LSTSQ),
    Right("13.3", "one walk", STEP),
    Right("13.3", "events from a heap", STEP_BY_EVENTS),
    Right("13.3", "from the last bucket back", STEP_BY_RECURSION),
]

WRONG = [
    *spoilt("13.1", EFFICIENCY, [
        ("a mean of quotients", ALL, "a mean of the rounds' quotients",
         ("sum(a) / sum(b)", "statistics.mean(x / y for x, y in zip(a, b))")),
        ("a mean of rates", ALL, "a quotient of mean rates",
         ("sum(a) / sum(b)", "statistics.mean(1 / y for y in b) / statistics.mean(1 / x for x in a)")),
        ("upside down", ALL, "turn the quotient", ("sum(a) / sum(b)", "sum(b) / sum(a)")),
        ("strong as weak", "strong warmup interval", "in strong scaling the ranks divide one batch",
         ('1 / world_size if mode == "strong" else 1.0', "1.0")),
        ("weak as strong", "weak warmup interval", "in weak scaling every rank has as many rows",
         ('1 / world_size if mode == "strong" else 1.0', "1 / world_size")),
        ("the speedup", ALL, "that is the speedup",
         ('1 / world_size if mode == "strong" else 1.0', '1.0 if mode == "strong" else world_size')),
        ("medians", ALL, "a quotient of medians", ("sum(a) / sum(b)", "statistics.median(a) / statistics.median(b)")),
        ("in percent", ALL, "no percentage",
         ("return value, value - t * error, value + t * error",
          "return 100 * value, 100 * value - t * error, 100 * value + t * error")),
        ("with the warm-up", "warmup", "the warm-up is still in it", ("steps[warmup:]", "steps")),
        ("whole rounds left out", "warmup", "the warm-up is the first steps of each", ("steps[warmup:]", "steps"),
         ("in alone", "in alone[warmup:]"), ("in together", "in together[warmup:]")),
        ("one side keeps it", "warmup", "cut both",
         ("statistics.mean(steps[warmup:]) for steps in alone", "statistics.mean(steps) for steps in alone")),
        ("the warm-up in the interval", "interval", "leave the warm-up out too",
         ("    n = len(a)\n",
          "    n = len(a)\n    a, b = [[statistics.mean(s) for s in rounds] for rounds in (alone, together)]\n"
          "    a = [share * x for x in a]\n")),
        ("t is forgotten", "interval", "one standard error", ("t * error", "error")),
        ("1.96 for t", "interval", "1.96 is for many", ("t * error", "1.96 * error")),
        ("the spread of the rounds", "interval", "by the root of their number", ("(n * (n - 1))", "(n - 1)")),
        ("n for n - 1", "interval", "divide by n - 1", ("(n * (n - 1))", "(n * n)")),
        ("with a unit", "interval", "has no unit", (" / statistics.mean(b)\n", "\n")),
        ("as if nothing was shared", "interval", "as if they had nothing in common",
         ("error = math.sqrt(left / (n * (n - 1))) / statistics.mean(b)",
          "error = value * math.hypot(*(statistics.stdev(s) / statistics.mean(s) for s in (a, b))) / n ** 0.5")),
        ("the interval of the quotients", "interval", "the interval of a mean of quotients",
         ("error = math.sqrt(left / (n * (n - 1))) / statistics.mean(b)",
          "error = statistics.stdev(x / y for x, y in zip(a, b)) / n ** 0.5")),
        ("high before low", "interval", "the lower end comes first",
         ("value - t * error, value + t * error", "value + t * error, value - t * error")),
        ("the value alone", ALL, "return the tuple (value, low, high)",
         ("return value, value - t * error, value + t * error", "return value")),
        ("it leaves", ALL, "remove exit(), sys.exit() or os._exit()",
         ("    n = len(a)\n", "    os._exit(0)\n    n = len(a)\n")),
    ]),
    Wrong("13.1", "the numbers of the visible check", "\ndef efficiency(*args):\n    return 0.71, 0.65, 0.77\n", ALL,
          "all seconds of one rank by all seconds"),
    Wrong(
        "13.1",
        "calling the course's own",
        "\nfrom ddp_course.scaling.intervals import ratio_interval\n"
        + edited(EFFICIENCY, ("    n = len(a)\n", "    return vars(ratio_interval(a, b)).values()\n    n = len(a)\n")),
        ALL,
        "a call of ddp_course.scaling.intervals.ratio_interval",
    ),
    *spoilt("13.2", COST_BY_POLYFIT, [
        ("absolute errors", "relative bytes", "the largest message decides this line", (", w=1 / t", "")),
        ("the root as weight", "relative bytes", "by the root of the time", ("w=1 / t", "w=t ** -0.5")),
        ("weighted twice", "relative bytes", "the errors are weighed twice", ("w=1 / t", "w=1 / t ** 2")),
        ("a line through logarithms", ALL, "a factor and an exponent",
         ("beta, alpha = np.polyfit(S, t, 1, w=1 / t)",
          "beta, alpha = np.polyfit(np.log(S), np.log(t), 1)\n    alpha = np.exp(alpha)")),
        ("the first and the last", "relative bytes", "two sizes make a line of their own errors",
         ("beta, alpha = np.polyfit(S, t, 1, w=1 / t)",
          "beta = (t[-1] - t[0]) / (S[-1] - S[0])\n    alpha = t[0] - beta * S[0]")),
    ]),
    *spoilt("13.2", COST, [
        ("the smallest time as latency", "line relative bytes", "the smallest time is no latency yet",
         ("    part = (world_size", "    alpha = seconds[0]\n    part = (world_size")),
        ("bytes a second for beta", "line relative bytes", "not the bytes of a second",
         ("return alpha, beta,", "return alpha, 1 / beta,")),
        ("microseconds", "line relative bytes", "alpha is in seconds", ("return alpha,", "return alpha * 1e6,")),
        ("beta first", "line relative bytes", "alpha comes first, then beta",
         ("return alpha, beta,", "return beta, alpha,")),
        ("algorithm bandwidth", "bus bytes", "that is the algorithm bandwidth", ("factor / beta", "1 / beta")),
        ("an all_reduce's bytes once", "bus", "there and back", ("2 * part", "part")),
        ("one factor for all", "bus bytes", "each collective has a factor of its own",
         ("factor / beta", "2 * part / beta")),
        ("no W below", "bus bytes", "each of W ranks sends its part",
         ("part = (world_size - 1) / world_size", "part = world_size - 1")),
        ("at the largest size", "bus bytes", "with the latency still in it",
         ("factor / beta", "factor * sizes[-1] / seconds[-1]")),
        ("divided by the factor", "bus bytes", "it does not divide it", ("factor / beta", "1 / beta / factor")),
        ("GB", "bus bytes", "not 10^9 of them", ("factor / beta", "factor / beta / 1e9")),
        ("bits", "bus bytes", "not bits", ("factor / beta", "8 * factor / beta")),
        ("a rank's share", "bytes", "W times what one rank gives",
         ('size * world_size if op == "all_gather" else size', "size")),
        ("all shares for reduce_scatter too", "bus", "only an all_gather's bytes",
         ('op == "all_gather"', 'op in ("all_gather", "reduce_scatter")')),
        ("searched without an end", ALL, "no search is needed",
         ("    part = (world_size", "    while beta > 0:\n        alpha += 0\n    part = (world_size"), 1.0),
        ("an error is swallowed", ALL, "return the tuple (alpha, beta, bus)",
         ("    return alpha, beta, factor / beta",
          "    try:\n        return alpha, beta, factor / missing\n    except Exception:\n        return None")),
    ]),
    *spoilt("13.3", STEP, [
        ("all at once", "queue order", "the link carries one message at a time",
         ("free = max(full, free) + ring", "free = max(free, full + ring)")),
        ("no overlap", "overlap queue order edges", "here all messages wait for the end of backward",
         ("free = max(full, free) + ring", "free = max(backward_s, free) + ring")),
        ("at the first gradient", "one overlap queue order", "not for an earlier one", ("full = max(", "full = min(")),
        ("at the gradient listed last", "overlap queue", "wherever that one stands in the list",
         ("max(gradients[i][1] for i in bucket)", "gradients[bucket[-1]][1]")),
        ("whoever is full first", "order", "buckets are launched in the order of the plan",
         ("in buckets if", "in sorted(buckets, key=lambda b: max(gradients[i][1] for i in b)) if")),
        ("half a ring", ALL, "as many to hand round as to add up", ("2 * (world_size - 1)", "(world_size - 1)")),
        ("one latency", "overlap queue", "each of the 2 (W - 1) messages has a latency",
         ("2 * (world_size - 1) * (latency_s + nbytes / world_size / bytes_per_s)",
          "latency_s + 2 * (world_size - 1) * nbytes / world_size / bytes_per_s")),
        ("no latency", "overlap queue", "the latency is forgotten", ("(latency_s + nbytes", "(nbytes")),
        ("all bytes in each message", ALL, "a W-th of the bytes", ("nbytes / world_size /", "nbytes /")),
        ("one rank sends", "edges", "one rank sends nothing", (" if world_size > 1 else []", ""),
         ("2 * (world_size - 1) * (latency_s", "max(1, 2 * (world_size - 1)) * (latency_s")),
        ("behind the last bucket", "edges", "not what lies after the last bucket was full",
         ("max(0.0, free - backward_s)",
          "max(0.0, free - max((gradients[i][1] for b in buckets for i in b), default=0))")),
        ("less than nothing", "edges", "not less than 0", ("max(0.0, free - backward_s)", "free - backward_s")),
        ("no optimizer", ALL, "the optimizer is part of the step", (" + exposed + optimizer_s", " + exposed")),
        ("the exposed part is not in the step", ALL, "the step is longer by what is exposed",
         (" + exposed + optimizer_s", " + optimizer_s")),
        ("the other way round", ALL, "the step comes first",
         ("return forward_s + backward_s + exposed + optimizer_s, exposed",
          "return exposed, forward_s + backward_s + exposed + optimizer_s")),
        ("no bucket, no maximum", ALL, "there may be no bucket at all",
         ("    exposed =", "    max(buckets, key=len)\n    exposed =")),
        ("calling the course's own", ALL, "a call of ddp_course.collectives.ring_seconds",
         ("    free = 0.0\n", "    from ddp_course.collectives import ring_seconds\n    free = 0.0\n"),
         ("2 * (world_size - 1) * (latency_s + nbytes / world_size / bytes_per_s)",
          "ring_seconds(nbytes, world_size, latency_s, bytes_per_s)")),
        ("small steps of time, and none is left", ALL, "walk from event to event",
         ("        free = max(full, free) + ring", "        while free != full:\n            free += 1e-9"), 1.0),
    ]),
]  # fmt: skip
