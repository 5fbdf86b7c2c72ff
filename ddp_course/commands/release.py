"""How are exercises/ and the judges' copy of the solutions generated from solutions/, and are they what it generates?

    ddp-course release              # write what is stale; a notebook that holds answers is kept, without --force
    ddp-course release --check      # write nothing; status 1 if something is stale

Read next: `grading/instructor/release.py`, what happens to one notebook.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ddp_course.grading.instructor.release import for_judges, holds_answers, released
from ddp_course.grading.paths import course_root


def main(argv: list[str]) -> int:
    """Write exercises/, or with `--check` say which of its notebooks are stale; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="ddp-course release",
        description="Generate exercises/, and the judges' copy of the solutions, from solutions/.",
        epilog="Exit status: 0 done, 1 something was kept, is stale (--check) or could not be generated.",
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when something is stale")
    parser.add_argument("--force", action="store_true", help="replace notebooks that hold answers, too")
    parser.add_argument("--root", type=Path, help="the course's folder")
    chosen = parser.parse_args(argv)
    try:
        root = chosen.root or course_root()
        texts = {source: released(source) for source in sorted(root.glob("solutions/*/*.ipynb"))}
        if not texts:
            raise RuntimeError(f"{root / 'solutions'} holds no notebooks")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    generated = {root / "exercises" / source.relative_to(root / "solutions"): text for source, text in texts.items()}
    generated[root / "judges" / "solutions.json"] = for_judges(list(texts))
    if chosen.check:
        return check(root, generated)
    return max([0, *(write(root, path, text, chosen.force) for path, text in generated.items())])


def check(root: Path, generated: dict[Path, str]) -> int:
    stale = [
        f"{path.relative_to(root)} is not what solutions/ generates"
        for path, text in generated.items()
        if old(path) != text
    ]
    strangers = set(root.glob("exercises/*/*.ipynb")) - set(generated)
    stale += [f"{path.relative_to(root)} has no source in solutions/" for path in sorted(strangers)]
    for sentence in stale:
        print(f"{sentence}; run: make exercises", file=sys.stderr)
    return 1 if stale else 0


def write(root: Path, path: Path, text: str, force: bool) -> int:
    name = path.relative_to(root)
    if old(path) == text:
        print(f"{name} is up to date")
        return 0
    if path.suffix == ".ipynb" and path.exists() and not force and holds_answers(path):
        print(f"{name} holds answers and was kept; move it away, or use --force to replace it", file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"{name} written")
    return 0


def old(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None
