"""Do imports point down the rooms of the house, without a circle, and does every file named in a text exist?"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddp_course"

# From top to bottom; rooms of one line may import each other. A room is a folder or a file of the package.
ORDER = (
    ("cli", "commands"),
    ("draw",),
    ("judges",),
    ("grading",),
    ("observe",),
    ("rehearsal", "diagnose", "problems"),
    ("scaling",),
    ("beyond",),
    ("checkpoint",),
    ("parallel", "data"),
    ("gpt", "models", "metrics"),
    ("launcher",),
    ("collectives", "groups", "rendezvous"),
)
HEIGHT = {room: -depth for depth, rooms in enumerate(ORDER) for room in rooms}
ELSEWHERE = {"ddp_course": "launcher"}  # which it hands out

# A file or folder of ours, or of a package that a text names with its path.
NAMED = re.compile(r"`([\w./-]+(?:\.py|/))`|(?<![\w./`<-])(\w+/[\w/]+\.py)\b")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(*folders: str) -> dict[str, Path]:
    return {module_of(path): path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}


def room_of(module: str) -> str:
    top, *rest = module.split(".")
    return ELSEWHERE.get(module) or (top if top == "judges" else rest[0])


@cache
def imports() -> dict[str, dict[str, str]]:
    """Module -> the modules of ours that it imports, inside functions too, each with the file and line that does."""
    ours = modules("ddp_course", "judges")
    return {module: dict(imported(path, ours)) for module, path in ours.items()}


def imported(path: Path, ours: dict[str, Path]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{each.name}" for each in node.names]
            names = [name if name in ours else node.module for name in inside]
        yield from ((name, f"{path.relative_to(ROOT)}:{node.lineno}") for name in names if name in ours)


def test_every_file_has_a_room():
    assert {room_of(module) for module in imports()} == set(HEIGHT)
    assert len(list(PACKAGE.glob("*.py"))) <= 9


def test_imports_point_down():
    up = [
        f"{where} imports {target}, which is above it"
        for module, targets in imports().items()
        for target, where in targets.items()
        if HEIGHT[room_of(target)] > HEIGHT[room_of(module)]
    ]
    assert not up, "\n".join(up)


def test_imports_make_no_circle():
    circles = [" -> ".join(circle) for circle in (circle_from(module) for module in imports()) if circle]
    assert not circles, "\n".join(circles)


def circle_from(start: str) -> list[str]:
    """Return the lines of code on a way from a module back to itself, or nothing."""
    ways, seen = [(start, [])], set()
    while ways:
        module, way = ways.pop()
        for target, where in imports()[module].items():
            if target == start:
                return [*way, where]
            if target not in seen:
                seen.add(target)
                ways.append((target, [*way, where]))
    return []


def test_only_the_registry_reaches_the_judges():
    reaching = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"""^\s*(from|import) judges|["']judges\.""", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert reaching == {"grading/registry.py"}


def test_options_are_read_in_commands_alone():
    readers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^\s*(from|import) argparse", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {name for name in readers if not name.startswith("commands/")} == {"cli.py"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("folder", ["ddp_course", "judges", "benchmarks"])
def test_every_module_is_what_its_full_name_gives(folder):
    hidden = []
    for name in modules(folder):
        if name.endswith("__main__"):
            continue  # to be run, not imported
        module = import_module(name)
        above, _, own = name.rpartition(".")
        if above and getattr(import_module(above), own, module) is not module:
            hidden.append(f"{name} is hidden by a {type(getattr(import_module(above), own)).__name__} of {above}")
    assert not hidden, "\n".join(hidden)


def test_the_files_that_texts_name_exist():
    missing = [
        f"{path.relative_to(ROOT)}:{number} names {name}, which does not exist"
        for path in modules("ddp_course", "judges", "benchmarks").values()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for name in (quoted or bare for quoted, bare in NAMED.findall(line))
        if not exists(name, path.parent)
    ]
    assert not missing, "\n".join(missing)


def exists(name: str, folder: Path) -> bool:
    """Look beside the file that names it, in the folders above, in the package, and in a package installed here."""
    ours = [folder, *(above for above in folder.parents if above.is_relative_to(ROOT)), PACKAGE]
    top, slash, rest = name.partition("/")
    theirs = find_spec(top) if slash and rest and top.isidentifier() else None
    return any((base / name).exists() for base in ours) or bool(
        theirs and theirs.origin and (Path(theirs.origin).parent / rest).exists()
    )
