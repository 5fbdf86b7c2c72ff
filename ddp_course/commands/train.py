"""How is the training program run from a terminal?

    ddp-course train --world-size 2                          # starts the ranks itself
    torchrun --nproc-per-node 2 -m ddp_course.train.images          # joins the ranks that are there

Both call the same `train` with the same options and print the same lines; `program.py` says how, and with which exit
status.

Read next: `cli.py`, the other commands.
"""

from __future__ import annotations

import argparse

from ddp_course.train.images import Config, Result, train
from ddp_course.train.program import add_options, equality, run_program


def main(argv: list[str] | None = None) -> int:
    """Run the program with the options in `argv`.

    Returns:
        The exit status.
    """
    return run_program(options_parser(), Config, train, summary, was_stopped, argv)


def options_parser() -> argparse.ArgumentParser:
    """One option for each field of `Config`, and three that say where to run and how to tell."""
    parser = argparse.ArgumentParser(
        prog="ddp-course train",
        usage="%(prog)s [options]",
        description="Train a network on several ranks. Under torchrun, joins the ranks that are there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    return add_options(parser, Config)


def was_stopped(config: Config, results: list[Result]) -> bool:
    return any(result.stopped for result in results)


def shown(loss: float | None) -> str:
    return f"{'-':>6}" if loss is None else f"{loss:6.4f}"


def summary(config: Config, results: list[Result]) -> str:
    """Return the story of a run: a line an epoch, then what came of it."""
    first = results[0]
    lines = ["epoch    loss  test" + "".join(f"  rank {result.rank}" for result in results)]
    for i, (loss, accuracy) in enumerate(zip(first.losses, first.accuracies, strict=True)):
        own = "".join(f"  {shown(result.own_losses[i])}" for result in results)
        lines.append(f"{i + 1:5d}  {loss:6.4f}  {accuracy:.1%}{own}")
    ranks = f"{first.world_size} rank{'s' if first.world_size > 1 else ''} on {first.device.partition(':')[0]}"
    lines.append(f"{config.dataset}, {config.model}, {ranks}: {first.accuracy:.1%} of the test rows are right")
    lines.append(f"{first.steps - first.first_step} steps took {first.seconds:.1f} s")
    if first.stopped:
        lines.append(f"stopped by a signal after step {first.steps}, saved; go on with --resume")
    return "\n".join([*lines, equality(results)])
