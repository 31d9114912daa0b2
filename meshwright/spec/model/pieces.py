"""The chunks in which linear layers communicate over tp while they multiply (`comm.overlap.tensor`). No torch.

The layers (`nn/overlap.py`) and the parts both use these functions. With sequence parallelism, a product over t ranks
that is cut needs t - 1 sends instead of one collective. The host launches each of them. A device that finishes its
kernels faster than the host launches new ones has to wait. A product is therefore cut only if each of its sends
overlaps with at least `comm.overlap.piece_gflop` GFLOP of the product.
"""

from __future__ import annotations

from itertools import pairwise

TP_CHUNKS = 4  # the most chunks into which a product over tp is cut


def runs(size: int) -> list[range]:
    """Return the runs of ranks whose rows are multiplied at once, as distances from this rank. The first run is this
    rank itself, at distance 0."""
    count = min(size - 1, TP_CHUNKS - 1)
    cuts = [1 + (size - 1) * number // count for number in range(count + 1)]
    return [range(1), *(range(low, high) for low, high in pairwise(cuts))]


def in_chunks(rows: int, weight: int, size: int, least: float | None) -> bool:
    """Return whether a product is cut into chunks if its rows are divided among `size` ranks.

    `rows` are the rows of all ranks, and `weight` is the number of this rank's elements of the weight. `least` is the
    fewest FLOPs per send; None: no product is cut.
    """
    return least is not None and 2.0 * rows * weight >= least * (size - 1)


def summed_chunks(rows: int, weight: int, least: float | None) -> int:
    """Return the number of chunks in which a row product is all-reduced while it is multiplied, if all ranks hold all
    rows. Each chunk is a separate call."""
    fits = least is not None and 2.0 * rows * weight >= least * TP_CHUNKS
    return TP_CHUNKS if fits and rows % TP_CHUNKS == 0 else 1
