"""Rules: does a logged loss come from all ranks?

A value is followed through the names that it goes into, by text alone.
Read next: `text_of_rows.py`.
"""

from __future__ import annotations

import ast

from ddp_course.rehearsal.source import COLLECTIVES, Found, Source, last_name, words_in

LOGGERS = frozenset(
    ["print", "info", "debug", "warning", "log", "log_scalar", "add_scalar", "write", "writerow", "log_metrics"]
)
# Names that stand for many things, and would tie everything to everything.
COMMON = {
    "self",
    "torch",
    "float",
    "len",
    "dist",
    "item",
    "device",
    "rank",
    "world_size",
    "args",
    "step",
    "epoch",
    "tensor",
}


def loss_not_reduced(source: Source) -> Found:
    """A loss that is read by .item(), is logged, and never meets another rank's."""
    flow = _Flow(source)
    losses = {word for node in source.all(ast.Name) for word in [node.id] if "loss" in word.lower()}
    losses |= {node.attr for node in source.all(ast.Attribute) if "loss" in node.attr.lower()}
    flow.close(losses)
    for call in source.named("item"):
        words = words_in(call.func.value) & losses
        if not words:
            continue
        names = flow.onward(words, call)
        held = {word for parts, targets in flow.loops if targets & words for word in parts - COMMON}
        if flow.reduced & held:  # it is one of the values that were reduced in a loop
            continue
        if not flow.reduced & (names | words) and not source.reaches(call, COLLECTIVES) and flow.logged(call, names):
            yield call, "this is the loss of one rank's rows, and no collective combines it with the others'"


class _Flow:
    """Which names get their value from which others? All functions share one namespace, which errs towards silence."""

    def __init__(self, source: Source):
        self.source = source
        self.edges: list[tuple[set[str], set[str]]] = []
        for node in source.all(ast.Assign) + source.all(ast.AugAssign) + source.all(ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None:
                self.edges.append((words_in(node.value), set().union(*map(words_in, targets))))
        self.loops = [(words_in(node.iter), words_in(node.target))
                      for node in [*source.all(ast.For), *source.all(ast.comprehension)]]  # fmt: skip
        self.edges += self.loops
        for call in source.named("append", "update", "add_", "extend", "copy_"):
            if isinstance(call.func, ast.Attribute):
                self.edges.append((set().union(*map(words_in, call.args), set()), words_in(call.func.value)))
        for call in source.all(ast.Call):
            if function := source.functions.get(last_name(call)):
                own = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
                self.edges += [(words_in(given), {name}) for given, name in zip(call.args, own, strict=False)]
                if rest := function.args.vararg:
                    self.edges += [(words_in(given), {rest.arg}) for given in call.args[len(own) :]]
                self.edges += [(words_in(each.value), {each.arg}) for each in call.keywords if each.arg]
                if named := function.args.kwarg:
                    self.edges += [(words_in(each.value), {named.arg}) for each in call.keywords]
        talking = source.named(*COLLECTIVES - {"barrier", "broadcast", "broadcast_object_list"})
        given = [words_in(part) for call in talking for part in [*call.args, *(each.value for each in call.keywords)]]
        self.reduced = set().union(*given, set()) - {
            "dist",
            "op",
            "ReduceOp",
            "SUM",
            "AVG",
            "self",
            "torch",
            "device",
            "rank",
        }
        self.close(self.reduced, backwards=True)

    def close(self, names: set[str], backwards: bool = False) -> None:
        while True:
            before = len(names)
            for sources, targets in self.edges:
                if backwards and targets & names:
                    names |= sources - COMMON
                elif not backwards and sources & names:
                    names |= targets - COMMON
            if len(names) == before:
                return

    def onward(self, words: set[str], call: ast.Call) -> set[str]:
        """The names that a value goes into, from the statement that reads it."""
        names = set(words)
        for each in self.source.above(call):
            if isinstance(each, ast.Assign | ast.AugAssign):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                names |= set().union(*map(words_in, targets)) - {"self"}
            if isinstance(each, ast.stmt):
                break
        self.close(names)
        return names

    def logged(self, call: ast.Call, names: set[str]) -> bool:
        for logger in self.source.named(*LOGGERS):
            inside = [*logger.args, *(each.value for each in logger.keywords)]
            if any(call in set(ast.walk(part)) or words_in(part) & names for part in inside):
                return True
        return False
