"""Permutations that depend on a key alone: on any machine, with any version of numpy."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def keyed_permutation(size: int, *key: int | str) -> NDArray[np.unsignedinteger[Any]]:
    """Draws a permutation of range(size) from `key`: [size] uint32, or uint64 from 2**32 on.

    Each index gets random high bits from Philox (a counter-based generator whose raw output is fixed by its
    definition) above its own low bits, and these are sorted: all values differ, so every sorting algorithm gives the
    same result, and sorting plain integers is several times faster than shuffling.
    """
    dtype = np.dtype(np.uint32 if size < 1 << 32 else np.uint64)
    if size < 2:
        return np.zeros(size, dtype)
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    values = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(size)
    low = np.uint64((1 << (size - 1).bit_length()) - 1)
    values &= ~low
    values |= np.arange(size, dtype=np.uint64)
    values.sort()
    values &= low
    return values.astype(dtype, copy=False)
