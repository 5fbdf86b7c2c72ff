"""The parts of the site that are made of what the course has already: errors, the reference, terms, pictures.

Read next: `conf.py`, which calls this.
"""

import json
import pkgutil
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import errors
from docutils import nodes
from sphinx.addnodes import pending_xref

import ddp_course

PARTS = ("launcher", "data", "parallel", "checkpoint", "scaling", "beyond", "diagnose", "rehearsal", "grading")


def write_errors(path: Path) -> None:
    """Write a page of hangs, error texts and silent faults, each with its cause, its cure, and where to see it."""
    write(path, "\n".join(errors.page()))


def write_reference(folder: Path) -> None:
    """Write a page for each part of the package, made of its docstrings."""
    names = [f"ddp_course.{part}" for part in PARTS]
    single = [f"ddp_course.{m.name}" for m in pkgutil.iter_modules(ddp_course.__path__) if not m.ispkg]
    pages = {"single": sorted(single)}
    for name in names:
        package = import_module(name)
        inner = pkgutil.walk_packages(package.__path__, f"{name}.")
        pages[name.rpartition(".")[2]] = [name, *sorted(m.name for m in inner if not m.ispkg)]
    for page, modules in pages.items():
        title = "`ddp_course`: groups, collectives, metrics, ..." if page == "single" else f"`ddp_course.{page}`"
        lines = [f"# {title}\n"]
        for module in modules:
            # A package repeats what its files have, and so does a file's list of names.
            inner = "   :no-index:" if module in names else "   :members:\n   :ignore-module-all:"
            lines += [] if module in names else [f"## `{module}`\n"]
            lines += ["```{eval-rst}", f".. automodule:: {module}", inner, "```\n"]
        write(folder / f"{page}.md", "\n".join(lines))
    for old in folder.glob("*.md"):
        if old.stem not in {*pages, "errors"}:  # of a part that is gone
            old.unlink()


def write(path: Path, text: str) -> None:
    """Write a page if it has changed, so that an unchanged one is not read again."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


_SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Yields):$")
# Each leads to the section of the reference that says what it means.
_COLLECTIVE = ":ref:`Collective: <what-collective-means>`"
_PARAGRAPH = re.compile(r"(Collective|Source|Read next|Left out on purpose|(?:Args, )?Returns, Raises): ")


def read_docstring(app, what, name, thing, options, lines: list[str]) -> None:
    """Say to Sphinx what our docstrings leave to the reader's eye: code, names, and short sections of one paragraph."""
    if lines and lines[0].startswith("Alias for field number"):  # of a named tuple: nobody wrote it
        lines.clear()
    told, section, short = [], False, False
    for line in lines:
        indented = line.startswith(" ")
        if not indented and line:
            section, short = bool(_SECTION.match(line)), bool(_PARAGRAPH.match(line))
        if short and line:
            told += ["" if not indented else None, _PARAGRAPH.sub(r"**\1:** ", line.strip())]
        elif indented and not section and told and not told[-1] and not any(each.startswith(" ") for each in told[-2:]):
            told += ["::", "", line]
        else:
            told.append(line)
    code = re.compile(r"(?<!`)`([^`]+)`(\w?)(?!`)")
    lines[:] = [
        line
        if line is None or line.startswith(" ") and not section
        else code.sub(_as_code, line).replace("**Collective:**", _COLLECTIVE)
        for line in told
        if line is not None
    ]


def _as_code(found: re.Match) -> str:
    return f"``{found[1]}``" + (f"\\ {found[2]}" if found[2] else "")


def describe_pictures(app, doctree) -> None:
    """Give each picture of a lesson the text that `draw` has stored with it."""
    source = Path(app.env.doc2path(app.env.docname))
    if source.suffix != ".ipynb":
        return
    cells = json.loads(source.read_text())["cells"]
    outputs = (output for cell in cells for output in cell.get("outputs", []))
    texts = [
        o.get("metadata", {}).get("image/png", {}).get("alt", "") for o in outputs if "image/png" in o.get("data", {})
    ]
    pictures = [image for image in doctree.findall(nodes.image) if _is_output(image)]
    for image, text in zip(pictures, texts, strict=True):
        image["alt"] = text


def _is_output(image: nodes.image) -> bool:
    node = image.parent
    while node is not None and "cell_output" not in node.get("classes", []):
        node = node.parent
    return node is not None


def link_terms(app, doctree) -> None:
    """Link a lesson's first use of a term, which is in bold there, to the glossary."""
    if not app.env.docname.startswith("notebooks/"):
        return
    glossary = (Path(__file__).parent / "glossary.md").read_text()
    terms = {line.lower(): line for line in re.findall(r"^(\S.*)\n  \S", glossary, re.MULTILINE)}
    for strong in list(doctree.findall(nodes.strong)):
        if term := terms.pop(strong.astext().lower().rstrip("s.:,"), None) or terms.pop(strong.astext().lower(), None):
            link = pending_xref(
                "", reftype="term", refdomain="std", reftarget=term, refdoc=app.env.docname, refexplicit=True
            )
            strong.replace_self(link)
            link += strong


LESSONS = {path.name[:2]: path for path in sorted((Path(__file__).parents[1] / "notebooks").glob("[0-9]*.ipynb"))}


def link_lessons(app, docname: str, source: list[str]) -> None:
    """End each entry of the glossary with its lesson, and link what these pages call "lesson 12"."""
    if docname == "docs/glossary":
        source[0] = re.sub(r"^(\S.*)\n  \S.*", _with_lesson, source[0], flags=re.MULTILINE)
    if docname in ("docs/cheatsheet", "docs/glossary", "docs/made/errors"):
        not_linked = r"(?<!\[)\b[Ll]esson (\d\d)\b"
        source[0] = re.sub(not_linked, lambda found: f"[{found[0]}](/notebooks/{LESSONS[found[1]].name})", source[0])


def _with_lesson(entry: re.Match) -> str:
    """Add the first lesson that has the term in bold; where none has, the first that has it at all."""
    texts, term = _texts_of_lessons(), entry[1].lower()
    return f"{entry[0]} Lesson {next(n for word in (f'**{term}', term) for n in texts if word in texts[n])}."


@cache
def _texts_of_lessons() -> dict[str, str]:
    return {number: path.read_text().lower() for number, path in LESSONS.items()}
