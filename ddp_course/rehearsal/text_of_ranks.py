"""Rules: who saves, writes, prints and communicates?

Read next: `text_of_losses.py`.
"""

from __future__ import annotations

import ast
import re

from ddp_course.rehearsal.source import (
    COLLECTIVES,
    ONE_RANK,
    RANK,
    Found,
    Source,
    keyword,
    last_name,
    name_of,
    own_of_rank,
    speaks_of_rank,
    words_in,
)

WRITERS = (
    *(
        "FileHandler",
        "RotatingFileHandler",
        "SummaryWriter",
        "to_csv",
        "to_parquet",
        "savefig",
        "save_image",
        "imwrite",
    ),
    *("write_text", "write_bytes", "savez", "savez_compressed", "savetxt"),
)
LOGGED = ("info", "warning", "error")
LEVELS = ("basicConfig", "setLevel", "addHandler", "addFilter", "disable", "getLogger", "Formatter", "StreamHandler")


def unguarded_save(source: Source) -> Found:
    own = own_of_rank(source)
    for call in source.named("save"):
        path = [*call.args[1:], *filter(None, [keyword(call, "f")])]
        if name_of(call) in ("torch.save", "save") and not source.one_rank_only(call) and not any(map(own, path)):
            yield call, "torch.save runs on every rank"


def file_by_every_rank(source: Source) -> Found:
    own = own_of_rank(source)
    for call in source.named("open", *WRITERS):
        mode = keyword(call, "mode") or next(iter(call.args[1:] if name_of(call) == "open" else call.args), None)
        writes = last_name(call) in WRITERS or (
            isinstance(mode, ast.Constant) and str(mode.value)[:1] in ("w", "a", "x")
        )
        place = [call.func, *call.args, *(each.value for each in call.keywords)]
        if writes and not source.one_rank_only(call) and not any(map(own, place)):
            yield call, f"{last_name(call)} writes on every rank"


def prints_by_every_rank(source: Source) -> Found:
    """A print of the training that does not say which rank it is; before the group exists nobody has a rank."""
    for call in source.named("print"):
        if (
            name_of(call) == "print"
            and _in_a_loop(source, call)
            and not source.one_rank_only(call)
            and not any(map(speaks_of_rank, call.args))
        ):
            yield call, "print runs on every rank, and its line does not name the rank"
    about = source.named(*LEVELS)
    if not about or any(source.one_rank_only(call) or _by_rank(call) for call in about):
        return
    for call in source.named(*LOGGED):
        loops = _in_a_loop(source, call) and not source.one_rank_only(call)
        if loops and re.search(r"log", name_of(call)) and not any(map(speaks_of_rank, call.args)):
            yield about[0], f"every rank logs line {call.lineno}, and no line names the rank"


def _by_rank(call: ast.Call) -> bool:
    return any("rank" in word.lower() or ONE_RANK.search(word) for word in words_in(call))


def _in_a_loop(source: Source, node: ast.AST, depth: int = 4) -> bool:
    for each in source.above(node):
        if isinstance(each, ast.For | ast.While):
            return True
        if isinstance(each, ast.FunctionDef):
            return depth > 0 and any(_in_a_loop(source, call, depth - 1) for call in source.callers(each))
    return False


def collective_under_rank_0(source: Source) -> Found:
    for call in source.named(*COLLECTIVES):
        prefix = name_of(call).rpartition(".")[0]
        if prefix.rpartition(".")[2] not in ("dist", "distributed", "") or (
            not prefix and last_name(call) not in _imported(source)
        ):
            continue
        if keyword(call, "group") is None and source.one_rank_only(call) and not _also_elsewhere(source, call):
            where, depth = call, 0
            while not source.guarded(where) and depth < 5:
                callers = source.callers(source.function_of(where)) if source.function_of(where) else []
                where, depth = next(iter(callers), where), depth + 1
            behind = "" if where is call else f": line {call.lineno} is reached from here"
            yield where, f"{last_name(call)} stands where only some ranks come{behind}"


def _imported(source: Source) -> set[str]:
    modules = [node for node in source.all(ast.ImportFrom) if node.module == "torch.distributed"]
    return {each.asname or each.name for node in modules for each in node.names}


def _also_elsewhere(source: Source, call: ast.Call) -> bool:
    """Whether the other ranks make the call in the other branch, or after the block: `if rank == 0: …; barrier()`."""
    for each in source.above(call):
        if isinstance(each, ast.If) and source.is_rank_test(each.test):
            inside = {node for part in each.body for node in ast.walk(part)}
            other = each.orelse if call in inside else each.body
            names = [last_name(n) for part in other for n in ast.walk(part) if isinstance(n, ast.Call)]
            if last_name(call) in names:
                return True
            # Two tests that complete each other, as `if rank != 0: barrier()` … `if rank == 0: barrier()` do.
            same = [other for other in source.named(last_name(call)) if other is not call]
            for node in same:
                tests = [t.test for t in source.above(node) if isinstance(t, ast.If) and source.is_rank_test(t.test)]
                if any(_opposite(test, each.test) for test in tests):
                    return True
    return False


def _opposite(one: ast.AST, other: ast.AST) -> bool:
    signs = {_sense(one), _sense(other)}
    return len(signs) == 2


def _sense(test: ast.AST) -> bool:
    """True for a test that rank 0 passes."""
    if isinstance(test, ast.UnaryOp):
        return not _sense(test.operand)
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.Eq | ast.LtE)
    return not RANK.search(last_name(test))
