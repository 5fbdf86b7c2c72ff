"""The command `ddp-course faults`: what goes wrong in distributed training, to be seen and fixed at home.

Without a name it lists the faults. With one it provokes it, on ranks of this machine: what a person sees, what the
report says, what a tool makes of the report, the cure, and the fixed program.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import sys
import textwrap
from dataclasses import asdict

from ddp_course.diagnose.faults.catalogue import FAULTS, INCIDENTS
from ddp_course.diagnose.faults.fault import Diagnosis, Fault
from ddp_course.diagnose.faults.incidents import Started
from ddp_course.diagnose.faults.rehearsed import Rehearsed


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="ddp-course faults",
        description="List the faults of distributed training, or provoke some.",
        epilog="Exit status: 0 every fault provoked was named, and none in the fixed programs; 1 not so.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the faults to provoke; `all` for each of them")
    parser.add_argument("--code", action="store_true", help="show both programs instead of running them")
    parser.add_argument("--json", action="store_true", help="one JSON object for each fault")
    options = parser.parse_args(argv)
    known = FAULTS | INCIDENTS
    if unknown := [name for name in options.names if name not in known and name != "all"]:
        parser.error(f"no fault is called {unknown[0]!r}; `ddp-course faults` lists them")
    chosen = list(known) if "all" in options.names else options.names
    if not chosen:
        print(listing())
        return 0
    if options.code:
        print("\n\n".join(code(known[name]) for name in chosen))
        return 0
    return max([run(known[name], options.json) for name in chosen])


def listing() -> str:
    """One line a fault, and below them one an incident."""
    width = max(map(len, FAULTS | INCIDENTS))
    faults, incidents = (
        [f"{each.name:{width}}  {each.title}" for each in kind.values()] for kind in (FAULTS, INCIDENTS)
    )
    return "\n".join([*faults, "", "real incidents", "", *incidents])


def code(fault: Fault) -> str:
    """The broken program and the fixed one; of one that is a text, all of it with the lines that differ."""
    if isinstance(fault.provoke, Rehearsed | Started):
        broken, fixed = fault.provoke.text.splitlines(), fault.fix.text.splitlines()
        return "\n".join(difflib.unified_diff(broken, fixed, "broken", "fixed", lineterm="", n=len(broken)))
    return f"{inspect.getsource(fault.provoke)}\n\n{inspect.getsource(fault.fix)}"


def run(fault: Fault, as_json: bool = False) -> int:
    """Provoke and fix one fault and say what was found."""
    if not as_json:
        print(before(fault), flush=True)
    how = "is rehearsed on 1 rank and on 2" if isinstance(fault.provoke, Rehearsed) else "runs"
    print(f"faults: the broken program {how}", file=sys.stderr, flush=True)
    broken = fault.provoke()
    print(f"faults: the fixed program {how}", file=sys.stderr, flush=True)
    fixed = fault.fix()
    if as_json:
        print(json.dumps({"name": fault.name, "broken": asdict(broken), "fixed": asdict(fixed)}))
    else:
        print(after(fault, broken, fixed), flush=True)
    return 0 if broken.fault == fault.name and fixed.fault is None else 1


def before(fault: Fault) -> str:
    return "\n".join([f"{fault.name}: {fault.title}", "", *said("what you see", fault.symptom)])


def after(fault: Fault, broken: Diagnosis, fixed: Diagnosis) -> str:
    """The report, the diagnosis, the cause, the cure and the fixed run."""
    who = "" if broken.rank is None else f", rank {broken.rank}"
    lines = []
    if broken.report:
        lines += ["the report", textwrap.indent(broken.report, "    "), ""]
    lines += said("diagnosis", f"{broken.fault}{who}, {broken.seconds:.1f} s after the start: {broken.evidence}")
    lines += [*said("cause", fault.cause), *said("cure", fault.cure), *said("met at", fault.met_at)]
    return "\n".join([*lines, *said("fixed", fixed.evidence if fixed.fault is None else f"still {fixed.fault}")])


def said(word: str, sentence: str) -> list[str]:
    """A heading, and what it says, in lines of a terminal's width."""
    width = {"width": 100, "initial_indent": "    ", "subsequent_indent": "    "}
    return [word, textwrap.fill(sentence, break_long_words=False, break_on_hyphens=False, **width), ""]
