"""How is a training program run from a terminal?

    ddp-course train --world-size 2                          # images; starts the ranks itself
    ddp-course train gpt --world-size 2                      # a language model
    torchrun --nproc-per-node 2 -m ddp_course.train policy   # a game; joins the ranks that are there

All take their options from their config, print a story of the run, and end with the same statuses (`train/program.py`).

Read next: `cli.py`, the other commands.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from ddp_course.train import gpt, images, policy
from ddp_course.train.config import Config
from ddp_course.train.program import RANKS, Place, Program, equality, run_program
from ddp_course.train.rollouts import SOLVED


def main(argv: list[str] | None = None) -> int:
    """Run a program with the options in `argv`.

    Returns:
        The exit status.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    word = argv.pop(0) if argv[:1] and argv[0] in PROGRAMS else "images"
    program, parser = PROGRAMS[word], options_parser(word)
    options = parser.parse_args(argv)
    try:
        config = program.config(**{each.name: getattr(options, each.name) for each in fields(program.config)})
        return run_program(program, config, Place(options.world_size, options.backend), options.json)
    except ValueError as error:
        parser.error(str(error))


def options_parser(word: str = "images") -> argparse.ArgumentParser:
    """One option for each field of the program's config, and three that say where to run and how to tell."""
    program = PROGRAMS[word]
    parser = argparse.ArgumentParser(
        prog="ddp-course train" if word == "images" else f"ddp-course train {word}",
        usage=f"%(prog)s{' [gpt|policy]' if word == 'images' else ''} [options]",
        description=f"{program.says} Under torchrun, joins the ranks that are there.",
        epilog="Exit status: 0; 1 the training failed or its replicas differ; 2 wrong options; 143 asked to stop by "
        "a signal, and saved: start it again with --resume.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--world-size", type=int, help=f"ranks to start (default: {RANKS}, or torchrun's)")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="nccl if every rank has a GPU, else gloo")
    parser.add_argument("--json", action="store_true", help="print the result of each rank as JSON")
    for each in program.config.options():
        flag, default, says = f"--{each.name.replace('_', '-')}", each.default, each.metadata["help"]
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=says)
        else:
            kind, choices = str if default is None else type(default), each.metadata["choices"] or None
            parser.add_argument(flag, type=kind, default=default, choices=choices, help=says)
    return parser


# --- What came of a run ----------------------------------------------------------------------------


def of_images(config: Config, results: list[images.Result]) -> str:
    """A line an epoch, then what came of it."""
    first = results[0]
    lines = ["epoch    loss  test" + "".join(f"  rank {result.rank}" for result in results)]
    for i, (loss, accuracy) in enumerate(zip(first.losses, first.accuracies, strict=True)):
        own = "".join(f"  {shown(result.own_losses[i], '.4f')}" for result in results)
        lines.append(f"{i + 1:5d}  {loss:6.4f}  {accuracy:.1%}{own}")
    ranks = f"{first.world_size} rank{'s' if first.world_size > 1 else ''} on {first.device.partition(':')[0]}"
    lines.append(f"{config.dataset}, {config.model}, {ranks}: {first.accuracy:.1%} of the test rows are right")
    lines.append(f"{first.steps - first.first_step} steps took {first.seconds:.1f} s")
    if first.stopped:
        lines.append(f"stopped by a signal after step {first.steps}, saved; go on with --resume")
    return "\n".join([*lines, equality(results)])


def of_gpt(config: gpt.GPTConfig, results: list[gpt.GPTResult]) -> str:
    """The held-out losses, the speed, and what the model writes."""
    first = results[0]
    lines = [f"{first.parameters:,} parameters on {first.world_size} ranks, {first.device.partition(':')[0]}"]
    lines += [f"step {step:5d}: {loss:.3f} nats per byte of held-out text" for step, loss in first.held_out]
    took = first.steps - first.first_step
    lines.append(f"{took} steps took {first.seconds:.1f} s: {first.tokens_per_s:,.0f} tokens per second")
    lines.append(
        f"{first.mfu:.0%} of the {first.peak_flops / 1e9:,.0f} GFLOP/s that the ranks reached here in a plain matrix "
        "product (not the MFU of a data sheet's peak)"
    )
    if first.stopped:
        lines.append(f"left after step {first.steps}, saved; go on with --resume")
    return "\n".join([*lines, equality(results), "", first.sample])


def of_policy(config: policy.PolicyConfig, results: list[policy.PolicyResult]) -> str:
    """Ten lines of its course, then what came of it."""
    first = results[0]
    lines = ["    steps  return" + "".join(f"  rank {result.rank}" for result in results)]
    every = max(1, len(first.steps) // 10)
    for i in range(every - 1, len(first.steps), every):
        returns = (first.returns[i], *(result.own_returns[i] for result in results))
        lines.append(f"{first.steps[i]:9d}  {'  '.join(shown(value, '.1f') for value in returns)}")
    ranks = f"{first.world_size} rank{'s' if first.world_size > 1 else ''}"
    verdict = "solved" if first.solved else f"not solved, which takes {SOLVED:g}"
    lines.append(f"{ranks}, {first.seconds:.1f} s: mean return {first.evaluation:.1f} of new episodes: {verdict}")
    return "\n".join([*lines, equality(results)])


def shown(value: float | None, digits: str) -> str:
    return f"{'-' if value is None else format(value, digits):>6}"


PROGRAMS = {
    "images": Program(
        "Train a network on several ranks.",
        Config,
        images.train,
        of_images,
        lambda config, results: any(result.stopped for result in results),
    ),
    "gpt": Program(
        "Train a GPT on the source of Python's standard library.",
        gpt.GPTConfig,
        gpt.train_gpt,
        of_gpt,
        lambda config, results: results[0].stopped and results[0].steps != config.until,  # a signal, and not `until`
    ),
    "policy": Program("Learn CartPole on several ranks.", policy.PolicyConfig, policy.train_policy, of_policy),
}
