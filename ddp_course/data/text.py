"""Which piece of a text does each rank read, and how does it find its place again?

Python's standard library lies on every machine that has Python, as source: some megabytes of text, without a download.
A token is a byte, so the vocabulary has 256 entries and nothing has to be learnt first. The text is cut into windows.
A seeded permutation shuffles the windows, and each rank takes every W-th one. How many windows all ranks together have
read is one number: whoever has it goes on exactly there, with another number of ranks too.

The files differ between versions of Python, so the same seed gives another model there. A position knows its text by a
checksum, and is refused on another one.

Left out on purpose: tokens longer than a byte (byte pairs and the like), and texts larger than the memory.
Read next: `gpt.py`, the model; or `permutation.py`, the shuffled order.

Shapes: N windows in this rank's batch, T tokens in a window.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_course.data.downloads import DatasetError
from ddp_course.data.permutation import Permutation
from ddp_course.data.sampler import exact_shard

VOCABULARY = 256
END_OF_FILE = 0  # a byte that Python's source never has
HELD_OUT_EVERY = 10  # of ten files, in sorted order, the last one is held out


class Text(NamedTuple):
    """Tokens to train on, and tokens of other files to be judged by."""

    train: torch.Tensor  # uint8, one after the other, each file ended by END_OF_FILE
    held_out: torch.Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def library_text(folder: str | Path | None = None) -> Text:
    """Read the Python files that lie directly in a folder.

    Args:
        folder: None is the standard library of the Python that runs this.
    Raises:
        DatasetError: there are too few files to hold one out.
    """
    folder = Path(folder or sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py"))
    if len(paths) < HELD_OUT_EVERY:
        raise DatasetError(
            f"{folder} has {len(paths)} Python files, at least {HELD_OUT_EVERY} are needed: one of {HELD_OUT_EVERY} is "
            "held out; name another folder with text=..."
        )
    held_out = paths[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [path for path in paths if path not in held_out]
    names = (tuple(path.name for path in part) for part in (train, held_out))
    return Text(_tokens_of(train), _tokens_of(held_out), *names)


def _tokens_of(paths: list[Path]) -> torch.Tensor:
    content = b"".join(path.read_bytes() + bytes([END_OF_FILE]) for path in paths)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def encode(text: str) -> torch.Tensor:
    """Return the tokens of a text: the bytes of its UTF-8 form, as int64."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens: torch.Tensor) -> str:
    """Return the text of tokens; what is no UTF-8 becomes a question mark, as a young model writes it now and then."""
    return bytes(tokens.tolist()).decode(errors="replace").replace("\0", "\n# --- end of file ---\n")


# --- Windows ---------------------------------------------------------------------------------------


def count_windows(tokens: torch.Tensor, context: int) -> int:
    """Return how many windows a text has: `context` tokens each, and one more that is only to be predicted."""
    return (len(tokens) - 1) // context


def windows(tokens: torch.Tensor, context: int, chosen_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen windows, and for each token the one that follows it; both (N, T), int64."""
    first_N1 = torch.from_numpy(chosen_N.astype(np.int64))[:, None] * context
    piece = tokens[first_N1 + torch.arange(context + 1)].long()
    return piece[:, :-1], piece[:, 1:]


def exact_windows(tokens: torch.Tensor, context: int, most: int, world_size: int, rank: int) -> np.ndarray:
    """Return the windows on which `rank` evaluates: every window has one rank, none has two.

    Args:
        most: if the text has more windows, as many of them, evenly spread; 0 takes all.
    """
    total = count_windows(tokens, context)
    taken = min(total, most or total)
    return np.array([number * total // taken for number in exact_shard(taken, world_size, rank)], dtype=np.int64)


class TokenStream:
    """This rank's windows of a text, epoch after epoch, without an end.

        stream = TokenStream(text.train, context=128, local_batch=16, world_size=2, rank=0)
        token_NT, next_NT = stream.next_batch()

    The ranks never talk about it. Each knows the order, takes position + rank, then every W-th one, and moves the
    position by what *all* ranks take. What is left at an epoch's end and does not fill a batch on every rank is left
    out.

    Args:
        tokens: the same on every rank.
        local_batch: N, the windows that one rank takes at a time.
        seed: the same on every rank; with the epoch it gives the order.
    Raises:
        ValueError: the text has too few windows for one batch on every rank, or the rank does not exist.
    """

    def __init__(
        self, tokens: torch.Tensor, context: int, local_batch: int, world_size: int, rank: int, seed: int = 0
    ) -> None:
        self.tokens, self.context, self.local_batch, self.seed = tokens, context, local_batch, seed
        self.world_size, self.rank = world_size, rank
        self.length = count_windows(tokens, context)
        exact_shard(max(self.length, 1), world_size, rank)  # refuses a rank that is not there
        if self.length < world_size * local_batch:
            raise ValueError(
                f"rank {rank}: the text has {self.length} windows of {context} tokens, and one batch on every rank "
                f"takes {world_size} x {local_batch}; give it a longer text, or make the batch smaller"
            )
        self.epoch = 0
        self.position = 0  # windows of this epoch that all ranks together have taken

    def next_windows(self) -> np.ndarray:
        """Return the numbers of this rank's next N windows, and move on."""
        together = self.world_size * self.local_batch
        if self.position + together > self.length:
            self.epoch, self.position = self.epoch + 1, 0
        positions_N = self.position + self.rank + self.world_size * np.arange(self.local_batch)
        self.position += together
        return Permutation(self.length, self.seed, self.epoch)(positions_N)

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's next N windows and what follows each of their tokens; both (N, T), int64."""
        return windows(self.tokens, self.context, self.next_windows())

    # --- Where the stream is -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain values, the same on every rank."""
        return {"epoch": self.epoch, "position": self.position, **self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, be it with another number of ranks or another batch.

        Raises:
            ValueError: the state belongs to another order of windows, or to another text; names the difference.
        """
        for name, mine in self._order().items():
            if state[name] != mine:
                raise ValueError(
                    f"rank {self.rank}: the saved place has {name}={state[name]!r}, this stream {mine!r}: the windows "
                    "would be others; go on with the same text and settings (Python's own source differs by version)"
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def _order(self) -> dict[str, Any]:
        checksum = zlib.crc32(self.tokens.numpy())
        return {"length": self.length, "context": self.context, "seed": self.seed, "checksum": checksum}
