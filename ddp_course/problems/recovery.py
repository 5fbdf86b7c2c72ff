"""Lesson 15: what do failures and saves cost, and how often should a run save?

The words are in `recovery.toml`.
Read next: `sharding.py`, the problems of lesson 17.
"""

from __future__ import annotations

import math

from ddp_course.problems.counting import split
from ddp_course.problems.problem import Counted, Numbers

DAY = 86400.0
SLICES = 200


def expected_seconds(interval_s: float, save_s: float, mtbf_s: float) -> float:
    """Return how long it takes on average to train for an interval and save, when a failure starts both again.

    The time is cut into slices. In each slice some of the runs that are still alive fail, lose what they have done, and
    begin again.
    """
    whole = interval_s + save_s
    alive, lost = 1.0, 0.0
    for slice_ in range(SLICES):
        dying = alive * whole / SLICES / mtbf_s
        lost += dying * (slice_ + 0.5) * whole / SLICES
        alive -= dying
    return whole + lost / alive


def best_interval(n: Numbers) -> Counted:
    node_s, mtbf_s = n.years * 365 * DAY, n.years * 365 * DAY / n.nodes

    def cost(interval_s: float) -> float:
        return expected_seconds(interval_s, n.save, mtbf_s) / interval_s

    low, high = math.log(n.save), math.log(mtbf_s)
    while high - low > 1e-4:  # the cost falls, then rises
        third = (high - low) / 3
        low, high = (
            (low + third, high) if cost(math.exp(low + third)) > cost(math.exp(high - third)) else (low, high - third)
        )
    true = math.exp(low)
    slips = dict(no_two=true / 2**0.5, double=2**0.5 * true, node=(2 * n.save * node_s) ** 0.5, gpus=true / 8**0.5)
    slips |= dict(half=true / 2, twice=2 * true)
    return true, slips | dict(no_root=2 * n.save * mtbf_s, mtbf=mtbf_s)


def job_failures(n: Numbers) -> Counted:
    mean_s, alive, seconds = n.days * DAY, 1.0, 0.0
    slice_s = mean_s / n.nodes / 500
    while alive > 1e-5:  # nodes are alive independently of each other, each with the same chance
        seconds += alive * slice_s
        alive *= (1 - slice_s / mean_s) ** n.nodes
    slips = dict(node=mean_s, gpus=seconds / n.gpus, half=seconds / 2, double=2 * seconds, times=mean_s * n.nodes)
    slips |= dict(root=mean_s / n.nodes**0.5, fewer=seconds * n.nodes / (n.nodes - 1))
    if n.nodes > 80:
        del slips["fewer"]
    return seconds, slips


def back_where_it_was(n: Numbers) -> Counted:
    saved = max(step for step in range(n.step) if step % n.every == 0)
    restart = n.restart * 60
    true = restart + sum(n.seconds for _ in range(saved, n.step))
    if n.step % n.every == 0:
        return None
    slips = dict(restart=restart, steps=true - restart, next=restart + (saved + n.every - n.step) * n.seconds)
    slips |= dict(only_interval=n.every * n.seconds)
    slips |= dict(half=restart + n.every / 2 * n.seconds, interval=restart + n.every * n.seconds)
    return true, slips | dict(all=restart + n.step * n.seconds)


def lost_hours(n: Numbers) -> Counted:
    interval, trained, lost = n.minutes * 60, 0, 0.0
    while trained < n.days * DAY:
        trained += interval
        lost += n.save
    for failure in range(n.failures):  # spread evenly over the moments of an interval
        lost += (failure + 0.5) / n.failures * interval + n.restart * 60
    saves, work, restarts = n.save * trained / interval, n.failures * interval / 2, n.failures * n.restart * 60
    slips = dict(whole=lost + work, no_restart=lost - restarts, no_saves=lost - saves, no_work=lost - work, saves=saves)
    slips |= dict(total=lost + n.days * DAY, work=work, restarts=restarts)
    return lost, slips


def async_save(n: Numbers) -> Counted:
    now = written = 0.0
    for _ in range(n.saves):
        now = max(now + n.every * n.step, written) + n.copy
        written = now + n.write
    steps, copies = n.saves * n.every * n.step, n.saves * n.copy
    slips = dict(
        blocking=steps + copies + n.saves * n.write, no_wait=steps + copies, no_copy=now - copies, silent=steps
    )
    slips |= dict(one_round=now / n.saves)
    slips |= dict(write_only=n.saves * (n.write + n.copy), with_last=written, writes=steps + n.saves * n.write)
    return (now, slips) if n.write > 1.1 * n.every * n.step else None


def checkpoint_write(n: Numbers) -> Counted:
    speed, tensor = n.speed * 1e9, n.millions * 1e6 * 4
    true = sum(tensor / speed for _ in ("weights", "mean of the gradients", "mean of their squares"))
    slips = dict(weights=true / 3, state=true * 2 / 3, gradients=true * 4 / 3, bfloat16=true / 2, bits=true * 8)
    return true, slips | dict(numbers=true / 4)


def sharded_save(n: Numbers) -> Counted:
    left = split(n.gigabytes * 10**9, n.nodes * n.gpus)  # bytes that each rank still has to write
    now, step = 0.0, n.gigabytes / min(n.total, n.nodes * n.link) / 100  # in seconds
    while sum(left) > 1:
        links = [min(sum(left[node * n.gpus : (node + 1) * n.gpus]), n.link * 1e9 * step) for node in range(n.nodes)]
        passing = min(1.0, n.total * 1e9 * step / sum(links))  # the part that the file system takes
        left = [size - links[rank // n.gpus] * passing / n.gpus for rank, size in enumerate(left)]
        now += step
    by_links, by_files = n.gigabytes / (n.nodes * n.link), n.gigabytes / n.total
    slips = dict(no_limit=min(by_links, by_files), rank_0=n.gigabytes / n.link, per_node=by_files / n.nodes)
    slips |= dict(limits=1 / (1 / by_links + 1 / by_files), one_gpu=by_links * n.gpus)
    slips |= dict(serial=by_links + by_files, one_rank=by_links / n.gpus, part=by_files / n.nodes / n.gpus)
    return now, slips


def told_to_leave(n: Numbers) -> Counted:
    true = 0
    while sum(n.step for _ in range(true + 1)) + n.save <= n.grace:  # the signal comes right after an exchange
        true += 1
    left = n.grace - n.save
    slips = dict(no_save=n.grace // n.step, after=n.save // n.step, mean=2 * left // n.step, seconds=left)
    slips |= dict(plus=(n.grace + n.save) // n.step, twice=(left - n.save) // n.step)
    return (true, slips) if abs(left / n.step - round(left / n.step)) > 0.02 and true > 2 else None


def rest_of_epoch(n: Numbers) -> Counted:
    order, at = range(n.rows), 0  # in the present epoch
    for _ in range(n.step):
        at += n.batch
        if at + n.batch > n.rows:
            at = 0
    left = order[at:]
    used = left[: len(left) // n.batch * n.batch]
    steps, done = n.rows // n.batch, at // n.batch
    slips = dict(before=len(used) / n.before, all_ranks=len(used), done=at / n.after, epoch=steps * n.batch / n.after)
    slips |= dict(whole=n.rows / n.after, fewer=(len(used) - n.batch) / n.after)
    slips |= dict(tail=-(-len(left) // n.after), since_start=n.step * n.batch / n.after)
    return (len(used[0 :: n.after]), slips) if n.step > steps and done and n.before != n.after else None


def jobs_in_a_row(n: Numbers) -> Counted:
    minutes, left, jobs = 0, 60 * n.need, 0
    computes = 60 * n.limit - n.start - n.early  # at most, in a job
    while left > 0:
        computed = min(left, computes)
        minutes += 60 * n.queue + n.start + computed + (n.early if left > computes else 0)
        left, jobs = left - computed, jobs + 1
    now, start = minutes / 60, n.start / 60
    slips = dict(no_queue=now - jobs * n.queue, one_queue=now - (jobs - 1) * n.queue, first_free=now - n.queue)
    slips |= dict(one_more=now + n.limit + n.queue)
    slips |= dict(no_start=now - jobs * start, full_jobs=jobs * (n.queue + n.limit), computing=n.need)
    if -(-n.need // n.limit) < jobs:
        slips["few"] = -(-n.need // n.limit) * (n.queue + n.limit)
    return 3600 * now, {name: 3600 * value for name, value in slips.items()}


def kept_checkpoints(n: Numbers) -> Counted:
    kept, most, one = [], 0, n.ranks * n.gigabytes * 10**9
    for now in range(0, 3 * n.hours * 60, n.minutes):
        kept.append(now)
        most = max(most, len(kept))
        kept = [moment for moment in kept if moment >= now - 60 * n.hours]
    true = most * one
    slips = dict(fence=true - one, fences=true - 2 * one, one_more=true + one, one_rank=true / n.ranks, one=one)
    fits = 60 * n.hours % n.minutes == 0  # so that there is one of so many hours ago
    return (true, slips | dict(nodes=true * 8 / n.ranks)) if most > 3 and fits else None


def hang_cost(n: Numbers) -> Counted:
    lost = [n.limit + n.restart + n.since for _ in range(n.gpus)]  # minutes of each GPU
    true = sum(lost) / 60
    each = n.gpus / 60
    slips = dict(
        one=true / n.gpus, minutes=60 * true, no_wait=true - each * n.limit, no_restart=true - each * n.restart
    )
    slips |= dict(wait=each * n.limit, redo=each * n.since)
    return true, slips | dict(no_redo=true - each * n.since, nodes=true / 8, half=true - each * n.since / 2)
