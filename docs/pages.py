"""The parts of the site that are made of what the course has already: errors, the reference, terms, pictures.

Read next: `conf.py`, which calls this.
"""

import json
import pkgutil
import re
from importlib import import_module
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref

import ddp_course
from ddp_course.diagnose.causes import CAUSES
from ddp_course.diagnose.faults.catalogue import FAULTS

LAB = "[failure lab](/notebooks/12_failure_lab.ipynb)"
PARTS = ("launcher", "data", "parallel", "checkpoint", "train", "scaling", "beyond", "diagnose", "rehearsal", "grading")


def write_errors(path: Path) -> None:
    """Write a page of error texts and of silent faults, each with its cause, its cure, and where to see it."""
    lines = [
        "# What does this error mean?",
        "Search this page for a few words of your error. `ddp-course read LOGS` does the same for the logs of a job.",
        f"Each fault with a command can be provoked, diagnosed and fixed on your machine; the {LAB} explains them.\n",
        "## Error texts\n",
    ]
    for cause in CAUSES:
        more = f"`ddp-course faults {cause.name}` provokes it." if cause.name in FAULTS else ""
        lines += [f"### {_words(cause.words)}\n", f"{cause.cure[0].upper()}{cause.cure[1:]}. {more}\n"]
    lines += ["## Faults, loud and silent\n"]
    for fault in FAULTS.values():
        lines += [f"### {fault.title}\n", f"**You see:** {fault.symptom}\n", f"**Cause:** {fault.cause}\n"]
        lines += [f"**Cure:** {fault.cure}\n", f"**Try it:** `ddp-course faults {fault.name}`\n"]
    _write(path, lines)


def _words(pattern: str) -> str:
    """A pattern as a person would say it: its first alternative, with gaps."""
    first = re.split(r"(?<!\\)\|", re.sub(r"^\(\?[a-z]+\)|\(\?P<\w+>|\(\?[:!=<]+", "(", pattern))[0]
    plain = re.sub(r"\\[bBsSdwW][+*]?|\.[*+]\??|\[[^\]]*\][+*?]?|(?<!\\)[()^$?]", " … ", first)
    return re.sub(r"(\s*…\s*)+", " … ", re.sub(r"\\(.)", r"\1", plain)).strip(" …")


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
        title = "The package's own files" if page == "single" else f"`ddp_course.{page}`"
        lines = [f"# {title}\n"]
        for module in modules:
            # A package repeats what its files have, and so does a file's list of names.
            inner = "   :no-index:" if module in names else "   :members:\n   :ignore-module-all:"
            lines += [] if module in names else [f"## `{module}`\n"]
            lines += ["```{eval-rst}", f".. automodule:: {module}", inner, "```\n"]
        _write(folder / f"{page}.md", lines)


def _write(path: Path, lines: list[str]) -> None:
    """Write a page if it has changed, so that an unchanged one is not read again."""
    path.parent.mkdir(exist_ok=True)
    text = "\n".join(lines)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


_SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Yields):$")
_PARAGRAPH = re.compile(r"(Collective|Source|Read next|Left out on purpose|Args, Returns, Raises): ")


def read_docstring(app, what, name, thing, options, lines: list[str]) -> None:
    """Say to Sphinx what our docstrings leave to the reader's eye: code, names, and short sections of one paragraph."""
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
        line if line is None or line.startswith(" ") and not section else code.sub(_as_code, line)
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
