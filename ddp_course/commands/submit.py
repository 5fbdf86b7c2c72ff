"""How is a training script handed to a cluster?

    ddp-course submit --slurm --nodes 2 --gpus-per-node 4 -- python train.py run7.pt > run7.sbatch
    ddp-course submit --k8s --nodes 1:4 --image registry/course:1 -- python train.py /checkpoints/run7.pt > run7.yaml

Both clusters do the same three things: start one torchrun agent on each node, tell where the agents meet, and send
SIGTERM before they take a node away. So each needs only a form that is filled in; the forms are in `templates/`, to be
read. Every value is checked and quoted: a typing error shows here, and not after a night in the queue.

The script is started again by the same line after each stop. So it has to save when SIGTERM comes, and to resume from
what it finds, as `programs/train_resumable.py` does.

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
from pathlib import Path
from typing import Any

from ddp_course.cli import in_words

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
    words = argv[argv.index("--") + 1 :] if "--" in argv else []
    parser = submit_parser()
    options = parser.parse_args(argv[: argv.index("--")] if "--" in argv else argv)
    try:
        text = slurm_script(options, words) if options.slurm else kubernetes_job(options, words)
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
        usage="%(prog)s (--slurm | --k8s) [options] -- python SCRIPT [its options]",
        description="Write a job for a cluster: an sbatch script, or a PyTorchJob. What follows -- runs on each rank; "
        "after a stop the same line runs again, so the script has to save on SIGTERM and to resume by itself.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cluster = parser.add_mutually_exclusive_group(required=True)
    cluster.add_argument("--slurm", action="store_true", help="a script for sbatch")
    cluster.add_argument("--k8s", action="store_true", help="a PyTorchJob of Kubeflow's training operator 1 (legacy)")
    parser.add_argument("--output", metavar="FILE", help="where to write (default: the standard output)")
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
    k8s.add_argument("--image", help="one with torch and the script in it; required")
    k8s.add_argument("--claim", default="checkpoints", help="a volume claim that all nodes can write to")
    k8s.add_argument("--mount", default="/checkpoints", metavar="FOLDER", help="where it is mounted; absolute")
    k8s.add_argument("--memory", default="16Gi", help="of a pod")
    k8s.add_argument("--shared-memory", default="4Gi", help="size of /dev/shm; counts as memory")
    return parser


# --- The two forms ---------------------------------------------------------------------------------


def slurm_script(options: argparse.Namespace, words: list[str]) -> str:
    """Return an sbatch script: it runs an agent on each node, has the ranks save in time, and queues again.

    Raises:
        ValueError: a value cannot be meant; names it, and what is expected.
    """
    low, high = nodes_of(options.nodes)
    if low != high:
        raise ValueError(f"--nodes {options.nodes}: SLURM gives a fixed number; say one, such as {high}")
    k8s = {"image": None, "claim": "checkpoints", "mount": "/checkpoints", "memory": "16Gi", "shared_memory": "4Gi"}
    refuse_others(options, "k8s", **k8s)
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
    values["script"] = shlex.join(script_of(words))
    values["cpus"] = options.cpus_per_rank * values["ranks"]
    return fill("job.sbatch", values | {"nodes": high})


def kubernetes_job(options: argparse.Namespace, words: list[str]) -> str:
    """Return a PyTorchJob in YAML.

    Raises:
        ValueError: a value cannot be meant; names it, and what is expected.
    """
    low, high = nodes_of(options.nodes)
    refuse_others(options, "slurm", partition=None, account=None)
    if not options.image:
        raise ValueError("--k8s needs an --image that has torch and the script in it")
    check("image", options.image, WORD, "registry/name:tag")
    if "\n" in options.mount or not options.mount.startswith("/"):
        raise ValueError(f"--mount {options.mount!r}: expected an absolute path")
    check("claim", options.claim, NAME, "the name of a PersistentVolumeClaim")
    for name in ("memory", "shared_memory"):
        check(name, getattr(options, name), QUANTITY, "an amount such as 16Gi")
    values = common_values(options)
    indent = " " * 16
    # In a pod's arguments $(NAME) would be replaced, and $$ stands for $.
    quoted = (json.dumps(word.replace("$", "$$")) for word in script_of(words))
    return fill(
        "pytorchjob.yaml",
        values
        | {
            "min_nodes": low,
            "nodes": high,
            "seconds": seconds_of(options.time),
            "image": json.dumps(options.image),
            "python": json.dumps(options.python or "python"),
            "mount": json.dumps(options.mount),
            "claim": options.claim,
            "memory": options.memory,
            "shared_memory": options.shared_memory,
            "cpus": options.cpus_per_rank * values["ranks"],
            "gpus": f", nvidia.com/gpu: {options.gpus_per_node}" if options.gpus_per_node else "",
            "script": "\n".join(f"{indent}- {word}" for word in quoted),
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


def script_of(words: list[str]) -> list[str]:
    """Return what torchrun starts on each rank: a script or `-m module`, with its options.

    Raises:
        ValueError: it is neither; says what is expected.
    """
    given = shlex.join(words)
    if words and Path(words[0]).name == "torchrun":
        raise ValueError(f"-- {given}: leave torchrun and its options out; the job starts it: -- python train.py")
    if words and re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        words = words[1:]  # which one is said by --python
    if not words:
        raise ValueError("what runs on each rank? Give it after --, such as: -- python train.py run.pt")
    if not words[0].endswith(".py") and not (words[0] == "-m" and len(words) > 1):
        raise ValueError(f"-- {given}: expected python and a script, such as: -- python train.py run.pt")
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
