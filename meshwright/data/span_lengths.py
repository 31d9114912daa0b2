"""How long the input and the target of a sample are when spans of it are replaced, as T5 has it. No numpy."""

from __future__ import annotations

SHARE, MEAN = 0.15, 3.0  # of the tokens that are replaced, and tokens of a span


def noise_counts(tokens: int, share: float = SHARE, mean: float = MEAN) -> tuple[int, int]:
    """Returns how many of a sample's tokens are replaced, and in how many spans."""
    noise = min(max(round(tokens * share), 1), tokens - 1)
    spans = min(max(round(noise / mean), 1), noise, tokens - noise)
    return noise, spans


def span_lengths(tokens: int, share: float = SHARE, mean: float = MEAN) -> tuple[int, int]:
    """Returns the lengths of the input (what is left, with one sentinel for each span, and the end token) and of the
    target (a sentinel before each span, and the end token)."""
    noise, spans = noise_counts(tokens, share, mean)
    return tokens - noise + spans + 1, noise + spans + 1


def tokens_for(seq: int, share: float = SHARE, mean: float = MEAN) -> int:
    """Returns the most tokens whose input is no longer than `seq`; it is then exactly as long, since one token more
    makes it longer by one at most."""
    most = seq
    while span_lengths(most, share, mean)[0] <= seq:
        most *= 2
    low, high = 2, most
    while low < high:  # the length never falls as tokens are added
        middle = (low + high + 1) // 2
        low, high = (middle, high) if span_lengths(middle, share, mean)[0] <= seq else (low, middle - 1)
    return low
