"""Rules: who saves, writes, prints and communicates?

Read next: `lint_checkpoints.py`.
"""

from __future__ import annotations

import ast
import re

from ddp_course.rehearsal.parsed import is_true, keyword, last_name, name_of, words_in
from ddp_course.rehearsal.source import COLLECTIVES, ONE_RANK, RANK, Found, Source, speaks_of_rank

WRITERS = (
    *("FileHandler", "RotatingFileHandler", "SummaryWriter", "to_csv", "to_parquet", "savefig", "save_image"),
    *("imwrite", "write_text", "write_bytes", "savez", "savez_compressed", "savetxt"),
)
LOGGED = ("info", "warning", "error")
LEVELS = ("basicConfig", "setLevel", "addHandler", "addFilter", "disable", "getLogger", "Formatter", "StreamHandler")


def unguarded_save(source: Source) -> Found:
    for call in source.named("save"):
        path = [*call.args[1:], *filter(None, [keyword(call, "f")])]
        if (
            name_of(call) in {"torch.save", "save"} - source.functions.keys()  # `save` may be the program's own
            and not source.one_rank_only(call)
            and not any(map(source.of_rank, path))
        ):
            yield call, "torch.save runs on every rank"


def file_by_every_rank(source: Source) -> Found:
    for call in source.named("open", *WRITERS):
        mode = keyword(call, "mode") or next(iter(call.args[1:] if name_of(call) == "open" else call.args), None)
        writes = last_name(call) in WRITERS or (
            isinstance(mode, ast.Constant) and str(mode.value)[:1] in ("w", "a", "x")
        )
        place = [call.func, *call.args, *(each.value for each in call.keywords)]
        if writes and not source.one_rank_only(call) and not any(map(source.of_rank, place)):
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


# Methods that communicate, and have no `dist.` before them.
JOINED = ("consolidate_state_dict", "full_tensor", "summon_full_params")


def collective_under_rank_0(source: Source) -> Found:
    for call in source.named(*JOINED):
        if source.one_rank_only(call) and not _also_elsewhere(source, call):
            yield call, f"{last_name(call)} stands where only some ranks come"
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


def set_order(source: Source) -> Found:
    """A loop over a set of texts that reduces one value after the other."""
    sets = {last_name(target) for node in source.all(ast.Assign) for target in node.targets
            if _unordered(node.value) and not _reordered(source, target)}  # fmt: skip
    for loop in source.all(ast.For):
        over = loop.iter.args[0] if last_name(loop.iter) == "enumerate" and loop.iter.args else loop.iter
        named = isinstance(over, ast.Name | ast.Attribute) and last_name(over) in sets
        if (named or _unordered(over)) and (call := next(
            (c for part in loop.body if (c := source.reaches(part, COLLECTIVES)) is not None), None)):  # fmt: skip
            yield loop, f"{last_name(call)} runs in the order of a set, line {call.lineno}"


def unordered_names(source: Source) -> Found:
    """A list or an index made of a set that may hold texts."""
    for call in source.named("list", "tuple", "enumerate"):
        over = call.args[0] if call.args else None
        comprehended = isinstance(over, ast.SetComp)
        named = isinstance(over, ast.Call) and last_name(over) in ("set", "frozenset") and _unordered(over)
        if (comprehended or named) and isinstance(source.parent.get(call), ast.Assign | ast.comprehension):
            yield call, "the set's order goes into what this makes"
            return


def _unordered(node: ast.AST) -> bool:
    """Whether it is a set, of texts as far as one can see: those of whole numbers have one order everywhere."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.Sub | ast.BitXor):
        return _unordered(node.left) or _unordered(node.right) or last_name(node.left) == "keys"
    if isinstance(node, ast.Set):
        return any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in node.elts)
    if not isinstance(node, ast.Call) or last_name(node) not in ("set", "frozenset") or not node.args:
        return isinstance(node, ast.SetComp)
    return not (isinstance(node.args[0], ast.Call) and last_name(node.args[0]) == "range")


def _reordered(source: Source, target: ast.AST) -> bool:
    given = [
        node.value for node in source.all(ast.Assign) for each in node.targets if last_name(each) == last_name(target)
    ]
    return not all(map(_unordered, given))


def collective_under_join(source: Source) -> Found:
    """A collective of the program's own under join(), which stands in for those of DDP alone."""
    for node in source.all(ast.With):
        if any(
            last_name(item.context_expr) == "join" for item in node.items if isinstance(item.context_expr, ast.Call)
        ):
            for part in node.body:
                if call := source.reaches(part, COLLECTIVES):
                    yield call, f"{last_name(call)} is called for each batch, and a rank without batches never calls it"
                    return


def lost_broadcast(source: Source) -> Found:
    """A list that is made in the call: what rank 0 sends is thrown away."""
    for call in source.named("broadcast_object_list"):
        if call.args and isinstance(call.args[0], ast.List):
            yield call, "the list is made in the call, and nothing can read it afterwards"


def unwaited(source: Source) -> Found:
    """Handles of which only the last is waited for, and what is received used before its handle is waited for."""
    waits = [call for call in source.named("wait") if isinstance(call.func, ast.Attribute)]
    for call in source.named("irecv"):
        statement = source.parent[call]
        block = getattr(source.parent.get(statement), "body", [])
        if isinstance(statement, ast.Assign) and statement in block and call.args:
            place, handle = ast.unparse(call.args[0]), last_name(statement.targets[0])
            for later in block[block.index(statement) + 1 :]:
                if any(handle in words_in(w.func.value) for w in ast.walk(later) if w in waits):
                    break
                if any(ast.unparse(each) == place for each in ast.walk(later) if isinstance(each, ast.expr)):
                    yield later, f"{place} is used before what line {call.lineno} receives has arrived"
                    break
    for call in source.all(ast.Call):
        given = source.parent.get(call)
        if not is_true(keyword(call, "async_op")) or not isinstance(given, ast.Assign | ast.Call):
            continue
        if isinstance(given, ast.Call):  # handles.append(…), and then handles[-1].wait()
            held = given.func.value if isinstance(given.func, ast.Attribute) and last_name(given) == "append" else None
            of = [w for w in waits if isinstance(w.func.value, ast.Subscript)
                  and held is not None and last_name(w.func.value.value) == last_name(held)]  # fmt: skip
            last = [w for w in of if ast.unparse(w.func.value.slice) == "-1"]
            looped = any(held is not None and last_name(held) in words_in(loop.iter) for loop in source.all(ast.For))
            if last and not looped:
                yield last[0], f"the handles of line {call.lineno} are kept, and the last one is waited for"
            continue
        name = last_name(given.targets[0])
        loop = next((each for each in source.above(given) if isinstance(each, ast.For | ast.While)), None)
        own = [w for w in waits if last_name(w.func.value) == name]
        hook = source.function_of(given)
        hooked = hook is not None and any(hook.name in words_in(each) for each in source.all(ast.Call)
                                          if "hook" in last_name(each))  # fmt: skip
        outside = [w for w in own if loop is None or loop not in set(source.above(w))]
        same = [w for w in own if source.function_of(w) is hook]
        if own and ((loop is not None and outside == own) or (hooked and not same)):
            yield given, f"each handle replaces the one before, and line {own[0].lineno} waits for the last"


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
