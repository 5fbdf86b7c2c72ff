"""Rules: do the ranks' weights begin alike, and do their gradients meet?

Read next: `lint_replicas.py`.
"""

from __future__ import annotations

import ast
import re

from ddp_course.rehearsal.parsed import last_name, name_of, words_in
from ddp_course.rehearsal.source import COLLECTIVES, Found, Source

WRAPPERS = ("DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "fully_shard")
SEEDS = ("torch.manual_seed", "manual_seed")
# Names of what may average gradients in the place of torch's wrapper: a library's, or one of the program's own.
OTHERS = re.compile(
    r"[Pp]arallel(?!ism)|DDP|_ddp|FSDP|fsdp|deepspeed|Accelerator|Fabric|[Hh]orovod|hvd|^prepare|^Zero|[Dd]istributedOptim"
    r"|^Dist[A-Z]|replicate|LightningModule|Trainer$"
)
# What is asked of a module inside a replica without computing anything.
KEEPING = re.compile(
    r"state_dict|param|buffer|modules|^(train|eval|to|apply|requires_grad_)$|^(load|save|set|get|update)"
)


def different_start(source: Source) -> Found:
    """A seed of the rank's own before the model is made, and nothing that makes the weights equal afterwards."""
    if source.named(*WRAPPERS, "broadcast", "broadcast_coalesced", "broadcast_object_list", "load_state_dict"):
        return
    for optimizer in _optimizers(source):
        function, names = source.function_of(optimizer), words_in(optimizer.args[0]) - {"parameters", "self"}
        made = [each for each in source.all(ast.Assign) if source.function_of(each) is function
                and names & {last_name(target) for target in each.targets}]  # fmt: skip
        before = [call for call in source.all(ast.Call) if made and source.function_of(call) is function
                  and call.lineno < made[0].lineno and _seeds(source, call)]  # fmt: skip
        if before and any(map(source.of_rank, before[-1].args)):
            yield before[-1], "each rank makes its weights from a seed of its own, and no broadcast makes them equal"


def _optimizers(source: Source) -> list[ast.Call]:
    calls = [call for call in source.all(ast.Call) if call.args and "parameters" in words_in(call.args[0])]
    return [call for call in calls if last_name(call)[:1].isupper()]


def _seeds(source: Source, call: ast.Call) -> bool:
    function = source.functions.get(last_name(call))
    inner = [each for each in ast.walk(function) if isinstance(each, ast.Call)] if function else []
    return any(name_of(each) in SEEDS for each in [call, *inner])


def not_averaged(source: Source) -> Found:
    """A training in which no gradient can meet another rank's."""
    backward, optimizers = source.named("backward"), _optimizers(source)
    if not backward or not optimizers:
        return
    quiet = [next((each for each in source.above(call) if isinstance(each, ast.With) and any(
        isinstance(item.context_expr, ast.Call) and last_name(item.context_expr) == "no_sync" for item in each.items
    )), None) for call in backward]  # fmt: skip
    if all(quiet):
        yield quiet[0], "every backward of this program runs under no_sync"
    if (
        _wrapped_otherwise(source)
        or source.named(*WRAPPERS, "register_comm_hook")
        or any("grad" in words_in(node) for node in source.all(ast.Attribute) if isinstance(node.ctx, ast.Load))
    ):
        return
    functions = [source.function_of(call) or source.tree for call in source.named(*COLLECTIVES)]
    if not any({"parameters", "buffers", "state_dict"} & words_in(each) for each in functions if each is not source.tree
               and not source.reaches(each, frozenset({"backward"}))):  # fmt: skip
        yield optimizers[0], "nothing wraps the model, and no collective touches a gradient"


def _wrapped_otherwise(source: Source) -> bool:
    """Whether a wrapper or an optimizer of another make may average the gradients."""
    names = {last_name(call) for call in source.all(ast.Call)}
    names |= {each.asname or each.name for node in source.all(ast.ImportFrom) for each in node.names
              if not (node.module or "").startswith("torch")}  # fmt: skip
    return any(OTHERS.search(name) for name in names - set(WRAPPERS) - set(source.functions))


def past_the_replica(source: Source) -> Found:
    """A training forward through the module inside a replica: its gradients are this rank's own."""
    wraps = source.named("DistributedDataParallel", "DDP")
    if len(wraps) > 1 or len(source.wrapped) > 1:  # of two networks, one is often asked without being trained
        return
    inside = {}  # the plain model's name
    for call in wraps:
        if call.args and isinstance(call.args[0], ast.Name):
            inside[call.args[0].id] = call
    for call in source.all(ast.Call):
        function = source.function_of(call) or source.tree
        if not call.args or not source.reaches(function, frozenset({"backward"})) or _without_gradients(source, call):
            continue
        name = name_of(call)
        within = re.search(r"(\w+)\.module(\.(\w+))?$", name)
        if within and within[1] in source.wrapped and not KEEPING.search(within[3] or ""):
            yield call, "this forward goes past DistributedDataParallel, so nothing averages its gradients"
        wrapping = inside.get(name)
        if wrapping and name not in source.wrapped and wrapping.lineno < call.lineno and (
            source.function_of(wrapping) or source.tree
        ) is function:  # fmt: skip
            yield call, f"{name} is the plain model; the replica of line {wrapping.lineno} averages the gradients"


def _without_gradients(source: Source, call: ast.Call) -> bool:
    """Whether names or contexts say that nothing is learned here."""
    for each in source.above(call):
        if isinstance(each, ast.With) and words_in(each.items[0].context_expr) & {"no_grad", "inference_mode"}:
            return True
        if isinstance(each, ast.FunctionDef):
            texts = [each.name, *(word for part in each.decorator_list for word in words_in(part))]
            return any(re.search(r"no_grad|inference|eval|valid|test|predict|sample|generate", text) for text in texts)
        if isinstance(each, ast.If) and source.is_rank_test(each.test):
            return True
    return False
