"""Do all ranks make the same call?

If one rank sums float32 and another int32, or one asks for the maximum and another for the sum, gloo and NCCL see
nothing wrong: they add the bytes. So before a rank enters its n-th call on a group, it writes what it is about to do
where all ranks of this machine can read it, and reads what the others have written for theirs. The second to come sees
the difference, and raises before anything is sent.

Left out on purpose: ranks on other machines, and messages from one rank to another.
Read next: `recorder.py`, which asks this before each call.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterable

import torch.distributed as dist

SLOTS, SLOT_BYTES = 256, 192  # of each rank; a rank may be this many calls ahead of another
_KEY = struct.Struct("<IIQ")  # group, which group of this name, number of the call; all zero: nothing is written
_TEXT_BYTES = SLOT_BYTES - _KEY.size


class Disagreement(RuntimeError):
    """Two ranks are about to do different things in the same call."""


class SharedCalls:
    """What each rank of this machine is doing in its latest calls, in memory that all of them share.

    Args:
        path: of a file that the ranks of one launch share; whoever comes first makes it. There must be a default group.
    """

    def __init__(self, path: str, rank: int, world_size: int):
        self.rank, self._world = rank, weakref.ref(dist.group.WORLD)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, world_size * SLOTS * SLOT_BYTES)
        self._map = mmap.mmap(file, 0)
        os.close(file)

    def holds(self) -> bool:
        """Whether the default group is still the one of the beginning: only then are names and ranks what they were."""
        return self._world() is dist.group.WORLD

    def check(self, group: str, born: int, seq: int, doing: str, members: Iterable[int]) -> None:
        """Write what this rank is about to do in call number `seq` of the group, and read what the others wrote.

        Args:
            born: which group of this name it is: names come again once a group has ended.
        Raises:
            Disagreement: another rank is about to do something else; says what.
        """
        code = zlib.crc32(group.encode())
        key, slot = _KEY.pack(code, born, seq), (code + seq) % SLOTS
        text = doing.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        start = (self.rank * SLOTS + slot) * SLOT_BYTES
        self._map[start : start + _KEY.size] = bytes(_KEY.size)  # whoever reads now finds nothing
        self._map[start + _KEY.size : start + SLOT_BYTES] = text
        self._map[start : start + _KEY.size] = key
        mine = key + text
        for other in members:
            theirs = self._read(other, slot)
            # Read again: the other may have been writing. What it writes for a later call has another key.
            if theirs != mine and theirs.startswith(key) and theirs == self._read(other, slot):
                found = theirs[_KEY.size :].rstrip(b"\0").decode(errors="replace")
                raise Disagreement(
                    f"rank {self.rank} calls {doing}, where rank {other} calls {found}: every rank must make the "
                    "same calls, in the same order, with the same shapes and dtypes"
                )

    def _read(self, rank: int, slot: int) -> bytes:
        start = (rank * SLOTS + slot) * SLOT_BYTES
        return self._map[start : start + SLOT_BYTES]
