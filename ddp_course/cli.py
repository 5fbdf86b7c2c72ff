"""The command `ddp-course`: one word for each thing that a terminal is good for.

Each command reads its own options, and what it needs is imported when it is called: a learner without nbgrader can
train, and a machine without a working torchvision can see the doctor.

Exit status: 0 all is well, 1 the thing itself failed, 2 the command was not understood, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

COURSE = Path(__file__).resolve().parents[1]
FIRST_LESSON = Path("notebooks", "00_start_here.ipynb")


def run_doctor(argv: list[str]) -> int:
    from ddp_course.diagnose.doctor import main

    return main(argv)


def run_train(argv: list[str]) -> int:
    from ddp_course.commands.train import main

    return main(argv)


def run_faults(argv: list[str]) -> int:
    from ddp_course.commands.faults import main

    return main(argv)


def run_scale(argv: list[str]) -> int:
    from ddp_course.commands.scale import main

    return main(argv)


def run_plan(argv: list[str]) -> int:
    from ddp_course.beyond.plan import main

    return main(argv)


def run_submit(argv: list[str]) -> int:
    from ddp_course.commands.submit import main

    return main(argv)


def run_check(argv: list[str]) -> int:
    from ddp_course.commands import grade as cli

    parser = argparse.ArgumentParser(prog="ddp-course check", description=COMMANDS["check"][1])
    cli.add_check_arguments(parser)
    return cli.run_check(parser.parse_args(argv))


def run_progress(argv: list[str]) -> int:
    from ddp_course.commands import grade as cli

    parser = argparse.ArgumentParser(prog="ddp-course progress", description=COMMANDS["progress"][1])
    cli.add_progress_arguments(parser)
    return cli.run_progress(parser.parse_args(argv))


def run_grade(argv: list[str]) -> int:
    from ddp_course.commands import grade as cli

    parser = argparse.ArgumentParser(prog="ddp-course grade", description=COMMANDS["grade"][1])
    cli.add_grade_arguments(parser)
    return cli.run_grade(parser.parse_args(argv))


def run_lab(argv: list[str]) -> int:
    """Become JupyterLab. It prints its address with the token, and Ctrl-C reaches it directly."""
    parser = argparse.ArgumentParser(prog="ddp-course lab", description=COMMANDS["lab"][1])
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    options = parser.parse_args(argv)
    course = next((folder for folder in (Path.cwd(), COURSE) if (folder / FIRST_LESSON).exists()), None)
    if course is None:
        return fail(f"there is no {FIRST_LESSON} here or in {COURSE}; run this in a checkout of the course")
    if importlib.util.find_spec("jupyterlab") is None:
        return fail("JupyterLab is not installed; run `make env`, or pip install 'ddp-course[course]'")
    os.chdir(course)  # served whole: lessons and exercises
    # What a terminal in JupyterLab should find: this environment's ddp-course and torchrun.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    sys.stdout.flush()
    os.execv(sys.executable, lab_command(options.no_browser, as_root=os.geteuid() == 0))


def lab_command(no_browser: bool, as_root: bool) -> list[str]:
    """Return the command line: loopback only, with the token that Jupyter makes up."""
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", "--log-level=ERROR"]
    command.append(f"--LabApp.default_url=/lab/tree/{FIRST_LESSON.as_posix()}")
    return command + ["--no-browser"] * no_browser + ["--allow-root"] * as_root


# Word -> what runs it, and what it is for.
COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "doctor": (run_doctor, "Say what is missing or wrong on this machine, and how to mend it."),
    "lab": (run_lab, "Open JupyterLab on the first lesson."),
    "train": (run_train, "Train a network on several ranks."),
    "faults": (run_faults, "Provoke a failure of distributed training on purpose, and see it diagnosed and mended."),
    "scale": (run_scale, "Measure what more ranks bring on this machine, and where the rest of the time goes."),
    "plan": (run_plan, "Say which strategy fits a model into the memory of your GPUs, and why."),
    "submit": (run_submit, "Write the job file for a cluster: SLURM or Kubernetes."),
    "check": (run_check, "Check your answers to the exercises of a lesson."),
    "progress": (run_progress, "Show the exercises of each lesson, and your points so far."),
    "grade": (run_grade, "Grade the submissions of a class."),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    words = "\n".join(f"  {word:8} {purpose}" for word, (_, purpose) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="ddp-course",
        usage="%(prog)s COMMAND [options]",
        description=f"Learn distributed data parallel training.\n\ncommands:\n{words}",
        epilog="`ddp-course COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    command = parser.parse_args(argv[:1]).command  # the rest is the command's own
    try:
        return COMMANDS[command][0](argv[1:])
    except ModuleNotFoundError as error:
        if str(error.name).startswith("ddp_course"):
            raise  # a mistake of ours, not a missing package
        return fail(f"ddp-course {command} needs {error.name}, which is not installed; run `make env`")
    except KeyboardInterrupt:
        return 130


def fail(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
