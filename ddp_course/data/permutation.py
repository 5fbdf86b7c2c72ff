"""How can a shuffled order be known without being stored?

A permutation can be a formula: it takes a position and gives the sample at that position. Cut the position's bits
into two halves, scramble one half by a hash of the other, in turns: each round can be undone, so no two positions
ever meet. This is a Feistel network, as in ciphers. Where it leads outside the dataset, it is applied again.

Left out on purpose: secrecy. The hash is quick, not safe.
Read next: `sampler.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.random import SeedSequence  # at the top: NumPy loads this part only when it is asked for

ROUNDS = 8
_ODD = (np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B))  # odd, so that multiplying loses no bit; well mixed


class Permutation:
    """A shuffled order of `range(length)`, evaluated where it is asked for. It occupies a few hundred bytes.

    Args:
        length: from 1 to 2**62.
        key: whole numbers below 2**32, such as seed and epoch; other numbers give another order. Larger ones are
            taken as well, and may give the order of others.
    Raises:
        ValueError: the length is out of range.
    Source: J. Black, P. Rogaway 2002, Ciphers with Arbitrary Finite Domains, sections 3 (cycle walking) and 5.
    """

    def __init__(self, length: int, *key: int) -> None:
        if not 1 <= length <= 2**62:
            raise ValueError(f"length={length}: must be from 1 to 2**62")
        bits = (length - 1).bit_length()
        self.length = length
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint32(2 ** (bits // 2) - 1)
        self._high_mask = np.uint32(2 ** (bits - bits // 2) - 1)
        self._keys = SeedSequence([number % 2**64 for number in key]).generate_state(ROUNDS, np.uint32)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at `positions`, an array of whole numbers from 0 to length - 1, as uint64."""
        samples = self._scrambled(positions.astype(np.uint64))
        # The network permutes a power of two, less than twice the length. Whoever lands outside goes on until inside:
        # the walk of a permutation ends where no other walk ends.
        outside = np.flatnonzero(samples >= self.length)
        while outside.size:
            samples[outside] = self._scrambled(samples[outside])
            outside = outside[samples[outside] >= self.length]
        return samples

    def _scrambled(self, numbers: np.ndarray) -> np.ndarray:
        """One pass through the network."""
        low = (numbers & np.uint64(self._low_mask)).astype(np.uint32)
        high = (numbers >> self._low_bits).astype(np.uint32)
        for turn in range(0, ROUNDS, 2):
            high ^= _hash(low, self._keys[turn]) & self._high_mask
            low ^= _hash(high, self._keys[turn + 1]) & self._low_mask
        return (high.astype(np.uint64) << self._low_bits) | low


def _hash(half: np.ndarray, key: np.uint32) -> np.ndarray:
    """Mix the bits of 32-bit numbers with a key; products overflow, as they are meant to."""
    mixed = (half ^ key) * _ODD[0]
    mixed ^= mixed >> np.uint32(15)
    mixed *= _ODD[1]
    mixed ^= mixed >> np.uint32(13)
    return mixed
