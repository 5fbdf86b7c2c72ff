"""Rules: what is wrong with replicas, and with what is saved of them?

Read next: `lint_startup.py`.
"""

from __future__ import annotations

import ast

from ddp_course.rehearsal.parsed import is_true, keyword, last_name, words_in
from ddp_course.rehearsal.source import WORLD, Found, Source


def averaged_twice(source: Source) -> Found:
    """Gradients that DistributedDataParallel has averaged, divided or reduced again."""
    for call in source.named("all_reduce"):
        own = any("grad" in words_in(arg) for arg in call.args) and source.concerns_replica(call)
        if own and "backward" in source.calls and not source.named("no_sync"):
            yield call, "DistributedDataParallel has averaged these gradients already"
    for node in source.all(ast.AugAssign):
        by_world = any(map(WORLD.search, words_in(node.value)))
        if (
            isinstance(node.op, ast.Div)
            and "grad" in words_in(node.target)
            and by_world
            and source.concerns_replica(node)
        ):
            yield node, "DistributedDataParallel has divided these gradients already"
    for call in source.named("div_", "mul_"):
        words = words_in(call.func) if isinstance(call.func, ast.Attribute) else set()
        by_world = any(WORLD.search(word) for arg in call.args for word in words_in(arg))
        if "grad" in words and by_world and source.concerns_replica(call):
            yield call, "DistributedDataParallel has divided these gradients already"


def module_prefix(source: Source) -> Found:
    """A loosely loaded state whose names carry `module.` on one side alone."""
    for call in source.named("load_state_dict"):
        strict = keyword(call, "strict")
        loose = isinstance(strict, ast.Constant) and strict.value is False and isinstance(call.func, ast.Attribute)
        if loose and _saved_wrapped(source) != source.is_replica(call.func.value):
            yield call, "the state and the model differ by `module.`, and strict=False lets that pass"


def _saved_wrapped(source: Source) -> bool:
    saved = source.named("state_dict")
    return any(isinstance(call.func, ast.Attribute) and source.is_replica(call.func.value) for call in saved)


def local_batchnorm(source: Source) -> Found:
    if {"convert_sync_batchnorm", "SyncBatchNorm"} & words_in(source.tree) or not source.wrapped:
        return
    batch = {last_name(t): n.value for n in source.all(ast.Assign) for t in n.targets}
    for norm in source.named("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"):
        for loader in source.named("DataLoader"):
            size = keyword(loader, "batch_size") or next(iter(loader.args[1:2]), None)
            size = batch.get(last_name(size) or None, size) if size is not None else None
            if isinstance(size, ast.Constant) and isinstance(size.value, int) and 1 <= size.value <= 8:
                yield norm, f"each rank normalises {size.value} rows by themselves"
                return


def find_unused_without_need(source: Source) -> Found:
    for call in source.named("DistributedDataParallel", "DDP"):
        forwards = [node for node in source.all(ast.FunctionDef) if node.name == "forward"]
        sequential = source.named("Sequential", "Linear") and not forwards
        plain = forwards and not any(_chooses(node) for node in forwards)
        if is_true(keyword(call, "find_unused_parameters")) and (sequential or plain):
            yield call, "no forward of this program chooses between ways"


def _chooses(forward: ast.FunctionDef) -> bool:
    kinds = (ast.If, ast.IfExp, ast.While, ast.Break, ast.Continue, ast.Match, ast.Subscript, ast.Try)
    return (
        any(isinstance(node, kinds) for node in ast.walk(forward))
        or len([each for each in ast.walk(forward) if isinstance(each, ast.Return)]) != 1
    )


def forward_outside_no_sync(source: Source) -> Found:
    quiet = {last_name(t) for node in source.all(ast.Assign) for t in node.targets if "no_sync" in words_in(node.value)}
    quiet |= {name for name, node in source.functions.items() if "no_sync" in words_in(node)}
    for node in source.all(ast.With):
        asked = set().union(*(words_in(item.context_expr) for item in node.items))  # with `no_sync`, the replica
        if not asked & (quiet | {"no_sync"}):
            continue
        calls = [each for part in node.body for each in ast.walk(part) if isinstance(each, ast.Call)]
        inside = {last_name(each) for each in calls}
        if "backward" in inside and not inside & (
            source.wrapped | set(source.functions) | asked | {"forward", "model", "net", "ddp", "ddp_model"}
        ):
            yield node, "backward stands inside, the forward does not"
