"""How is the training handed to a cluster?

    ddp-course submit --slurm --nodes 2 --gpus-per-node 4 --checkpoint /shared/run7 -- --epochs 90 > run7.sbatch
    ddp-course submit --k8s --nodes 1:4 --image registry/course:1 --checkpoint /checkpoints -- --lr 0.2 > run7.yaml

Both clusters do the same three things: start one torchrun agent on each node, tell where the agents meet, and send
SIGTERM before they take a node away. So each needs only a form that is filled in; the forms are in `templates/`, to be
read. Every value is checked and quoted, the options of the training too: a typing error shows here, and not after a
night in the queue.

Left out on purpose: handing it in, which is `sbatch` or `kubectl apply`, and building an image.
Read next: `templates/job.sbatch`, then `templates/pytorchjob.yaml`.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ddp_course.cli import in_words
from ddp_course.commands.train import options_parser
from ddp_course.train.config import Config

TEMPLATES = Path(__file__).with_name("templates")
HOLE = re.compile(r"@([a-z_]+)@")
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # short: Kubernetes adds to it, and stops at 63
QUANTITY = re.compile(r"[1-9][0-9]*(Ki|Mi|Gi|Ti)")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
# To SLURM 1:30 is a minute and a half; to most people, and here, an hour and a half. So the form gets all four parts.
TIME = re.compile(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d)(?::([0-5]\d))?")
START_S = 300  # to start the ranks, and to get somewhere; SLURM may send its signal a minute early


def main(argv: list[str]) -> int:
    """Write the filled-in form to the standard output or to a file.

    Returns:
        The exit status: 0; 1 if the file cannot be written. Wrong options exit with 2.
    """
    training = argv[argv.index("--") + 1 :] if "--" in argv else []
    parser = submit_parser()
    options = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    try:
        text = slurm_script(options, training) if options.slurm else kubernetes_job(options, training)
    except ValueError as error:
        parser.error(str(error))
    if options.output is None:
        print(text, end="")
        return 0
    try:
        Path(options.output).write_text(text)
    except OSError as error:
        print(f"cannot write {options.output}: {in_words(error)}", file=sys.stderr)
        return 1
    return 0


def submit_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddp-course submit",
        usage="%(prog)s (--slurm | --k8s) --checkpoint FOLDER [options] [-- training options]",
        description="Write a job for a cluster: an sbatch script, or a PyTorchJob. The training gets what follows --.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cluster = parser.add_mutually_exclusive_group(required=True)
    cluster.add_argument("--slurm", action="store_true", help="a script for sbatch")
    cluster.add_argument("--k8s", action="store_true", help="a PyTorchJob of Kubeflow's training operator 1 (legacy)")
    parser.add_argument("--output", metavar="FILE", help="where to write (default: the standard output)")
    parser.add_argument("--checkpoint", required=True, metavar="FOLDER", help="a folder that all nodes see; absolute")
    parser.add_argument("--name", default="ddp-course", help="the job's name")
    parser.add_argument("--nodes", default="2", help="how many; MIN:MAX on Kubernetes")
    parser.add_argument("--gpus-per-node", type=int, default=1, help="a rank for each; 0: no GPUs")
    parser.add_argument("--ranks-per-node", type=int, help="without GPUs (default: 1)")
    parser.add_argument("--cpus-per-rank", type=int, default=4, help="cores, and threads, of a rank")
    parser.add_argument("--time", default="4:00:00", help="[DAYS-]HOURS:MINUTES[:SECONDS] until the job is ended")
    parser.add_argument("--grace", type=int, default=120, help="seconds between SIGTERM and the end, to save in")
    parser.add_argument("--max-restarts", type=int, default=3, help="how often ranks that failed are started again")
    parser.add_argument("--python", help="on the nodes (default: on SLURM this one, in an image python)")
    slurm = parser.add_argument_group("SLURM only")
    slurm.add_argument("--partition", help="where to queue")
    slurm.add_argument("--account", help="who pays")
    k8s = parser.add_argument_group("Kubernetes only")
    k8s.add_argument("--image", help="one with this course in it; required")
    k8s.add_argument("--claim", default="checkpoints", help="the volume claim, mounted at --checkpoint")
    k8s.add_argument("--memory", default="16Gi", help="of a pod")
    k8s.add_argument("--shared-memory", default="4Gi", help="size of /dev/shm; counts as memory")
    return parser


# --- The two forms ---------------------------------------------------------------------------------


def slurm_script(options: argparse.Namespace, training: list[str]) -> str:
    """Return an sbatch script: it runs an agent on each node, has the ranks save in time, and queues again.

    Raises:
        ValueError: a value cannot be meant; names it, and what is expected.
    """
    low, high = nodes_of(options.nodes)
    if low != high:
        raise ValueError(f"--nodes {options.nodes}: SLURM gives a fixed number; say one, such as {high}")
    refuse_others(options, "k8s", image=None, claim="checkpoints", memory="16Gi", shared_memory="4Gi")
    values = common_values(options)
    wanted = {
        "gpus-per-node": options.gpus_per_node or None,
        "partition": options.partition,
        "account": options.account,
    }
    for name in ("partition", "account"):
        check(name, wanted[name] or "x", WORD, "letters, digits and . _ - only")
    values["directives"] = "\n".join(f"#SBATCH --{name}={value}" for name, value in wanted.items() if value)
    values["python"] = shlex.quote(options.python or sys.executable)
    values["training"] = shlex.join(training_options(options, training))
    values["cpus"] = options.cpus_per_rank * values["ranks"]
    return fill("job.sbatch", values | {"nodes": high})


def kubernetes_job(options: argparse.Namespace, training: list[str]) -> str:
    """Return a PyTorchJob in YAML.

    Raises:
        ValueError: a value cannot be meant; names it, and what is expected.
    """
    low, high = nodes_of(options.nodes)
    refuse_others(options, "slurm", partition=None, account=None)
    if not options.image:
        raise ValueError("--k8s needs an --image that has this course in it")
    check("image", options.image, WORD, "registry/name:tag")
    check("claim", options.claim, NAME, "the name of a PersistentVolumeClaim")
    for name in ("memory", "shared_memory"):
        check(name, getattr(options, name), QUANTITY, "an amount such as 16Gi")
    values = common_values(options)
    indent = " " * 16
    # In a pod's arguments $(NAME) would be replaced, and $$ stands for $.
    words = (json.dumps(word.replace("$", "$$")) for word in training_options(options, training))
    return fill(
        "pytorchjob.yaml",
        values
        | {
            "min_nodes": low,
            "nodes": high,
            "seconds": seconds_of(options.time),
            "image": json.dumps(options.image),
            "python": json.dumps(options.python or "python"),
            "checkpoint": json.dumps(options.checkpoint),
            "claim": options.claim,
            "memory": options.memory,
            "shared_memory": options.shared_memory,
            "cpus": options.cpus_per_rank * values["ranks"],
            "gpus": f", nvidia.com/gpu: {options.gpus_per_node}" if options.gpus_per_node else "",
            "training": "\n".join(f"{indent}- {word}" for word in words),
        },
    )


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Put `values` into the holes, written @name@, of a form. A line that becomes empty goes."""
    lines = (TEMPLATES / template).read_text().splitlines()
    filled = [(line, HOLE.sub(lambda hole: str(values[hole[1]]), line)) for line in lines]
    return "".join(f"{new}\n" for line, new in filled if new.strip() or not line.strip())


# --- What may stand in them ------------------------------------------------------------------------


def common_values(options: argparse.Namespace) -> dict[str, Any]:
    check("name", options.name, NAME, "up to 40 small letters, digits and -, a letter first")
    if "\n" in options.checkpoint or not options.checkpoint.startswith("/"):
        raise ValueError(f"--checkpoint {options.checkpoint!r}: expected an absolute path, the same on every node")
    for name, least in (("gpus_per_node", 0), ("cpus_per_rank", 1), ("grace", 20), ("max_restarts", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    if options.ranks_per_node is not None and (options.gpus_per_node or options.ranks_per_node < 1):
        raise ValueError("--ranks-per-node is for nodes without GPUs (--gpus-per-node 0), and at least 1")
    if seconds_of(options.time) < options.grace + START_S:
        raise ValueError(
            f"--time {options.time} must be {START_S} s more than the --grace of {options.grace} s at least"
        )
    return {
        "file": Path(options.output).name if options.output and "\n" not in options.output else "FILE",
        "name": options.name,
        "time": in_full(seconds_of(options.time)),
        "grace": options.grace,
        "save": options.grace - 10,  # the agent's own end takes a moment
        "ranks": options.gpus_per_node or options.ranks_per_node or 1,
        "threads": options.cpus_per_rank,
        "max_restarts": options.max_restarts,
    }


def training_options(options: argparse.Namespace, training: list[str]) -> list[str]:
    """Return the training's command line, once its own parser has accepted it. A wrong option exits with 2."""
    words = ["--checkpoint", options.checkpoint, "--resume", "--no-progress", *training]
    parsed = options_parser().parse_args(words)
    config = Config(**{each.name: getattr(parsed, each.name) for each in fields(Config)})
    if (config.checkpoint, config.resume) != (options.checkpoint, True):
        raise ValueError(
            "the training goes on after a stop from --checkpoint: give it before the --, and no --no-resume"
        )
    return words


def check(name: str, value: str, pattern: re.Pattern[str], expected: str) -> None:
    if not pattern.fullmatch(value):
        raise ValueError(f"--{name.replace('_', '-')} {value!r}: expected {expected}")


def refuse_others(options: argparse.Namespace, cluster: str, **defaults: Any) -> None:
    for name, default in defaults.items():
        if getattr(options, name) != default:
            raise ValueError(f"--{name.replace('_', '-')} is for --{cluster} only; leave it out")


def nodes_of(text: str) -> tuple[int, int]:
    """Return the least and the largest number of nodes."""
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    low, high = (int(found[1] or found[2]), int(found[2])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ValueError(f"--nodes {text!r}: expected a number such as 2, or MIN:MAX such as 1:4")
    return low, high


def seconds_of(text: str) -> int:
    """Return the length of a time."""
    check("time", text, TIME, "[DAYS-]HOURS:MINUTES[:SECONDS], such as 4:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in TIME.fullmatch(text).groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def in_full(seconds: int) -> str:
    """Return a time as SLURM reads it in one way only."""
    minutes, hours = seconds // 60, seconds // 3600
    return f"{hours // 24}-{hours % 24:02}:{minutes % 60:02}:{seconds % 60:02}"
