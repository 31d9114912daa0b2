"""When linear layers communicate over tp while they multiply, in how many chunks (`comm.overlap.tensor`). No torch.

Both the layers (`nn/overlap.py`) and the statements of parts ask here. With sequence parallelism a product over t ranks
needs t - 1 sends in the place of one collective. The host launches each of them, and a device that multiplies faster
than it is given work waits for the host. So a product is cut only where each of its sends has at least
`comm.overlap.piece_gflop` GFLOP of it to hide behind.
"""

from __future__ import annotations

from itertools import pairwise

TP_CHUNKS = 4  # chunks in which a product over tp is multiplied at most while others travel


def runs(size: int) -> list[range]:
    """Return the distances of a group's ranks, 0 for this rank itself, in the runs that are multiplied at once."""
    count = min(size - 1, TP_CHUNKS - 1)
    cuts = [1 + (size - 1) * number // count for number in range(count + 1)]
    return [range(1), *(range(low, high) for low, high in pairwise(cuts))]


def in_chunks(rows: int, weight: int, size: int, least: float | None) -> bool:
    """Whether a product of all ranks' rows with this rank's elements of the weight is cut, where rows are divided among
    `size` ranks. `least`: FLOPs for each send; None: nothing is cut."""
    return least is not None and 2.0 * rows * weight >= least * (size - 1)


def summed_chunks(rows: int, weight: int, least: float | None) -> int:
    """Return the number of chunks in which a row product is summed while it is multiplied, where all ranks hold all
    rows: each is a call of its own."""
    fits = least is not None and 2.0 * rows * weight >= least * TP_CHUNKS
    return TP_CHUNKS if fits and rows % TP_CHUNKS == 0 else 1
