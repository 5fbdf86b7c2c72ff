"""The text of a program as a tree: its calls by name, what stands above each, and which statement is on a line.

Read next: `source.py`, which asks it who runs which line.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property


def name_of(node: ast.AST) -> str:
    """Return the dotted name of a name, attribute or call; "" for anything else."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name."""
    return name_of(node).rpartition(".")[2]


def words_in(node: ast.AST) -> frozenset[str]:
    """Return the names, attributes and texts that occur in a piece of program."""
    if not hasattr(node, "words"):  # asked for again by every rule
        found = set()
        for each in ast.walk(node):
            if isinstance(each, ast.Name):
                found.add(each.id)
            elif isinstance(each, ast.Attribute):
                found.add(each.attr)
            elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                found.add(each.value)
        node.words = frozenset(found)
    return node.words


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)


def is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


class Parsed:
    """A script, read.

    Raises:
        SyntaxError: it is no Python.
    """

    def __init__(self, text: str):
        self.text, self.tree = text, ast.parse(text)
        self.parent = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.of_kind: dict[type, list] = {}
        self.nodes = sorted(self.parent, key=lambda node: getattr(node, "lineno", 0))

    def all(self, kind: type) -> list:
        if kind not in self.of_kind:
            self.of_kind[kind] = [node for node in self.nodes if isinstance(node, kind)]
        return self.of_kind[kind]

    @cached_property
    def calls(self) -> dict[str, list[ast.Call]]:
        """The calls, in the order of lines, by the last part of the name."""
        found = defaultdict(list)
        for call in self.all(ast.Call):
            found[last_name(call)].append(call)
        return found

    def named(self, *names: str) -> list[ast.Call]:
        return sorted((call for name in names for call in self.calls.get(name, ())), key=lambda call: call.lineno)

    @cached_property
    def given(self) -> dict[str, list[ast.Assign]]:
        """The assignments to each name, by its last part."""
        found = defaultdict(list)
        for node in self.all(ast.Assign):
            for name in {last_name(target) for target in node.targets}:
                found[name].append(node)
        return found

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.all(ast.FunctionDef)}

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while node := self.parent.get(node):
            yield node

    def function_of(self, node: ast.AST) -> ast.FunctionDef | None:
        return next((each for each in self.above(node) if isinstance(each, ast.FunctionDef)), None)

    def callers(self, function: ast.FunctionDef) -> list[ast.Call]:
        """Where the function is called, as far as names tell; a class is called where its __init__ is meant."""
        name = function.name
        if name == "__init__":
            owner = self.parent[function]
            name = getattr(owner, "name", name)
        inside = set(ast.walk(function)) if name in self.calls else set()
        return [call for call in self.calls.get(name, ()) if call not in inside]

    # --- Which statement stands on this line? ---------------------------------------------------------

    @cached_property
    def statements(self) -> dict[int, ast.stmt]:
        """The statement on each line; of a compound one, on the lines of its head."""
        found: dict[int, ast.stmt] = {}
        for node in self.all(ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
            for line in range(node.lineno, max(last, node.lineno) + 1):
                found.setdefault(line, node)
        return found

    @cached_property
    def handlers(self) -> dict[int, ast.ExceptHandler]:
        """The handlers by the lines on which one enters them."""
        return {line: each for each in self.all(ast.ExceptHandler) for line in (each.lineno, each.body[0].lineno)}

    @cached_property
    def turns(self) -> set[int]:
        """The lines that leave a loop or a step early."""
        return {each.lineno for kind in (ast.Continue, ast.Break, ast.Return) for each in self.all(kind)} | set(
            self.handlers
        )

    @property
    def has_sets(self) -> bool:
        """Whether the order of a set, which differs from process to process, may matter."""
        return bool(self.all(ast.Set) or self.all(ast.SetComp) or self.named("set", "frozenset", "hash", "keys"))

    @cached_property
    def thaws(self) -> set[int]:
        """The lines that set requires_grad by an assignment."""
        targets = [(node.lineno, each) for node in self.all(ast.Assign) for each in node.targets]
        return {line for line, each in targets if isinstance(each, ast.Attribute) and each.attr == "requires_grad"}

    @cached_property
    def loops(self) -> dict[int, list[str]]:
        """For each line inside for loops, the names that they set, the outermost first."""
        found: dict[int, list[str]] = defaultdict(list)
        for node in self.all(ast.For):
            names = [each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)]
            for line in range(node.body[0].lineno, node.end_lineno + 1):
                found[line] += names
        return dict(found)

    def test_above(self, line: int) -> int | None:
        """The line of the test under which the statement on a line stands."""
        node = self.statements.get(line)
        return next((each.lineno for each in self.above(node) if isinstance(each, ast.If)), None) if node else None

    def constructs(self, line: int) -> bool:
        """Whether the line is in a constructor."""
        node = self.statements.get(line)
        function = self.function_of(node) if node else None
        return function is not None and function.name == "__init__"

    def writes(self, name: str) -> list[int]:
        """The lines that change something of this name in place, or assign it again outside of __init__."""
        found = [call.lineno for call in self.all(ast.Call) if isinstance(call.func, ast.Attribute)
                 and last_name(call).endswith("_") and name in words_in(call.func)]  # fmt: skip
        for kind in (ast.Assign, ast.AugAssign):
            for node in self.all(kind):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                function = self.function_of(node)
                made = function is not None and function.name == "__init__"
                if any(name in words_in(target) for target in targets) and not made:
                    found.append(node.lineno)
        return sorted(found)

    def origin(self, line: int | None) -> int | None:
        """For a line with `loss.backward()`, the line at which that loss was computed; else the line itself."""
        calls = [
            call for call in self.named("backward") if call.lineno == line and isinstance(call.func, ast.Attribute)
        ]
        name = last_name(calls[0].func.value) if calls else ""
        given = [each.lineno for each in self.all(ast.Assign) if each.lineno < (line or 0)
                 and self.function_of(each) is self.function_of(calls[0]) and name
                 and name in {last_name(target) for target in each.targets}] if calls else []  # fmt: skip
        return given[-1] if given else line

    def loads(self, node: ast.AST) -> bool:
        """Whether an expression speaks of batches from a DataLoader."""
        loaders = self.named("DataLoader")
        made = {last_name(target) for each in self.all(ast.Assign) for target in each.targets
                if any(part in loaders for part in ast.walk(each.value))}  # fmt: skip
        return any(word in made or "loader" in word.lower() for word in words_in(node))
