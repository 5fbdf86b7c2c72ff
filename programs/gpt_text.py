"""A text as tokens, and which of its windows each step reads; for `train_gpt.py`."""

import sysconfig
from functools import lru_cache
from pathlib import Path

import torch


def read_text():
    """Return the training and the held-out tokens: bytes of Python's own library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = files[9::10]
    parts = [file for file in files if file not in held_out], held_out
    contents = (b"".join(file.read_bytes() for file in part) for part in parts)
    return [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in contents]


@lru_cache(maxsize=1)  # so an epoch is shuffled once, not at each step
def order_of(count, epoch):
    """Return all windows in the order of this epoch, on every rank the same."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch))


def numbers_of_step(count, step, batch):
    """Which of `count` windows a step reads: the same for any number of ranks."""
    epoch, place = divmod(step, count // batch)
    return order_of(count, epoch)[place * batch : (place + 1) * batch]


def windows(tokens, numbers, context):
    """Return these windows of `context` tokens, and their targets, one token later."""
    # One row for each window, with one token more than the context: the last target.
    pieces = tokens[numbers[:, None] * context + torch.arange(context + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]
