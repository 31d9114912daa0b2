"""How many tokens the output layer processes at a time, for the layer and for the planner. No torch."""

from __future__ import annotations

# Logits of one piece. Every further piece costs one more pass over the weight's gradient, and larger pieces cost
# memory: with 2^29 logits (1 GiB in bf16) the passes are negligible beside the products.
LOGITS = 1 << 29


def piece_rows(tokens: int, columns: int) -> int:
    """Returns the tokens of one piece, with `columns` logits each; all pieces but the last have the same size."""
    pieces = max(1, -(-tokens * columns // LOGITS))
    return -(-tokens // pieces)


def answers_of(seq: int) -> int:
    """Returns for how many answers of a packed sample there is a place: no sample has more, and pairs of them fit."""
    return seq + 2 + seq % 2
