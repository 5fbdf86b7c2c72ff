"""What works on the GPUs of this machine, and how fast? Runs everything that needs one, and writes one report.

    make gpu                                        without a GPU it says so, and makes the dry run
    make gpu BUDGET=540                             in so many seconds
    make gpu GPU_PYTHON=python3                     with packages that are there already, instead of .venv's
    .venv/bin/python -m benchmarks.gpu_run --dry --only tests,memory

The tests marked `gpu` come first, then the benchmarks of `gpu.py`, then the lessons, several at a time. Each part has a
limit of its own, and after each the report is written again: out/gpu/report.md for people, report.json for programs.
The dry run goes the same way on the CPU, with tiny sizes and one lesson.

Read next: `gpu.py`, the benchmarks; `gpu_report.py`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks import gpu, gpu_report, measure
from benchmarks.gpu_report import DONE, Part, read_junit, save
from ddp_course.groups import usable_cores

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider"]
TESTS = ["-m", "gpu", "--timeout=120", "-p", "no:nbval"]
LESSON = ["--nbval", "--nbval-current-env", "--nbval-sanitize-with=tests/notebooks/sanitize.cfg"]
LESSON += ["--nbval-cell-timeout=120", "--again"]
LIMITS_S = {"tests": 300.0, "benchmark": 60.0, "lesson": 400.0}  # of a benchmark: each of its cases
DRY_LESSON = "02"


def pytest_part(name: str, arguments: list[str], limit_s: float) -> Part:
    """Run pytest in a process of its own, and read what became of each test or cell."""
    if limit_s <= 1:
        return Part(name)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder:
        junit = Path(folder, "junit.xml")
        status, said = run([*PYTEST, f"--junitxml={junit}", *arguments], limit_s)
        cases = read_junit(junit.read_text()) if junit.exists() else []
    ended = "ended after its limit" if status is None else DONE if status in (0, 1) else f"ended with status {status}"
    return Part(name, ended, time.monotonic() - start, cases, "" if ended == DONE else said)


def run(command: list[str], limit_s: float) -> tuple[int | None, str]:
    """Return a command's status, None if it was ended after its limit, and the end of what it printed."""
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        told = {"stdout": out, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **told)
        status = None
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        if status is None:
            os.killpg(process.pid, signal.SIGINT)  # on which pytest still writes down what it knows
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out.seek(0)
        return status, out.read()[-3000:]


def lesson_part(path: Path, left: Callable[[float], float]) -> Part:
    """Run one lesson, within what time is left when its turn comes."""
    return pytest_part(path.stem, [*LESSON, str(path)], left(LIMITS_S["lesson"]))


def benchmark_part(name: str, blocks: int, limit_s: float) -> Part:
    """Run one of the benchmarks in this process, which itself leaves the GPUs alone."""
    if limit_s <= 1:
        return Part(name)
    start = time.monotonic()
    result = gpu.GROUPS[name](blocks, limit_s)
    figures = measure.as_json({name: result}, {}, "", False)["benchmarks"][name]
    return Part(name, DONE, time.monotonic() - start, figures=figures, table=measure.table(result))


def files_with_gpu_tests() -> list[str]:
    """Only these are collected: what the other files import may not be there."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]


def parts(dry: bool, only: list[str], deadline: float) -> Iterator[Part]:
    """Run everything that is wanted, and yield each part when it has ended."""

    def left(limit_s: float) -> float:
        return min(limit_s, deadline - time.monotonic() - 15)  # to end what runs, and to write

    # Ranks then share a GPU if there is one only. An NCCL before 2.30 does not know the variable, and they use gloo.
    sharing = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if torch.cuda.device_count() == 1 else {}
    with patch.dict(os.environ, sharing):
        if "tests" in only:
            yield pytest_part("tests", [*TESTS, *files_with_gpu_tests()], left(LIMITS_S["tests"]))
        for name in gpu.GROUPS:
            if name in only:
                yield benchmark_part(name, 2 if dry else 11, left(LIMITS_S["benchmark"]))
    lacking = [name for name in ("nbval", "ipykernel", "gymnasium", "matplotlib") if find_spec(name) is None]
    if "lessons" in only and lacking:
        yield Part("lessons", f"not run: {', '.join(lacking)} not installed")
    elif "lessons" in only:
        paths = sorted((ROOT / "notebooks").glob(f"{DRY_LESSON if dry else ''}*.ipynb"))
        with ThreadPoolExecutor(max(1, usable_cores() // 4)) as several:
            running = [several.submit(lesson_part, path, left) for path in paths]
            yield from (each.result() for each in as_completed(running))


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; the status is 1 if anything failed."""
    names = ["tests", *gpu.GROUPS, "lessons"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=3600, help="seconds for everything (default 3600)")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--only", type=lambda text: text.split(","), default=names, help=f"of {','.join(names)}")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="folder (default out/gpu)")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - set(names):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {','.join(names)}")
    deadline = time.monotonic() + options.budget
    report = {"schema": 1, "started": datetime.now(UTC).isoformat(timespec="seconds"), "dry": options.dry}
    report["machine"] = gpu_report.machine()
    if report["machine"]["GPUs"] == "none" and not options.dry:
        print("There is no GPU here: this is the dry run, on the CPU (--dry).")
        report["dry"] = True
    if report["dry"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found: list[Part] = []
    for part in parts(report["dry"], options.only, deadline):
        found.append(part)
        print(f"{part.name}: {part.ended}, {part.seconds:.0f} s, {len(part.failures)} failed", flush=True)
        save(report, found, options.out)
    print(f"written: {options.out / 'report.md'} and report.json")
    return 1 if any(part.failures for part in found) else 0


if __name__ == "__main__":
    sys.exit(main())
