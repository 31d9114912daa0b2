"""Compute the lengths of the input and the target of a span-corruption sample, as in T5. No numpy."""

from __future__ import annotations

SHARE, MEAN = 0.15, 3.0  # share of the tokens that are replaced, and mean number of tokens in a span


def noise_counts(tokens: int, share: float = SHARE, mean: float = MEAN) -> tuple[int, int]:
    """Return the number of a sample's tokens to replace, and the number of their spans."""
    noise = min(max(round(tokens * share), 1), tokens - 1)
    spans = min(max(round(noise / mean), 1), noise, tokens - noise)
    return noise, spans


def span_lengths(tokens: int, share: float = SHARE, mean: float = MEAN) -> tuple[int, int]:
    """Return the lengths of the input and of the target.

    The input is the remaining tokens, one sentinel per span and the end token. The target is each span with a sentinel
    before it, and the end token.
    """
    noise, spans = noise_counts(tokens, share, mean)
    return tokens - noise + spans + 1, noise + spans + 1


def tokens_for(seq: int, share: float = SHARE, mean: float = MEAN) -> int:
    """Return the largest number of tokens whose input is no longer than `seq`.

    That input has exactly `seq` tokens, because one more token makes the input at most one longer.
    """
    most = seq
    while span_lengths(most, share, mean)[0] <= seq:
        most *= 2
    # Bisection is valid because the length never falls as tokens are added.
    low, high = 2, most
    while low < high:
        middle = (low + high + 1) // 2
        if span_lengths(middle, share, mean)[0] <= seq:
            low = middle
        else:
            high = middle - 1
    return low
