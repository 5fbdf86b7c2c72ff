"""Which files are the core of the course, and in which order do they read as a book?

Each chapter is a page: the question that the file answers, its code, and what its tests prove, in the tests' own names.

Read next: `pages.py`, the other pages that are made of the package.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from pages import write

ROOT = Path(__file__).parents[1]
# Title -> files of ddp_course/, and the tests that prove them: all of a file, or those whose names have one of the
# words. A file uses what stands before it.
CHAPTERS = {
    "Meeting": (["rendezvous"], ["test_groups: meet|come|store|disagree|claim|earlier|port|address|agent"]),
    "Groups": (["groups"], ["test_groups: place|wrong|nccl|share|backend|subgroup|block"]),
    "Collectives": (["collectives"], ["test_collectives"]),
    "The sampler": (["data/permutation", "data/sampler"], ["data/test_permutation", "data/test_sampler"]),
    "The least that keeps replicas equal": (["parallel/replicas", "parallel/naive"], ["parallel/test_ddp"]),
    "Buckets": (["parallel/bucketing", "parallel/grad_bucket"], ["parallel/test_bucketing"]),
    "DDP": (["parallel/nested", "parallel/ddp"], ["parallel/test_ddp", "parallel/test_as_torch", "parallel/test_fuzz"]),
    "SyncBatchNorm": (["parallel/syncbn"], ["parallel/test_syncbn"]),
    "Metrics": (["metrics"], ["test_metrics"]),
    "Checkpoints": (["checkpoint/file"], ["checkpoint/test_file"]),
}


def write_chapters(folder: Path) -> None:
    """Write a page for each chapter, and remove those of chapters that are gone."""
    names = [f"{number:02}_{title.lower().replace(' ', '_')}.md" for number, title in enumerate(CHAPTERS, 1)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, title in zip(names, CHAPTERS, strict=True):
        write(folder / name, chapter(title))
    for old in set(folder.glob("*.md")) - {folder / name for name in names}:
        old.unlink()


def chapter(title: str) -> str:
    """Return a chapter's page, in Markdown."""
    sources, tests = CHAPTERS[title]
    lines = ["---", "html_theme.sidebar_secondary.remove: true", "---", f"# {title}", ""]
    for source in sources:
        path = ROOT / "ddp_course" / f"{source}.py"
        lines += [f"## {source}.py: {said(path)}", "", f"```{{literalinclude}} ../../../ddp_course/{source}.py"]
        lines += [":language: python", ":class: book", "```", ""]
    lines += ["## What the tests prove", ""]
    for test in tests:
        name, _, words = test.partition(": ")
        path = ROOT / "tests" / f"{name}.py"
        lines += [f"`tests/{name}.py`: {said(path)}", ""]
        lines += [*(f"- {proof}" for proof in proofs(path) if re.search(words, proof)), ""]
    return "\n".join(lines)


def said(path: Path) -> str:
    """Return the first paragraph of a file's docstring: the question that it answers."""
    return " ".join(ast.get_docstring(ast.parse(path.read_text())).partition("\n\n")[0].split())


def proofs(path: Path) -> list[str]:
    """Return the names of a file's tests as sentences, in their order."""
    nodes = ast.walk(ast.parse(path.read_text()))
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [name.removeprefix("test_").replace("_", " ") for name in names]
