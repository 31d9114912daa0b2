"""The tiles of logits that the output layer computes one at a time, for the layer and the planner. No torch."""

from __future__ import annotations

from collections.abc import Iterator

# The most logits of one tile. Every further tile costs one more pass over the weight gradient, and larger tiles cost
# memory. With 2^29 logits (1 GiB in bf16) these passes are negligible compared with the products.
LOGITS = 1 << 29


def tile_rows(tokens: int, columns: int, parts: int = 1) -> int:
    """Return the number of tokens of a tile of logits, with `columns` logits per token.

    All tiles but the last have this size. It is a multiple of `parts`, because a grid scatters a tile in equal parts.
    """
    tiles = max(1, -(-tokens * columns // LOGITS))
    rows = -(-tokens // tiles)
    return -(-rows // parts) * parts


def tile_counts(tokens: int, columns: int, parts: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (tokens per tile, number of tiles) for the full tiles of the logits, and for the last one if it is
    smaller."""
    size = tile_rows(tokens, columns, parts)
    full, rest = divmod(tokens, size)
    yield size, full
    if rest:
        yield rest, 1


def answers_of(seq: int) -> int:
    """Return the number of slots for answers in a packed sample. No sample has more answers, and the number is even so
    that answers can be paired."""
    return seq + 2 + seq % 2
