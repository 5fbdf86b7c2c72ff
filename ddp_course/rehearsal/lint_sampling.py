"""Rules: which rows do ranks read, in which order, and how are means taken over them?

Read next: `lint_replicas.py`.
"""

from __future__ import annotations

import ast
import re

from ddp_course.rehearsal.parsed import is_true, keyword, last_name, name_of, words_in
from ddp_course.rehearsal.source import COLLECTIVES, RANK, WORLD, Found, Source, speaks_of_rank

ROWS = re.compile(r"len\(\w+\)|\w+\.(size\(0\)|shape\[0\])")  # the number of a batch's rows
DRAWS = frozenset(
    [
        *("rand", "randn", "randint", "random", "uniform", "normal", "choice", "randperm", "standard_normal"),
        *("integers", "gauss", "bernoulli", "permutation"),
    ]
)
# Calls that name rank and world size without dividing any rows between ranks.
NO_SHARDS = {
    *("print", "init_process_group", "device", "format", "info", "set_device", "DistributedDataParallel", "DDP"),
    *("run", "main", "spawn"),
}


def same_rows(source: Source) -> Found:
    """A loader that shuffles whole data by itself; or a program in which nothing divides samples between ranks."""
    loaders = [call for call in source.named("DataLoader") if not _evaluates(source, call)]
    own = [call for call in loaders if any(map(source.of_rank, [*call.args, *(each.value for each in call.keywords)]))]
    for call in loaders:
        if call not in own and is_true(keyword(call, "shuffle")) and not _picks_by_rank(source):
            yield call, "it shuffles all samples, on every rank"
            return
    if loaders and not own and not _shards(source):
        yield loaders[0], "no sampler, slice or seed in this program depends on the rank"


def unread_samples(source: Source) -> Found:
    """A DistributedSampler over data that is a rank's own already."""
    for call in source.named("DistributedSampler"):
        data = next(iter(call.args[:1]), None) or keyword(call, "dataset")
        made = source.given.get(last_name(data), ()) if data is not None else ()
        seeded = any(each.arg == "seed" and source.of_rank(each.value) for node in made for each in
                     getattr(node.value, "keywords", ()))  # fmt: skip
        if data is None or seeded or _evaluates(source, call):
            continue
        if source.of_rank(data) and not _named_again(source, call, [node.value for node in made]):
            yield call, "the data that it divides depends on the rank already"


def _named_again(source: Source, call: ast.Call, made: list[ast.AST]) -> bool:
    """Whether the data depends on the rank only because a loop over its loader has the names of its parts, `x, y`."""
    parts = [each for value in made for each in ast.walk(value) if isinstance(each, ast.Name)]
    later = {each.id for loop in source.all(ast.For) if loop.lineno > call.lineno
             for each in ast.walk(loop.target) if isinstance(each, ast.Name)}  # fmt: skip
    looped = {each.id for each in parts} & later
    here = (node for node in source.all(ast.Assign) if source.function_of(node) is source.function_of(call))
    given = [node.value for node in here if any(looped & words_in(target) for target in node.targets)]
    others = [each for each in parts if each.id not in looped]
    plain = not any("rank" in word.lower() for value in made for word in words_in(value))
    return bool(looped) and plain and not any(map(source.of_rank, [*given, *others]))


def _picks_by_rank(source: Source) -> bool:
    """Whether something beside a sampler is chosen by rank and world size: `if i % world_size != rank: continue`."""
    for node in [each for kind in (ast.Slice, ast.BinOp, ast.Compare) for each in source.all(kind)]:
        if any(map(WORLD.search, words_in(node))) and source.of_rank(node):
            return True
    return False


def _shards(source: Source) -> bool:
    """Whether anything makes the rows of a rank its own."""
    bases = [last_name(base) for node in source.all(ast.ClassDef) for base in node.bases]
    if source.named("DistributedSampler", "split_dataset_by_node") or "DistributedSampler" in bases:
        return True
    for node in [each for kind in (ast.Call, ast.Slice, ast.BinOp, ast.Compare) for each in source.all(kind)]:
        if isinstance(node, ast.Call) and last_name(node) in NO_SHARDS:
            continue
        words = words_in(node)
        both = any(map(RANK.search, words)) and any(map(WORLD.search, words))
        if both and not any(isinstance(each, ast.JoinedStr) for each in ast.walk(node)):
            return True
    seeded = source.named("manual_seed", "default_rng", "RandomState", "seed", "Generator")
    return any(map(speaks_of_rank, seeded)) and not source.named("RandomSampler") and not _map_style_only(source)


def _map_style_only(source: Source) -> bool:
    """Whether the loader draws rows of one data set, so that another seed only changes their order."""
    return any(is_true(keyword(call, "shuffle")) for call in source.named("DataLoader"))


def missing_set_epoch(source: Source) -> Found:
    if "set_epoch" in source.calls:
        return
    if sampler := source.functions.get("set_epoch"):  # a sampler of one's own
        made = source.calls.get(getattr(source.parent[sampler], "name", ""), [])
        yield from ((call, "its set_epoch is never called") for call in made[:1])
    for call in source.named("DistributedSampler"):
        shuffle = keyword(call, "shuffle")
        if (shuffle is None or not (isinstance(shuffle, ast.Constant) and shuffle.value is False)) and not _evaluates(
            source, call
        ):
            yield call, "it shuffles, and nothing in this program calls set_epoch"


SCORES = re.compile(
    r"f1|auc|auroc|precision|recall|r2_score|pearson|spearman|kappa|matthews|median|quantile|perplexity"
)
EVALUATION = re.compile(r"(^|_)(val|valid|validation|test|eval|dev|holdout|heldout)", re.IGNORECASE)


def _evaluates(source: Source, call: ast.Call) -> bool:
    """Whether names say that this is the data of an evaluation."""
    statement = next((each for each in source.above(call) if isinstance(each, ast.Assign)), None)
    words = words_in(call) | (set().union(*map(words_in, statement.targets)) if statement else set())
    return any(EVALUATION.search(word) for word in words)


def mean_of_means(source: Source) -> Found:
    """A value that was divided by a rank's own count, averaged over ranks."""
    divided: dict[str, ast.AST] = {}
    for node in source.all(ast.Assign):
        if any(
            (isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div) and _counts(each.right))
            or _mean_of_batches(source, each)
            for each in ast.walk(node.value)
        ):
            for target in node.targets:
                divided[last_name(target)] = node
    scores = {
        last_name(target): node
        for node in source.all(ast.Assign)
        for target in node.targets
        if any(isinstance(each, ast.Call) and SCORES.search(last_name(each)) for each in ast.walk(node.value))
    }
    for node in source.all(ast.Assign):  # t = torch.tensor(score)
        if held := words_in(node.value) & scores.keys():
            scores |= {last_name(target): scores[min(held)] for target in node.targets}
    for call in source.named("all_reduce", "reduce"):
        if not call.args:
            continue
        given = set(words_in(call.args[0]))
        if (given & scores.keys()) and _averages(source, call, given):
            hit = scores[min(given & scores.keys())]
            yield hit, "this score of a rank's own samples is averaged, and is no sum over samples"
            continue
        own = source.function_of(call)
        names = {word for word in words_in(call.args[0])}
        hit = next(
            (divided[name] for name in names if name in divided and source.function_of(divided[name]) is own), None
        )
        if (
            hit is not None
            and divided[last_name(hit.targets[0])].lineno < call.lineno
            and _averages(source, call, names)
        ):
            yield hit, "each rank divides by its own count, and the quotients are averaged"
    yield from _rows_for_targets(source)


def _rows_for_targets(source: Source) -> Found:
    """A loss with `ignore_index` is a mean over the targets that count, however many rows they are in."""
    losses = {name for name, each in source.functions.items() if _ignores(each)}
    losses |= {last_name(target) for each in source.all(ast.Assign) if _ignores(each.value) for target in each.targets}

    def is_mean(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and last_name(node) in losses and not {"sum", "none"} & words_in(node)

    means = {last_name(t) for each in source.all(ast.Assign) if is_mean(each.value) for t in each.targets}
    for node in source.all(ast.BinOp):
        for mean, rows in ((node.left, node.right), (node.right, node.left)):
            found = isinstance(node.op, ast.Mult) and ROWS.fullmatch(ast.unparse(rows))
            if found and any(is_mean(each) or name_of(each) in means for each in ast.walk(mean)):
                yield node, "the loss is a mean over the targets that are not ignored, and is weighted by rows"


def _ignores(node: ast.AST) -> bool:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and keyword(each, "ignore_index")]
    return any(not {"sum", "none"} & words_in(call) for call in calls)


def _mean_of_batches(source: Source, node: ast.AST) -> bool:
    """`torch.stack(means).mean()` in an evaluation, whose last batch is smaller as a rule."""
    if not (isinstance(node, ast.Call) and last_name(node) == "mean" or name_of(node).endswith(".mean")):
        return False
    inner = {last_name(each) for each in ast.walk(node) if isinstance(each, ast.Call)}
    own = source.function_of(node)
    learns = own is None or source.reaches(own, frozenset({"backward"}))
    return bool({"stack", "cat", "tensor"} & inner) and not learns


def _counts(node: ast.AST) -> bool:
    words = {word.lower() for word in words_in(node)}
    return any(
        re.search(r"(^|_)(len|count|seen|n|total|num|samples|batches|rows)(_|$)", word) for word in words
    ) and not any(WORLD.search(word) for word in words)


def _averages(source: Source, call: ast.Call, names: set[str]) -> bool:
    if "AVG" in words_in(call):
        return True
    own = source.function_of(call)
    after = [each for kind in (ast.BinOp, ast.AugAssign) for each in source.all(kind) if isinstance(each.op, ast.Div)]
    words = [words_in(each) for each in after if each.lineno >= call.lineno and source.function_of(each) is own]
    return any(some & names and any(map(WORLD.search, some)) for some in words)


def loss_not_reduced(source: Source) -> Found:
    """A loss that is read and told, in a training in which no rank's numbers meet another's."""
    tells = source.named("print", "info", "log", "write", "writerow", "add_scalar")
    alone = not source.named(*COLLECTIVES - {"barrier", "broadcast", "broadcast_object_list"})
    if alone and tells and "backward" in source.calls:
        for call in source.named("item"):
            given = source.callers(source.function_of(call)) if source.function_of(call) else []
            words = words_in(call).union(each.arg or "" for caller in given for each in caller.keywords)
            if any("loss" in word.lower() for word in words):
                yield call, "this is the loss of one rank's samples, and no collective combines it with the others'"


def slow_loading(source: Source) -> Found:
    """A wait in __getitem__ that is written there in plain words."""
    loaders = source.named("DataLoader")
    if not loaders or any(keyword(call, "num_workers") is not None for call in loaders):
        return
    for name in ("__getitem__",):
        for node in source.all(ast.FunctionDef):
            if node.name == name and (
                call := next((c for c in ast.walk(node) if isinstance(c, ast.Call) and last_name(c) == "sleep"), None)
            ):
                yield call, "the rank itself waits for every row"


def same_augmentation(source: Source) -> Found:
    """numpy's or Python's generator, seeded alike on all ranks, and drawn from in a data set."""
    seeded = {name_of(call): call for call in source.named("seed", "manual_seed") if not speaks_of_rank(call)}
    for owner, seed in (
        ("np.random.", "np.random.seed"),
        ("numpy.random.", "numpy.random.seed"),
        ("random.", "random.seed"),
        ("torch.", "torch.manual_seed"),
    ):
        if seed not in seeded or any(
            speaks_of_rank(call) for call in source.named("seed", "manual_seed", "initial_seed")
        ):
            continue
        for node in source.all(ast.FunctionDef):
            if node.name not in ("__getitem__", "__call__", "augment", "collate", "collate_fn"):
                continue
            draws = [c for c in ast.walk(node) if isinstance(c, ast.Call) and name_of(c).startswith(owner)
                     and last_name(c) in DRAWS and keyword(c, "generator") is None]  # fmt: skip
            if draws:
                yield draws[0], f"{seed} is the same on every rank (line {seeded[seed].lineno})"
                return
