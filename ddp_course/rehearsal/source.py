"""What does the text of a program say about who runs which line?

From the conditions above a line, and above the calls of its function, follows which ranks come to it: all of them, or
only those that pass a test such as `if rank == 0`.

Left out on purpose: values. `is_main` is a rank's test because of its name, not because of what it holds.
Read next: `parsed.py`, the tree that is asked; `lint.py`, the rules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property

from ddp_course.rehearsal.parsed import Parsed, last_name, name_of, words_in
from ddp_course.rehearsal.rank_flow import RANK, RankFlow

COLLECTIVES = frozenset(
    [
        *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object"),
        *("all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather"),
        *("gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
        "scatter_object_list",
    ]
)
Found = Iterator[tuple[ast.AST, str]]  # what a rule yields: where, and what was seen there
ONE_RANK = re.compile(r"(^|_)(main|master|chief|primary|leader|writer|root|zero|first|rank_?0)(_|$)", re.IGNORECASE)
WORLD = re.compile(r"world|num_replicas|n_?ranks|n_?procs|n_?gpus|num_?gpus|WORLD_SIZE|^ws$", re.IGNORECASE)


def speaks_of_rank(node: ast.AST) -> bool:
    """Whether a piece of program names a rank."""
    return any(RANK.search(word) for word in words_in(node) if len(word) < 40)


class Source(Parsed):
    """A script, and what its text says about ranks.

    Raises:
        SyntaxError: it is no Python.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.asked: set[str] = set()  # names whose tests are being looked at

    @cached_property
    def distributed(self) -> bool:
        return bool(
            self.named("init_process_group", "DistributedDataParallel", "DDP", "spawn", "FullyShardedDataParallel")
        )

    @cached_property
    def flow(self) -> RankFlow:
        return RankFlow(self.tree, self.parent)

    def of_rank(self, node: ast.AST) -> bool:
        """Whether a value is another on each rank, as far as its text tells."""
        return self.flow.depends(node)

    # --- Who comes to this line? ----------------------------------------------------------------------

    def one_rank_only(self, node: ast.AST, seen: frozenset = frozenset()) -> bool:
        """Whether a test lets only some ranks come here: around it, before it, or around every call of its function."""
        if self.guarded(node):
            return True
        function = self.function_of(node)
        if function is None or function in seen:
            return False
        if any(last_name(each) in ("rank_zero_only", "main_process_only") or "rank" in last_name(each).lower()
               for each in function.decorator_list):  # fmt: skip
            return True
        callers = self.callers(function)
        return bool(callers) and all(self.one_rank_only(call, seen | {function}) for call in callers)

    def guarded(self, node: ast.AST) -> bool:
        """Whether the test stands in the same function."""
        return any(self._kept_by(test, node) for test in self._tests_above(node)) or self._left_before(node)

    def _tests_above(self, node: ast.AST) -> Iterator[ast.AST]:
        for each in self.above(node):
            if isinstance(each, ast.FunctionDef | ast.ClassDef | ast.Lambda):
                return
            if isinstance(each, ast.If | ast.IfExp | ast.BoolOp):
                yield each

    def _kept_by(self, test: ast.AST, node: ast.AST) -> bool:
        """Whether this `if` (or `and`) is a rank's test, and the node stands where only some ranks come."""
        if isinstance(test, ast.BoolOp):
            return any(self.is_rank_test(each) for each in test.values[:-1])
        path = {node, *self.above(node)}
        in_test = test.test in path
        return not in_test and self.is_rank_test(test.test)

    def is_rank_test(self, test: ast.AST) -> bool:
        """`rank == 0`, `not rank`, `is_main()`, `self.rank == 0 and …`; not `world_size > 1`, not `rank is None`."""
        if isinstance(test, ast.BoolOp):
            return any(self.is_rank_test(each) for each in test.values)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.is_rank_test(test.operand)
        if isinstance(test, ast.Compare):
            if isinstance(test.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn):
                return False
            sides = [test.left, *test.comparators]
            return any(isinstance(s, ast.Constant) and s.value in (0, -1, "0") for s in sides) and any(
                speaks_of_rank(side) or self.flow.is_rank(side) for side in sides
            )
        if self.flow.is_rank(test):  # `not self.gpu_id`
            return True
        name = last_name(test)
        named = ONE_RANK.search(name) or name.lower() in ("rank", "rank0", "ismain")
        if not name or named or name in self.asked:
            return bool(named)
        self.asked.add(name)
        try:
            return self._stands_for_rank_test(name)
        finally:
            self.asked.remove(name)

    def _stands_for_rank_test(self, name: str) -> bool:
        """Whether the name is given a rank's test somewhere: `chief = rank == 0`, or a function that returns one."""
        for node in self.given.get(name, ()):
            if isinstance(node.value, ast.Compare) and self.is_rank_test(node.value):
                return True
        if self._opened_by_one_rank(name):
            return True
        function = self.functions.get(name)
        returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)] if function else []
        return any(
            isinstance(each, ast.Compare | ast.BoolOp | ast.UnaryOp) and self.is_rank_test(each) for each in returned
        )

    def _opened_by_one_rank(self, name: str) -> bool:
        """Whether it is something on one rank and None on the others: `log = open(…) if rank == 0 else None`."""
        given = [
            node
            for node in self.given.get(name, ())
            if not (isinstance(node.value, ast.Constant) and node.value.value is None)
        ]
        return bool(given) and all(
            (isinstance(node.value, ast.IfExp) and self.is_rank_test(node.value.test))
            or any(self._kept_by(test, node) for test in self._tests_above(node))
            for node in given
        )

    def _left_before(self, node: ast.AST) -> bool:
        """Whether some ranks have returned earlier in the same block: `if rank != 0: return`."""
        child = node
        for each in self.above(node):
            for block in (getattr(each, "body", None), getattr(each, "orelse", None)):
                if isinstance(block, list) and child in block:
                    earlier = block[: block.index(child)]
                    if any(isinstance(e, ast.If) and not e.orelse and self.is_rank_test(e.test)
                           and isinstance(e.body[-1], ast.Return | ast.Continue) for e in earlier):  # fmt: skip
                        return True
            if isinstance(each, ast.FunctionDef):
                return False
            child = each
        return False

    # --- What is this name? ---------------------------------------------------------------------------

    @cached_property
    def wrapped(self) -> set[str]:
        """Names (last parts) of models that DistributedDataParallel wraps."""
        found = set()
        for node in self.all(ast.Assign):
            if any(isinstance(each, ast.Call) and last_name(each) in ("DistributedDataParallel", "DDP")
                   for each in ast.walk(node.value)):  # fmt: skip
                found |= {last_name(each) for target in node.targets for each in getattr(target, "elts", [target])}
        for function in self.wrapping:
            for call in self.callers(function):
                statement = next((each for each in self.above(call) if isinstance(each, ast.Assign)), None)
                found |= {last_name(target) for target in statement.targets} if statement else set()
        return found - {""}

    @cached_property
    def wrapping(self) -> list[ast.FunctionDef]:
        """Functions that return a wrapped model: `def wrap(model): return DDP(model)`."""
        return [
            function
            for function in self.functions.values()
            if any(
                isinstance(each, ast.Return) and last_name(each.value) in ("DistributedDataParallel", "DDP")
                for each in ast.walk(function)
                if isinstance(each, ast.Return) and isinstance(each.value, ast.Call)
            )
        ]

    def is_replica(self, node: ast.AST) -> bool:
        """Whether a name stands for a wrapped model here: by the last assignment in its function, or anywhere."""
        name, own = last_name(node), self.function_of(node)
        given = [each for each in self.all(ast.Assign) if each.lineno < node.lineno and self.function_of(each) is own
                 and name in {last_name(target) for target in each.targets}]  # fmt: skip
        if given and not name_of(node).startswith("self."):
            made = [last_name(each) for each in ast.walk(given[-1].value) if isinstance(each, ast.Call)]
            return bool({"DistributedDataParallel", "DDP", *(each.name for each in self.wrapping)} & set(made))
        return name in self.wrapped

    def concerns_replica(self, node: ast.AST) -> bool:
        """Whether a line stands in a loop over the parameters of a model that DistributedDataParallel wraps."""
        given = [words_in(part) for call in self.named("DistributedDataParallel", "DDP") for part in call.args[:1]]
        names = self.wrapped.union(*given) - {"self", "to", "device"}
        loops = [each for each in self.above(node) if isinstance(each, ast.For)]
        return any(words_in(loop.iter) & names for loop in loops)

    def reaches(self, node: ast.AST, names: frozenset[str], seen: frozenset = frozenset()) -> ast.Call | None:
        """Return a call of one of these names in a piece of program, or in the functions of this file that it calls."""
        if not hasattr(node, "calls"):  # asked for again by every rule
            node.calls = [(last_name(each), each) for each in ast.walk(node) if isinstance(each, ast.Call)]
        for name, call in node.calls:
            if name in names:
                return call
        for name, _ in node.calls:
            function = self.functions.get(name)
            if function and function not in seen and (found := self.reaches(function, names, seen | {function})):
                return found
        return None
