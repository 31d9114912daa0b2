"""Read from a vocabulary which tokens continue the word of the token before them, and the ids of special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPECIAL_NAMES = (("[CLS]", "[SEP]", "[MASK]", "[PAD]"), ("<s>", "</s>", "<mask>", "<pad>"))
# Byte-level tokenizers and SentencePiece write white space, which begins a word, as these characters.
BLANKS = "Ġ▁ĊĉčĀ"


@dataclass(frozen=True)
class WordParts:
    """Masks that show which tokens form one word.

    Two neighbouring tokens belong to one word if `open` is True for the first and `goes_on` for the second.
    """

    goes_on: NDArray[np.bool_]  # [vocab], the token continues a word
    open: NDArray[np.bool_]  # [vocab], a word may continue after the token

    def continues_word(self, before: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the pairs of neighbouring tokens (before, after) that belong to one word."""
        last = len(self.open) - 1
        # Ids beyond the vocabulary are treated like its last one.
        same_word: NDArray[Any] = self.open[np.minimum(before, last)] & self.goes_on[np.minimum(after, last)]
        return same_word


def word_parts(pieces: Sequence[str]) -> WordParts:
    """Derive the word masks from the spellings of a vocabulary.

    WordPiece marks tokens that continue a word with ##. In other vocabularies, a token that begins with a letter or
    digit continues the word of a token that ends with one.
    """
    if any(piece.startswith("##") for piece in pieces):
        goes_on = [len(piece) > 2 and piece.startswith("##") for piece in pieces]
        return WordParts(np.array(goes_on), np.ones(len(pieces), bool))

    def within(character: str) -> bool:
        return character.isalnum() and character not in BLANKS

    return WordParts(np.array([within(p[:1]) for p in pieces]), np.array([within(p[-1:]) for p in pieces]))


def special_ids(pieces: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of [CLS], [SEP], [MASK] and [PAD], or an empty tuple if one is missing."""
    ids = {piece: number for number, piece in enumerate(pieces)}
    for names in SPECIAL_NAMES:
        if all(name in ids for name in names):
            return tuple(ids[name] for name in names)
    return ()
