"""The answer bank of lesson 02: scatter, threads, and replicas.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong

IMPORTS = """
import copy
import os
import threading
import torch
from torch import nn
"""

# --- 02.1 ------------------------------------------------------------------------------------------

SCATTER = """
def scatter(batch, n):
    if isinstance(batch, torch.Tensor):
        return list(batch.chunk(n))
    if isinstance(batch, dict):
        columns = {key: scatter(item, n) for key, item in batch.items()}
        count = shortest(columns.values())
        return [{key: column[i] for key, column in columns.items()} for i in range(count)]
    if isinstance(batch, (list, tuple)):
        columns = [scatter(item, n) for item in batch]
        return [type(batch)(column[i] for column in columns) for i in range(shortest(columns))]
    return [batch] * n

def shortest(columns):
    return min(map(len, columns), default=0)
"""

SCATTER_BY_PYTREE = """
from torch.utils import _pytree as pytree

def scatter(batch, n):
    leaves, shape = pytree.tree_flatten(batch)
    rows = next(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    size = (rows + n - 1) // n
    starts = range(0, rows, size)
    return [
        pytree.tree_unflatten([leaf[s:s + size] if torch.is_tensor(leaf) else leaf for leaf in leaves], shape)
        for s in starts
    ]
"""

SCATTER_SPLIT = "def scatter(batch, n):\n    return list(torch.tensor_split(batch, n))\n"

# --- 02.2 ------------------------------------------------------------------------------------------

THREADS = """
def parallel_apply(replicas, inputs):
    results = [None] * len(replicas)
    errors = []
    grad = torch.is_grad_enabled()

    def run(i):
        torch.set_grad_enabled(grad)
        try:
            results[i] = replicas[i](*inputs[i])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(replicas))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    if errors:
        raise errors[0]
    return results
"""

THREADS_BY_POOL = """
from concurrent.futures import ThreadPoolExecutor

def parallel_apply(replicas, inputs):
    mode = torch.is_grad_enabled()

    def call(replica, args):
        with torch.set_grad_enabled(mode):
            return replica(*args)

    with ThreadPoolExecutor(max_workers=len(replicas)) as pool:
        futures = [pool.submit(call, *pair) for pair in zip(replicas, inputs)]
        return [future.result() for future in futures]
"""

# --- 02.3 ------------------------------------------------------------------------------------------

REPLICATE = """
def replicate(model, count):
    return [one(model, {}) for _ in range(count)]

def one(module, clones):
    replica = copy.copy(module)
    replica.__dict__ = dict(module.__dict__)
    replica._parameters = {}
    replica._modules = {name: one(child, clones) for name, child in module._modules.items()}
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in clones:
            clones[id(parameter)] = parameter.clone()
        setattr(replica, name, None if parameter is None else clones[id(parameter)])
    return replica
"""

REPLICATE_FUNCTIONAL = """
from torch.func import functional_call

def replicate(model, count):
    def replica():
        weights = {name: parameter * 1 for name, parameter in model.named_parameters()}
        return lambda *args: functional_call(model, weights, args)
    return [replica() for _ in range(count)]
"""

DEEPCOPIES = "def replicate(model, count):\n    return [copy.deepcopy(model) for _ in range(count)]\n"

RIGHT = [
    Right("02.1", "column by column", SCATTER),
    Right("02.1", "flattened and put together again", SCATTER_BY_PYTREE),
    Right("02.2", "a list of results", THREADS),
    Right("02.2", "an executor", THREADS_BY_POOL),
    Right("02.3", "module by module", REPLICATE),
    Right("02.3", "a functional call", REPLICATE_FUNCTIONAL),
]

WRONG = [
    # 02.1
    Wrong(
        "02.1",
        "as even as possible",
        SCATTER.replace("batch.chunk(n)", "batch.tensor_split(n)"),
        ("uneven", "few"),
        "all chunks but the last have rows / devices rows, rounded up",
    ),  # fmt: skip
    Wrong(
        "02.1",
        "tensors only",
        SCATTER_SPLIT.replace("torch.tensor_split(batch, n)", "batch.chunk(n)"),
        ("nested", "kept"),
        "a tuple, a list or a dictionary has no rows itself",
    ),  # fmt: skip
    Wrong(
        "02.1",
        "the rest is lost",
        SCATTER.replace(
            "list(batch.chunk(n))", "[batch[i * (len(batch) // n):(i + 1) * (len(batch) // n)] for i in range(n)]"
        ),
        ("uneven", "few"),
        "rows are lost",
    ),  # fmt: skip
    Wrong(
        "02.1",
        "dealt out like cards",
        SCATTER.replace("list(batch.chunk(n))", "[batch[i::n] for i in range(n)]"),
        ("tensor", "uneven", "few", "nested", "kept"),
        "chunk 0 has the first rows, chunk 1 the next",
    ),  # fmt: skip
    Wrong(
        "02.1",
        "tuples become lists",
        SCATTER.replace("type(batch)(column", "list(column"),
        ("nested", "kept"),
        "dictionaries, tuples and lists stay what they are",
    ),  # fmt: skip
    Wrong(
        "02.1",
        "cuts the structure, not its tensors",
        "def scatter(batch, n):\n    size = -(-len(batch) // n)\n"
        "    batch = batch if torch.is_tensor(batch) else list(batch)\n"
        "    return [batch[i:i + size] for i in range(0, len(batch), size)]\n",
        ("nested", "kept"),
        "one structure for each device",
    ),  # fmt: skip
    Wrong(
        "02.1",
        "torch's own",
        "from torch.nn.parallel.scatter_gather import scatter as theirs\n"
        "def scatter(batch, n):\n    return theirs(batch, [torch.device('cpu')] * n)\n",
        ALL,
        "this exercise is to write what it does",
    ),  # fmt: skip
    # 02.2
    Wrong(
        "02.2",
        "one after the other",
        "def parallel_apply(replicas, inputs):\n    return [r(*args) for r, args in zip(replicas, inputs)]\n",
        ("together",),
        "start a thread for each replica",
    ),  # fmt: skip
    Wrong(
        "02.2",
        "started and joined in one loop",
        THREADS.replace(
            "    [t.start() for t in threads]\n    [t.join() for t in threads]\n",
            "    for t in threads:\n        t.start()\n        t.join()\n",
        ),
        ("together",),
        "join them when all have started",
    ),  # fmt: skip
    Wrong(
        "02.2",
        "errors swallowed",
        THREADS.replace("    if errors:\n        raise errors[0]\n", ""),
        ("error",),
        "an error in a thread ends only the thread",
    ),  # fmt: skip
    Wrong(
        "02.2",
        "another error",
        THREADS.replace("raise errors[0]", "raise RuntimeError('a replica failed')"),
        ("error",),
        "raise the replica's own error again",
    ),  # fmt: skip
    Wrong(
        "02.2",
        "the threads record always",
        THREADS.replace("        torch.set_grad_enabled(grad)\n", ""),
        ("gradients",),
        "whether autograd records is a matter of each thread",
    ),  # fmt: skip
    Wrong(
        "02.2",
        "results as they come",
        THREADS.replace("results = [None] * len(replicas)", "results = []").replace(
            "results[i] = replicas[i](*inputs[i])", "results.append(replicas[i](*inputs[i]))"
        ),
        ("order",),
        "in which the threads ended",
    ),  # fmt: skip
    Wrong(
        "02.2",
        "not joined",
        THREADS.replace("    [t.join() for t in threads]\n", ""),
        ALL,
        "wait for every thread with join()",
    ),  # fmt: skip
    Wrong(
        "02.2",
        "raised before the others have ended",
        THREADS.replace(
            "    [t.join() for t in threads]\n",
            "    for t in threads:\n        t.join()\n        if errors:\n            break\n",
        ),
        ("error",),
        "join all threads before you raise",
    ),
    Wrong(
        "02.2",
        "errors are left to the thread",
        THREADS.replace("except Exception as error:\n            errors.append(error)", "finally:\n            pass"),
        ("error",),
        "an error in a thread ends only the thread",
    ),
    Wrong(
        "02.2",
        "the tuple as one argument",
        THREADS.replace("(*inputs[i])", "(inputs[i])"),
        ("order", "together", "arguments"),
        "each input is a tuple",
    ),  # fmt: skip
    Wrong(
        "02.2",
        "never joins itself",
        THREADS.replace("[t.join() for t in threads]", "while True: pass"),
        ALL,
        "an endless loop",
        limit_s=1.0,
    ),  # fmt: skip
    # 02.3
    Wrong("02.3", "deep copies", DEEPCOPIES, ("home", "awkward"), "nothing came home"),
    Wrong(
        "02.3",
        "the model itself",
        "def replicate(model, count):\n    return [model] * count\n",
        ("memory",),
        "their weights must be copies",
    ),  # fmt: skip
    Wrong(
        "02.3",
        "detached",
        REPLICATE.replace("parameter.clone()", "parameter.detach().clone()"),
        ("home", "awkward"),
        "cut that tie",
    ),  # fmt: skip
    Wrong(
        "02.3",
        "changes the model",
        REPLICATE.replace(
            "replica = copy.copy(module)\n    replica.__dict__ = dict(module.__dict__)\n    replica._parameters = {}",
            "replica = module\n    params = dict(module._parameters)\n    module._parameters.clear()",
        ).replace("for name, parameter in module._parameters.items()", "for name, parameter in params.items()"),
        ("memory",),
        "the model was changed",
    ),  # fmt: skip
    Wrong(
        "02.3",
        "only one replica is tied to the model",
        DEEPCOPIES.replace(
            "[copy.deepcopy(model) for _ in range(count)]", "[model] + [copy.deepcopy(model) for _ in range(count - 1)]"
        ),
        ("home", "awkward"),
        "only some replicas' gradients came home",
    ),  # fmt: skip
    Wrong(
        "02.3",
        "divided by the replicas",
        REPLICATE.replace("parameter.clone()", "mean(parameter, 4)")
        + """
def mean(parameter, count):
    clone = parameter.clone()
    if clone.requires_grad:
        clone.register_hook(lambda g: g / 4)
    return clone
""",
        ("home", "awkward"),
        "gradients add up",
    ),  # fmt: skip
    Wrong(
        "02.3",
        "plain tensors set on a module",
        "def replicate(model, count):\n    replica = copy.deepcopy(model)\n"
        "    replica[0].weight = model[0].weight.clone()\n    return [replica] * count\n",
        ALL,
        "take the name out of there",
    ),  # fmt: skip
    Wrong(
        "02.3",
        "the course's own",
        "from ddp_course.parallel import replicate as theirs\n"
        "def replicate(model, count):\n    return theirs(model, ['cpu'] * count)\n",
        ALL,
        "this exercise is to write what it does",
    ),  # fmt: skip
    Wrong("02.3", "os._exit", "def replicate(model, count):\n    os._exit(2)\n", ALL, "the function ends its process"),
]
