"""How is a GPT trained from a terminal, whoever starts the ranks? As with `terminal.py`, for another program.

    python -m ddp_course.train_gpt --world-size 2                        # starts the ranks itself
    torchrun --nproc-per-node 2 -m ddp_course.train_gpt                  # joins the ranks that are there

Exit status: 0; 1 if the training failed or its replicas differ; 2 for wrong options; 143 if a signal stopped it, saved.

Read next: `scaling/`, where the time goes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
from dataclasses import asdict, fields

import torch.distributed as dist

from ddp_course.checkpoint import CheckpointError
from ddp_course.data import DatasetError
from ddp_course.groups import process_group, read_place
from ddp_course.launch import RankError, launch
from ddp_course.train_gpt import GPTConfig, GPTResult, train_gpt

SENTENCES = (CheckpointError, DatasetError)  # their message says it all


def main(argv: list[str] | None = None) -> int:
    """Train from a terminal, or as one of the ranks that torchrun has started.

    Returns:
        0; 1 if the training failed or the replicas differ; 143 if a signal stopped it, saved.
    """
    parser = options_parser()
    options = parser.parse_args(argv)
    first = os.environ.get("RANK", "0") == "0"
    try:
        config = GPTConfig(**{each.name: getattr(options, each.name) for each in fields(GPTConfig)})
        results = (join_ranks if "RANK" in os.environ else start_ranks)(config, options)
    except ValueError as error:
        parser.error(str(error))
    except SENTENCES as error:
        return fail(str(error), first)
    except RankError as error:
        told = error.error_type in [known.__name__ for known in SENTENCES]
        return fail(error.message if told else error.report, first)
    if first:
        print(json.dumps([asdict(result) for result in results]) if options.json else summary(results))
    if len({result.checksum for result in results}) > 1:
        return 1
    asked = options.until and results[0].steps == options.until
    return 128 + signal.SIGTERM if results[0].stopped and not asked else 0


def fail(message: str, first: bool) -> int:
    if first:
        print(message, file=sys.stderr)
    return 1


def options_parser() -> argparse.ArgumentParser:
    """One option for each field of `GPTConfig`, and three that say where to run and how to tell."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_course.train_gpt",
        description="Train a GPT on the source of Python's standard library. Under torchrun, joins the ranks there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--world-size", type=int, help="ranks to start (default: 2, or torchrun's)")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="nccl if every rank has a GPU, else gloo")
    parser.add_argument("--json", action="store_true", help="print the result of each rank as JSON")
    for each in fields(GPTConfig):
        flag, default, says = f"--{each.name.replace('_', '-')}", each.default, each.metadata["help"]
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=says)
        else:
            kind, choices = str if default is None else type(default), each.metadata["choices"] or None
            parser.add_argument(flag, type=kind, default=default, choices=choices, help=says)
    return parser


def start_ranks(config: GPTConfig, options: argparse.Namespace) -> list[GPTResult]:
    world_size = 2 if options.world_size is None else options.world_size
    settings = {"backend": options.backend, "timeout_s": config.timeout_s, "quiet": options.json}
    return launch(train_gpt, world_size, args=(config,), **settings)


def join_ranks(config: GPTConfig, options: argparse.Namespace) -> list[GPTResult]:
    """Be one rank of a job that a launcher has started; see `terminal.join_ranks`.

    Returns:
        Every rank's result on rank 0; its own on the others.
    Collective: the group's opening and end, all of `train_gpt`, one gather_object; every rank.
    """
    expected = read_place(backend=options.backend).world_size
    if options.world_size not in (None, expected):
        raise ValueError(
            f"--world-size {options.world_size}, but the launcher has started {expected} ranks; leave it out"
        )
    with process_group(backend=options.backend, timeout_s=config.timeout_s) as place:
        result = train_gpt(place.rank, place.world_size, config)
        results = [None] * place.world_size if place.rank == 0 else None
        dist.gather_object(result, results)
        gc.collect()  # DDP's object ends while its group is there; later, its threads may abort the process
    return results or [result]


def summary(results: list[GPTResult]) -> str:
    """Return what came of a run, and what it wrote."""
    first = results[0]
    lines = [f"{first.parameters:,} parameters on {first.world_size} ranks, {first.device.partition(':')[0]}"]
    lines += [f"step {step:5d}: {loss:.3f} nats per byte of held-out text" for step, loss in first.held_out]
    took = first.steps - first.first_step
    lines.append(f"{took} steps took {first.seconds:.1f} s: {first.tokens_per_s:,.0f} tokens per second")
    lines.append(
        f"model FLOPs utilisation {first.mfu:.0%}, of the {first.peak_flops / 1e9:,.0f} GFLOP/s that the ranks "
        "reached here in a plain matrix product"
    )
    if first.stopped:
        lines.append(f"left after step {first.steps}, saved; go on with --resume")
    lines += [f"note: {note}" for note in first.notes]
    equal = len({result.checksum for result in results}) == 1
    lines.append(f"the replicas are equal: {first.checksum}" if equal else "THE REPLICAS DIFFER")
    return "\n".join([*lines, "", first.sample])
