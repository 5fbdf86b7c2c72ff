"""Which values in a program are a rank, and which depend on one?

Followed by text alone: through assignments, arguments, results, attributes, and what stands under a rank's test. A name
counts in its own function and in those inside it; an attribute counts everywhere. Devices are left out: that a tensor
lies on the rank's own GPU makes it no other tensor.

Read next: `source.py`, which asks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

RANK = re.compile(r"(^|_)rank(_?id|_?0)?($|_)|^rk$|proc(ess)?_?(index|idx|id|num)$", re.IGNORECASE)
SOURCES = {
    "get_rank",
    "get_node_local_rank",
    "get_group_rank",
    "process_index",
    "local_process_index",
    "get_local_rank",
}
VARIABLES = {"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "GROUP_RANK"}
DEVICES = {"to", "cuda", "device", "set_device", "DistributedDataParallel", "DDP", "init_process_group", "print"}
GROWS = {"append", "extend", "add", "update", "insert"}
Key = tuple[ast.AST | None, str]  # the function, None for the module; "." + name for an attribute


class RankFlow:
    """The names that hold a rank, and those that hold something that a rank has decided.

    Args:
        tree: the program.
        parent: of each node.
    """

    def __init__(self, tree: ast.AST, parent: dict[ast.AST, ast.AST]):
        self.tree, self.parent = tree, parent
        self.nodes = list(ast.walk(tree))
        self.scopes: dict[ast.AST, tuple[ast.AST | None, ...]] = {}
        self.functions: dict[str, list[ast.AST]] = {}
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(self._called(node), []).append(node)
        self.ranks = self._closed(self.is_rank)
        self.owned = set(self.ranks)
        self.owned = self._closed(self.depends)

    def _called(self, function: ast.AST) -> str:
        owner = self.parent.get(function)
        return owner.name if function.name == "__init__" and isinstance(owner, ast.ClassDef) else function.name

    def scope(self, node: ast.AST) -> tuple[ast.AST | None, ...]:
        """The functions around a node, the innermost first, and the module."""
        if node not in self.scopes:
            above = self.parent.get(node)
            outer = self.scope(above) if above is not None else (None,)
            self.scopes[node] = (
                (above, *outer) if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else outer
            )
        return self.scopes[node]

    # --- What is a rank? ------------------------------------------------------------------------------

    def is_rank(self, node: ast.AST) -> bool:
        """Whether an expression is a rank: its name says so, or where it comes from."""
        if isinstance(node, ast.Call):
            name = _last(node.func)
            if name in SOURCES or (name in ("get", "getenv") and _variable(node)):
                return True
            return name in ("int", "str") and bool(node.args) and self.is_rank(node.args[0])
        if isinstance(node, ast.Subscript):
            return isinstance(node.slice, ast.Constant) and node.slice.value in VARIABLES
        return isinstance(node, ast.Name | ast.Attribute) and (
            bool(RANK.search(_last(node))) or self._holds(node, getattr(self, "ranks", set()))
        )

    def _holds(self, node: ast.AST, names: set[Key]) -> bool:
        if isinstance(node, ast.Attribute):
            return (None, f".{node.attr}") in names
        return isinstance(node, ast.Name) and any((scope, node.id) in names for scope in self.scope(node))

    def depends(self, node: ast.AST) -> bool:
        """Whether an expression is another on each rank, as far as its text tells."""
        return any(
            self.is_rank(each) or self._holds(each, getattr(self, "owned", set())) or self._makes_own(each)
            for each in _without_devices(node)
        )

    def _makes_own(self, node: ast.AST) -> bool:
        """Whether it calls a function whose result depends on the rank, or a class that asks for it."""
        if not isinstance(node, ast.Call):
            return False
        name = _last(node.func)
        return (None, f"{name}()") in getattr(self, "owned", set())

    # --- Following ------------------------------------------------------------------------------------

    def _closed(self, holds: Callable[[ast.AST], bool]) -> set[Key]:
        """Return the names that hold such a value, however many steps away."""
        whole = holds == self.depends
        found: set[Key] = set(self.owned) if whole else set()
        while True:
            if whole:
                self.owned = set(found)
            else:
                self.ranks = set(found)
            for value, targets in self._moves(whole):
                if holds(value):
                    found |= targets
            if whole:
                found |= set(self._results())
            if len(found) == len(self.owned if whole else self.ranks):
                return found

    def _moves(self, whole: bool) -> Iterator[tuple[ast.AST, set[Key]]]:
        """A value, and the names that it goes into."""
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        for one, value in zip(target.elts, node.value.elts, strict=False):
                            yield value, self._keys(one)
                    else:
                        yield node.value, self._keys(target)
                    for test in self._tests(node) if whole else ():
                        yield test, self._keys(target)
            elif whole and isinstance(node, ast.For | ast.comprehension):
                yield node.iter, self._keys(node.target)
            elif isinstance(node, ast.Call):
                yield from self._given(node)
                if whole and isinstance(node.func, ast.Attribute) and _last(node.func) in GROWS:
                    for value in (*node.args, *self._tests(node)):
                        yield value, self._keys(node.func.value)

    def _given(self, call: ast.Call) -> Iterator[tuple[ast.AST, set[Key]]]:
        name = _last(call.func)
        if name == "spawn" and call.args and isinstance(call.args[0], ast.Name):  # spawn gives each process its rank
            for function in self.functions.get(call.args[0].id, ()):
                if function.args.args:
                    yield ast.Name(id="rank"), {(function, function.args.args[0].arg)}
        for function in self.functions.get(name, ()):
            own = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
            for value, argument in zip(call.args, own, strict=False):
                yield value, {(function, argument)}
            for each in call.keywords:
                if each.arg:
                    yield each.value, {(function, each.arg)}

    def _results(self) -> Iterator[Key]:
        for name, functions in self.functions.items():
            for function in functions:
                inside = list(ast.walk(function))
                results = [each.value for each in inside if isinstance(each, ast.Return | ast.Yield) and each.value]
                if any(map(self.depends, results)) or any(
                    test for each in inside if isinstance(each, ast.Return | ast.Yield)
                    for test in self._tests(each) if self.depends(test)
                ):  # fmt: skip
                    yield None, f"{name}()"
                owner = self.parent.get(function)
                if isinstance(owner, ast.ClassDef) and function.name != "__init__" and any(map(self.is_rank, inside)):
                    yield None, f"{owner.name}()"  # its objects ask for the rank themselves
        for node in self.nodes:
            if isinstance(node, ast.Call) and _last(node.func) in self.functions and _last(node.func)[:1].isupper():
                given = [*node.args, *(each.value for each in node.keywords)]
                if any(map(self.depends, given)):
                    yield None, f"{_last(node.func)}()"

    def _tests(self, node: ast.AST) -> Iterator[ast.AST]:
        """The tests under which a node stands, in its function."""
        while (above := self.parent.get(node)) is not None and not isinstance(
            above, ast.FunctionDef | ast.ClassDef | ast.Lambda
        ):
            if isinstance(above, ast.If | ast.IfExp | ast.While) and node is not above.test:
                yield above.test
            node = above

    def _keys(self, target: ast.AST) -> set[Key]:
        found: set[Key] = set()
        for each in [target] if not isinstance(target, ast.Tuple | ast.List) else target.elts:
            while isinstance(each, ast.Subscript | ast.Starred):
                each = each.value
            if isinstance(each, ast.Name) and not re.match(r"dev(ice)?s?$", each.id):
                found.add((self.scope(each)[0], each.id))
            elif isinstance(each, ast.Attribute) and not re.match(r"_?dev(ice)?s?$", each.attr):
                found.add((None, f".{each.attr}"))
        return found


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _variable(call: ast.Call) -> bool:
    return any(isinstance(each, ast.Constant) and each.value in VARIABLES for each in call.args)


def _without_devices(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression, without what only says where a tensor lies."""
    yield node
    if isinstance(node, ast.Call) and _last(node.func) in DEVICES:
        inner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        if _last(node.func) in ("DistributedDataParallel", "DDP"):
            inner = node.args[:1]
    else:
        inner = list(ast.iter_child_nodes(node))
    for each in inner:
        yield from _without_devices(each)
