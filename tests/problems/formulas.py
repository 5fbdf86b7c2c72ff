"""What a person would compute on paper for each problem: written without a look at how the package counts it.

Bytes, seconds, bytes per second, percent, or a count.
"""

from fractions import Fraction
from math import ceil, floor, log2, sqrt

SIZE = {"float32": 4, "bfloat16": 2}


def ring(ranks):
    return (ranks - 1) / ranks


def exposed(backward, message, buckets):
    return max(message - backward * (buckets - 1) / buckets, message / buckets)


def rounds(n):
    return ceil(log2(n.ranks))


def causal(first, last):
    """Pairs of the queries from `first` up to, not including, `last`."""
    return last * (last + 1) / 2 - first * (first + 1) / 2


def jobs(n):
    computes = n.limit - Fraction(n.start + n.early, 60)
    count = ceil(n.need / computes)
    last = n.need - (count - 1) * computes
    return float(3600 * (count * n.queue + (count - 1) * n.limit + Fraction(n.start, 60) + last))


def largest_divisor(number, limit):
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)


def fewest_gpus(n):
    rows = floor(n.memory * 1e9 * n.percent / 100 / (16 * n.width * n.layers))
    return ceil(n.width / rows)


FORMULAS = {
    # 04
    "ring_sent": lambda n: 2 * ring(n.ranks) * n.millions * 1e6 * SIZE[n.dtype],
    "ring_total": lambda n: 2 * (n.nodes * n.gpus - 1) * n.megabytes * 1e6 * n.steps,
    "star_time": lambda n: 2 * (n.ranks - 1) * n.megabytes * 8e6 / (n.gbit * 1e9),
    "ring_time": lambda n: 2 * (n.ranks - 1) * (n.us * 1e-6 + n.kilobytes * 8e3 / n.ranks / (n.gbit * 1e9)),
    "tree_time": lambda n: 2 * rounds(n) * (n.us * 1e-6 + n.kilobytes * 1e3 / (n.gigabytes * 1e9)),
    "chain_time": lambda n: (n.ranks + n.pieces - 2) * n.gigabytes / n.speed / n.pieces,
    "expert_tokens": lambda n: 2 * ring(n.ranks) * n.tokens * n.experts * n.width * 2,
    "gathered_logits": lambda n: (n.ranks - 1) * n.rows * n.classes * 4,
    "over_the_port": lambda n: 2 * ring(n.nodes) * n.megabytes * 1e6 / n.gpus,
    "bus_bandwidth": lambda n: 2 * ring(n.ranks) * n.megabytes * 1e6 / (n.ms / 1e3),
    "crossover": lambda n: n.us * 1e-6 * n.gbit * 1e9 / 8 * (n.ranks - 1 - rounds(n)) / (rounds(n) - ring(n.ranks)),
    "barrier_wait": lambda n: n.ranks * (n.ranks - 1) / 2 * n.ms / 1e3 * n.steps,
    # 14
    "strong_scaling": lambda n: 100 * n.alone / n.gpus / (n.alone / n.gpus + n.exposed),
    "tokens_to_hide": lambda n: SIZE[n.dtype] / 2 * n.tflops * 1e12 / (n.speed * 1e9),
    "exposed_buckets": lambda n: exposed(n.backward, n.message, n.buckets) / 1e3,
    "accumulation": lambda n: (n.passes * (n.forward + n.backward) + n.message) / 1e3,
    "straggler": lambda n: n.gpus * n.rows * 1e3 / (n.compute * (100 + n.percent) / 100 + n.exposed),
    "utilisation": lambda n: 600 * n.billions * 1e9 * n.tokens / n.seconds / (n.peak * 1e12),
    "most_gpus": lambda n: largest_divisor(n.rows, n.rows // ceil(n.tokens / n.length)),
    "amdahl": lambda n: ceil((n.step - n.fixed) / (Fraction(n.step, n.speedup) - n.fixed)),
    "fitted_link": lambda n: (n.large - n.small) * 1e9 / (n.large_us - n.small_us),
    "compressed": lambda n: (n.forward + n.backward + exposed(n.backward, n.message / 2, n.buckets)) / 1e3,
    "local_sgd": lambda n: n.steps // n.every * 2 * ring(n.ranks) * n.millions * 4e6,
    "days": lambda n: 6 * n.billions * 1e9 * n.trillions * 1e12 / (n.gpus * n.peak * 1e12 * n.percent / 100),
    # 15
    "best_interval": lambda n: sqrt(2 * n.save * n.years * 365 * 86400 / n.nodes),
    "job_failures": lambda n: n.days * 86400 / n.nodes,
    "back_where_it_was": lambda n: n.restart * 60 + n.step % n.every * n.seconds,
    "lost_hours": lambda n: ceil(n.days * 1440 / n.minutes) * n.save + n.failures * (n.minutes / 2 + n.restart) * 60,
    "async_save": lambda n: n.every * n.step + n.copy + (n.saves - 1) * (n.write + n.copy),
    "checkpoint_write": lambda n: 12 * n.millions * 1e6 / (n.speed * 1e9),
    "sharded_save": lambda n: n.gigabytes / min(n.nodes * n.link, n.total),
    "told_to_leave": lambda n: (n.grace - n.save) // n.step,
    "rest_of_epoch": lambda n: (n.rows // n.batch - n.step % (n.rows // n.batch)) * n.batch / n.after,
    "jobs_in_a_row": jobs,
    "kept_checkpoints": lambda n: (n.hours * 60 / n.minutes + 2) * n.ranks * n.gigabytes * 1e9,
    "hang_cost": lambda n: n.gpus * (n.limit + n.restart + n.since) / 60,
    # 17
    "replica": lambda n: 16 * (12 * n.layers * n.width**2 + n.vocabulary * n.width),
    "default_peak": lambda n: 24 * n.layers * n.width**2,
    "zero_1": lambda n: n.layers * n.millions * 1e6 * (8 + 8 / n.gpus),
    "fewest_gpus": fewest_gpus,
    "gathered_peak": lambda n: n.millions * 1e6 * (4 * n.layers / n.gpus + 2 * 2),
    "fsdp_sent": lambda n: ring(n.gpus) * n.layers * n.millions * 1e6 * (2 + 2 + 4),
    "hsdp_crossing": lambda n: 2 * ring(n.nodes) * 4 * n.millions * 1e6 / n.gpus,
    "last_shard": lambda n: n.rows - (n.gpus - 1) * ceil(n.rows / n.gpus),
    "recomputed_peak": lambda n: (n.layers - 1 + n.kept) * n.rows * n.length * n.width * 2,
    "accumulated_gathers": lambda n: ring(n.gpus) * n.millions * 1e6 * (n.passes * 4 + 4),
    "hidden_gathers": lambda n: ring(n.gpus) * n.tflops * 1e12 / (n.speed * 1e9),
    "host_memory": lambda n: (4 * n.gpus + 2) * n.millions * 1e6,
    # 18
    "own_heads": lambda n: 2 * n.width * n.size * (2 * n.heads + 2 * n.groups) / n.gpus,
    "tensor_sent": lambda n: n.blocks * 4 * 2 * ring(n.gpus) * n.rows * n.length * n.width * 2,
    "tensor_time": lambda n: (
        2 * n.millions * 1e6 * n.tokens / n.gpus / (n.tflops * 1e12)
        + 2 * 2 * ring(n.gpus) * n.tokens * n.width * 2 / (n.speed * 1e9)
    ),
    "sequence_saved": lambda n: ring(n.gpus) * n.blocks * n.kept * n.rows * n.length * n.width * 2,
    "context_share": lambda n: 100 * causal(n.tokens * (n.gpus - 1) / n.gpus, n.tokens) / causal(0, n.tokens),
    "ring_attention": lambda n: ring(n.gpus) * n.layers * 2 * n.thousands * 1e3 * n.groups * n.size * 2,
    "pipeline_bubble": lambda n: 100 * (n.stages - 1) / (n.micro + n.stages - 1),
    "pipeline_step": lambda n: (n.micro + n.stages - 1) * (n.forward + n.backward) / 1e3,
    "pipeline_kept": lambda n: min(n.micro, n.stages - n.stage) * n.megabytes * 1e6,
    "fewest_micro": lambda n: ceil(Fraction((n.stages - 1) * (1000 - n.tenths), n.tenths)),
    "slow_stage": lambda n: 3 * n.forward * (n.stages - 1 + n.micro * (100 + n.percent) / 100) / 1e3,
    "mesh_steps": lambda n: ceil(ceil(n.rows / (n.gpus // n.tensor)) / n.batch),
}
