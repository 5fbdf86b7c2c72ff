"""How long does it take from the call to the result, for each way to run a function on ranks?

Every way runs the same function, one all_reduce of 4 bytes over gloo on loopback, and its answer is checked. Ways
that start ranks for one call are timed whole, from the call to the result with all ranks gone. A pool, whose ranks
stay, is timed twice: the start until its group is up, and each call. A round takes every way once, so that a slow
minute of the machine falls on all of them.

Left out on purpose: imports in this process, which a notebook pays for once.
Read next: `measure.py`, what is made of the samples.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable

import torch.multiprocessing as mp

import ddp_course
from benchmarks.measure import (
    Plan,
    Result,
    Row,
    Target,
    attempt,
    find,
    in_fresh_interpreter,
    ratio,
    refuse_unknown,
    show_progress,
)
from benchmarks.on_ranks import one_all_reduce, threads_per_rank, whole_life
from ddp_course import RankPool
from ddp_course.rendezvous import pin_loopback

TITLE = "From the call to the result: one all_reduce of 4 bytes on ranks"
NOTES = [
    "Ranks of plain mp.spawn open a gloo group by a file store, answer through a queue, pass a barrier and leave.",
]
ROUNDS, BLOCKS, CALLS, WARM_UP_CALLS = 5, 5, 40, 20
QUICK = (1, 2, 20, 5)
POOL = {"rank_pool_start": "RankPool start", "rank_pool_call": "RankPool.run"}


def check(found: list[float], world_size: int) -> None:
    """Raise when the ranks' answers are wrong."""
    expected = [world_size * (world_size + 1) / 2] * world_size
    if found != expected:
        raise RuntimeError(f"expected {expected} from {world_size} ranks, found {found}")


# --- Ways that start ranks for one call: each returns the seconds it took ------------------------------


def plain_spawn(world_size: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        answers = mp.get_context("spawn").SimpleQueue()
        arguments = (world_size, f"{folder}/store", threads_per_rank(world_size), answers)
        start = time.perf_counter()
        context = mp.spawn(whole_life, arguments, world_size, join=False)
        try:
            while not context.join():  # what mp.spawn does by itself when it joins
                pass
            found = sorted(answers.get() for _ in range(world_size))
        finally:
            for process in context.processes:
                process.kill()
        seconds = time.perf_counter() - start
    check([value for _, value in found], world_size)
    return seconds


def launch_by(start_method: str) -> Callable[[int], float]:
    def launch(world_size: int) -> float:
        start = time.perf_counter()
        found = ddp_course.launch(one_all_reduce, world_size, backend="gloo", start_method=start_method, quiet=True)
        seconds = time.perf_counter() - start
        check(found, world_size)
        return seconds

    return launch


def forkserver_first(world_size: int) -> float:
    """The first launch in a fresh interpreter, where no fork server runs yet; the interpreter is not timed."""
    code = f"from benchmarks.launch import launch_by; print(launch_by('forkserver')({world_size}))"
    return float(in_fresh_interpreter(code))


ONE_SHOT: dict[str, tuple[str, Callable[[int], float]]] = {
    "plain_spawn": ("plain mp.spawn", plain_spawn),
    "launch_spawn": ("launch, spawn", launch_by("spawn")),
    "launch_forkserver_first": ("launch, forkserver, first", forkserver_first),
    "launch_forkserver": ("launch, forkserver, later", launch_by("forkserver")),
}


# --- The rounds ------------------------------------------------------------------------------------


def measure(plan: Plan) -> Result:
    """Time every way that `plan` wants and compare the medians with the course's targets."""
    refuse_unknown("launch", plan, empty_rows(2))
    pin_loopback()  # for all: ranks inherit this process's environment
    rounds, *sizes = QUICK if plan.quick else (ROUNDS, BLOCKS, CALLS, WARM_UP_CALLS)
    rows = [row for world_size in plan.world_sizes for row in empty_rows(world_size) if plan.wants(row.key)]
    rng = random.Random(0)
    for world_size in plan.world_sizes:
        mine = {row.key: row for row in rows if row.ranks == world_size}
        warm_up(world_size, mine, plan.quick)
        for number in range(rounds):
            show_progress(f"launch: {world_size} ranks, round {number + 1} of {rounds}")
            one_shot_round(world_size, mine, rng)
            pool_round(world_size, mine, *sizes)
    return Result(TITLE, rows, targets(rows), NOTES, baseline="rank_pool_call")


def empty_rows(world_size: int) -> list[Row]:
    labels = {key: label for key, (label, _) in ONE_SHOT.items()} | POOL
    return [Row(key, label, world_size) for key, label in labels.items()]


def warm_up(world_size: int, rows: dict[str, Row], quick: bool) -> None:
    """Run ways once without keeping the time: files are then cached, and the fork server runs."""
    for key in ONE_SHOT:
        if key in rows and (key == "launch_forkserver" or not quick and world_size == 2):
            with attempt([rows[key]], "the warm-up"):
                ONE_SHOT[key][1](world_size)


def one_shot_round(world_size: int, rows: dict[str, Row], rng: random.Random) -> None:
    for key in rng.sample(list(ONE_SHOT), len(ONE_SHOT)):
        if key in rows and not rows[key].failed:
            with attempt([rows[key]], "the call"):
                rows[key].samples.append(ONE_SHOT[key][1](world_size))


def pool_round(world_size: int, rows: dict[str, Row], blocks: int, calls: int, warm_up_calls: int) -> None:
    """Open a pool, call it, and keep how long both took."""
    mine = {key: rows[key] for key in POOL if key in rows and not rows[key].failed}
    if not mine:
        return
    with attempt(mine.values(), "the pool"):
        start = time.perf_counter()
        with RankPool(world_size, backend="gloo", quiet=True) as ranks:
            taken = {"rank_pool_start": [time.perf_counter() - start], "rank_pool_call": []}
            for number in range(warm_up_calls + blocks * calls):
                start = time.perf_counter()
                found = ranks.run(one_all_reduce)
                seconds = time.perf_counter() - start
                check(found, world_size)
                if number >= warm_up_calls:
                    taken["rank_pool_call"].append(seconds)
        for key, row in mine.items():
            row.samples += taken[key]


# --- The targets -----------------------------------------------------------------------------------


def targets(rows: list[Row]) -> list[Target]:
    pool = find(rows, "rank_pool_call", 2)
    found = [
        Target("RankPool.run, 2 ranks", 3e-3, pool.median if pool else None, "s"),
        Target("RankPool.run / plain mp.spawn, 2 ranks", 1 / 500, ratio(pool, find(rows, "plain_spawn", 2))),
    ]
    for row in rows:
        if row.key == "launch_forkserver":
            found.append(Target(f"{row.way}, {row.ranks} ranks", 0.3, row.median, "s"))
    return found
