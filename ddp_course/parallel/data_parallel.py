"""How does one process train on several devices?

By copying the model to every device in every forward. The batch is cut (scatter), the model copied (replicate),
each copy runs in a thread of its own (parallel apply), and the outputs come home to the first device, the master
(gather). Every copy is an autograd function whose backward goes the other way, so one `backward()` brings each
replica's gradients home and adds them up on the original parameters.

A device may be listed more than once: `["cpu"] * 4` are four virtual devices, and copies between them are really
made. `Traffic` counts the bytes that leave or reach the master.

Left out on purpose: NCCL's broadcast and reduce, which torch's takes between distinct NVIDIA GPUs, packing small
tensors into one message, copy streams, an output device other than the master, and ScriptModules.
Read next: `naive.py`, where every device has a process and keeps its replica.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from ddp_course.parallel.nested import leaves, map_leaves

Device = torch.device | str


class Traffic:
    """Bytes copied from the master to other devices ("out") and from them to the master ("in"), by kind."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self._lock = threading.Lock()  # autograd has a thread per GPU, and each may count

    def count(self, kind: str, tensor: torch.Tensor) -> None:
        with self._lock:
            self.bytes[kind] += tensor.numel() * tensor.element_size()

    def clear(self) -> None:
        self.bytes.clear()


# --- Copies that autograd can follow ---------------------------------------------------------------


class Move(Function):
    """Copy one tensor to another device; backward copies its gradient back.

    `Tensor.to` is differentiable as well, but between two entries of the same device it would copy nothing.
    """

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, device: torch.device, traffic: Traffic, kinds: tuple[str, str]):
        ctx.home, ctx.device, ctx.traffic, ctx.kinds = tensor.device, device, traffic, kinds
        traffic.count(kinds[0], tensor)
        return tensor.to(device, copy=True)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        # Counted the other way round, since the gradient travels against its tensor.
        return Move.apply(gradient, ctx.home, ctx.traffic, ctx.kinds[::-1]), None, None, None


class Broadcast(Function):
    """Copy many tensors to every device; backward adds up the gradients of the copies, in the order of devices.

    The first device is the master, and its "copies" share storage with the sources: what a replica writes there
    in place stays.

    Source: torch/nn/parallel/_functions.py, whose Broadcast refuses tensors on the CPU.
    """

    @staticmethod
    def forward(ctx, devices: Sequence[torch.device], traffic: Traffic, *sources: torch.Tensor):
        ctx.home, ctx.traffic, ctx.count = devices[0], traffic, len(sources)
        ctx.set_materialize_grads(False)  # an unused parameter keeps the gradient None, as in one process
        copies = [source.detach() for source in sources]
        for device in devices[1:]:
            for source in sources:
                traffic.count("out: parameters" if isinstance(source, nn.Parameter) else "out: buffers", source)
                copies.append(source.detach().to(device, copy=True))
        sources_again = sources * len(devices)
        fixed = [copy for copy, source in zip(copies, sources_again, strict=True) if not source.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return tuple(copies)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None):
        sums: list[torch.Tensor | None] = list(gradients[: ctx.count])
        for place, gradient in enumerate(gradients[ctx.count :]):
            if gradient is None:
                continue
            ctx.traffic.count("in: parameter gradients", gradient)
            arrived, so_far = gradient.to(ctx.home, copy=True), sums[place % ctx.count]
            sums[place % ctx.count] = arrived if so_far is None else so_far + arrived
        return None, None, *sums


# --- The four steps --------------------------------------------------------------------------------


def scatter(inputs: Any, devices: Sequence[Device], dim: int = 0, traffic: Traffic | None = None) -> list[Any]:
    """Cut every tensor in `inputs` along `dim` into one chunk per device; share everything else.

    Args:
        inputs: a tensor, or tensors in nested tuples, lists and dicts.
        devices: where chunk 0, 1, ... go; `devices[0]` is the master, whose chunk is not copied if it is there.
        dim: of the batch, in every tensor alike.
    Returns:
        One structure like `inputs` per chunk. A small batch gives fewer chunks than devices, since all chunks but
        the last have rows / devices rows, rounded up. So 5 rows on 4 devices become 2, 2 and 1.
    Raises:
        ValueError: a tensor has no batch dimension, or two tensors give different numbers of chunks.
    Source: torch/nn/parallel/scatter_gather.py; there, surplus chunks of a longer tensor are dropped silently.
    """
    traffic = traffic or Traffic()
    devices = [torch.device(device) for device in devices]
    for tensor in leaves(inputs):
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 0:
            raise ValueError("cannot cut a tensor without dimensions into chunks: pass a number, or give it a batch")
    chunks = {id(t): t.chunk(len(devices), dim) for t in leaves(inputs) if isinstance(t, torch.Tensor)}
    counts = sorted({len(parts) for parts in chunks.values()}) or [len(devices)]
    if len(counts) > 1:
        raise ValueError(f"tensors give {counts} chunks: give all of them the same number of rows in dim {dim}")

    def place(index: int) -> Callable:
        def chunk_or_share(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            chunk = chunks[id(leaf)][index]
            if index == 0 and chunk.device == devices[0]:
                return chunk
            return Move.apply(chunk, devices[index], traffic, ("out: inputs", "in: input gradients"))

        return chunk_or_share

    return [map_leaves(place(index), inputs) for index in range(counts[0])]


def replicate(module: nn.Module, devices: Sequence[Device], traffic: Traffic | None = None) -> list[nn.Module]:
    """Return one copy of `module` per device, whose tensors are differentiable copies of the module's.

    A replica has tensors where the module has parameters, so `replica.parameters()` is empty: there is nothing to
    optimise in something that lives for one step. Replica 0 shares storage with the module, so in-place updates of
    its buffers stay, BatchNorm's running statistics among them. The other replicas' updates are lost with them.

    Source: torch/nn/parallel/replicate.py.
    """
    devices = [torch.device(device) for device in devices]
    sources = [*module.parameters(), *module.buffers()]  # each tied tensor once
    flat = Broadcast.apply(devices, traffic or Traffic(), *sources) if sources else ()
    replicas = []
    for index in range(len(devices)):
        copies = flat[index * len(sources) : (index + 1) * len(sources)]
        copy_of = dict(zip(map(id, sources), copies, strict=True))
        replicas.append(_copy_module(module, copy_of, {}))
    return replicas


def _copy_module(module: nn.Module, copy_of: Mapping[int, torch.Tensor], done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:  # one module in two places stays one module
        return done[id(module)]
    # A shallow copy without parameters. A method, since recurrent layers keep a second list of their weights.
    replica = done[id(module)] = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _copy_module(child, copy_of, done)
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        setattr(replica, name, None if tensor is None else copy_of[id(tensor)])
    return replica


def parallel_apply(
    replicas: Sequence[nn.Module], args: Sequence[tuple], kwargs: Sequence[dict], devices: Sequence[Device]
) -> list[Any]:
    """Call every replica with its own arguments, each in a thread, and return what they returned, in order.

    Raises:
        BaseException: the error of the first replica, by number, that failed, with a note that names it. All
            threads have ended by then.
    Source: torch/nn/parallel/parallel_apply.py.
    """
    outputs: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    settings = _thread_settings([torch.device(device) for device in devices])

    def run(index: int) -> None:
        try:
            with ExitStack() as stack:
                for setting in settings[index]:
                    stack.enter_context(setting())
                outputs[index] = replicas[index](*args[index], **kwargs[index])
        except BaseException as error:  # a thread's error would only be printed
            error.add_note(f"in replica {index} of {len(replicas)}, on device {devices[index]}")
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [outputs[index] for index in range(len(replicas))]


def _thread_settings(devices: Sequence[torch.device]) -> list[list[Callable]]:
    """Per device, what a new thread must switch on to compute as the calling thread would."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    settings: list[list[Callable]] = []
    for device in devices:
        kind = device.type
        cast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
        # Inference mode first: entering it, even with False, sets the gradient mode too.
        mine = [lambda: torch.inference_mode(inference), lambda: torch.set_grad_enabled(grad)]
        mine.append(lambda kind=kind, cast=cast: torch.autocast(kind, **cast))
        if kind == "cuda":
            stream = torch.cuda.current_stream(device)
            mine += [lambda d=device: torch.cuda.device(d), lambda s=stream: torch.cuda.stream(s)]
        settings.append(mine)
    return settings


def gather(outputs: Sequence[Any], device: Device, dim: int = 0, traffic: Traffic | None = None) -> Any:
    """Bring the replicas' outputs to `device` and join every tensor along `dim`.

    Args:
        outputs: one structure per replica, all alike: a tensor, None, or these in nested tuples, lists and dicts.
        device: the master. Output 0 is not copied if it is there.
        dim: of the batch. Tensors without dimensions, such as losses, become a vector with one entry per replica;
            the mean of that vector is the mean over the batch only if all chunks had the same size.
    Raises:
        TypeError: a replica returned something that cannot be joined; names its type.
        ValueError: the replicas' outputs differ in structure.
    Source: torch/nn/parallel/scatter_gather.py.
    """
    traffic, device = traffic or Traffic(), torch.device(device)

    def join(*parts: Any) -> Any:
        if all(part is None for part in parts):
            return None
        if not all(isinstance(part, torch.Tensor) for part in parts):
            found = ", ".join(sorted({type(part).__name__ for part in parts}))
            raise TypeError(f"cannot gather {found} from {len(parts)} replicas: return tensors, or None from all")
        kinds = ("in: outputs", "out: output gradients")
        home = [
            part if index == 0 and part.device == device else Move.apply(part, device, traffic, kinds)
            for index, part in enumerate(parts)
        ]
        return torch.stack(home) if home[0].dim() == 0 else torch.cat(home, dim)

    return map_leaves(join, *outputs)


# --- All of it -------------------------------------------------------------------------------------


class DataParallel(nn.Module):
    """Run `module` on several devices of one process; the gradients land on the parameters of `module`.

    Args:
        module: with all parameters and buffers on `devices[0]`, the master.
        devices: one entry per replica; entries may repeat. With a single one, the module is simply called.
        dim: of the batch, in inputs and outputs.
    Attributes:
        traffic: bytes over the master's links since it was last cleared.
    Raises:
        ValueError: no device is given; or, in forward, a parameter or buffer is not on the master.
    Source: torch/nn/parallel/data_parallel.py. There an unused parameter gets a gradient of zeros; here it keeps
        None, as in one process.
    """

    def __init__(self, module: nn.Module, devices: Sequence[Device], dim: int = 0) -> None:
        super().__init__()
        if not devices:
            raise ValueError("expected at least one device, found none: name them, such as ['cuda:0', 'cuda:1']")
        self.module, self.devices, self.dim = module, [torch.device(device) for device in devices], dim
        self.traffic = Traffic()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check_home()
        if len(self.devices) == 1:
            return self.module(*args, **kwargs)
        chunks = scatter((args, kwargs), self.devices, self.dim, self.traffic) if args or kwargs else [((), {})]
        devices = self.devices[: len(chunks)]
        replicas = replicate(self.module, devices, self.traffic)
        args_of, kwargs_of = zip(*chunks, strict=True)
        outputs = parallel_apply(replicas, args_of, kwargs_of, devices)
        return gather(outputs, self.devices[0], self.dim, self.traffic)

    def _check_home(self) -> None:
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if tensor.device != self.devices[0]:
                home = self.devices[0]
                raise ValueError(f"{name} is on {tensor.device}, expected the master {home}: call module.to('{home}')")
