"""How is a GPT trained from a terminal, whoever starts the ranks? As with `terminal.py`, for another program.

    python -m ddp_course.train.gpt --world-size 2                        # starts the ranks itself
    torchrun --nproc-per-node 2 -m ddp_course.train.gpt                  # joins the ranks that are there

`program.py` says how, and with which exit status.

Read next: `scaling/`, where the time goes.
"""

from __future__ import annotations

import argparse

from ddp_course.train.gpt import GPTConfig, GPTResult, train_gpt
from ddp_course.train.program import add_options, equality, run_program


def main(argv: list[str] | None = None) -> int:
    """Train from a terminal, or as one of the ranks that torchrun has started.

    Returns:
        The exit status; see `program.py`.
    """
    return run_program(options_parser(), GPTConfig, train_gpt, summary, was_stopped, argv)


def options_parser() -> argparse.ArgumentParser:
    """One option for each field of `GPTConfig`, and three that say where to run and how to tell."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_course.train.gpt",
        description="Train a GPT on the source of Python's standard library. Under torchrun, joins the ranks there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    return add_options(parser, GPTConfig)


def was_stopped(config: GPTConfig, results: list[GPTResult]) -> bool:
    """Whether a signal ended the run, and not `until`."""
    return results[0].stopped and results[0].steps != config.until


def summary(config: GPTConfig, results: list[GPTResult]) -> str:
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
    return "\n".join([*lines, equality(results), "", first.sample])
