"""What does a training script do with a wrapped module, and in which order may it do so?

A pattern is a few operations that belong together: a plain step, a step with accumulation, a dropped output, a second
backward pass, or what a script does now and then, such as copying, saving or wrapping again, and a step after it. A
pattern may raise, on every rank alike, but must not hang and must not depend on timing with torch's own
DistributedDataParallel: what would is not drawn, and the reason stands beside the condition.
Read next: `fuzz_player.py`, which carries the operations out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.parallel.fuzz_nets import NetSpec


@dataclass(frozen=True)
class Op:
    """One operation: a method of `Player`, and its arguments."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


def patterns_for(rng: random.Random, net: NetSpec, find_unused: bool) -> dict[Callable, float]:
    """The patterns that torch carries out without hanging, each with how often it is drawn."""
    weights = {
        plain: 4.0,
        accumulate: 2.0,
        half_in_no_sync: 1.0,
        backward_twice: 1.0,
        without_grad: 1.5,
        dropped: 1.0,
        local: 1.5,
        evaluated: 2.0,
        failed: 0.7,
        own_gradient: 1.0,
        new_data: 1.0,
        new_state: 1.0,
        hooked: 0.7,
        copied: 1.5,
        saved: 1.0,
    }
    # What raises in the middle of backward raises before all buckets are sent. Ranks that use other layers have sent
    # other buckets by then, and wait for each other.
    same_on_ranks = not net.by_rank
    if same_on_ranks:
        weights[recomputed] = 0.5
    if same_on_ranks or all(block.used != "even" for block in net.blocks):
        weights[several_forwards] = 1.0
    sinks = find_unused and net.container != "dataclass"  # torch then counts outputs outside the loss as done
    if net.heads > 1 and sinks:
        weights[some_heads] = 1.5
    if net.heads > 1 and same_on_ranks:
        weights[in_parts] = 2.0 if net.apart or sinks else 0.1
    ends = (net.all_take_part or find_unused) and not (net.outside_loss and not sinks)
    freezes = find_unused or rng.random() < 0.1
    if freezes and same_on_ranks:
        weights[frozen] = 1.0
    # An old wrapper whose reduction has not ended would reduce too, and both would write to a gradient at any time.
    if ends and (find_unused or not freezes):
        weights |= {wrapped_again: 1.5, old_wrapper: 1.0}
    return weights


# --- Single operations and patterns ----------------------------------------------------------------


def forward(rng: random.Random, mode: str = "sync", **options: Any) -> Op:
    """Modes: "sync", "no_sync", "no_grad", "local" (the module inside, called directly)."""
    drawn = {
        "mode": mode,
        "step": rng.randint(0, 3),
        "rows": rng.randint(2, 4),
        "call": rng.choice(["positional", "keyword", "nested"]),
    }
    return Op("forward", drawn | options)


def backward(rng: random.Random, **options: Any) -> Op:
    """Of all forward passes since the last backward pass; `heads` None are those in the loss."""
    return Op("backward", {"heads": None, **({"in_place": True} if rng.random() < 0.1 else {}), **options})


def step(rng: random.Random) -> Op:
    return Op("step", {"clip": True} if rng.random() < 0.2 else {})


def user_hook(rng: random.Random) -> Op:
    kind = rng.choice(["on the tensor", "after accumulation"])
    return Op("user_hook", {"parameter": rng.randrange(100), "kind": kind})


def plain(rng: random.Random, net: NetSpec) -> list[Op]:
    return [forward(rng), backward(rng), step(rng)]


def accumulate(rng: random.Random, net: NetSpec) -> list[Op]:
    ops = []
    for _ in range(rng.randint(1, 2)):
        mode = rng.choice(["no_sync", "no_sync", "sync"])
        ops += [forward(rng, mode), backward(rng, no_sync=mode == "no_sync")]
    return [*ops, forward(rng), backward(rng), step(rng)]


def half_in_no_sync(rng: random.Random, net: NetSpec) -> list[Op]:
    if rng.random() < 0.5:
        ops = [forward(rng, "no_sync"), backward(rng)]
    else:
        ops = [forward(rng), backward(rng, no_sync=True)]
    return [*ops, *([] if rng.random() < 0.5 else [step(rng)]), *plain(rng, net)]


def backward_twice(rng: random.Random, net: NetSpec) -> list[Op]:
    return [forward(rng), backward(rng, retain=True, in_place=False), backward(rng, in_place=False), step(rng)]


def without_grad(rng: random.Random, net: NetSpec) -> list[Op]:
    if rng.random() < 0.5:
        return [forward(rng, "no_grad"), *plain(rng, net)]
    return [forward(rng), forward(rng, "no_grad"), backward(rng), step(rng)]


def dropped(rng: random.Random, net: NetSpec) -> list[Op]:
    return [forward(rng, rng.choice(["sync", "sync", "no_sync"])), Op("drop"), *plain(rng, net)]


def local(rng: random.Random, net: NetSpec) -> list[Op]:
    """The module inside is used directly: its gradients are this rank's own, alone or before an average."""
    ops = [forward(rng, "local"), backward(rng)]
    return [*ops, step(rng)] if rng.random() < 0.4 else [*ops, *plain(rng, net)]


def several_forwards(rng: random.Random, net: NetSpec) -> list[Op]:
    modes = rng.choice([["sync"] * 2, ["sync"] * 3, ["no_sync", "sync"], ["sync", "no_sync"]])
    return [*(forward(rng, mode) for mode in modes), backward(rng), step(rng)]


def in_parts(rng: random.Random, net: NetSpec) -> list[Op]:
    heads = list(range(net.heads))
    rng.shuffle(heads)
    parts = [backward(rng, heads=(head,), retain=head != heads[-1], in_place=False) for head in heads]
    return [forward(rng), *parts, step(rng)]


def some_heads(rng: random.Random, net: NetSpec) -> list[Op]:
    """Some outputs are outside the loss of this step, and may have gradients of a pass before."""
    before = [forward(rng, "no_sync"), backward(rng, no_sync=True)]
    own = [Op("gradient", {"parameter": rng.randrange(100), "becomes": "own, of the rank"}) for _ in range(3)]
    ops = rng.choice([before, own, []])
    heads = tuple(sorted(rng.sample(range(net.heads), rng.randint(1, net.heads - 1))))
    return [*ops, forward(rng), backward(rng, heads=heads), step(rng)]


def evaluated(rng: random.Random, net: NetSpec) -> list[Op]:
    ops = [forward(rng, "no_grad")] if rng.random() < 0.6 else [forward(rng), backward(rng)]
    before = plain(rng, net) if rng.random() < 0.5 else []
    return [*before, Op("mode", {"train": False}), *ops, Op("mode", {"train": True}), *plain(rng, net)]


def failed(rng: random.Random, net: NetSpec) -> list[Op]:
    """The script's own error, which it catches, in a forward pass or at the beginning of backward."""
    if rng.random() < 0.3:
        return [forward(rng), backward(rng, fails=True), *plain(rng, net)]
    mode = rng.choice(["sync", "no_sync", "no_grad", "local"])
    return [forward(rng, mode, fails=True), *plain(rng, net)]


def recomputed(rng: random.Random, net: NetSpec) -> list[Op]:
    """All activations of the wrapper are thrown away: backward calls it again."""
    return [forward(rng, recomputed=True), backward(rng), step(rng)]


def own_gradient(rng: random.Random, net: NetSpec) -> list[Op]:
    kind = rng.choice(["none", "own", "own, of the rank", "own, a slice", "own, transposed"])
    return [Op("gradient", {"parameter": rng.randrange(100), "becomes": kind}), *plain(rng, net)]


def new_data(rng: random.Random, net: NetSpec) -> list[Op]:
    kind = rng.choice(["a copy", "other values"])
    return [Op("data", {"parameter": rng.randrange(100), "becomes": kind}), *plain(rng, net)]


def new_state(rng: random.Random, net: NetSpec) -> list[Op]:
    return [Op("load_state", {"of_rank": rng.random() < 0.3}), *plain(rng, net)]


def hooked(rng: random.Random, net: NetSpec) -> list[Op]:
    return [user_hook(rng), *plain(rng, net)]


def frozen(rng: random.Random, net: NetSpec) -> list[Op]:
    layer = rng.randrange(100)
    ops = [Op("trainable", {"block": layer, "flag": rng.random() < 0.3}), *plain(rng, net)]
    if rng.random() < 0.6:
        ops += [Op("trainable", {"block": layer, "flag": True}), *plain(rng, net)]
    return ops


def copied(rng: random.Random, net: NetSpec) -> list[Op]:
    used = rng.choice(["copy", "copy", "original"])
    return [Op("deepcopy", {"used": used, "other": rng.choice(["kept", "dropped"])}), *plain(rng, net)]


def saved(rng: random.Random, net: NetSpec) -> list[Op]:
    return [Op("save_and_load"), *plain(rng, net)]


def wrapped_again(rng: random.Random, net: NetSpec) -> list[Op]:
    old, ops = rng.choice(["kept", "deleted"]), []
    if old == "deleted" and rng.random() < 0.5:
        # Never without wrapping again: torch then reads a gradient from its bucket in the order of the old strides.
        ops = [Op("data", {"parameter": rng.randrange(100), "becomes": "other strides"})]
    return [*ops, Op("wrap_again", {"old": old, "view": rng.random() < 0.5}), *plain(rng, net)]


def old_wrapper(rng: random.Random, net: NetSpec) -> list[Op]:
    return [Op("wrap_again", {"old": "kept"}), *plain(rng, net), Op("back_to_old"), *plain(rng, net)]
