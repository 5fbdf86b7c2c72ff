"""Which values in a program are a rank, and which depend on one?

Followed by text alone: through assignments, arguments, results, attributes, and what stands under a rank's test. A name
counts in its own function and in those inside it; an attribute counts everywhere. Devices are left out: that a tensor
lies on the rank's own GPU makes it no other tensor.

Read next: `source.py`, which asks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

RANK = re.compile(r"(^|_)rank(_?id|_?0)?($|_)|^rk$|proc(ess)?_?(index|idx|id|num)$", re.IGNORECASE)
SOURCES = {
    *("get_rank", "get_node_local_rank", "get_group_rank", "process_index", "local_process_index", "get_local_rank"),
}
VARIABLES = {"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "GROUP_RANK"}
DEVICES = {"to", "cuda", "device", "set_device", "DistributedDataParallel", "DDP", "init_process_group", "print"}
GROWS = {"append", "extend", "add", "update", "insert"}
DEVICE = re.compile(r"_?dev(ice)?s?$")
Key = tuple[ast.AST | None, str]  # the function, None for the module; "." + name: an attribute; name + "()": a call
ITSELF: Key = (None, "rank")


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
        given = list(self._given())
        assigned = list(self._assigned())
        self.ranks: set[Key] = set()
        self._close(self.ranks, [(self._as_rank(value), keys) for value, keys in (*given, *assigned)])
        self.owned = set(self.ranks) | set(self._asking())
        moves = [*given, *assigned, *self._under_tests(), *self._results()]
        self._close(self.owned, [(self._parts(value), keys) for value, keys in moves])

    def is_rank(self, node: ast.AST) -> bool:
        """Whether an expression is a rank: its name says so, or where it comes from."""
        return bool(self._as_rank(node) & (self.ranks | {ITSELF}))

    def depends(self, node: ast.AST) -> bool:
        """Whether an expression is another on each rank, as far as its text tells."""
        return not self.owned.isdisjoint(parts := self._parts(node)) or ITSELF in parts

    # --- What an expression is made of ----------------------------------------------------------------

    def _as_rank(self, node: ast.AST) -> frozenset[Key]:
        """The names of which an expression is one, if it may be a rank; ITSELF if it is one whatever they hold."""
        if isinstance(node, ast.Call):
            name = _last(node.func)
            if name in SOURCES or (name in ("get", "getenv") and _variable(node)):
                return frozenset([ITSELF])
            return self._as_rank(node.args[0]) if name in ("int", "str") and node.args else frozenset()
        if isinstance(node, ast.Subscript):
            named = isinstance(node.slice, ast.Constant) and node.slice.value in VARIABLES
            return frozenset([ITSELF]) if named else frozenset()
        if isinstance(node, ast.Name | ast.Attribute):
            return frozenset([ITSELF]) if RANK.search(_last(node)) else self._names(node)
        return frozenset()

    def _names(self, node: ast.AST) -> frozenset[Key]:
        if isinstance(node, ast.Attribute):
            return frozenset([(None, f".{node.attr}")])
        return frozenset((scope, node.id) for scope in self.scope(node))

    def _parts(self, node: ast.AST) -> frozenset[Key]:
        """The names in an expression, and the functions that it calls; ITSELF if a rank is in it."""
        found: set[Key] = set()
        for each in _without_devices(node):
            found |= self._as_rank(each)
            if isinstance(each, ast.Call):
                found.add((None, f"{_last(each.func)}()"))
        return frozenset(found)

    def _called(self, function: ast.AST) -> str:
        owner = self.parent.get(function)
        return owner.name if function.name == "__init__" and isinstance(owner, ast.ClassDef) else function.name

    def scope(self, node: ast.AST) -> tuple[ast.AST | None, ...]:
        """The functions around a node, the innermost first, and the module."""
        if node not in self.scopes:
            above = self.parent.get(node)
            outer = self.scope(above) if above is not None else (None,)
            inside = isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            self.scopes[node] = (above, *outer) if inside else outer
        return self.scopes[node]

    # --- Following: values, and the names that they go into -------------------------------------------

    @staticmethod
    def _close(found: set[Key], moves: list[tuple[frozenset[Key], set[Key]]]) -> None:
        """Add the names that hold such a value, however many steps away."""
        before = -1
        while len(found) != before:
            before = len(found)
            for parts, keys in moves:
                if ITSELF in parts or not found.isdisjoint(parts):
                    found |= keys

    def _assigned(self) -> Iterator[tuple[ast.AST, set[Key]]]:
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        for one, value in zip(target.elts, node.value.elts, strict=False):
                            yield value, self._keys(one)
                    else:
                        yield node.value, self._keys(target)

    def _given(self) -> Iterator[tuple[ast.AST, set[Key]]]:
        """Arguments, and the names that functions give them."""
        for call in self.nodes:
            if not isinstance(call, ast.Call):
                continue
            name = _last(call.func)
            if name == "spawn" and call.args and isinstance(call.args[0], ast.Name):  # each process is given its rank
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

    def _under_tests(self) -> Iterator[tuple[ast.AST, set[Key]]]:
        """Loops, containers that grow, and what is assigned where a test decides."""
        for node in self.nodes:
            if isinstance(node, ast.For | ast.comprehension):
                yield node.iter, self._keys(node.target)
            elif isinstance(node, ast.Assign):
                for test in self._tests(node):
                    for target in node.targets:
                        yield test, self._keys(target)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GROWS:
                for value in (*node.args, *self._tests(node)):
                    yield value, self._keys(node.func.value)

    def _results(self) -> Iterator[tuple[ast.AST, set[Key]]]:
        for name, functions in self.functions.items():
            for each in (part for function in functions for part in ast.walk(function)):
                if isinstance(each, ast.Return | ast.Yield) and each.value:
                    for value in (each.value, *self._tests(each)):
                        yield value, {(None, f"{name}()")}
        for node in self.nodes:
            if isinstance(node, ast.Call) and _last(node.func)[:1].isupper() and _last(node.func) in self.functions:
                for value in (*node.args, *(each.value for each in node.keywords)):
                    yield value, {(None, f"{_last(node.func)}()")}

    def _asking(self) -> Iterator[Key]:
        """Classes whose methods ask for the rank themselves."""
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if getattr(each, "name", "__init__") != "__init__"]
                if any(self.is_rank(part) for method in methods for part in ast.walk(method)):
                    yield None, f"{node.name}()"

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
            if isinstance(each, ast.Name) and not DEVICE.match(each.id):
                found.add((self.scope(each)[0], each.id))
            elif isinstance(each, ast.Attribute) and not DEVICE.match(each.attr):
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
