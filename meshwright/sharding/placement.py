"""Where parameters lie in flat buffers and what is reduced at once, from their sizes alone.

The buffers are built from these functions and the planner reads the same ones. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

# Each rank's share of a bucket is a multiple of this many elements, and each parameter starts at one.
ALIGN = 16

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grad_bytes(param_bytes: int) -> int:
    """Bytes of one element's gradient, which adds up in float32 at least."""
    return max(4, param_bytes)


def bucket_elements(bucket_bytes: float, element_bytes: int) -> int:
    """Elements that fill a bucket."""
    return max(1, int(bucket_bytes // element_bytes))


def backward_order(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Parameters, given in the order of forward, by what those of one buffer share, in the order of backward."""
    keyed: dict[Key, list[Item]] = {}
    for item in reversed(list(items)):
        keyed.setdefault(key(item), []).append(item)
    return keyed


def padded(size: int, ranks: int) -> int:
    unit = ALIGN * ranks
    return -(-size // unit) * unit


def place(sizes: list[int], ranks: int, bucket_elements: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(start, bucket) of each parameter and (start, stop) of each bucket.

    A bucket is closed by the parameter that fills it; no parameter is cut.
    """
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    begin = at = 0
    for size in sizes:
        places.append((at, len(buckets)))
        at += -(-size // ALIGN) * ALIGN
        if at - begin >= bucket_elements:
            at = begin + padded(at - begin, ranks)
            buckets.append((begin, at))
            begin = at
    if at > begin:
        buckets.append((begin, begin + padded(at - begin, ranks)))
    return places, buckets
