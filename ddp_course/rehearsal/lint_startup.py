"""Rules: how are the ranks and their workers started, and on which device?

Read next: `watch.py`, the same faults while the program runs.
"""

from __future__ import annotations

import ast

from ddp_course.rehearsal.parsed import keyword, last_name, name_of, words_in
from ddp_course.rehearsal.source import Found, Source


def no_main_guard(source: Source) -> Found:
    for call in source.named("spawn", "start_processes", "Process"):
        top = _module_level(source, call)
        if (
            top is not None
            and name_of(call).split(".")[-1] != "Process"
            or top is not None
            and "mp" in words_in(call.func)
        ):
            yield top, "this line starts processes when the file is imported"
    for call in source.named("DataLoader"):
        context = keyword(call, "multiprocessing_context")
        spawns = isinstance(context, ast.Constant) and context.value in ("spawn", "forkserver")
        spawns |= any(
            isinstance(a, ast.Constant) and a.value in ("spawn", "forkserver")
            for c in source.named("set_start_method")
            for a in c.args
        )
        workers = keyword(call, "num_workers")
        some = workers is not None and not (isinstance(workers, ast.Constant) and workers.value == 0)
        if spawns and some and (top := _module_level(source, call)) is not None:
            yield top, "workers are started by spawn when the file is imported"


def _module_level(source: Source, call: ast.Call, depth: int = 5) -> ast.AST | None:
    """The line outside every function, and outside a __main__ guard, from which this call is reached."""
    for each in source.above(call):
        if isinstance(each, ast.If) and "__name__" in words_in(each.test):
            return None
        if isinstance(each, ast.FunctionDef):
            if depth == 0:
                return None
            reached = (_module_level(source, caller, depth - 1) for caller in source.callers(each))
            return next((line for line in reached if line is not None), None)
    return call


def fixed_address(source: Source) -> Found:
    """MASTER_ADDR or MASTER_PORT overwritten in a program that torchrun starts."""
    if source.named("spawn", "start_processes", "Process", "mp_spawn", "setdefault") or not (
        {"LOCAL_RANK", "RANK", "TORCHELASTIC_RUN_ID"} & words_in(source.tree)
    ):
        return
    for node in source.all(ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and {"MASTER_ADDR", "MASTER_PORT"} & words_in(target.slice):
                tested = any(isinstance(each, ast.If) for each in source.above(node))
                if not tested and isinstance(node.value, ast.Constant):
                    yield node, "torchrun has set it, and its store listens there"
                    return


def local_rank_argument(source: Source) -> Found:
    for call in source.named("add_argument"):
        names = [each.value for each in call.args if isinstance(each, ast.Constant)]
        default = keyword(call, "default")
        if {"--local_rank", "--local-rank"} & set(names) and not (
            default is not None and "LOCAL_RANK" in words_in(default)
        ):
            yield call, f"{names[0]} comes from torch.distributed.launch, which torchrun replaced"


def cuda_without_device(source: Source) -> Found:
    if source.named("set_device") or any("CUDA_VISIBLE_DEVICES" in words_in(node) for node in source.all(ast.Assign)):
        return
    for call in source.named("cuda", "device", "to"):
        plain = (
            last_name(call) == "cuda" and not call.args and not call.keywords and isinstance(call.func, ast.Attribute)
        )
        if name_of(call) in ("torch.cuda", "cuda"):
            continue
        texts = [
            each
            for arg in call.args
            for each in ast.walk(arg)
            if isinstance(each, ast.Constant) and each.value == "cuda"
        ]
        numbered = last_name(call) == "device" and len(call.args) > 1
        if plain or (
            texts and not numbered and (last_name(call) != "device" or name_of(call) in ("torch.device", "device"))
        ):
            yield call, "no number, and torch.cuda.set_device is never called"
