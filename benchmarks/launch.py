"""How long does it take from the call to the result, for each way to run a function on ranks?

Every way runs the same function, one all_reduce of 4 bytes over gloo on loopback, and its answer is checked. Ways
that start ranks for one call are timed whole, from the call to the result with all ranks gone. Ways whose ranks stay
are timed twice: the start until a group is up, and each call. A round takes every way once, in an order drawn again,
and live ways take turns in blocks of calls, so that a slow minute of the machine falls on all of them.

Left out on purpose: imports in this process, which a notebook pays for once.
Read next: `measure.py`, what is made of the samples.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec

import torch.multiprocessing as mp

import ddp_course
from benchmarks.live_ways import LIVE_WAYS, check, shell
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
from ddp_course.rendezvous import pin_loopback

TITLE = "From the call to the result: one all_reduce of 4 bytes on ranks"
NOTES = [
    "Ranks of plain mp.spawn open a gloo group by a file store, answer through a queue, pass a barrier and leave.",
    "ipyparallel: its own default settings on loopback; %%px shows a value per engine, apply_sync returns one,",
    "execute returns none. Its quickest call is the one that the target is compared with.",
]
ROUNDS, BLOCKS, CALLS, WARM_UP_CALLS = 5, 5, 40, 20
QUICK = (1, 2, 20, 5)
Call = Callable[[], list[float] | None]
PX = ("px_call", "apply_sync_call", "execute_call")

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
    pin_loopback()  # for all: ranks and engines inherit this process's environment
    rounds, *sizes = QUICK if plan.quick else (ROUNDS, BLOCKS, CALLS, WARM_UP_CALLS)
    rows = [row for world_size in plan.world_sizes for row in empty_rows(world_size) if plan.wants(row.key)]
    rng = random.Random(0)
    for world_size in plan.world_sizes:
        mine = {row.key: row for row in rows if row.ranks == world_size}
        warm_up(world_size, mine, plan.quick)
        for number in range(rounds):
            show_progress(f"launch: {world_size} ranks, round {number + 1} of {rounds}")
            one_shot_round(world_size, mine, rng)
            live_round(world_size, mine, rng, *sizes)
    return Result(TITLE, rows, targets(rows), NOTES, baseline="rank_pool_call")


def empty_rows(world_size: int) -> list[Row]:
    rows = [Row(key, label, world_size) for key, (label, _) in ONE_SHOT.items()]
    for way in LIVE_WAYS.values():
        missing = "" if find_spec(way.package) else f"{way.package} is not installed"
        rows += [Row(key, label, world_size, missing=missing) for key, label in way.labels.items()]
    return rows


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


def live_round(
    world_size: int, rows: dict[str, Row], rng: random.Random, blocks: int, calls: int, warm_up_calls: int
) -> None:
    with ExitStack() as stack:
        live: dict[str, Call] = {}
        for name in rng.sample(list(LIVE_WAYS), len(LIVE_WAYS)):
            live |= open_way(name, world_size, rows, stack)
        for key, call in live.items():
            block(rows[key], call, warm_up_calls, keep=False)
        for _ in range(blocks):
            for key in rng.sample(list(live), len(live)):
                block(rows[key], live[key], calls)


def open_way(name: str, world_size: int, rows: dict[str, Row], stack: ExitStack) -> dict[str, Call]:
    """Start one live way, keep how long that took, and return the calls that are wanted of it."""
    way = LIVE_WAYS[name]
    mine = [rows[key] for key in way.labels if key in rows]
    if not mine or mine[0].missing or all(row.failed for row in mine):
        return {}
    import_module(way.package)  # not part of the start
    shell()
    opened: dict[str, Call] = {}
    with attempt(mine, "the start"):
        ranks = ExitStack()
        start = time.perf_counter()
        opened = ranks.enter_context(way.open(world_size))
        seconds = time.perf_counter() - start
        stack.callback(close, ranks, mine)
        if (key := next(iter(way.labels))) in rows:
            rows[key].samples.append(seconds)
    return {key: call for key, call in opened.items() if key in rows}


def close(ranks: ExitStack, rows: list[Row]) -> None:
    with attempt(rows, "the end"):
        ranks.close()


def block(row: Row, call: Call, calls: int, keep: bool = True) -> None:
    if row.failed:
        return
    with attempt([row], "a block of calls"):
        for _ in range(calls):
            start = time.perf_counter()
            found = call()
            seconds = time.perf_counter() - start
            check(found, row.ranks)
            if keep:
                row.samples.append(seconds)


# --- The targets -----------------------------------------------------------------------------------


def targets(rows: list[Row]) -> list[Target]:
    pool = find(rows, "rank_pool_call", 2)
    peers = [row for key in PX if (row := find(rows, key, 2)) and row.median]
    peer = min(peers, key=lambda row: row.median or 0.0, default=None)
    found = [
        Target("RankPool.run, 2 ranks", 3e-3, pool.median if pool else None, "s"),
        Target(f"RankPool.run / {peer.way if peer else 'ipyparallel'}, 2 ranks", 1 / 2, ratio(pool, peer)),
        Target("RankPool.run / plain mp.spawn, 2 ranks", 1 / 500, ratio(pool, find(rows, "plain_spawn", 2))),
    ]
    for row in rows:
        if row.key == "launch_forkserver":
            found.append(Target(f"{row.way}, {row.ranks} ranks", 0.3, row.median, "s"))
    return found
