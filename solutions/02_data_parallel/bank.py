"""The answer bank of lesson 02: threads, and replicas.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import Right, right, wrong
from tests.grading.bank import wrong as strangers

IMPORTS = """
import copy
import os
import threading
import torch
from torch import nn
"""

# --- 02.1 ------------------------------------------------------------------------------------------

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

THREADS_RIGHT = r"""
an executor
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

THREADS_WRONG = r"""
a pool of its usual size | together | start a thread for each replica
    from concurrent.futures import ThreadPoolExecutor

    def parallel_apply(replicas, inputs):
        mode = torch.is_grad_enabled()

        def call(replica, args):
            with torch.set_grad_enabled(mode):
                return replica(*args)

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(call, *pair) for pair in zip(replicas, inputs)]
            return [future.result() for future in futures]
a returned error is taken for a raised one | error | an error that a replica returns is its result
    errors.append(error) => results[i] = error
    if errors: => errors = [result for result in results if isinstance(result, Exception)]
        if errors:
one after the other | together | start a thread for each replica
    def parallel_apply(replicas, inputs):
        return [r(*args) for r, args in zip(replicas, inputs)]
started and joined in one loop | together | join them when all have started
        [t.start() for t in threads]\n    [t.join() for t in threads]\n =>     for t in threads:
            t.start()
            t.join()\n
a new error of the kind | error | raise the replica's own error again
    raise errors[0] => raise type(errors[0])(*errors[0].args)
results are kept by replica | arguments | one replica is in the list twice
    [None] * len(replicas) => {}
    results[i] = => results[replicas[i]] =
    return results => return [results[replica] for replica in replicas]
None is dropped | error | None is a result
    return results => return [result for result in results if result is not None]
the first one in the caller's thread | together | the caller's own thread
    [t.start() for t in threads] => [t.start() for t in threads[1:]]
        run(0)
    [t.join() for t in threads] => [t.join() for t in threads[1:]]
errors swallowed | error | an error in a thread ends only the thread
        if errors:\n        raise errors[0]\n =>
another error | error | raise the replica's own error again
    raise errors[0] => raise RuntimeError('a replica failed')
the threads record always | gradients | whether autograd records is a matter of each thread
            torch.set_grad_enabled(grad)\n =>
results as they come | order | in which the threads ended
    results = [None] * len(replicas) => results = []
    results[i] = replicas[i](*inputs[i]) => results.append(replicas[i](*inputs[i]))
not joined | all | wait for every thread with join()
        [t.join() for t in threads]\n =>
raised before the others have ended | error | join all threads before you raise
        [t.join() for t in threads]\n =>     for t in threads:
            t.join()
            if errors:
                break\n
errors are left to the thread | error | an error in a thread ends only the thread
    except Exception as error:\n            errors.append(error) => finally:\n            pass
the tuple as one argument | order together arguments | each input is a tuple
    (*inputs[i]) => (inputs[i])
never joins itself | all | an endless loop | 1
    [t.join() for t in threads] => while True: pass
"""

# --- 02.2 ------------------------------------------------------------------------------------------

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

REPLICATE_RIGHT = r"""
a deep copy with clones in its memo
    def replicate(model, count):
        return [copy.deepcopy(model, {id(p): p.clone() for p in model.parameters()}) for _ in range(count)]
"""

REPLICATE_WRONG = r"""
deep copies | home awkward | nothing came home
    def replicate(model, count):
        return [copy.deepcopy(model) for _ in range(count)]
hooks that add to .grad | home awkward | a hook is no step of autograd
    def replicate(model, count):
        def home(parameter):
            def hook(gradient):
                parameter.grad = parameter.grad + gradient
            return hook

        replicas = [copy.deepcopy(model) for _ in range(count)]
        for replica in replicas:
            for mine, parameter in zip(replica.parameters(), model.parameters()):
                if parameter.requires_grad:
                    mine.register_hook(home(parameter))
        return replicas
the replicas of the first call | outputs home awkward | the model's weights and buffers
    return [one => return vars(model).setdefault("made", [one
    range(count)] => range(count)])
weights and biases only | home awkward | only some replicas' gradients came home
    def replicate(model, count):
        replicas = [model] + [copy.deepcopy(model) for _ in range(count - 1)]
        for replica in replicas[1:]:
            for mine, module in zip(replica.modules(), model.modules()):
                for name in {"weight", "bias"} & {*mine._parameters}:
                    parameter = mine._parameters.pop(name)
                    setattr(mine, name, None if parameter is None else getattr(module, name).clone())
        return replicas
the model itself | memory | their weights must be copies
    def replicate(model, count):
        return [model] * count
one copy for all devices | memory | for each again
    [one(model, {}) for _ in range(count)] => [model] + [one(model, {})] * (count - 1)
a layer without a bias | all | NoneType
    parameter is not None and id(parameter) => id(parameter)
    None if parameter is None else clones => clones
detached | home awkward | cut that tie
    parameter.clone() => parameter.detach().clone()
changes the model | all | the model was changed
    copy.copy(module)\n    replica.__dict__ = dict(module.__dict__) => module\n    params = dict(module._parameters)
    replica._parameters = {} => module._parameters.clear()
    in module._parameters.items() => in params.items()
only one replica is tied to the model | home awkward | only some replicas' gradients came home
    def replicate(model, count):
        return [model] + [copy.deepcopy(model) for _ in range(count - 1)]
divided by the replicas | home awkward | gradients add up
    parameter.clone() => mean(parameter)
    def replicate( => def mean(parameter):
        clone = parameter.clone()
        if clone.requires_grad:
            clone.register_hook(lambda g: g / 4)
        return clone

    def replicate(
plain tensors set on a module | all | take the name out of there
    def replicate(model, count):
        replica = copy.deepcopy(model)
        replica[0].weight = model[0].weight.clone()
        return [replica] * count
a functional call | all | this exercise is to write what it does
    from torch.func import functional_call

    def replicate(model, count):
        def replica():
            weights = {name: parameter * 1 for name, parameter in model.named_parameters()}
            return lambda *args: functional_call(model, weights, args)
        return [replica() for _ in range(count)]
os._exit | all | the function ends its process
    def replicate(model, count):
        os._exit(2)
"""

RIGHT = [
    Right("02.1", "a list of results", THREADS),
    *right("02.1", THREADS, THREADS_RIGHT),
    Right("02.2", "module by module", REPLICATE),
    *right("02.2", REPLICATE, REPLICATE_RIGHT),
]
WRONG = [
    *wrong("02.1", THREADS, THREADS_WRONG),
    *wrong("02.2", REPLICATE, REPLICATE_WRONG),
]

# --- From strangers, who had seen the texts alone -------------------------------------------------

WRONG += strangers(
    "02.2",
    "",
    r"""
frozen weights are not cloned, all replicas share them with the model | memory | replicas 1
    def replicate(model, count):
        replicas = [model]
        for _ in range(count - 1):
            memo = {id(p): p.clone() if p.requires_grad else p for p in model.parameters()}
            replicas.append(copy.deepcopy(model, memo))
        return replicas
zeroes the model's gradients, so gradients that were being accumulated are lost
| home awkward | backward adds to the gradients that are there
    def replicate(model, count):
        model.zero_grad()
        replicas = [model]
        for _ in range(count - 1):
            replicas.append(copy.deepcopy(model, {id(p): p.clone() for p in model.parameters()}))
        return replicas
""",
)
