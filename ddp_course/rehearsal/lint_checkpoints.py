"""Rules: does a rank load what another has finished saving?

Read next: `lint_startup.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_course.rehearsal.parsed import last_name, name_of, words_in
from ddp_course.rehearsal.source import COLLECTIVES, Found, Source

MEETING = COLLECTIVES | {"DistributedDataParallel", "DDP"}
COMMON = {"self", "os", "path", "join", "args", "cfg", "config", "Path", "str"}


def early_load(source: Source) -> Found:
    """A load by all ranks after a save by one, and nothing between them at which the ranks meet."""
    told = set()
    for body in [*source.all(ast.FunctionDef), source.tree]:
        saved = None
        for what, call in _events(source, body):
            if what == "meet":
                saved = None
            elif what == "save":
                saved = call
            elif saved is not None and call not in told and _one_file(saved, call):
                told.add(call)
                own = source.function_of(saved)
                early = [
                    each
                    for each in source.named("barrier")
                    if own and source.function_of(each) is own and each.lineno < saved.lineno
                ]
                where, seen = (
                    (early[0], "the barrier stands before it") if early else (call, "no barrier stands between")
                )
                yield where, f"rank 0 saves at line {saved.lineno}, a load is at line {call.lineno}, and {seen}"


def _events(source: Source, body: ast.AST, seen: frozenset = frozenset()) -> Iterator[tuple[str, ast.Call]]:
    """The saves by one rank, loads by all and meetings of a function, in the order of lines, through what it calls."""
    calls = [each for each in ast.walk(body) if isinstance(each, ast.Call) and _own(source, each, body)]
    for call in sorted(calls, key=lambda each: (each.lineno, each.col_offset)):
        function = source.functions.get(last_name(call))
        if last_name(call) in MEETING or (last_name(call) == "backward" and source.wrapped):
            yield "meet", call
        elif name_of(call) in ("torch.save", "torch.load"):
            one = source.one_rank_only(call)
            if one == (last_name(call) == "save"):
                yield last_name(call), call
        elif function and function not in seen and len(seen) < 5:
            guarded = source.one_rank_only(call)
            for what, inner in _events(source, function, seen | {function}):
                if not (what == "load" and guarded):
                    yield what, inner


def _own(source: Source, call: ast.Call, body: ast.AST) -> bool:
    """Whether a call is made where the function runs, not in one that is defined inside it."""
    inside = source.function_of(call)
    return inside is body or (inside is None and body is source.tree)


def _one_file(save: ast.Call, load: ast.Call) -> bool:
    paths = [call.args[place] for call, place in ((save, 1), (load, 0)) if len(call.args) > place]
    words = [words_in(path) - COMMON for path in paths]
    return len(words) < 2 or not all(words) or bool(words[0] & words[1])


def inexact_resume(source: Source) -> Found:
    """A program that goes on at a saved epoch with an optimizer or a schedule that begins again."""
    counters = [node for node in source.all(ast.Subscript) if isinstance(node.slice, ast.Constant)
                and str(node.slice.value) in ("epoch", "step", "global_step", "iteration")]  # fmt: skip
    if not source.named("load") or not any(
        isinstance(source.parent[node], ast.Assign | ast.BinOp) for node in counters
    ):
        return
    loaded = {_owner(call) for call in source.named("load_state_dict")}
    saved = {_owner(call) for call in source.named("state_dict")}
    optimizers = {last_name(target) for node in source.all(ast.Assign) for target in node.targets
                  if isinstance(node.value, ast.Call) and ".optim." in f".{name_of(node.value)}"
                  and "lr_scheduler" not in name_of(node.value)}  # fmt: skip
    model = next((call for call in source.named("load_state_dict") if _owner(call) not in optimizers), None)
    each_of_several = {each.id for loop in (*source.all(ast.For), *source.all(ast.comprehension))
                       for each in ast.walk(loop.target) if isinstance(each, ast.Name)}  # fmt: skip
    if model is None or loaded & each_of_several:  # a loop over all that has a state
        return
    if optimizers and not optimizers & loaded:
        yield model, f"the weights come back, and the state of {sorted(optimizers)[0]} does not"
    for name in sorted(saved - loaded - {""}):
        if "sched" in name.lower():
            yield model, f"the state of {name} is saved and never loaded"


def _owner(call: ast.Call) -> str:
    return last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
