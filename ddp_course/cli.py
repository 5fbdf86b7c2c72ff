"""The command `ddp-course`: one word for each thing that a terminal is good for.

Each word has a file in `commands/`, which reads the options and is imported when its word is said: a learner without
nbgrader can check answers, and a machine without a working torchvision can see the doctor.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib import import_module
from importlib.metadata import version

# Word, and file of `commands/` -> what it is for.
COMMANDS = {
    "doctor": "Say what is missing or wrong on this machine, and how to fix it.",
    "lab": "Open JupyterLab on the first lesson.",
    "new": "Copy lessons and exercises into a folder of yours.",
    "lint": "Read your own DDP program and say what is wrong with it.",
    "rehearse": "Run your own DDP program on ranks of this machine and say what is wrong with it.",
    "run": "Run your own program as it is, and say which rank and line when it hangs or dies.",
    "read": "Read the logs of a job that failed and say what it died of.",
    "faults": "Provoke a failure of distributed training on purpose, and see it diagnosed and fixed.",
    "drill": "Solve an incident from the logs that a job leaves.",
    "problems": "Solve small problems with numeric answers, with other numbers each time.",
    "plan": "Say which strategy fits a model into the memory of your GPUs, and why.",
    "submit": "Write the job file for a cluster: SLURM or Kubernetes.",
    "check": "Check your answers to the exercises of a lesson.",
    "hint": "Print the hint of an exercise.",
    "solution": "Print one right answer of an exercise, after a try of your own.",
    "progress": "Show the exercises of each lesson, and your points so far.",
    "grade": "Grade the submissions of a class.",
    "release": "Generate the notebooks of exercises/ from solutions/.",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    words = "\n".join(f"  {word:10} {purpose}" for word, purpose in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="ddp-course",
        usage="%(prog)s COMMAND [options]",
        description=f"Learn distributed data parallel training.\n\ncommands:\n{words}",
        epilog="`ddp-course COMMAND --help` shows the options of a command.\n\nexit status: 0 all is well, 1 the thing "
        "itself failed (a fault is found, points are missing),\n2 the command was not understood or has nothing to "
        "work on, 130 ended by Ctrl-C",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('ddp-course')}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    any_locale()
    command = parser.parse_args(argv[:1]).command  # the rest is the command's own
    try:
        status = import_module(f"ddp_course.commands.{command}").main(argv[1:])
        sys.stdout.flush()
        return status
    except ModuleNotFoundError as error:
        if str(error.name).startswith("ddp_course"):
            raise  # a mistake of ours, not a missing package
        print(f"ddp-course {command} needs {error.name}, which is not installed; run `make env`", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who reads, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python would still write at its end
        return 141
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.filename is None:
            raise  # not of a file: a mistake of ours, not the user's
        print(f"{error.filename}: {in_words(error)}", file=sys.stderr)
        return 2


def in_words(error: Exception) -> str:
    """Return why a file could not be read or written, as every command says it."""
    if isinstance(error, UnicodeDecodeError):
        return "this is no text: it is not encoded as UTF-8"
    if isinstance(error, SyntaxError):
        return f"this is no Python: line {error.lineno}, {error.msg}"
    words = (said for kind, said in _WORDS.items() if isinstance(error, kind))
    return next(words, None) or getattr(error, "strerror", None) or str(error)


_WORDS = {
    FileNotFoundError: "there is no such file or folder",
    FileExistsError: "there is a file of this name already",
    IsADirectoryError: "this is a folder, not a file",
    NotADirectoryError: "a folder in this path is a file",
    PermissionError: "you have no permission",
}


def any_locale() -> None:
    """Have the standard streams name a character that the terminal's encoding has not, instead of failing on it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # and not what a test or a notebook has put there
            stream.reconfigure(errors="namereplace")


if __name__ == "__main__":
    sys.exit(main())
