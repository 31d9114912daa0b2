"""How many tokens the output layer takes at once: for the layer and for the planner. No torch."""

from __future__ import annotations

# Logits of one chunk. Many chunks cost one more pass over the weight's gradient each, few cost memory: with 2^29 logits
# (1 GiB in bf16) the passes are lost beside the products.
LOGITS = 1 << 29


def chunk_rows(tokens: int, columns: int) -> int:
    """Tokens of a chunk, of equal size but for the last, with `columns` logits each."""
    chunks = max(1, -(-tokens * columns // LOGITS))
    return -(-tokens // chunks)
