"""How many tokens the output layer processes at a time, for the layer and for the planner. No torch."""

from __future__ import annotations

from collections.abc import Iterator

# Logits of one tile. Every further tile costs one more pass over the weight's gradient, and larger tiles cost memory:
# with 2^29 logits (1 GiB in bf16) the passes are negligible beside the products.
LOGITS = 1 << 29


def tile_rows(tokens: int, columns: int, parts: int = 1) -> int:
    """Return the tokens of a tile of logits, `columns` for each; all tiles but the last have the same size. On a grid
    a tile is then scattered in equal `parts`."""
    tiles = max(1, -(-tokens * columns // LOGITS))
    rows = -(-tokens // tiles)
    return -(-rows // parts) * parts


def tile_counts(tokens: int, columns: int, parts: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (tokens, number) of the equal tiles of the logits, and of the rest."""
    each = tile_rows(tokens, columns, parts)
    full, rest = divmod(tokens, each)
    yield each, full
    if rest:
        yield rest, 1


def answers_of(seq: int) -> int:
    """Return for how many answers of a packed sample there is a place: no sample has more, and pairs of them fit."""
    return seq + 2 + seq % 2
