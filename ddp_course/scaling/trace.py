"""When does each rank compute, and when does it talk?

Every rank records one training step with torch.profiler and turns the records into a few `Span`s: forward,
backward, each collective, optimizer. The ranks share a machine and so a monotonic clock; each reads it inside a
marked range, which gives the offset from the profiler's clock to the common one.

What the records mean. gloo's "gloo:all_reduce" lasts from the moment a gloo thread takes the collective up until it
is done, on that thread. `loss.backward()` returns later than the last gradient, since DDP waits inside it for its
all_reduces; so the lane "backward" holds the autograd nodes, and the rest of the range is the lane "waiting". On a
GPU the spans are kernels, each in the lane of the stage that launched it: a launch is over long before its kernel.

What they lack. A collective that a communication hook starts from a future's callback runs on a gloo thread that the
profiler does not watch; torch's PowerSGD hook sends two of its three so. `launcher/recorder.py` sees all and knows the
line that called each, but no times; so lines are matched to spans by the order of calls of one size.

Left out on purpose: clocks of several machines, memory, and the operators inside a layer.
Read next: `draw/timelines.py`, the picture; or torch/profiler/profiler.py.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_course.groups import my_device
from ddp_course.launcher.interception import mark, recorded
from ddp_course.launcher.rank_status import Collective
from ddp_course.scaling.spans import TALKING, Span

STAGES = ("forward", "backward", "waiting", "optimizer")

_MARK = "ddp_course:"  # begins the name of every range that this file opens
_NODE = "autograd::engine::evaluate_function: "
_ACCUMULATE = _NODE + "torch::autograd::AccumulateGrad"
_CLOCK_READINGS = 5
_ITEM_SIZE = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8, "long int": 8, "short": 2}
_ITEM_SIZE |= {"short int": 2, "byte": 1, "unsigned char": 1, "char": 1, "signed char": 1, "bool": 1}

Event = dict  # one entry of "traceEvents", as torch.profiler exports it; times in microseconds


# --- From the profiler's records to spans ----------------------------------------------------------


def clock_offset_s(readings_ns: Sequence[tuple[int, int]], starts_us: Sequence[float]) -> float:
    """Seconds to add to a profiler's time to get the machine's monotonic time.

    Args:
        readings_ns: the monotonic clock, read just before and just after each marked range opened.
        starts_us: when the profiler says that each of them opened.
    Raises:
        ValueError: the profiler has not as many ranges as there are readings.
    """
    if len(readings_ns) != len(starts_us) or not readings_ns:
        raise ValueError(f"expected {len(readings_ns)} clock ranges in the records, found {len(starts_us)}")
    # The narrowest pair of readings: the first range of a recording may take a hundred times as long to open.
    (before, after), start_us = min(zip(readings_ns, starts_us, strict=True), key=lambda pair: pair[0][1] - pair[0][0])
    return (before + after) / 2e9 - start_us / 1e6


def spans_of(events: Sequence[Event], offset_s: float = 0.0) -> list[Span]:
    """Turn one rank's profiler records into spans, ordered by start.

    Args:
        events: "traceEvents" of the profiler's Chrome trace.
        offset_s: as `clock_offset_s` found it.
    Raises:
        ValueError: no stage was marked.
    """
    events = [event for event in events if event.get("ph") == "X"]
    stages = {stage: [e for e in events if e["name"] == _MARK + stage] for stage in STAGES}
    if not any(stages.values()):
        raise ValueError("no stage in the records; wrap each part: with stage('backward'): loss.backward()")
    on_gpu = any(_is_kernel(event) for event in events)
    found = [*(_kernels(events, stages) if on_gpu else _ranges(events, stages)), *_collectives(events)]
    spans = [
        Span(name, e["ts"] / 1e6 + offset_s, (e["ts"] + e["dur"]) / 1e6 + offset_s, lane, size)
        for name, lane, e, size in found
    ]
    return sorted(spans, key=lambda span: (span.start_s, span.end_s))


def _ranges(events: list[Event], stages: dict[str, list[Event]]) -> Iterator[tuple[str, str, Event, None]]:
    """On the CPU: the stages as marked, but backward as its autograd nodes and what is left after them."""
    for stage, ranges in stages.items():
        for marked in ranges:
            if stage != "backward":
                yield stage, stage, marked, None
                continue
            nodes = [e for e in events if e["name"].startswith(_NODE) and _inside(e["ts"], marked)]
            # DDP's work is done in hooks of AccumulateGrad: planning, copying, even waiting. That is not the model's.
            nodes = [e for e in nodes if e["name"] != _ACCUMULATE]
            yield from ((node["name"].removeprefix(_NODE), stage, node, None) for node in nodes)
            last = max((node["ts"] + node["dur"] for node in nodes), default=marked["ts"])
            rest = {"ts": last, "dur": marked["ts"] + marked["dur"] - last}
            yield "rest of backward", "waiting", rest, None


def _kernels(events: list[Event], stages: dict[str, list[Event]]) -> Iterator[tuple[str, str, Event, None]]:
    """On a GPU: each kernel in the lane of the stage whose range was open when it was launched."""
    launched = {_correlation(e): e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    for kernel in filter(_is_kernel, events):
        at = launched.get(_correlation(kernel))
        for stage, ranges in stages.items():
            if at is not None and "nccl" not in kernel["name"] and any(_inside(at, marked) for marked in ranges):
                yield kernel["name"], stage, kernel, None


def _collectives(events: list[Event]) -> Iterator[tuple[str, str, Event, int | None]]:
    for event in events:
        args = event.get("args", {})
        if event["name"].startswith("gloo:"):
            op = event["name"].removeprefix("gloo:")
            counts, kinds = [math.prod(dims) for dims in args.get("Input Dims", [])], args.get("Input type", [])
        elif _is_kernel(event) and "nccl" in event["name"]:
            op = args.get("Collective name", event["name"])
            counts, kinds = [args[key] for key in ("In msg nelems",) if key in args], [args.get("dtype", "")]
        else:
            continue
        lane = "all-reduce" if op.replace("_", "") == "allreduce" else "other collective"
        yield op, lane, event, payload_bytes(counts, kinds)


def payload_bytes(counts: Sequence[int], kinds: Sequence[str]) -> int | None:
    """Bytes of tensors with so many elements of these dtypes, as torch's records write them; None if they don't say."""
    sizes = [_ITEM_SIZE.get(kind.lower().removeprefix("c10::")) for kind in kinds]
    if not counts or len(counts) != len(sizes) or None in sizes:
        return None
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _is_kernel(event: Event) -> bool:
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def _correlation(event: Event) -> int | None:
    return event.get("args", {}).get("correlation")


def _inside(at_us: float, marked: Event) -> bool:
    return marked["ts"] <= at_us <= marked["ts"] + marked["dur"]


def with_lines(spans: Sequence[Span], calls: Sequence[Collective]) -> list[Span]:
    """Add to each collective the line that called it, as far as it can be told.

    Calls and spans of one payload belong together in order, if there are as many of the one as of the other. gloo runs
    some calls as two, and the recorder keeps 100; those stay without a line.

    Args:
        spans: of one rank, ordered by start.
        calls: of the same step of that rank, in order.
    """
    called, run = defaultdict(list), defaultdict(list)
    for call in calls:
        called[call.n_bytes].append(str(call.line or ""))
    for index, span in enumerate(spans):
        if span.lane in TALKING:
            run[span.bytes or 0].append(index)
    lines = {}
    for size, places in run.items():
        if len(places) == len(called[size]):
            lines |= zip(places, called[size], strict=True)
    return [replace(span, line=lines.get(index, "")) for index, span in enumerate(spans)]


# --- Recording -------------------------------------------------------------------------------------


def stage(name: str) -> AbstractContextManager:
    """Mark a part of a training step: `with stage("backward"): loss.backward()`.

    Raises:
        ValueError: not one of STAGES.
    """
    if name not in STAGES:
        raise ValueError(f"stage {name!r} is not known; choose from {', '.join(STAGES)}")
    return record_function(_MARK + name)


def record_trace(step: Callable[[], object], *, warmup: int = 2, group: dist.ProcessGroup | None = None) -> list[Span]:
    """Run `step` `warmup` times, then once under the profiler, and return this rank's spans.

    Times are on the machine's monotonic clock, so the ranks of one machine agree; `merge_ranks` makes them start at 0.
    Switches the recorder of this process's collectives on, if it is not on already.

    Args:
        step: one training step, its parts marked by `stage`.
        warmup: steps before it; DDP plans its buckets again after the first.
    Raises:
        ValueError: the step marks no stage.
    Collective: `warmup` + 1 times those of `step`, and one barrier before and after the last; every rank of `group`.
    """
    for _ in range(warmup):
        step()
    on_gpu = my_device(group).type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    if not on_gpu:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler complains of the missing GPU
    dist.barrier(group)
    with profile(activities=activities, record_shapes=True, acc_events=True) as recorder:
        readings_ns = [_read_clock() for _ in range(_CLOCK_READINGS)]
        begin = mark()
        step()
        calls = recorded(begin)
        if on_gpu:
            torch.cuda.synchronize()
        readings_ns.append(_read_clock())  # what begins later is not the step's
        dist.barrier(group)  # a gloo thread may note the end of a collective only after the step has gone on
    events = [event for event in _exported(recorder) if event["ph"] == "X"]
    marks = sorted(event["ts"] for event in events if event["name"] == _MARK + "clock")
    of_step = [event for event in events if event["ts"] < marks[-1]]
    return with_lines(spans_of(of_step, clock_offset_s(readings_ns, marks)), calls)


def _read_clock() -> tuple[int, int]:
    before = time.monotonic_ns()
    with record_function(_MARK + "clock"):
        return before, time.monotonic_ns()


def _exported(recorder: profile) -> list[Event]:
    with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder:
        path = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]
